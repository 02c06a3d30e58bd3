"""What the planner says of a recorded profile and link, for the pages: from ``results/long_context.json``."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from page_text import read, table, torch_of

from offload.planning.plan import make_plan
from offload.planning.profile import Link, Profile


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


def _said(asked: str, *lines: str) -> str:
    record, _, _ = recorded()
    where = f"{record['hardware']['gpu']}, {torch_of(record)}, Llama-3.1-8B's shape, {record['profiled']:,} tokens"
    return f"{where}: `{asked}`\n\n```text\n" + "\n".join(lines) + "\n```\n"
