"""What offloading takes and saves inside CUDA graphs, for the pages: from ``results/graphs.json``.

``results.py`` writes it into the pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawing import NARROW_INCHES, WIDE_INCHES, Maker
from page_text import ROOT, day_of, gib, image, machine, markdown_table, ms

from offload.base.checks import format_bytes
from offload.observe.plot import COLORS, INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORD = ROOT / "results" / "graphs.json"
PICTURE = Path("docs/_static/results/graphs.svg")

Row = dict[str, Any]


def read_record() -> Row:
    """The record of the benchmark."""
    record: Row = json.loads(RECORD.read_text("utf-8"))
    return record


def graphs_table(record: Row) -> str:
    """Step and peak of both models, eager and as a graph, kept and offloaded, and what follows from them."""
    shown = [
        {
            "model": row["workload"],
            "layers offloaded": row["k"],
            "mode": row["mode"],
            "step, ms": ms(row["step_s"], 2),
            "activation peak, GiB": gib(row["peak_bytes"]),
        }
        for row in record["rows"]
    ]
    where = machine(record, record["link"], day_of(record))
    decoder, launch_bound = record["summary"]["decoder"], record["summary"]["launch_bound"]
    said = (
        f"On the decoder, the graph with offloading takes {decoder['graph_offload_to_graph']:.3f} times as long as the "
        f"graph without, and saves {format_bytes(decoder['graph_saved_bytes'])}; eager mode saves "
        f"{format_bytes(decoder['eager_saved_bytes'])}. On the launch-bound model, the graph with offloading is "
        f"{launch_bound['graph_speedup_offloaded']:.1f} times as fast as the eager step with offloading."
    )
    return f"{where}\n\n{markdown_table(shown, left=1)}\n\n{said}\n"


def graphs_picture(record: Row, page: Path) -> str:
    """The picture, as an image with a path from ``page`` and a text for those who cannot see it."""
    said = "; ".join(f"{_name(row)}: {ms(row['step_s'], 1)} ms" for row in record["rows"])
    return image(f"Bars of step times. {said}.", PICTURE, page)


def draw(record: Row, *, narrow: bool = False) -> Figure:
    """A panel for each model, a bar for each way to run its step."""
    models = list(dict.fromkeys(row["workload"] for row in record["rows"]))
    figure = new_figure((NARROW_INCHES, 2.0 * len(models)) if narrow else (WIDE_INCHES, 2.6))
    panels = figure.subplots(*((len(models), 1) if narrow else (1, len(models))))
    for ax, model in zip(panels, models, strict=True):
        rows = [row for row in record["rows"] if row["workload"] == model][::-1]
        style_axes(ax)
        for place, row in enumerate(rows):
            color = COLORS["forward"] if row["mode"] == "graph" else COLORS["offload"]
            ax.barh(place, row["step_s"] * 1e3, height=0.62, color=color, linewidth=0)
            text = f" {ms(row['step_s'], 1)}"
            ax.text(row["step_s"] * 1e3, place, text, color=INK, fontsize=9, va="center_baseline")
        ax.set_yticks(range(len(rows)), [f"{row['mode']}, {_offloads(row)}" for row in rows])
        ax.set_xlim(0, 1.18 * max(row["step_s"] for row in rows) * 1e3)
        ax.set_xlabel("step, ms", color=INK, fontsize=9)
        ax.set_title(model, color=INK, loc="left", fontsize=11)
    return figure


def _name(row: Row) -> str:
    return f"{row['workload']}, {row['mode']}, {_offloads(row)}"


def _offloads(row: Row) -> str:
    return f"{row['k']} offloaded" if row["k"] else "kept"


BLOCKS: dict[tuple[str, str], Callable[[Path], str]] = {
    ("table", "graphs"): lambda _: graphs_table(read_record()),
    ("picture", "graphs"): lambda page: graphs_picture(read_record(), page),
}
"""A block's kind and name → its text, for a page at this path."""

PICTURES: dict[Path, Maker] = {PICTURE: lambda *, narrow: draw(read_record(), narrow=narrow)}
"""Path in the repository → what draws it."""
