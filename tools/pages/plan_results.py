"""What the planner says of a recorded profile and link, for the pages: from ``results/long_context.json``."""

import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from blocks import markdown_table, read, table
from page_text import GB, torch_of

from offload.command_line.main import H200, RATES
from offload.planning.plan import make_plan
from offload.planning.profile import Link, Profile


@cache
def recorded() -> tuple[dict[str, Any], Profile, Link]:
    """The record, its profile of Llama-3.1-8B's layers, and its link."""
    record = read("long_context")
    return record, Profile.from_json(json.dumps(record["profile"])), Link(**record["link"])


DATASHEET = {"tflops": 989.0, "memory": 4.8, "link": 63.0}
"""NVIDIA's, of an H200: bfloat16 without sparsity, TB/s, and GB/s each way of PCIe Gen5 x16."""
WIDTH = 4096
"""Input features of the products of Llama-3.1-8B's attention."""


@table("planner_speeds")
def planner_speeds(_page: Path) -> str:
    """What the planner takes for an H200, next to its datasheet and to what single operations reach in a record."""
    record, profile, link = recorded()
    timed = [region for region in profile.layers[len(profile.layers) // 2].regions if region.seconds]
    products = [region.nbytes * WIDTH / region.seconds for region in timed if "proj: mm" in region.name]
    [residual] = [region for region in timed if region.name == "add"]  # reads two tensors of its size and writes one
    taken = {
        "tflops": RATES.flop_per_s / 1e12,
        "memory": RATES.bytes_per_s / 1e12,
        "link": H200.d2h_bytes_per_s / GB,
    }
    found = {
        "tflops": f"{statistics.median(products) / 1e12:.0f}",
        "memory": f"{3 * residual.nbytes / residual.seconds / 1e12:.1f}",
        "link": f"{link.d2h_bytes_per_s / GB:.0f}",
    }
    names = {"tflops": "products, TFLOP/s", "memory": "memory, TB/s", "link": "link, GB/s"}
    rows = [
        {
            "H200": names[key],
            "planner": f"{taken[key]:.3g}",
            "datasheet": f"{DATASHEET[key]:.3g}",
            "share": f"{taken[key] / DATASHEET[key]:.0%}",
            "measured": found[key],
        }
        for key in names
    ]
    return (
        f"{markdown_table(rows, left=1)}\n\n"
        "Datasheet: [NVIDIA](https://www.nvidia.com/en-us/data-center/h200/), without sparsity; PCIe Gen5 x16 each way."
        f" Measured: single operations of Llama-3.1-8B's layers on {record['profiled']:,} tokens, "
        f"{record['hardware']['gpu']}.\n"
    )


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
