"""What offloading takes and saves inside CUDA graphs, for the pages: from ``results/graphs.json``."""

from pathlib import Path

from page_text import Row, day_of, gib, machine, markdown_table, ms, read, table

from offload.base.checks import format_bytes


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
