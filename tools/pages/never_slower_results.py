"""Budgets on models that no plan was tuned for, for the pages: from ``results/never_slower.json``."""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path

from page_text import Row, gib, markdown_table, measured_on, ms, read, table, torch_of

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


@table("never_slower")
def never_slower_table(_page: Path) -> str:
    """Each model within each budget, beside the fastest other way in the same memory."""
    record = read("never_slower")
    rows: list[Row] = record["rows"]
    shown, ratios = [], []
    for model, group in groupby(rows, key=lambda row: row["model"]):
        of_model = list(group)
        nothing = of_model[0]
        for row in (one for one in of_model if one["what"] == "budget"):
            other = beside(row, rows)
            ratio = math.nan if other is None else row["step_s"] / other["step_s"]
            ratios.append(ratio)
            shown.append(
                {
                    "model": NAMES[model],
                    "nothing": f"{ms(nothing['step_s'])} ms, {gib(nothing['peak_bytes'], 1)} GiB",
                    "budget, GiB": gib(row["budget_bytes"]),
                    "peak, GiB": gib(row["peak_bytes"]),
                    "step, ms": ms(row["step_s"]),
                    "fastest other way": "-" if other is None else f"{ms(other['step_s'])} ms: {_named(other)}",
                    "ratio": f"{ratio:.2f}",
                }
            )
    said = (
        f"{record['hardware']['gpu']}, {torch_of(record)}, {measured_on(rows, record)}. Of {len(ratios)} budgets, "
        f"{sum(ratio <= 1.02 for ratio in ratios)} are at most 2% slower than the fastest other way, "
        f"{sum(ratio <= 0.97 for ratio in ratios)} at least 3% faster; the slowest takes {max(ratios):.2f} times as "
        "long."
    )
    if all(row["bit_identical"] for row in rows if row.get("bit_identical") is not None):
        said += " Gradients are bit-identical."
    return f"{said}\n\n{markdown_table(shown, left=1, answer=('ratio', 'fastest other way'))}\n"


def _named(row: Row) -> str:
    layers = f" of {row['layers']} layers" if row["what"].endswith("some") else ""
    verb = {"checkpoint some": "checkpointing", "checkpoint all": "checkpointing all", "offload some": "offloading"}
    return f"{verb.get(row['what'], row['what'])}{layers}"
