"""What the planner says of a recorded profile and link, for the pages: from ``results/long_context.json``."""

import json
from pathlib import Path

from blocks import markdown_table, read, table
from page_text import GB, torch_of

from offload.command_line.main import H200, RATES
from offload.planning.plan import make_plan
from offload.planning.profile import Link, Profile

SPEEDS = {
    "products, TFLOP/s": (RATES.flop_per_s / 1e12, 989.0),
    "memory, TB/s": (RATES.bytes_per_s / 1e12, 4.8),
    "link, GB/s": (H200.d2h_bytes_per_s / GB, 63.0),
}
"""What the planner takes, and NVIDIA's datasheet: bfloat16 without sparsity, and PCIe Gen5 x16 each way."""


@table("planner_speeds")
def planner_speeds(_page: Path) -> str:
    """What the planner takes for an H200, next to its datasheet."""
    rows = [
        {"H200": name, "planner": f"{taken:.3g}", "datasheet": f"{most:.3g}", "share": f"{taken / most:.0%}"}
        for name, (taken, most) in SPEEDS.items()
    ]
    source = "[NVIDIA](https://www.nvidia.com/en-us/data-center/h200/), without sparsity; PCIe Gen5 x16 each way"
    return f"{markdown_table(rows, left=1)}\n\nDatasheet: {source}.\n"


@table("regions_plan")
def regions_plan(_page: Path) -> str:
    """``print(plan)`` of a plan by region."""
    record = read("long_context")
    profile, link = Profile.from_json(json.dumps(record["profile"])), Link(**record["link"])
    budget, host = "24GiB", "40GiB"
    asked = f'plan(profile, memory_budget="{budget}", link=link, max_host_bytes="{host}")'
    plan = make_plan(profile, memory_budget=budget, link=link, max_host_bytes=host)
    where = f"{record['hardware']['gpu']}, {torch_of(record)}, Llama-3.1-8B's shape, {record['profiled']:,} tokens"
    return f"{where}: `{asked}`\n\n```text\n{plan}\n```\n"
