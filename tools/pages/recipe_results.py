"""Whole trainings under one budget, for the pages: from ``results/recipe.json`` and ``optimizer_state.json``."""

import math
from operator import itemgetter
from pathlib import Path
from typing import Any

from blocks import Columns, Row, cells, link_to, markdown_table, measured_on, read, table, where, with_runs
from budget_results import LLAMA
from page_text import gib, gib1, more

PINNED = "100GiB"
OPTIONS = f'`max_host_bytes="{PINNED}", step_in_backward=True, state_dtype=torch.float32`'

IN_WORDS = {
    "weights streamed": "held weights on the host",
    "gradients consumed": "freed gradients in backward",
    "gradients host": "held gradients on the host",
    "optimizer streamed": "held optimizer state on the host",
    "optimizer cpu": "stepped on the CPU",
}
"""Part of a recipe → what the call did for it."""


def resident_of(row: Row, rows: list[Row]) -> Row | None:
    """The run of as many tokens with everything on the device and checkpointing, if it fitted the GPU.

    Machines differ by some percent from session to session: the one of the same commit, or else the newest.
    """
    found = [one for one in rows if one["tokens"] == row["tokens"] and not one["budget_bytes"] and "error" not in one]
    return max(found, key=lambda one: (one.get("commit") == row.get("commit"), one.get("date", "")), default=None)


def best_of(rows: list[Row]) -> tuple[Row, Row]:
    """Of the smallest budget that was kept, the row of the most tokens; and the step with everything on the device."""
    beside = [(row, resident_of(row, rows)) for row in rows if row["budget_bytes"] and "error" not in row]
    kept = [(row, resident) for row, resident in beside if resident is not None]
    return min(kept, key=lambda pair: (pair[0]["budget_bytes"], -pair[0]["tokens"]))


def longer(row: Row, rows: list[Row]) -> str:
    """How much longer a step is than with everything on the device."""
    resident = resident_of(row, rows)
    return "" if resident is None or resident is row else more(row["step_s"] / resident["step_s"])


@table("start_recipe")
def start_recipe(page: Path) -> str:
    """What the start page's one line came to: all on the device, the smallest budget, and the first faster one."""
    record = read("recipe")
    row, resident = best_of(record["rows"])
    faster = faster_of([one for one in record["rows"] if one["tokens"] == row["tokens"]])
    rows = [resident, row, *(one for one in faster if one is not row)]
    columns: Columns = {
        "way": lambda one: (
            f'`memory_budget="{gib(one["budget_bytes"], 0)}GiB"`'
            if one["budget_bytes"]
            else "all on the GPU, activations checkpointed"
        ),
        "GPU, GiB": ("peak_bytes", lambda nbytes: gib(nbytes, 0)),
        "host, GiB": lambda one: gib(one["pinned_bytes"] * bool(one["budget_bytes"]), 0),
        "time of a step": lambda one: f"{one['step_s']:.2f} s" + f" ({longer(one, rows)})" * (one is not resident),
    }
    each = [said for part, said in IN_WORDS.items() if part in row["recipe"].split(", ")] or ["kept all on the GPU"]
    did = ", and ".join([", ".join(each[:-1]), each[-1]][len(each) == 1 :])
    chunks = f"{link_to(Path('docs/howto/long_context.md'), page)}#a-loss-without-logits"
    return (
        f"{markdown_table(cells(rows, columns), left=1)}\n\n"
        f"A full fine-tune of {LLAMA} with AdamW, {row['tokens']:,} tokens a step, the loss [in chunks]({chunks}). "
        f"With {gib(row['budget_bytes'], 0)} GiB, `prepare` {did}. Options: {OPTIONS}; stepping in "
        f"backward excludes clipping. {where(record, rows, by_row=False)}\n"
    )


def faster_of(rows: list[Row]) -> list[Row]:
    """The smallest budget with a step that is shorter than with everything on the device, if there is one."""
    kept = [(row, resident_of(row, rows)) for row in rows if row["budget_bytes"] and "error" not in row]
    less = [row for row, other in kept if other is not None and row["step_s"] < other["step_s"]]
    return sorted(less, key=itemgetter("budget_bytes"))[:1]


@table("whole_trainings")
def whole_trainings(_page: Path) -> str:
    """A table for each number of tokens: what each budget came to, and what was predicted."""
    record = read("recipe")
    rows = record["rows"]
    said = (
        f"{where(record, rows)} "
        f"{LLAMA} in bfloat16, AdamW with float32 moments, the loss in chunks, {OPTIONS}. "
        "PyTorch limits each row's process to the budget. Without a budget, all is on the device, "
        "checkpointed by Hugging Face: the others' baseline, of their commit or the newest."
    )
    parts = [said]
    for tokens in sorted({row["tokens"] for row in rows}):
        those = sorted((row for row in rows if row["tokens"] == tokens), key=itemgetter("budget_bytes"))
        shown = with_runs(cells(those, columns_of(rows)), those, record, among=rows)
        parts.append(f"{tokens:,} tokens:\n\n{markdown_table(shown, left=1, answer=('longer by', 'peak, GiB'))}")
        if by_hand := [row for row in record["by_hand"] if row["tokens"] == tokens and "step_s" in row]:
            parts.append(beside_by_hand(by_hand, those, record))
    if any("error" in row and "step_s" in row for row in rows):
        parts.append("The row without a peak is of a run that was cut: its seconds are from its log.")
    parts += [largest_of(row, record) for row in record.get("largest", ()) if "step_s" in row]
    return "\n\n".join(parts) + "\n"


def beside_by_hand(by_hand: list[Row], by_one_line: list[Row], record: Row) -> str:
    """A row for each recipe that was put together by the calls for its parts, and a column for each budget it fits."""
    chosen = {row["budget_bytes"]: row["step_s"] for row in by_one_line if row["budget_bytes"] and "step_s" in row}
    budgets = sorted(chosen.keys() & {row["budget_bytes"] for row in by_hand})

    def cells_of(seconds: dict[int, float]) -> dict[str, str]:
        return {f"{gib(one, 0)} GiB": f"{seconds[one]:.2f}" if one in seconds else "" for one in budgets}

    shown = [{"step, s": "by the one line"} | cells_of(chosen) | {"measured": "above"}]
    for recipe in dict.fromkeys(row["recipe"] for row in sorted(by_hand, key=itemgetter("budget_bytes"))):
        own = [row for row in by_hand if row["recipe"] == recipe]
        seconds = {row["budget_bytes"]: row["step_s"] for row in own}
        shown.append({"step, s": recipe_in_words(recipe)} | cells_of(seconds) | {"measured": measured_on(own, record)})
    best = {one: min(row["step_s"] for row in by_hand if row["budget_bytes"] == one) for one in budgets}
    faster = max(chosen[one] / best[one] - 1 for one in budgets)
    return (
        "Put together by hand (`python -m benchmarks.recipe --by-hand`), no recipe that fits is more than "
        f"{math.ceil(100 * faster)}% faster:\n\n{markdown_table(shown, left=1)}"
    )


def recipe_in_words(recipe: str) -> str:
    """What is not on the device all the time."""
    moved = [part for part in recipe.split(", ") if not part.endswith("resident")]
    return ", ".join(moved) or "weights and state on the device"


def largest_of(row: Row, record: Row) -> str:
    """The largest model that one GPU has trained, beside the limit by arithmetic."""
    here, there = (gib(nbytes, 0) for nbytes in row["state_bytes"])
    device, host = (gib(row[key], 0) for key in ("budget_bytes", "host_limit_bytes"))
    trained, limit = (f"{row[key] / 1e9:.1f}" for key in ("parameters", "limit_parameters"))
    peak = f"peak {gib(row['peak_bytes'], 1)} GiB" if "peak_bytes" in row else "from its log, without a peak"
    return (
        f"The largest model has the same shape with {row['layers']} layers, **{trained} billion parameters**. With "
        f"{device} GiB of device and {host} GiB of host memory, the one line trains it at {row['tokens_per_s']:,.0f} "
        f"tokens/s, {row['tokens']:,} tokens in {row['step_s']:.2f} s. With 10 bytes of weights and state for a "
        f"parameter, both memories hold at most {limit} billion; this is {100 * row['of_limit']:.0f}%. "
        f"The device has {here} GiB of the state, the host {there} GiB. {measured_on([row], record)}; {peak}."
    )


def columns_of(rows: list[Row]) -> Columns:
    """First what was asked, then what it came to."""

    def step(row: Any) -> str:
        if "step_s" in row:  # a run that was cut has whole steps in its log
            return f"{row['step_s']:.2f}"
        return "out of memory" if "OutOfMemoryError" in row["error"] or "out of memory" in row["error"] else "failed"

    def predicted(row: Any) -> str:
        if "error" in row or "predicted_s" not in row:
            return ""
        off = row["predicted_s"] / row["step_s"], row["predicted_peak_bytes"] / max(1, row["peak_bytes"])
        return ", ".join(map(more, off))

    def recipe(row: Any) -> str:
        if "recipe" not in row:
            return "" if "error" in row else "all on the device, checkpointed"
        return recipe_in_words(row["recipe"])

    return {
        "budget": lambda row: f"{gib(row['budget_bytes'], 0)} GiB" if row["budget_bytes"] else "none",
        "step, s": step,
        "longer by": lambda row: longer(row, rows) if "step_s" in row else "",
        "peak, GiB": ("peak_bytes", gib1),
        "host, GiB": lambda row: gib1(row["pinned_bytes"] * bool(row["budget_bytes"])) if "pinned_bytes" in row else "",
        "predicted: step, peak": predicted,
        "recipe": recipe,
    }


WAYS = (
    "resident",
    "streamed",
    "streamed, beside the next forward",
    "streamed in backward",
    "streamed in backward, gradients consumed",
    "streamed in backward, beside the next forward",
    "streamed in backward, beside the next forward, 16 GiB resident",
    "layers' weights streamed, stepped on the CPU",
    "torchao's CPUOffloadOptimizer",
)


@table("optimizer_state")
def optimizer_state(_page: Path) -> str:
    """A step with the state on the device and on the host: a row for each way, a column for each length."""
    record = read("optimizer_state")
    rows = [row for row in record["rows"] if "step_s" in row]
    assert all(record["equal"].values())
    assert {row["what"] for row in rows} == set(WAYS)
    sizes = sorted({(row["tokens"], row["microbatches"], row["clipping"]) for row in rows})

    def cell(what: str, size: tuple[int, int, bool]) -> str:
        """Against the resident state of the same length; of that, the time."""
        wanted = dict(zip(("tokens", "microbatches", "clipping"), size, strict=True))
        found = [row for row in rows if row["what"] == what and wanted.items() <= row.items()]
        if not found:
            return ""
        [row] = found
        step = f"{row['step_s']:.2f} s" if what == WAYS[0] else f"{row['to_resident']:.2f} ×"
        return f"{step}, {gib1(row['peak_bytes'])} GiB"

    def title(size: tuple[int, int, bool]) -> str:
        tokens, microbatches, clipping = size
        return f"{tokens:,} tokens" + f" × {microbatches}, clipped" * clipping

    def name(what: str) -> str:
        if "CPU" in what:
            return f"{what}, bfloat16 moments"
        *_, more = what.partition("beside the next forward")
        return f"the same{more}" if more else what.replace("beside the next forward", "while the next forward runs")

    shown = [{"optimizer state": name(what)} | {title(size): cell(what, size) for size in sizes} for what in WAYS]
    copied = [row for row in rows if row["link_s"]]
    link, pinned = ([row[key] for row in copied] for key in ("link_s", "pinned_bytes"))
    copies, memory = f"{min(link):.2f} to {max(link):.2f}", f"{gib1(min(pinned))} to {gib1(max(pinned))}"
    return (
        f"{where(record, rows, by_row=False)} Llama-8B's shape in bfloat16, fused AdamW with float32 moments, "
        f"checkpointed: time against the same run's resident state, and peak. Copies alone take {copies} s; "
        f"{memory} GiB are pinned. A smaller model's parameters are bit-identical.\n\n"
        f"{markdown_table(shown, left=1)}\n"
    )
