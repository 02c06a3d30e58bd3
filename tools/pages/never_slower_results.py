"""Budgets on other models, for the pages: from ``results/never_slower*.json`` and ``varying_lengths.json``."""

import statistics
from itertools import groupby
from pathlib import Path

from blocks import Columns, Row, cells, markdown_table, read, table, where, with_runs
from page_text import gib, gib1, more, ms

from benchmarks.comparison import SURE
from benchmarks.never_slower import COMPILED_SHARES, SHARES, beside
from offload.measuring.compare_plans import error_of_median

NAMES = {
    "vit": "ViT-H, 96 images",
    "gpt2": "GPT-2 XL, 24 layers, dropout",
    "t5": "T5-large, eager attention",
    "phi3": "Phi-3, 20 layers, dropout",
    "gemma2": "Gemma-2 9B, 14 layers",
    "moe": "Qwen3-MoE, 8 layers",
    "diffusion": "DiT-XL, 28 blocks",
    "convolution": "ConvNeXt-L",
    "decoder": "20 layers of a 7B model",
}
BUDGETS = sorted({*SHARES, *COMPILED_SHARES} - {0.0}, reverse=True)
"""Budgets as parts of the peak with nothing offloaded."""
CHECKPOINTING = "as checkpointing"  # the budget that checkpointing of every layer needs
RECORDS = "never_slower", "never_slower_h200"  # one for each GPU, with other rows in each


def _rows() -> list[Row]:
    """All rows, each with its GPU, model by model; those of compiled layers last."""
    records = [read(name) for name in RECORDS]
    rows = [row | {"gpu": record["hardware"]["gpu"]} for record in records for row in record["rows"]]
    order = [*dict.fromkeys(map(_place, rows))]  # rows that were measured again are at a record's end
    return sorted(rows, key=lambda row: (row["compiled"], order.index(_place(row))))


def _place(row: Row) -> tuple[str, str]:
    return row["gpu"], row["model"]


def compared() -> list[Row]:
    """Every budget beside the fastest other way in the same memory, model by model, the largest budget first."""
    rows, found = _rows(), []
    for (_, model), group in groupby(rows, key=_place):
        of_model = [one for one in group if "error" not in one]
        budgets = (one for one in of_model if one["what"].endswith("budget"))
        for row in sorted(budgets, key=lambda one: -one["budget_bytes"]):
            compiled = row["what"].removesuffix("budget")
            other, ratio = beside(row, rows)
            nothing = next(one for one in of_model if one["what"] == f"{compiled}nothing")
            share = row["budget_bytes"] / nothing["peak_bytes"]
            near = min(BUDGETS, key=lambda named: abs(named - share))  # called at once
            found.append(
                {
                    "row": row,
                    "name": NAMES.get(model, model) + (", compiled" if compiled else ""),
                    "nothing": nothing,
                    "budget": f"{near:.0%}" if abs(near - share) < 0.005 else CHECKPOINTING,
                    "step_s": statistics.median((other or {}).get("own_s", [row["step_s"]])),  # beside the other
                    "other": other,
                    "ratio": ratio,
                }
            )
    return found


@table("never_slower")
def never_slower_table(_page: Path) -> str:
    """A row for each model, and a column for each budget."""
    rows, found = _rows(), compared()
    used = {one["budget"] for one in found}
    columns = [column for column in (*(f"{share:.0%}" for share in BUDGETS), CHECKPOINTING) if column in used]
    shown = []
    for (name, _), group in groupby(found, key=lambda one: (one["name"], one["row"]["gpu"])):
        of_model = list(group)
        ratios = {one["budget"]: f"{one['ratio']:.2f}" for one in of_model}
        assert len(ratios) == len(of_model), ratios
        nothing = of_model[0]["nothing"]
        kept = f"{ms(nothing['step_s'])} ms, {gib1(nothing['peak_bytes'])} GiB"
        cells_of = {column: ratios.get(column, "") for column in columns}
        shown.append({"model": name, **cells_of, "keep all": kept, "GPU": _short(nothing)})
    measured = " ".join(where(record, record["rows"]) for record in map(read, RECORDS))
    said = measured.replace("(last column)", "(listed below)") + _counts(found) + _bits(rows)
    most, name = max((max(row["times_s"]) / min(row["times_s"]) - 1, row["model"]) for row in rows)
    unsteady = f"Two times of the same row differ by up to {most:.0%} ({NAMES[name]})."
    return f"{said}\n\n{markdown_table(shown, left=1)}\n\n{unsteady}\n"


def _counts(found: list[Row]) -> str:
    """How many budgets are as fast as the others, how many are kept, and how near their plans are."""
    ratios = [one["ratio"] for one in found]
    said = (
        f" Of {len(ratios)} budgets, {sum(ratio <= 1.02 for ratio in ratios)} are at most 2% slower than the fastest "
        f"other way, and {sum(ratio <= 0.97 for ratio in ratios)} are at least 3% faster."
    )
    if turns := [one["other"] for one in found if "beside" in one["row"]]:
        pairs = [zip(other["own_s"], other["times_s"], strict=True) for other in turns]
        errors = [error_of_median([own / other for own, other in some]) for some in pairs]
        sure = sum(error <= SURE for error in errors)
        said += (
            f" In {len(turns)}, steps of both ways alternate: the ratio's standard error is at most {SURE:.0%} in "
            f"{sure}, and {max(errors):.1%} in the worst."
        )
    budgets = [one["row"] for one in found]
    if over := [excess for row in budgets if (excess := row["peak_bytes"] / row["budget_bytes"] - 1) > 0]:
        said += f" Peaks above the budget: {len(over)}, by at most {max(over):.2%}."
    both = [row for row in budgets if "first_predicted_s" in row and "predicted_s" in row]
    if not both:
        return said

    def near(name: str, measured: str, within: float) -> int:
        return sum(abs(row[name] / row[measured] - 1) <= within for row in both)

    return said + (
        f" Of {len(both)} plans, {near('predicted_s', 'step_s', 0.05)} predict the step within 5% "
        f"({near('first_predicted_s', 'step_s', 0.05)} before it was timed), and "
        f"{near('predicted_peak_bytes', 'peak_bytes', 0.02)} the peak within 2%."
    )


def _bits(rows: list[Row]) -> str:
    different = [row["what"] for row in rows if row.get("bit_identical") is False]
    if not all(what.startswith("compiled") for what in different):
        return ""
    return f" Gradients are bit-identical{' where layers are not compiled' if different else ''}."


def _short(row: Row) -> str:
    """The GPU of a row, ``H100`` of ``NVIDIA H100 80GB HBM3``."""
    return str(row["gpu"]).removeprefix("NVIDIA ").split()[0]


@table("never_slower_rows")
def every_budget(_page: Path) -> str:
    """A row for each budget, with what it is compared with."""
    found = compared()
    columns: Columns = {
        "model": ("name", ""),
        "ratio": lambda one: "-" if one["other"] is None else f"{one['ratio']:.2f}",
        "step, ms": ("step_s", ms),
        "fastest other way": lambda one: "-" if one["other"] is None else _named(one["other"]),
        "budget, GiB": ("row", lambda row: gib(row["budget_bytes"])),
        "peak, GiB": ("row", lambda row: gib(row["peak_bytes"])),
        "GPU": ("row", _short),
    }
    shown = with_runs(cells(found, columns), [one["row"] for one in found], {}, among=_rows())
    return f"{markdown_table(shown, left=1)}\n"


def _named(row: Row) -> str:
    layers = f" of {row['layers']} layers" if row["what"].endswith("some") else ""
    verb = {"checkpoint some": "checkpointing", "checkpoint all": "checkpointing all", "offload some": "offloading"}
    what = row["what"].removeprefix("compiled ")
    compiled = "compiled, " if what != row["what"] else ""
    return f"{ms(row['step_s'])} ms: {compiled}{verb.get(what, what)}{layers}"


WAYS = {
    "plan by hand": "a plan for the longest batch, by hand",
    "nothing": "keep all",
    "gradient checkpointing": "checkpointing of every layer",
}
VARYING: Columns = {
    "way": ("what", lambda what: WAYS.get(what, f"`{what}`")),
    "against the plan by hand": ("ratio", more),
    "step, ms": lambda row: ms(row["train_s"] / row["steps"]),
    "steps": ("steps", ",d"),
    "over the budget": ("over_budget", lambda steps: str(len(steps))),
    "measured": ("measuring", lambda steps: str(len(steps))),
    "peak of budget, GiB": lambda row: f"{gib(row['peak_bytes'])} of {gib(row['budget_bytes'])}",
}


@table("varying_lengths")
def varying_lengths(_page: Path) -> str:
    """What each way to train took, and how well a budget was kept."""
    record = read("varying_lengths")
    budget = {"budget_bytes": record["budget_bytes"]}
    rows = [budget | row for row in record["rows"] if "error" not in row]
    return (
        f"**Lengths that vary.** Hugging Face's Trainer trains {record['layers']} layers of Llama-3.2-3B's width on 64 "
        "to 4,096 tokens (log-normal, padded per batch), with evaluations and without cuDNN's attention. "
        f"{where(record, record['rows'], by_row=False)} "
        "The budget is half of what the longest batch adds.\n\n"
        f"{markdown_table(cells(rows, VARYING), left=1, answer=('against the plan by hand', 'over the budget'))}\n"
    )
