"""What the planner says of a profile and a link that were recorded, for the pages: from ``results/long_context.json``.

``results.py`` writes it into the pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from drawing import Maker
from page_text import GIB, ROOT, full_record, torch_of

from offload.planning.link import Link
from offload.planning.plan import plan
from offload.planning.profile import Profile
from offload.planning.simulate import simulate
from offload.schedule.schedule import Schedule

RECORD = ROOT / "results/long_context.json"


@cache
def recorded() -> tuple[dict[str, Any], Profile, Link]:
    """The record, its profile of Llama-3.1-8B's layers, and its link."""
    record = full_record(RECORD)
    return record, Profile.from_json(json.dumps(record["profile"])), Link(**record["link"])


def regions_plan() -> str:
    """``print(plan)`` of a plan by region."""
    _, profile, link = recorded()
    budget, host = "24GiB", "40GiB"
    asked = f'plan(profile, memory_budget="{budget}", link=link, max_host_bytes="{host}")'
    return _said(asked, str(plan(profile, memory_budget=budget, link=link, max_host_bytes=host)))


def whole_layers() -> str:
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
    found = plan(profile, memory_budget="40GiB", link=link)
    asked = 'plan(profile, memory_budget="40GiB", link=link)'
    return _said(asked, str(link), header, first, step, repr(found), *curve)


def _said(asked: str, *lines: str) -> str:
    record, _, _ = recorded()
    where = f"{record['hardware']['gpu']}, {torch_of(record)}, Llama-3.1-8B's shape, {record['profiled']:,} tokens"
    return f"{where}: `{asked}`\n\n```text\n" + "\n".join(lines) + "\n```\n"


BLOCKS: dict[tuple[str, str], Callable[[Path], str]] = {
    ("table", "regions_plan"): lambda _: regions_plan(),
    ("table", "whole_layers"): lambda _: whole_layers(),
}
"""A block's kind and name → its text, for a page at this path."""

PICTURES: dict[Path, Maker] = {}
