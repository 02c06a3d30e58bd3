"""What offloading the first k decoder layers takes and saves, and the link, for the pages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drawing import NARROW_INCHES, label_axes
from page_text import GIB, Row, gib, markdown_table, ms, picture, read, table

from offload.observe.plot import COLORS, INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FREE = 1.03
"""How much longer a step of a free number of layers is measured to be, at most; the page on hardware says why."""


def rows_of(workload: str) -> list[Row]:
    """This library's rows of one workload, fewest offloaded layers first, the one without any included.

    Raises:
        ValueError: Offloading changed a gradient in one of them.
    """
    own = (row for row in read("suite")["rows"] if row["family"] in ("nothing", "offload"))
    rows = sorted((row for row in own if row["workload"] == workload), key=lambda row: row["k"])
    different = [row["k"] for row in rows if not row.get("bit_identical")]
    if different:
        raise ValueError(f"{workload}: gradients differ from those without offloading at k = {different}")
    return rows


def free_rows(rows: list[Row]) -> list[Row]:
    """The rows up to the first whose step takes longer than ``FREE`` times the one without offloading."""
    slow = (at for at, row in enumerate(rows) if round(row["step_s"] / rows[0]["step_s"], 2) > FREE)  # as tables show
    return rows[: next(slow, len(rows))]


@table("link")
def link(_page: Path) -> str:
    """What the link moved in the record's machine."""
    speeds = read("suite")["runs"]["decoder"]["link"]
    columns = {"to the host": "d2h", "to the GPU": "h2d", "both at once, sum": "duplex"}
    shown = {title: f"{speeds[f'{name}_bytes_per_s'] / 1e9:.1f} GB/s" for title, name in columns.items()}
    return markdown_table([{"GPU": read("suite")["hardware"]["gpu"], **shown}], left=1) + "\n"


def said() -> str:
    """The picture in words."""
    rows = rows_of("decoder")
    shown = rows[0], free_rows(rows)[-1], rows[-1]
    peaks, times = [gib(row["peak_bytes"]) for row in shown], [ms(row["step_s"]) for row in shown]
    return (
        f"Step time against activation peak for 0 to {rows[-1]['k']} offloaded layers: from {peaks[0]} to {peaks[1]} "
        f"GiB the time goes from {times[0]} to {times[1]} ms, then to {times[2]} ms at {peaks[2]} GiB."
    )


def draw(*, narrow: bool = False) -> Figure:
    """Step time against activation peak of the reference decoder, and where the time hardly changes."""
    rows = rows_of("decoder")
    figure = new_figure((NARROW_INCHES if narrow else 7.2, 3.9))
    ax = figure.subplots()
    style_axes(ax)
    peaks = [row["peak_bytes"] / GIB for row in rows]
    times_ms = [row["step_s"] * 1e3 for row in rows]
    top = 1.12 * max(times_ms)
    ax.plot(peaks, [row["link_s"] * 1e3 for row in rows], "--", color=COLORS["offload"], label="copies alone")
    ax.plot(peaks, times_ms, "o-", color=COLORS["forward"], label="measured step")
    _draw_free(ax, peaks[: len(free_rows(rows))], top)
    for peak, time_ms, row in zip(peaks, times_ms, rows, strict=True):
        text = f"k = {row['k']}" if row in (rows[0], rows[-1]) else str(row["k"])
        ax.annotate(text, (peak, time_ms), xytext=(3, 6), textcoords="offset points", color=INK, fontsize=9)
    ax.set_xlim(0, 1.08 * max(peaks))
    ax.set_ylim(0, top)
    where = "" if narrow else f", {read('suite')['hardware']['gpu']}"
    label_axes(ax, "activation peak, GiB", "step, ms", f"k of 20 decoder layers offloaded{where}")
    ax.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower left")
    return figure


def _draw_free(ax: Axes, peaks: list[float], top: float) -> None:
    ax.axvspan(min(peaks), max(peaks), color=COLORS["reload"], alpha=0.2, linewidth=0)
    middle = (min(peaks) + max(peaks)) / 2
    ax.text(middle, 0.97 * top, f"at most {FREE - 1:.0%} longer", color=INK, fontsize=9, ha="center", va="top")


picture("tradeoff", draw, said)
