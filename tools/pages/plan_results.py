"""What the planner says, for the pages: of a config, and of the profile and link in ``results/long_context.json``."""

import json
import tempfile
from pathlib import Path

from blocks import markdown_table, read, table
from page_text import GB, torch_of

from offload.command_line.main import H200, RATES, answer_plan, read_options
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


LLAMA_8B = {
    "model_type": "llama",
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
"""What the config of Llama-3.1-8B says that a plan asks for; the rest are Transformers' own values."""


def asked(options: str, *, regions: bool = False) -> str:
    """A command and its answer, without the table of regions, or with a few of its rows."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B), "utf-8")
        answer, _ = answer_plan(read_options(["plan", folder, *options.split()]))
    recipes, _, plan = answer.partition("\n\nregion ")
    text = f"$ python -m offload plan Llama-3.1-8B {options}\n{recipes}\n"
    if regions:
        rows = f"region {plan}".splitlines()
        names = {row: row.split("  ")[0] for row in rows[:-2]}
        shown = [row for row in names if row.startswith(("region", "mlp.gate_proj: mm", "mlp.act_fn"))]
        cut = max(len(names[row]) for row in shown), max(map(len, names.values()))  # the longest name is not shown
        few = [row[: cut[0]] + row[cut[1] :] for row in shown]
        text += "\n" + "\n".join([few[0], "...", *few[1:], "...", *rows[-2:]])
    return f"```text\n{text}{'' if regions else '...'}\n```\n"


@table("plan_80_gib")
def plan_80_gib(_page: Path) -> str:
    """A full fine-tune of an 8B model that does not fit without offloading."""
    return asked("--tokens 8192 --memory 80GiB --optimizer-bytes 8 --fused-loss")


@table("plan_96_gib")
def plan_96_gib(_page: Path) -> str:
    """A training that only has too many activations."""
    return asked("--tokens 8192 --memory 96GiB", regions=True)
