"""What each fault looks like: from ``results/faults.json``, and from the traces beside it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blocks import ROOT, Row, link_to, picture, read, table
from drawing import plotted
from page_text import day_of, gib, link_of, ms, torch_of

from offload.base.checks import format_bytes
from offload.observe.timeline import LANES, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRACES = Path("results/faults")


def draw(name: str, *, narrow: bool = False) -> Figure:
    """A fault's timeline, from the trace that ``benchmarks.faults`` wrote; the page has a heading above it."""
    spans, memory = [], []
    for event in json.loads((ROOT / TRACES / f"{name}.json").read_text("utf-8"))["traceEvents"]:
        begin_s, told = event.get("ts", 0) * 1e-6, event["args"]
        if event["ph"] == "C":
            memory.append((begin_s, told["bytes"]))
        elif event["ph"] == "X":
            kind, end_s = event["cat"], begin_s + event["dur"] * 1e-6
            label = event["name"] if event["name"] != kind else ""
            spans.append(Span(LANES[event["tid"]], kind, begin_s, end_s, label, told["layer"], told["bytes"]))
    return plotted(Timeline(tuple(spans), tuple(memory)), narrow=narrow, height=3.4)


def said(row: Row) -> str:
    """The picture in words."""
    recorded = row["recorded"]
    return (
        f"Recorded timeline of three streams and of memory. What one sees: {row['sees']}. The recorded step takes "
        f"{ms(recorded['duration_s'])} ms, {ms(recorded['stall_s'])} of them stalled."
    )


def counted(row: Row, page: Path) -> str:
    """A step without offloading and one with, the counters of a step, and its trace."""
    kept, found, stats, steps = row["kept"], row["found"], row["stats"], row["steps"]
    wasted = ", ".join(f"{name} {format_bytes(nbytes // steps)}" for name, nbytes in stats["wasted"].items())
    first = f", the first {ms(row['recorded']['duration_s'])} ms" if row["name"] == "first_step" else ""
    return (
        f"\nStep {ms(kept['step_s'])} → {ms(found['step_s'])} ms{first}, peak {gib(kept['peak_bytes'])} → "
        f"{gib(found['peak_bytes'])} GiB; {gib(stats['offloaded_bytes'] / steps)} GiB copied, `stall_s` "
        f"{ms(stats['stall_s'] / steps)} ms, `late_reloads` {stats['late_reloads'] // steps}, `wasted` {wasted or '0'}"
        f"; {{download}}`trace <{link_to(TRACES / row['name'], page)}.json>`.\n"
    )


@table("fault_setting")
def fault_setting(_page: Path) -> str:
    """What it was recorded on."""
    record = read("faults")
    return f"{record['hardware']['gpu']}, {link_of(record['link'])}, {torch_of(record)}, {day_of(record)}.\n"


for one in read("faults")["faults"]:
    picture(f"fault_{one['name']}", partial(draw, one["name"]), partial(said, one), partial(counted, one))
