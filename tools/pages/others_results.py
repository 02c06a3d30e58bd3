"""Other ways to offload, and this library, on one model: the picture, from ``results/suite.json``."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

from drawing import NARROW_INCHES, WIDE_INCHES, draw_bars
from page_text import GIB, Row, gib, ms, picture, read

from offload.observe.plot import COLORS, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FAMILY_COLORS = {
    "nothing": INK,
    "checkpoint": COLORS["reload"],
    "checkpoint_on_cpu": COLORS["offload"],
    "save_on_cpu": COLORS["offload"],
    "trl": COLORS["backward"],
    "te": COLORS["backward"],
    "offload": COLORS["forward"],
    "offload_checkpoint": COLORS["forward"],
}


def _others() -> list[Row]:
    """What is drawn of the Llama's rows: the library with fewest and with most layers."""
    rows = [row for row in read("suite")["rows"] if row["workload"] == "Hugging Face Llama" and "step_s" in row]
    own = {family: [row for row in rows if row["family"] == family] for family in ("offload", "offload_checkpoint")}
    between = [row for found in own.values() for row in found[1:-1]] + own["offload_checkpoint"][:-1]
    return [row for row in rows if row not in between]


def said() -> str:
    """The picture in words."""
    rows = (f"{row['contender']}: {ms(row['step_s'])} ms, {gib(row['peak_bytes'], 1)} GiB" for row in _others())
    return f"Bars of step time and activation peak of a Hugging Face Llama. {'; '.join(rows)}."


def draw(*, narrow: bool = False) -> Figure:
    """Step and peak of one model, with other ways to offload and with this library."""
    rows = _others()[::-1]
    names = [fill(row["contender"], 24) if narrow else row["contender"] for row in rows]
    colors = [FAMILY_COLORS[row["family"]] for row in rows]
    figure = new_figure((NARROW_INCHES, 6.6) if narrow else (WIDE_INCHES, 3.4))
    step, peak = figure.subplots(*((2, 1) if narrow else (1, 2)), sharey=not narrow)
    times_ms, peaks = [row["step_s"] * 1e3 for row in rows], [row["peak_bytes"] / GIB for row in rows]
    draw_bars(step, names, times_ms, colors, [f"{value:,.0f}" for value in times_ms], room=1.16)
    draw_bars(peak, names, peaks, colors, [f"{value:.1f}" for value in peaks], room=1.16)
    step.set_title("step, ms", color=INK, loc="left", fontsize=10)
    peak.set_title("activation peak, GiB", color=INK, loc="left", fontsize=10)
    return figure


picture("others", draw, said)
