"""The start page's figures, and those of the remedies for an out-of-memory error: from ``results/budget.json``."""

from pathlib import Path
from typing import Any

from page_text import Row, day_of, gib, link_of, markdown_table, more, ms, read, table, torch_of

CHEAP = 1.05
"""Up to so many times the step, a plan counts as nearly free."""


def row_of(rows: list[Row], **wanted: Any) -> Row:
    """The one row in which these have these values."""
    [row] = [row for row in rows if wanted.items() <= row.items()]
    return row


def plans_of(record: Row) -> tuple[Row, Row, Row, Row]:
    """Of the decoder: nothing, checkpointing, the smallest nearly free plan, and the plan nearest to checkpointing."""
    rows = [row for row in record["rows"] if row["model"] == "decoder" and "error" not in row]
    nothing, checkpoint = row_of(rows, what="nothing"), row_of(rows, what="checkpoint all")
    plans = [row for row in rows if row["what"].startswith("budget")]
    cheap = min((row for row in plans if row["ratio"] <= CHEAP), key=lambda row: int(row["peak_bytes"]))
    near = min(plans, key=lambda row: abs(int(row["peak_bytes"]) - int(checkpoint["peak_bytes"])))
    return nothing, checkpoint, cheap, near


def decoder_run(record: Row) -> str:
    """Where and when the decoder's rows were measured."""
    row = next(row for row in record["rows"] if row["model"] == "decoder")
    return f"{record['hardware']['gpu']}, {link_of(record['link'])}, {torch_of(record)}, {day_of(row)}"


LLAMA = "Llama-8B's shape"
LAYERS = "twenty decoder layers of a 7B model"
DECODER = f"{LAYERS} (hidden 4096), 2 × 4096 tokens, bfloat16"


@table("start_table")
def start_table(_page: Path) -> str:
    """Four ways to run the decoder's step."""
    record = read("budget")
    nothing, checkpoint, cheap, near = plans_of(record)
    shown = [("keep every activation", nothing), ("PyTorch's checkpointing of every layer", checkpoint)]
    shown += [(f"`memory_budget`, {row['what'].removeprefix('budget ')}", row) for row in (cheap, near)]
    rows = [
        {
            "way": way,
            "GPU, GiB": gib(row["peak_bytes"], 1),
            "host, GiB": gib(row.get("host_bytes", 0), 1),
            "time of a step": f"{ms(row['step_s'])} ms ({more(row['ratio'])})"
            if row is not nothing
            else f"{ms(row['step_s'])} ms",
        }
        for way, row in shown
    ]
    where = decoder_run(record)
    assert all(row["bit_identical"] for _, row in shown)
    return (
        f"{markdown_table(rows, left=1)}\n\n{DECODER[0].upper()}{DECODER[1:]}, forward and backward without an "
        'optimizer, budgets by `offload.offload_layers`. "GPU" is the peak above weights and gradients. Gradients are '
        f"bit-identical in all rows. {where}.\n"
    )


@table("recipes")
def recipes(page: Path) -> str:
    """What each remedy gave on the decoder that all pages measure: all rows are of one run."""
    record = read("budget")
    nothing, checkpoint, cheap, near = plans_of(record)
    rows = [row for row in record["rows"] if row["model"] == "decoder" and "error" not in row]
    free = row_of(rows, what="whole layers, 20 GiB")
    inputs = next(row for row in rows if row["what"].startswith("checkpoint all, inputs"))
    shown = [
        ("keep every activation", nothing),
        (f"{free['layers']} of 20 whole layers offloaded", free),
        (f"`memory_budget`, {cheap['what'].removeprefix('budget ')}", cheap),
        (f"`memory_budget`, {near['what'].removeprefix('budget ')}", near),
        ("checkpoint every layer", checkpoint),
        ("checkpoint every layer, offload the layers' inputs", inputs),
    ]
    table_rows = [
        {
            "remedy": what,
            "activation peak, GiB": gib(row["peak_bytes"], 1),
            "step, ms": ms(row["step_s"]),
            "longer by": more(row["ratio"]) if row is not nothing else "",
        }
        for what, row in shown
    ]
    where = decoder_run(record)
    return f"{where}.\n\n{markdown_table(table_rows, left=1, answer=('longer by', 'activation peak, GiB'))}\n"
