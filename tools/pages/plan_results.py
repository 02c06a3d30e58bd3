"""What the planner says of a recorded profile and link, for the pages: from ``results/long_context.json``."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from page_text import GIB, read, table, torch_of

from offload.planning.plan import make_plan
from offload.planning.profile import Link, Profile
from offload.planning.simulate import simulate
from offload.schedule.schedule import Schedule


@cache
def recorded() -> tuple[dict[str, Any], Profile, Link]:
    """The record, its profile of Llama-3.1-8B's layers, and its link."""
    record = read("long_context")
    return record, Profile.from_json(json.dumps(record["profile"])), Link(**record["link"])


@table("regions_plan")
def regions_plan(_page: Path) -> str:
    """``print(plan)`` of a plan by region."""
    _, profile, link = recorded()
    budget, host = "24GiB", "40GiB"
    asked = f'plan(profile, memory_budget="{budget}", link=link, max_host_bytes="{host}")'
    return _said(asked, str(make_plan(profile, memory_budget=budget, link=link, max_host_bytes=host)))


@table("whole_layers")
def whole_layers(_page: Path) -> str:
    """Link, profile, plan and curve, as the page's code prints them."""
    _, regions, link = recorded()
    profile = replace(regions, layers=tuple(replace(layer, regions=()) for layer in regions.layers))
    number = len(profile.layers)
    header, first, *_, step = str(profile).splitlines()
    kept_s = simulate(Schedule.default(0, number), profile, link).duration_s
    curve = []
    for k in range(0, number - 1, 5):
        of_k = simulate(Schedule.default(k, number), profile, link)
        curve.append(f"k = {k:2}: {of_k.duration_s / kept_s:.2f} times the step, {of_k.peak_bytes / GIB:.0f} GiB")
    found = make_plan(profile, memory_budget="40GiB", link=link)
    asked = 'plan(profile, memory_budget="40GiB", link=link)'
    return _said(asked, str(link), header, first, step, repr(found), *curve)


def _said(asked: str, *lines: str) -> str:
    record, _, _ = recorded()
    where = f"{record['hardware']['gpu']}, {torch_of(record)}, Llama-3.1-8B's shape, {record['profiled']:,} tokens"
    return f"{where}: `{asked}`\n\n```text\n" + "\n".join(lines) + "\n```\n"
