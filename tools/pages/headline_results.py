"""The strongest figures, and what each way out of an out-of-memory error gives: from several records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from page_text import ROOT, Row, gib, markdown_table, more, read, table

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


@table("headline")
def headline(page: Path) -> str:
    """The strongest figures, one a line."""
    nothing, checkpoint, cheap, near = plans_of(read("budget"))
    llama = read("llama_8b")
    theirs, ours = llama["rows"][0], llama["rows"][1]
    suite = read("suite")["rows"]
    long = [row for row in suite if row["workload"] == "long sequence" and "step_s" in row]
    kept = row_of(long, family="nothing")
    whole = max((row for row in long if row["family"] == "offload"), key=lambda row: int(row["k"]))
    run = read("suite")["runs"]["long sequence"]
    tokens, layers = run["tokens"], run["layers"] - 1  # the loss counts as a layer
    decoders = [row for row in suite if row["workload"] == "decoder" and "step_s" in row]
    checkpoints = row_of(decoders, family="checkpoint")
    inputs = row_of(decoders, family="offload_checkpoint", k=18)
    step = f"{theirs['step_s']:.1f} → {ours['step_s']:.1f} s"
    peak = f"{gib(theirs['peak_bytes'], 1)} → {gib(ours['peak_bytes'], 1)} GiB above weights and optimizer"
    eight_b = (
        f"**Llama-8B's shape, {llama['tokens']:,} tokens, AdamW, one GPU**: in the memory that Hugging Face's "
        f"checkpointing takes, a step takes **{ours['step_s'] / theirs['step_s']:.2f} × its time** ({step}; {peak})."
    )
    decoder = (
        f"**Twenty decoder layers of a 7B model**: activations {gib(nothing['peak_bytes'], 1)} → "
        f"**{gib(cheap['peak_bytes'], 1)} GiB for {more(cheap['ratio'])}** of the step's time; "
        f"{gib(near['peak_bytes'], 1)} GiB for {more(near['ratio'])}, where checkpointing every layer takes "
        f"{more(checkpoint['ratio'])} ({gib(checkpoint['peak_bytes'], 1)} GiB)."
    )
    sequence = (
        f"**One sequence of {tokens:,} tokens**: {gib(kept['peak_bytes'], 1)} → **{gib(whole['peak_bytes'], 1)} GiB "
        f"for {more(whole['step_s'] / kept['step_s'])}**, with {whole['k']} of {layers} layers on the host."
    )
    share = inputs["step_s"] / checkpoints["step_s"] - 1
    cost = f"for {share:+.1%}" if share > 0 else "in the same time"  # less is how far one step is from the next
    around = (
        f"**A model that checkpoints already**: {gib(checkpoints['peak_bytes'])} → **{gib(inputs['peak_bytes'])} GiB "
        f"{cost}**, with the checkpoints on the host."
    )
    limited = {row["row"]: row["longest_tokens"] for row in read("long_context")["rows"] if "limit_bytes" in row}
    streamed = (
        f"**The same shape on a device of 24 GiB**, where its weights and gradients, 30 GiB, do not fit: "
        f"**{limited['24GiB:streamed']:,} tokens**. With 48 GiB {limited['48GiB:streamed']:,} and more, where "
        f"checkpointing ends at {limited['48GiB:checkpointing']:,}."
    )
    budgets = Path(os.path.relpath(ROOT / "docs/howto/regions.md", page.parent)).as_posix()
    measured = f"\nAll measured on an {llama['hardware']['gpu']}: [the budgets one by one]({budgets}#what-it-gives)."
    return "".join(f"- {line}\n" for line in (eight_b, streamed, decoder, sequence, around)) + measured + "\n"


@table("recipes")
def recipes(page: Path) -> str:
    """What each way out gave on the decoder that all pages measure."""
    nothing, checkpoint, cheap, near = plans_of(read("budget"))
    suite = [row for row in read("suite")["rows"] if row["workload"] == "decoder" and "step_s" in row]
    kept = row_of(suite, family="nothing")
    free = row_of(suite, family="offload", k=5)
    both = row_of(suite, family="offload_checkpoint", k=18)
    shown = [
        ("nothing", nothing["peak_bytes"], ""),
        ("5 of 20 whole layers: what is free", free["peak_bytes"], more(free["step_s"] / kept["step_s"])),
        (f"`memory_budget`, {cheap['what'].removeprefix('budget ')}", cheap["peak_bytes"], more(cheap["ratio"])),
        (f"`memory_budget`, {near['what'].removeprefix('budget ')}", near["peak_bytes"], more(near["ratio"])),
        ("checkpointing every layer", checkpoint["peak_bytes"], more(checkpoint["ratio"])),
        ("checkpoints, their inputs on the host", both["peak_bytes"], more(both["step_s"] / kept["step_s"])),
    ]
    rows = [{"what": what, "activation peak, GiB": gib(peak), "step": step} for what, peak, step in shown]
    return markdown_table(rows, left=1) + "\n"
