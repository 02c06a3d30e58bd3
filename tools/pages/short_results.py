"""The first lines of the page of benchmarks: what each part came to, the weak results as well."""

from pathlib import Path

from blocks import read, row_of, table
from budget_results import LAYERS, LLAMA, plans_of
from never_slower_results import compared
from page_text import gib, more, percent
from pipeline_results import measured, read_records
from recipe_results import best_of

LONG_TOKENS = 262_144


@table("benchmarks_in_short")
def in_short(_page: Path) -> str:
    """A line for each part of the page, from the records of its tables."""
    gpus = [read(name)["hardware"]["gpu"] for name in ("budget", "never_slower")]
    lines = (_activations(), _training(), _long(), _models(), _pipelines())
    said = "\n".join(f"- {line}" for line in lines)
    return f"Measured on {gpus[0]}; other models on {gpus[1]}, too.\n\n{said}\n"


def _activations() -> str:
    nothing, checkpoint, cheap, near = plans_of()
    before, after, same = (gib(row["peak_bytes"], 1) for row in (nothing, cheap, checkpoint))
    host = {gib(row["host_bytes"], 1) for row in (cheap, near)}
    return (
        f"**Activations** of {LAYERS}: {before} → {after} GiB, step {more(cheap['ratio'])}. In the {same} GiB that "
        f"checkpointing needs, the step is {more(near['ratio'])} instead of {more(checkpoint['ratio'])}. Both take "
        f"{' to '.join(sorted(host))} GiB of host memory."
    )


def _training() -> str:
    row, resident = best_of(read("recipe")["rows"])
    return (
        f"**[A full fine-tune](howto/recipe.md#measured)** of {LLAMA}: {gib(resident['peak_bytes'], 0)} → "
        f"{gib(row['peak_bytes'], 0)} GiB with {gib(row['pinned_bytes'], 0)} GiB of host memory, step "
        f"{more(row['step_s'] / resident['step_s'])} against checkpointing."
    )


def _long() -> str:
    rows = read("long_context")["rows"]
    ours, inputs = (row_of(rows, row=f"{LONG_TOKENS}:{way}")["step_s"] for way in ("plan", "inputs"))
    return (
        f"**[{LONG_TOKENS:,} tokens](howto/long_context.md#measured)** with {LLAMA}: step {more(ours / inputs)} "
        "against checkpointing with offloaded inputs."
    )


def _models() -> str:
    ratios = [one["ratio"] for one in compared()]
    worst = max(compared(), key=lambda one: float(one["ratio"]))
    return (
        f"**[Other models](#other-models)**, {len(ratios)} budgets: {sum(one <= 1.02 for one in ratios)} are at "
        f"most 2% slower than the fastest other way in the same memory. The worst, {worst['name']}, takes "
        f"{worst['ratio']:.2f} times as long."
    )


def _pipelines() -> str:
    halves = [found.half for record in read_records() for found in measured(record)]
    longer = {row["width"]: [] for row in sorted(halves, key=lambda row: -int(row["width"]))}
    for row in halves:
        longer[row["width"]].append(row["slowdown"])
    said = [
        f"{percent(min(some))} to {percent(max(some))} with layers of width {width}" for width, some in longer.items()
    ]
    saved = [row["peak_saved"] for row in halves]
    return (
        f"**[Pipelines](#pipelines)**: the first rank's peak falls by {min(saved):.0%} to {max(saved):.0%}. The step "
        f"is longer by {', and by '.join(said)}."
    )
