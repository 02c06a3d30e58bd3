"""What offloading takes and saves inside CUDA graphs, for the pages: from ``results/graphs.json``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drawing import NARROW_INCHES, WIDE_INCHES, draw_bars
from page_text import Row, day_of, gib, machine, markdown_table, ms, picture, read, table

from offload.base.checks import format_bytes
from offload.observe.plot import COLORS, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@table("graphs")
def graphs_table(_page: Path) -> str:
    """Step and peak of both models, eager and as a graph, kept and offloaded, and what follows from them."""
    record = read("graphs")
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
    by_way = {(row["workload"], row["mode"], bool(row["k"])): row for row in record["rows"]}
    (eager, eager_off), (graph, graph_off) = (
        [by_way["decoder", mode, offloads] for offloads in (False, True)] for mode in ("eager", "graph")
    )
    eager_step, graph_step = (by_way["launch-bound", mode, True]["step_s"] for mode in ("eager", "graph"))
    said = (
        f"On the decoder, the graph with offloading takes {graph_off['step_s'] / graph['step_s']:.3f} times as long as "
        f"the graph without, and saves {_saved(graph, graph_off)}; eager mode saves {_saved(eager, eager_off)}. On the "
        f"launch-bound model, the graph with offloading is {eager_step / graph_step:.1f} times as fast as the eager "
        "step with offloading."
    )
    return f"{machine(record, record['link'], day_of(record))}\n\n{markdown_table(shown, left=1)}\n\n{said}\n"


def _saved(kept: Row, offloaded: Row) -> str:
    return format_bytes(kept["peak_bytes"] - offloaded["peak_bytes"])


def said() -> str:
    """The picture in words."""
    rows = read("graphs")["rows"]
    return (
        "Bars of step times. "
        + "; ".join(f"{row['workload']}, {_way(row)}: {ms(row['step_s'], 1)} ms" for row in rows)
        + "."
    )


def draw(*, narrow: bool = False) -> Figure:
    """A panel for each model, a bar for each way to run its step."""
    record = read("graphs")
    models = list(dict.fromkeys(row["workload"] for row in record["rows"]))
    figure = new_figure((NARROW_INCHES, 2.0 * len(models)) if narrow else (WIDE_INCHES, 2.6))
    panels = figure.subplots(*((len(models), 1) if narrow else (1, len(models))))
    for ax, model in zip(panels, models, strict=True):
        rows = [row for row in record["rows"] if row["workload"] == model][::-1]
        colors = [COLORS["forward"] if row["mode"] == "graph" else COLORS["offload"] for row in rows]
        times_ms = [row["step_s"] * 1e3 for row in rows]
        draw_bars(ax, list(map(_way, rows)), times_ms, colors, [f"{value:,.1f}" for value in times_ms], room=1.18)
        ax.set_xlabel("step, ms", color=INK, fontsize=9)
        ax.set_title(model, color=INK, loc="left", fontsize=11)
    return figure


def _way(row: Row) -> str:
    return f"{row['mode']}, {row['k']} offloaded" if row["k"] else f"{row['mode']}, kept"


picture("graphs", draw, said)
