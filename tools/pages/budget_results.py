"""The tables and the curve of memory budgets, from ``results/budget*.json`` and ``results/llama_8b.json``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drawing import NARROW_INCHES, label_axes
from page_text import GIB, Row, gib, markdown_table, measured_on, more, ms, picture, read, table, torch_of, with_runs

from offload.observe.plot import COLORS, INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LLAMA_ROWS = {
    "checkpointing of Hugging Face": "Hugging Face's checkpointing",
    "memory_budget= its peak": "`memory_budget`, of the same peak",
}
"""What a row of the whole training has → what the page says."""
MODELS = {"decoder": "20 decoder layers", "llama": "a Llama of 16 layers"}


def _where(record: Row, *rows: Row) -> str:
    return f"{record['hardware']['gpu']}, {torch_of(record)}, {measured_on(rows, record, by_row=True)}."


def budgets(model: str, _page: Path, name: str = "budget") -> str:
    """Within each budget: the step and the peak, predicted and measured."""
    record = read(name)
    rows = [row for row in record["rows"] if row["model"] == model and "error" not in row]
    shown = [
        {
            "": row["what"].replace("inputs travel", "inputs offloaded"),
            "step, ms": f"{1e3 * row['step_s']:.0f}",
            "against nothing": more(row["ratio"]),
            "predicted": _percent(row, "predicted_s", "step_s"),
            "peak, GiB": f"{row['peak_bytes'] / GIB:.2f}",
            "predicted peak": _percent(row, "predicted_peak_bytes", "peak_bytes"),
            "host, GiB": gib(row["host_bytes"], 1) if "host_bytes" in row else "",
        }
        for row in rows
    ]
    same = " Gradients are bit-identical in every row." if all(row["bit_identical"] for row in rows) else ""
    note = record.get("notes", {}).get(model)
    noted = "" if note is None else f" This run: {note}."
    told = markdown_table(with_runs(shown, rows, record), left=1, answer=("peak, GiB", "against nothing"))
    return f"{_where(record, *rows)}{same}{noted}\n\n{told}\n"


def _percent(row: Row, predicted: str, measured: str) -> str:
    return more(row[predicted] / row[measured]) if predicted in row else ""


@table("h100_beside")
def h100_beside(_page: Path) -> str:
    """How the H100's rows are beside the H200's of the same names."""
    here, there = (
        {row["what"]: row for row in read(name)["rows"] if row["model"] == "decoder"}
        for name in ("budget_h100", "budget")
    )
    slower = [100 * (row["step_s"] / there[what]["step_s"] - 1) for what, row in here.items()]
    plans = [what for what in here if what.startswith("budget")]
    dearer = max(100 * (here[what]["ratio"] - there[what]["ratio"]) for what in plans)
    off = {
        word: max(
            abs(100 * (row["predicted_s"] / row["step_s"] - 1)) for what, row in here.items() if what.startswith(word)
        )
        for word in ("budget", "whole layers")
    }
    return (
        f"On the H100, steps are {min(slower):.1f} to {max(slower):.1f}% longer than on the H200, and a budget costs "
        f"up to {dearer:.1f} points more of the step. Predictions of plans by region are off by at most "
        f"{off['budget']:.1f}%, those of whole layers by at most {off['whole layers']:.1f}%.\n"
    )


@table("llama_8b")
def llama_8b(_page: Path) -> str:
    """A whole training step beside Hugging Face's checkpointing."""
    record = read("llama_8b")
    first = record["rows"][0]
    shown = [
        {
            "": LLAMA_ROWS.get(row["what"], row["what"]),
            "step, s": f"{row['step_s']:.2f}",
            "against checkpointing": f"{row['step_s'] / first['step_s']:.2f}",
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "GPU memory, GiB": f"{(record['held_bytes'] + row['peak_bytes']) / GIB:.1f}",
            "on the host, GiB": f"{row['pinned_bytes'] / GIB:.0f}" if "pinned_bytes" in row else "",
        }
        for row in record["rows"]
    ]
    told = markdown_table(shown, left=1, answer=("against checkpointing", "GPU memory, GiB"))
    where = _where(record, record)
    return f"{where} {record['tokens']:,} tokens; weights, gradients and moments are included.\n\n{told}\n"


@table("budget_host_cost")
def host_cost(_page: Path) -> str:
    """The host's time for an operation, by how its layer is recomputed."""
    record = read("budget")
    cost = record["host_cost"]
    shown = [
        {"": name} | {f"{way}, µs": f"{1e6 * found[f'{way}_s']:.1f}" for way in ("forward", "backward")}
        for name, found in cost.items()
        if isinstance(found, dict)
    ]
    where = _where(record, cost)
    return f"{where} The time is per operation, in a layer of tiny tensors.\n\n{markdown_table(shown, left=1)}\n"


@table("budget_clock")
def clock(_page: Path) -> str:
    """Why whole layers are faster than predicted where forward waits."""
    found = read("budget")["whole_layers_clock"]
    kept, waited = found["nothing"], found["whole layers"]
    return (
        f"With whole layers for {found['budget_gib']} GiB, backward took {waited['backward_ms']:.0f} ms, where the "
        f"profile had {kept['backward_ms']:.0f}; the median clock was {waited['clock_mhz']:,} MHz, and without "
        f"offloading {kept['clock_mhz']:,} MHz.\n"
    )


def _curves(model: str) -> tuple[list[Row], list[Row], list[Row], list[Row]]:
    """The plans, whole layers, both with nothing first; the two ways to checkpoint all; what one line came to."""
    rows = [row for row in read("budget")["rows"] if row["model"] == model and "error" not in row]
    plans, whole = (
        [rows[0], *(row for row in rows if row["what"].startswith(word))] for word in ("budget", "whole layers")
    )
    return plans, whole, *([row for row in rows if row["what"].startswith(word)] for word in ("checkpoint", "memory_b"))


def said(model: str) -> str:
    """The picture in words."""
    plans, whole, checkpoints, lines = _curves(model)
    alt = (
        f"Step time against activation peak. Plans by region: from {gib(plans[0]['peak_bytes'], 1)} GiB and "
        f"{ms(plans[0]['step_s'])} ms to {gib(plans[-1]['peak_bytes'], 1)} GiB and {ms(plans[-1]['step_s'])} ms. Whole "
        f"layers: {ms(whole[-1]['step_s'])} ms at {gib(whole[-1]['peak_bytes'], 1)} GiB. Every layer checkpointed: "
        f"{ms(checkpoints[0]['step_s'])} ms at {gib(checkpoints[0]['peak_bytes'], 1)} GiB."
    )
    one_line = [f"{ms(row['step_s'])} ms at {gib(row['peak_bytes'], 1)} GiB" for row in lines]
    return alt + (f" memory_budget=, one line: {', '.join(one_line)}." if lines else "")


def draw(model: str, *, narrow: bool = False) -> Figure:
    """What a step takes within a memory budget, by three ways; for phones, as narrow as they are."""
    plans, whole, checkpoints, lines = _curves(model)
    figure = new_figure((NARROW_INCHES if narrow else 7.2, 3.9))
    ax = figure.subplots()
    style_axes(ax)
    for rows, line, color, label in (
        (whole, "s--", COLORS["offload"], "whole layers offloaded"),
        (plans, "o-", COLORS["forward"], "a plan by region"),
        (lines, "*", COLORS["reload"], "memory_budget=, one line"),
        (checkpoints[:1], "D", COLORS["recompute"], "every layer checkpointed"),
        (checkpoints[1:], "^", COLORS["recompute"], "the same, inputs on the host"),
    ):
        if rows:
            peaks, steps = [row["peak_bytes"] / GIB for row in rows], [1e3 * row["step_s"] for row in rows]
            ax.plot(peaks, steps, line, color=color, label=label, markersize=10 if line == "*" else None)
    ax.set_xlim(0, 1.08 * plans[0]["peak_bytes"] / GIB)
    ax.set_ylim(0, 1.15e3 * max(row["step_s"] for row in [*whole, *checkpoints]))
    gpu = "" if narrow else f", {read('budget')['hardware']['gpu']}"
    title = f"{MODELS[model]} within a {'' if narrow else 'memory '}budget{gpu}"
    label_axes(ax, "activation peak, GiB", "step, ms", title)
    ax.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower right")
    return figure


for block, of in (("budgets", "decoder"), ("budgets_llama", "llama")):
    table(block)(partial(budgets, of))
    picture(block, partial(draw, of), partial(said, of))
table("budgets_h100")(partial(budgets, "decoder", name="budget_h100"))
table("budgets_llama_short")(partial(budgets, "llama_short"))
