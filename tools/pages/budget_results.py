"""Memory budgets on the pages, from ``results/budget.json`` and ``llama_8b.json``: tables, curves, the start page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocks import Columns, Row, cells, markdown_table, picture, read, row_of, table, where, with_runs
from drawing import NARROW_INCHES, label_axes
from page_text import GIB, day_of, gib, gib1, link_of, more, ms, torch_of, way_of

from offload.observe.timeline import COLORS, INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = {"decoder": "20 decoder layers", "llama": "a Llama of 16 layers"}
CHEAP = 1.05  # up to so many times the step, a plan counts as nearly free
LLAMA = "Llama-8B's shape"
LAYERS = "twenty decoder layers of a 7B model"
DECODER = f"{LAYERS} (hidden 4096), 2 × 4096 tokens, bfloat16"


def rows_of(model: str) -> list[Row]:
    """What was measured of a model, the step with everything kept first."""
    rows: list[Row] = read("budget")["rows"]
    return [row for row in rows if row["model"] == model and "error" not in row and "nothing frozen" not in row["what"]]


def plans_of() -> tuple[Row, Row, Row, Row]:
    """Of the decoder: nothing, checkpointing, the smallest nearly free plan, and the plan nearest to checkpointing."""
    rows = rows_of("decoder")
    nothing, checkpoint = row_of(rows, what="nothing"), row_of(rows, what="checkpoint all")
    plans = [row for row in rows if row["what"].startswith("budget")]
    cheap = min((row for row in plans if row["ratio"] <= CHEAP), key=lambda row: int(row["peak_bytes"]))
    near = min(plans, key=lambda row: abs(int(row["peak_bytes"]) - int(checkpoint["peak_bytes"])))
    return nothing, checkpoint, cheap, near


def planner_rows() -> dict[str, dict[str, Any]]:
    """The GPU and the rows that the site's planner draws beside what it computes, by the planner's presets."""
    found = {}
    for name, rows in (("decoder", rows_of("decoder")), ("llama_8b", read("llama_8b")["rows"])):
        gpu = read("llama_8b" if name == "llama_8b" else "budget")["hardware"]["gpu"]
        points = [{key: row[key] for key in ("what", "peak_bytes", "step_s")} for row in rows]
        found[name] = {"gpu": gpu.removeprefix("NVIDIA "), "rows": points}
    return found


def _off(predicted: str, measured: str) -> Any:
    return lambda row: more(row[predicted] / row[measured]) if predicted in row else ""


BUDGETS: Columns = {
    "": ("what", way_of),
    "step, ms": ("step_s", ms),
    "against keep all": ("ratio", more),
    "predicted": _off("predicted_s", "step_s"),
    "peak, GiB": ("peak_bytes", gib),
    "predicted peak": _off("predicted_peak_bytes", "peak_bytes"),
    "host, GiB": ("host_bytes", gib1),
}


def budgets(model: str, _page: Path) -> str:
    """Within each budget: the step and the peak, predicted and measured."""
    record, rows = read("budget"), rows_of(model)
    same = " Gradients are bit-identical in every row." if all(row["bit_identical"] for row in rows) else ""
    note = record.get("notes", {}).get(model)
    noted = "" if note is None else f" This run: {note}."
    shown = with_runs(cells(rows, BUDGETS), rows, record)
    told = markdown_table(shown, left=1, answer=("peak, GiB", "against keep all"))
    return f"{where(record, rows)}{same}{noted}\n\n{told}\n"


@table("llama_8b")
def llama_8b(_page: Path) -> str:
    """A whole training step beside Hugging Face's checkpointing."""
    record = read("llama_8b")
    first_s, held_bytes = record["rows"][0]["step_s"], record["held_bytes"]
    names = {
        "checkpointing of Hugging Face": "Hugging Face's checkpointing",
        "memory_budget= its peak": "`memory_budget`, of the same peak",
    }
    columns: Columns = {
        "": ("what", lambda what: names.get(what, what)),
        "step, s": ("step_s", ".2f"),
        "against checkpointing": ("step_s", lambda step_s: f"{step_s / first_s:.2f}"),
        "tokens/s": ("tokens_per_s", ",.0f"),
        "GPU memory, GiB": ("peak_bytes", lambda nbytes: gib1(held_bytes + nbytes)),
        "on the host, GiB": ("pinned_bytes", lambda nbytes: gib(nbytes, 0)),
    }
    shown = cells(record["rows"], columns)
    told = markdown_table(shown, left=1, answer=("against checkpointing", "GPU memory, GiB"))
    tokens = f"{record['tokens']:,} tokens; weights, gradients and moments, all in bfloat16, are included."
    return f"{where(record)} {tokens}\n\n{told}\n"


def _decoder_run() -> str:
    """Where and when the decoder's rows were measured."""
    record = read("budget")
    day = day_of(rows_of("decoder")[0])
    return f"{record['hardware']['gpu']}, {link_of(record['link'])}, {torch_of(record)}, {day}"


@table("start_table")
def start_table(_page: Path) -> str:
    """Four ways to run the decoder's step."""
    nothing, _, cheap, near = rows = plans_of()
    names = ["keep all activations", "PyTorch's checkpointing of every layer"]
    names += [f"`memory_budget`, {row['what'].removeprefix('budget ')}" for row in (cheap, near)]
    columns: Columns = {
        "GPU, GiB": ("peak_bytes", gib1),
        "host, GiB": lambda row: gib1(row.get("host_bytes", 0)),
        "time of a step": lambda row: f"{ms(row['step_s'])} ms" + f" ({more(row['ratio'])})" * (row is not nothing),
    }
    assert all(row["bit_identical"] for row in rows)
    shown = [{"way": name} | shown for name, shown in zip(names, cells(rows, columns), strict=True)]
    return (
        f"{markdown_table(shown, left=1)}\n\n{DECODER[0].upper()}{DECODER[1:]}, forward and backward without an "
        'optimizer, budgets by `offload.offload_layers`. "GPU" is the peak above weights and gradients. Gradients are '
        f"bit-identical in all rows. {_decoder_run()}.\n"
    )


@table("recipes")
def recipes(_page: Path) -> str:
    """What each remedy gave on the decoder that all pages measure: all rows are of one run."""
    nothing, checkpoint, cheap, near = plans_of()
    rows = rows_of("decoder")
    free = row_of(rows, what="whole layers, 20 GiB")
    inputs = next(row for row in rows if row["what"].startswith("checkpoint all, inputs"))
    remedies = {
        "keep all activations": nothing,
        f"{free['layers']} of 20 whole layers offloaded": free,
        f"`memory_budget`, {cheap['what'].removeprefix('budget ')}": cheap,
        f"`memory_budget`, {near['what'].removeprefix('budget ')}": near,
        "checkpoint every layer": checkpoint,
        "checkpoint every layer, offload the layers' inputs": inputs,
    }
    columns: Columns = {
        "activation peak, GiB": ("peak_bytes", gib1),
        "step, ms": ("step_s", ms),
        "longer by": lambda row: more(row["ratio"]) if row is not nothing else "",
    }
    shown = [
        {"remedy": what} | one for what, one in zip(remedies, cells(list(remedies.values()), columns), strict=True)
    ]
    told = markdown_table(shown, left=1, answer=("longer by", "activation peak, GiB"))
    return f"{_decoder_run()}.\n\n{told}\n"


def _curves(model: str) -> dict[str, list[Row]]:
    """The plans, whole layers, both with nothing first; the two ways to checkpoint all; what one line came to."""
    rows = rows_of(model)
    found = {
        word: [row for row in rows if row["what"].startswith(word)] for word in ("budget", "whole", "check", "memory")
    }
    return found | {word: [rows[0], *found[word]] for word in ("budget", "whole")}


def said(model: str) -> str:
    """The picture in words."""

    def at(row: Row) -> str:
        return f"{ms(row['step_s'])} ms at {gib1(row['peak_bytes'])} GiB"

    curves = _curves(model)
    ends = curves["budget"][0], curves["budget"][-1]
    first, last = (f"{gib1(row['peak_bytes'])} GiB and {ms(row['step_s'])} ms" for row in ends)
    alt = (
        f"Step time against activation peak. Plans by region: from {first} to {last}. Whole "
        f"layers: {at(curves['whole'][-1])}. Every layer checkpointed: {at(curves['check'][0])}."
    )
    one_line = ", ".join(map(at, curves["memory"]))
    return alt + (f" memory_budget=, one line: {one_line}." if one_line else "")


def draw(model: str, *, narrow: bool = False) -> Figure:
    """What a step takes within a memory budget, by three ways; for phones, as narrow as they are."""
    curves = _curves(model)
    figure = new_figure((NARROW_INCHES if narrow else 7.2, 3.9))
    ax = figure.subplots()
    style_axes(ax)
    for rows, line, color, label in (
        (curves["whole"], "s--", COLORS["offload"], "whole layers offloaded"),
        (curves["budget"], "o-", COLORS["forward"], "a plan by region"),
        (curves["memory"], "*", COLORS["reload"], "memory_budget=, one line"),
        (curves["check"][:1], "D", COLORS["recompute"], "every layer checkpointed"),
        (curves["check"][1:], "^", COLORS["recompute"], "the same, inputs on the host"),
    ):
        if rows:
            peaks, steps = [row["peak_bytes"] / GIB for row in rows], [1e3 * row["step_s"] for row in rows]
            ax.plot(peaks, steps, line, color=color, label=label, markersize=10 if line == "*" else None)
    ax.set_xlim(0, 1.08 * curves["budget"][0]["peak_bytes"] / GIB)
    ax.set_ylim(0, 1.15e3 * max(row["step_s"] for row in [*curves["whole"], *curves["check"]]))
    gpu = "" if narrow else f", {read('budget')['hardware']['gpu']}"
    title = f"{MODELS[model]} within a {'' if narrow else 'memory '}budget{gpu}"
    label_axes(ax, "activation peak, GiB", "step, ms", title)
    ax.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower right")
    return figure


for block, of in (("budgets", "decoder"), ("budgets_llama", "llama")):
    table(block)(partial(budgets, of))
    picture(block, partial(draw, of), partial(said, of))
