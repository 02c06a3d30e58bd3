"""What each fault looks like: from ``results/faults.json``, and from the traces beside it."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blocks import BLOCKS, PICTURES, ROOT, Row, image, read, table
from drawing import plotted
from page_text import day_of, gib, link_of, ms, torch_of

from offload.base.checks import format_bytes
from offload.observe.timeline import LANES, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRACES = ROOT / "results" / "faults"

WORDS = {
    "none of them": "no fault",
    "layers travel free": "layers are offloaded for free",
    "layers travel": "layers are offloaded",
}
WORDS["than the link carries"] = "than the link can carry"
"""Words of the record → words of the pages."""


def timeline_of(trace: Row) -> Timeline:
    """What ``benchmarks.faults`` wrote, as a timeline. The heading above it on the page is its title."""
    spans, memory = [], []
    for event in trace["traceEvents"]:
        begin_s = event.get("ts", 0) * 1e-6
        if event["ph"] == "C":
            memory.append((begin_s, event["args"]["bytes"]))
        elif event["ph"] == "X":
            kind, name = event["cat"], event["name"]
            label = "" if name == kind else name
            layer, nbytes = event["args"]["layer"], event["args"]["bytes"]
            end_s = begin_s + event["dur"] * 1e-6
            spans.append(Span(LANES[event["tid"]], kind, begin_s, end_s, label, layer, nbytes))
    return Timeline(tuple(spans), tuple(memory), title="")


def draw(name: str, *, narrow: bool = False) -> Figure:
    """A fault's timeline."""
    timeline = timeline_of(json.loads((TRACES / f"{name}.json").read_text("utf-8")))
    return plotted(timeline, narrow=narrow, height=3.4)


def fault_picture(name: str, drawn: Path, page: Path) -> str:
    """A fault's timeline, what was counted, and its trace."""
    row = next(row for row in read("faults")["faults"] if row["name"] == name)
    trace = Path(os.path.relpath(TRACES / f"{name}.json", page.parent)).as_posix()
    sees = row["sees"]
    for recorded_word, word in WORDS.items():
        sees = sees.replace(recorded_word, word)
    recorded = f"{ms(row['recorded']['duration_s'])} ms, {ms(row['recorded']['stall_s'])} of them stalled"
    alt = (
        f"Recorded timeline of three streams and of memory. What one sees: {sees}. The recorded step takes {recorded}."
    )
    return f"{image(alt, drawn, page)}\n{_measured(row)}; {{download}}`trace <{trace}>`.\n"


def _measured(row: Row) -> str:
    """A step without offloading and one with, and the counters of a step."""
    kept, found, stats, steps = row["kept"], row["found"], row["stats"], row["steps"]
    wasted = ", ".join(f"{name} {format_bytes(nbytes // steps)}" for name, nbytes in stats["wasted"].items())
    first = f", the first {ms(row['recorded']['duration_s'])} ms" if row["name"] == "first_step" else ""
    return (
        f"Step {ms(kept['step_s'])} → {ms(found['step_s'])} ms{first}, peak {gib(kept['peak_bytes'])} → "
        f"{gib(found['peak_bytes'])} GiB; {gib(stats['offloaded_bytes'] / steps)} GiB copied, `stall_s` "
        f"{ms(stats['stall_s'] / steps)} ms, `late_reloads` {stats['late_reloads'] // steps}, `wasted` {wasted or '0'}"
    )


@table("fault_setting")
def fault_setting(_page: Path) -> str:
    """What it was recorded on."""
    record = read("faults")
    return f"{record['hardware']['gpu']}, {link_of(record['link'])}, {torch_of(record)}, {day_of(record)}.\n"


for one in read("faults")["faults"]:
    drawn_at = Path(f"docs/_static/results/fault_{one['name']}.svg")
    PICTURES[drawn_at] = partial(draw, one["name"])
    BLOCKS["picture", f"fault_{one['name']}"] = partial(fault_picture, one["name"], drawn_at)
