"""What each fault looks like: from ``results/faults.json``, and from the traces beside it as far as there are.

``results.py`` writes it into the pages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawing import Maker, plotted
from page_text import ROOT, day_of, full_record, gib, image, machine, ms

from offload.base.checks import format_bytes
from offload.observe.spans import LANES, Span
from offload.observe.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORD = ROOT / "results/faults.json"
FOLDER = Path("docs/_static/results")

NAMES = (
    "healthy",
    "all_small",
    "held",
    "no_room",
    "elsewhere",
    "too_many",
    "late_reloads",
    "many_small",
    "first_step",
)
"""The faults that have a picture."""

Row = dict[str, Any]


def read_record() -> Row:
    """The record."""
    return full_record(RECORD)


def timeline_of(trace: Row) -> Timeline:
    """What :meth:`offload.Timeline.chrome_trace` gave, as a timeline again."""
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
    return Timeline(tuple(spans), tuple(memory), trace["otherData"]["title"])


def trace_path(name: str) -> Path:
    """Where a fault's trace is."""
    return RECORD.with_suffix("") / f"{name}.json"


def picture_path(name: str) -> Path:
    """Where its picture goes, from the repository's root."""
    return FOLDER / f"fault_{name}.svg"


def draw(name: str, *, narrow: bool = False) -> Figure:
    """A fault's timeline."""
    timeline = timeline_of(json.loads(trace_path(name).read_text("utf-8")))
    return plotted(timeline, narrow=narrow, title="", height=3.4)


def fault_of(record: Row, name: str) -> Row:
    """What was found of a fault."""
    found: Row = next(row for row in record["faults"] if row["name"] == name)
    return found


def fault_picture(record: Row, name: str, page: Path) -> str:
    """A fault's timeline, what was counted, and its trace; without a trace, what was counted."""
    row = fault_of(record, name)
    if not trace_path(name).exists():
        return f"{_measured(row)}\n"
    trace = Path(os.path.relpath(trace_path(name), page.parent)).as_posix()
    sees = row["sees"].replace("none of them", "no fault")  # the record's list begins with the step as it should be
    alt = f"Recorded timeline of three streams and of memory. What one sees: {sees}. {_recorded(row)}"
    said = f"{_measured(row)} To open in [Perfetto](https://ui.perfetto.dev): {{download}}`its trace <{trace}>`."
    return f"{image(alt, picture_path(name), page)}\n{said}\n"


def _recorded(row: Row) -> str:
    recorded = row["recorded"]
    return f"The recorded step takes {ms(recorded['duration_s'])} ms, {ms(recorded['stall_s'])} of them stalled."


def _measured(row: Row) -> str:
    """What changes against the same step without offloading, and what is counted a step."""
    kept, found, stats, steps = row["kept"], row["found"], row["stats"], row["steps"]
    said = [
        f"step {ms(kept['step_s'])} → {ms(found['step_s'])} ms",
        f"activation peak {gib(kept['peak_bytes'])} → {gib(found['peak_bytes'])} GiB",
        f"copied {gib(stats['offloaded_bytes'] / steps)} GiB",
        f"`stall_s` {ms(stats['stall_s'] / steps)} ms",
    ]
    if row["name"] == "first_step":
        said.insert(0, f"recorded first step {ms(row['recorded']['duration_s'])} ms, later ones as follows")
    if stats["late_reloads"]:
        said.append(f"`late_reloads` {stats['late_reloads'] // steps}")
    if stats["wasted"]:
        named = ", ".join(f"{name} {format_bytes(nbytes // steps)}" for name, nbytes in stats["wasted"].items())
        said.append(f"`wasted` {named}")
    return f"Without offloading → with, and a step's counters: {'; '.join(said)}."


def reasons_text(record: Row) -> str:
    """What is counted in a step that has one tensor for each reason."""
    row = fault_of(record, "reasons")
    counts = {name: count // row["steps"] for name, count in row["stats"]["skipped"].items()}
    return f"A recorded step that has one tensor for each of them counts `{counts}`.\n"


def setting_text(record: Row) -> str:
    """What it was recorded on."""
    return f"{machine(record, record['link'], day_of(record))}.\n"


def _if_recorded(text: Callable[..., str], *arguments: Any) -> str:
    """Nothing, as long as there is no record."""
    return text(read_record(), *arguments) if RECORD.exists() else ""


BLOCKS: dict[tuple[str, str], Callable[[Path], str]] = {
    ("table", "fault_setting"): lambda _: _if_recorded(setting_text),
    ("table", "fault_reasons"): lambda _: _if_recorded(reasons_text),
    **{
        ("picture", f"fault_{name}"): partial(lambda name, page: _if_recorded(fault_picture, name, page), name)
        for name in NAMES
    },
}
"""A block's kind and name → its text, for a page at this path."""

PICTURES: dict[Path, Maker] = {picture_path(name): partial(draw, name) for name in NAMES if trace_path(name).exists()}
"""Path in the repository → what draws it."""
