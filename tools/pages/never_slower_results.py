"""Budgets on models that no plan was tuned for, for the pages: from ``results/never_slower.json``."""

import math
from itertools import groupby
from pathlib import Path

from page_text import Row, gib, markdown_table, measured_on, ms, read, table, torch_of, with_runs

from benchmarks.never_slower import COMPILED_SHARES, SHARES, beside

NAMES = {
    "vit": "ViT-H, 96 images",
    "gpt2": "GPT-2 XL, 24 layers, dropout",
    "t5": "T5-large, eager attention",
    "phi3": "Phi-3, 20 layers, dropout",
    "gemma2": "Gemma-2 9B, 14 layers",
    "moe": "Qwen3-MoE, 8 layers",
    "diffusion": "DiT-XL, 28 blocks",
    "convolution": "ConvNeXt-L",
}


BUDGETS = sorted({*SHARES, *COMPILED_SHARES}, reverse=True)
"""Budgets as parts of the peak with nothing offloaded."""
CHECKPOINTING = "as checkpointing"
"""The budget that checkpointing of every layer needs."""


def compared() -> list[Row]:
    """Every budget beside the fastest other way in the same memory, model by model."""
    record = read("never_slower")
    rows: list[Row] = record["rows"]
    found = []
    for model, group in groupby(rows, key=lambda row: row["model"]):
        of_model = [one for one in group if "error" not in one]
        for row in (one for one in of_model if one["what"].endswith("budget")):
            compiled = row["what"].removesuffix("budget")
            other = beside(row, rows)
            found.append(
                {
                    "row": row,
                    "name": NAMES.get(model, model) + (", compiled" if compiled else ""),
                    "nothing": next(one for one in of_model if one["what"] == f"{compiled}nothing"),
                    "other": other,
                    "ratio": math.nan if other is None else row["step_s"] / other["step_s"],
                }
            )
    return found


def _budget_of(one: Row) -> str:
    """The column of a row: its budget as a part of the peak with nothing offloaded."""
    share = one["row"]["budget_bytes"] / one["nothing"]["peak_bytes"]
    near = min(BUDGETS, key=lambda named: abs(named - share))
    return f"{near:.0%}" if abs(near - share) < 0.005 else CHECKPOINTING


@table("never_slower")
def never_slower_table(_page: Path) -> str:
    """A row for each model, and a column for each budget."""
    record = read("never_slower")
    rows: list[Row] = record["rows"]
    found = compared()
    ratios = [one["ratio"] for one in found]
    used = set(map(_budget_of, found))
    columns = [column for column in (*(f"{share:.0%}" for share in BUDGETS), CHECKPOINTING) if column in used]
    shown = []
    for name, group in groupby(found, key=lambda one: one["name"]):
        of_model = list(group)
        within = {_budget_of(one): one["ratio"] for one in of_model}
        assert len(within) == len(of_model), within
        nothing = of_model[0]["nothing"]
        told = {column: f"{within[column]:.2f}" if column in within else "" for column in columns}
        kept = f"{ms(nothing['step_s'])} ms, {gib(nothing['peak_bytes'], 1)} GiB"
        shown.append({"model": name, **told, "nothing offloaded": kept})
    said = (
        f"{record['hardware']['gpu']}, {torch_of(record)}, {measured_on(rows, record)}. Of {len(ratios)} "
        f"budgets, {sum(ratio <= 1.02 for ratio in ratios)} are at most 2% slower than the fastest other way, "
        f"and {sum(ratio <= 0.97 for ratio in ratios)} are at least 3% faster. The slowest takes "
        f"{max(ratio for ratio in ratios if not math.isnan(ratio)):.2f} times as long."
    )
    budgets = [one["row"] for one in found]
    over = [excess for row in budgets if (excess := row["peak_bytes"] / row["budget_bytes"] - 1) > 0]
    if over:
        said += f" {len(over)} of the peaks are above the budget, by at most {max(over):.1%}."
    said += _predictions(budgets)
    bits = [row for row in rows if row.get("bit_identical") is not None]
    if all(row["bit_identical"] for row in bits):
        said += " Gradients are bit-identical."
    elif all(row["bit_identical"] for row in bits if not row["what"].startswith("compiled")):
        said += " Gradients are bit-identical where layers are not compiled."
    meanwhile = f" Meanwhile {record['meanwhile']}." if "meanwhile" in record else ""
    return f"{said}\n\n{markdown_table(shown, left=1)}\n\n{_unsteady(rows)}{meanwhile}\n"


def _predictions(budgets: list[Row]) -> str:
    """How near plans are, before any step was timed under them and after, where the record has both."""
    both = [row for row in budgets if "first_predicted_s" in row and "predicted_s" in row]
    if not both:
        return ""

    def near(name: str, measured: str, within: float) -> int:
        return sum(abs(row[name] / row[measured] - 1) <= within for row in both)

    return (
        f" Of {len(both)} plans, {near('predicted_s', 'step_s', 0.05)} tell the step to 5% "
        f"({near('first_predicted_s', 'step_s', 0.05)} before it was timed), and "
        f"{near('predicted_peak_bytes', 'peak_bytes', 0.02)} the peak to 2%."
    )


@table("never_slower_rows")
def every_budget(_page: Path) -> str:
    """A row for each budget, with what it is compared with."""
    record, found = read("never_slower"), compared()
    shown = [
        {
            "model": one["name"],
            "ratio": "-" if one["other"] is None else f"{one['ratio']:.2f}",
            "step, ms": ms(one["row"]["step_s"]),
            "fastest other way": "-"
            if one["other"] is None
            else f"{ms(one['other']['step_s'])} ms: {_named(one['other'])}",
            "budget, GiB": gib(one["row"]["budget_bytes"]),
            "peak, GiB": gib(one["row"]["peak_bytes"]),
        }
        for one in found
    ]
    shown = with_runs(shown, [one["row"] for one in found], record, among=record["rows"])
    return f"{markdown_table(shown, left=1)}\n"


def _unsteady(rows: list[Row]) -> str:
    """By how much the two times of a row, each the mean of some steps, differ at most, and with which model."""
    most, name = max((max(row["times_s"]) / min(row["times_s"]) - 1, row["model"]) for row in rows)
    return f"Two times of the same row differ by up to {most:.0%} ({NAMES[name]})."


def _named(row: Row) -> str:
    layers = f" of {row['layers']} layers" if row["what"].endswith("some") else ""
    verb = {"checkpoint some": "checkpointing", "checkpoint all": "checkpointing all", "offload some": "offloading"}
    what = row["what"].removeprefix("compiled ")
    compiled = "compiled, " if what != row["what"] else ""
    return f"{compiled}{verb.get(what, what)}{layers}"
