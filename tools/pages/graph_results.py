"""What offloading takes and saves inside CUDA graphs, for the pages: from ``results/graphs.json``.

``results.py`` writes it into the pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from page_text import ROOT, day_of, gib, machine, markdown_table, ms

from offload.base.checks import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORD = ROOT / "results" / "graphs.json"

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


BLOCKS: dict[tuple[str, str], Callable[[Path], str]] = {("table", "graphs"): lambda _: graphs_table(read_record())}
"""A block's kind and name → its text, for a page at this path."""

PICTURES: dict[Path, Callable[[], Figure]] = {}
"""Path in the repository → what is drawn there."""
