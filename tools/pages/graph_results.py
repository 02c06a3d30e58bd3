"""What offloading takes and saves inside CUDA graphs, for the pages: from ``results/graphs.json``."""

from pathlib import Path

from blocks import Columns, cells, markdown_table, read, row_of, table
from page_text import day_of, gib, link_of, ms, torch_of

from offload.base.checks import format_bytes

COLUMNS: Columns = {
    "model": ("workload", ""),
    "layers offloaded": ("k", ""),
    "mode": ("mode", ""),
    "step, ms": ("step_s", lambda step_s: ms(step_s, 2)),
    "activation peak, GiB": ("peak_bytes", gib),
}


@table("graphs")
def graphs_table(_page: Path) -> str:
    """Step and peak of both models, eager and as a graph, kept and offloaded, and what follows from them."""
    record = read("graphs")
    kept, offloaded = (
        [row_of(record["rows"], workload="decoder", mode=mode, k=k) for mode in ("eager", "graph")] for k in (0, 5)
    )
    eager, graph = (
        format_bytes(one["peak_bytes"] - other["peak_bytes"]) for one, other in zip(kept, offloaded, strict=True)
    )
    eager_s, graph_s = (
        row_of(record["rows"], workload="launch-bound", mode=mode, k=1)["step_s"] for mode in ("eager", "graph")
    )
    ratio = offloaded[1]["step_s"] / kept[1]["step_s"]
    return (
        f"{record['hardware']['gpu']}, {link_of(record['link'])}, {torch_of(record)}, {day_of(record)}\n\n"
        f"{markdown_table(cells(record['rows'], COLUMNS), left=1)}\n\nOn the decoder, the graph with offloading takes "
        f"{ratio:.3f} times as long as the graph without, and saves {graph}; eager mode saves {eager}. On the "
        f"launch-bound model, the graph with offloading is {eager_s / graph_s:.1f} times as fast as the eager step "
        "with offloading.\n"
    )
