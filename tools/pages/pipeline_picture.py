"""The picture of what each way to offload in a pipeline gives and costs: measured and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawing import NARROW_INCHES, WIDE_INCHES
from matplotlib.lines import Line2D
from page_text import GIB, image, percent
from pipeline_records import Measured, Row, measured

from benchmarks.pipeline_report import BOUND, FREE, HALF
from offload.observe.plot import COLORS, INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = Path("docs/_static/results/pipeline.svg")

MARKERS = {HALF: ("o", COLORS["forward"]), FREE: ("^", COLORS["reload"]), BOUND: ("s", COLORS["offload"])}


def picture(records: list[Row], page: Path) -> str:
    """The picture, as an image with a path from ``page`` and a text for those who cannot see it."""
    said = "; ".join(
        f"{found.gpus} GPUs, {found.way['schedule']}, width {found.way['width']}: peak "
        f"{percent(found.way['peak_saved'])} less, step {percent(found.way['slowdown'])} longer"
        for record in records
        for found in measured(record, HALF)
    )
    return image(f"Points of peak and step time. Half on rank 0: {said}.", PICTURE, page)


def draw(records: list[Row], *, narrow: bool = False) -> Figure:
    """The first rank's peak against step time, a row of panels for each record: measured filled, predicted hollow.

    For phones, a row of panels for each record and schedule.
    """
    cases = list(dict.fromkeys(found.case for record in records for found in measured(record, HALF)))
    columns = 2 if narrow else len(cases)
    rows = [(record, cases[i : i + columns]) for record in records for i in range(0, len(cases), columns)]
    figure = new_figure((NARROW_INCHES, 0.7 + 2.0 * len(rows)) if narrow else (WIDE_INCHES, 5.2))
    panels = figure.subplots(len(rows), columns, sharex=True, sharey="row", squeeze=False)
    for (record, shown), row in zip(rows, panels, strict=True):
        for case, ax in zip(shown, row, strict=False):
            _draw_case(ax, [found for found in measured(record, HALF, FREE, BOUND) if found.case == case])
            schedule, width = case
            ax.set_title(f"{schedule}, width {width}", color=INK, loc="left", fontsize=9 if narrow else 10)
        row[0].set_ylim(0, None)
        what = "rank 0, GiB" if narrow else "peak of rank 0, GiB"
        row[0].set_ylabel(f"{record['options']['ranks']} GPUs: {what}", color=INK, fontsize=9)
    for ax in panels[-1]:
        ax.set_xlabel("step, % longer", color=INK, fontsize=9)
    look: dict[str, Any] = {"frameon": False, "labelcolor": INK, "fontsize": 9}
    figure.legend(handles=_legend(), loc="outside lower center", ncols=2 if narrow else 6, **look)
    return figure


def _draw_case(ax: Axes, found: list[Measured]) -> None:
    style_axes(ax)
    peak = found[0].nothing["peak_bytes"] / GIB
    ax.axhline(peak / 2, color=INK, linestyle=":", linewidth=1.0)
    ax.plot(0, peak, "x", color=INK, markersize=7)
    for _, way, _ in found:
        marker, color = MARKERS[way["offload"]]
        is_at = 100 * way["slowdown"], way["peak_bytes"] / GIB
        was_predicted = 100 * way["predicted_slowdown"], peak * (1 - way["predicted_peak_saved"])
        ax.plot(*zip(is_at, was_predicted, strict=True), "-", color=color, linewidth=0.8)
        ax.plot(*was_predicted, marker, markerfacecolor="none", markeredgecolor=color, markersize=8)
        ax.plot(*is_at, marker, color=color, markersize=5)


def _legend() -> list[Line2D]:
    def handle(label: str, marker: str, color: str, face: str, size: float) -> Line2D:
        look: dict[str, Any] = {"marker": marker, "color": color, "markerfacecolor": face, "markersize": size}
        return Line2D([], [], linestyle="none", label=label, **look)

    return [
        handle("without", "x", INK, INK, 7),
        *(handle(way, marker, color, color, 5) for way, (marker, color) in MARKERS.items()),
        handle("predicted", "o", INK, "none", 8),
        Line2D([], [], color=INK, linestyle=":", linewidth=1.0, label="half"),
    ]
