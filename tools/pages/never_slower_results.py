"""Budgets on models that no plan was tuned for, for the pages: from ``results/never_slower.json``."""

import math
from itertools import groupby
from pathlib import Path

from page_text import Row, gib, markdown_table, measured_on, ms, read, table, torch_of, with_runs

from benchmarks.never_slower import beside

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


UNSTEADY = 0.1
"""By what part two times of a row may differ before the table says so."""


@table("never_slower")
def never_slower_table(_page: Path) -> str:
    """Each model within each budget, beside the fastest other way in the same memory."""
    record = read("never_slower")
    rows: list[Row] = record["rows"]
    shown, ratios, budgets = [], [], []
    for model, group in groupby(rows, key=lambda row: row["model"]):
        of_model = [one for one in group if "error" not in one]
        for row in (one for one in of_model if one["what"].endswith("budget")):
            compiled = row["what"].removesuffix("budget")
            nothing = next(one for one in of_model if one["what"] == f"{compiled}nothing")
            other = beside(row, rows)
            ratio = math.nan if other is None else row["step_s"] / other["step_s"]
            ratios.append(ratio)
            budgets.append(row)
            shown.append(
                {
                    "model": NAMES.get(model, model) + (", compiled" if compiled else ""),
                    "nothing": f"{ms(nothing['step_s'])} ms, {gib(nothing['peak_bytes'], 1)} GiB",
                    "budget, GiB": gib(row["budget_bytes"]),
                    "peak, GiB": gib(row["peak_bytes"]),
                    "step, ms": ms(row["step_s"]),
                    "fastest other way": "-" if other is None else f"{ms(other['step_s'])} ms: {_named(other)}",
                    "ratio": "-" if other is None else f"{ratio:.2f}",
                }
            )
    said = (
        f"{record['hardware']['gpu']}, {torch_of(record)}, {measured_on(rows, record, by_row=True)}. Of {len(ratios)} "
        f"budgets, {sum(ratio <= 1.02 for ratio in ratios)} are at most 2% slower than the fastest other way, "
        f"and {sum(ratio <= 0.97 for ratio in ratios)} are at least 3% faster. The slowest takes "
        f"{max(ratio for ratio in ratios if not math.isnan(ratio)):.2f} times as long."
    )
    counts = {name: sum(one["model"] == name for one in shown) for name in dict.fromkeys(one["model"] for one in shown)}
    most = max(counts.values())
    if few := [f"{name} ({count})" for name, count in counts.items() if count < most]:
        said += f" Models with fewer than {most} budgets: {', '.join(few)}."
    over = [excess for row in budgets if (excess := row["peak_bytes"] / row["budget_bytes"] - 1) > 0]
    if over:
        said += f" {len(over)} of the peaks are above the budget, by at most {max(over):.1%}."
    said += f" {_unsteady(rows)}"
    if "meanwhile" in record:
        said += f" Meanwhile {record['meanwhile']}."
    compared = [row for row in rows if row.get("bit_identical") is not None]
    if all(row["bit_identical"] for row in compared):
        said += " Gradients are bit-identical."
    elif all(row["bit_identical"] for row in compared if not row["what"].startswith("compiled")):
        said += " Gradients are bit-identical where layers are not compiled."
    shown = with_runs(shown, budgets, record, among=rows)
    return f"{said}\n\n{markdown_table(shown, left=1, answer=('ratio', 'fastest other way'))}\n"


def _unsteady(rows: list[Row]) -> str:
    """By how much the two times of a row differ at most, each the mean of some steps, of the models where that is most.

    A step that waits for the host is longer while the host has other work.
    """
    apart = {
        name: max(max(row["times_s"]) / min(row["times_s"]) - 1 for row in rows if row["model"] == name)
        for name in dict.fromkeys(row["model"] for row in rows)
    }
    unsteady = [f"{NAMES[name]} ({most:.0%})" for name, most in apart.items() if most > UNSTEADY]
    if not unsteady:
        return f"Two times of the same row differ by at most {max(apart.values()):.0%}."
    return f"Two times of the same row differ by more than {UNSTEADY:.0%} with {', '.join(unsteady)}."


def _named(row: Row) -> str:
    layers = f" of {row['layers']} layers" if row["what"].endswith("some") else ""
    verb = {"checkpoint some": "checkpointing", "checkpoint all": "checkpointing all", "offload some": "offloading"}
    what = row["what"].removeprefix("compiled ")
    compiled = "compiled, " if what != row["what"] else ""
    return f"{compiled}{verb.get(what, what)}{layers}"
