"""Timelines drawn with matplotlib, which is imported here and nowhere else in the library.

Every colour has a contrast of at least 3 to white and to a dark page, and the background is
transparent, so one picture serves both. No meaning rests on colour alone: streams have rows,
layers have numbers, stalls have hatching.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from offload.base.units import format_bytes
from offload.observe.spans import LANES, Kind, Lane, Span, merged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#7b7b7b"
"""Text and lines: equally far from white and from a dark page (#131416), contrast 4.2 to both."""

COLORS: dict[Kind, str] = {
    "forward": "#0072b2",
    "backward": "#cc79a7",
    "other": "#8c8c8c",
    "offload": "#d55e00",
    "reload": "#009e73",
}
"""Okabe and Ito's palette for colour-blind readers, without the colours too pale for white."""

LANE_NAMES = {"compute": "compute", "d2h": "d2h\ndevice → host", "h2d": "h2d\nhost → device"}
LABEL_POINTS = 8.0
BOX_HEIGHT = 0.72


def plot_timeline(
    spans: Sequence[Span],
    memory: Sequence[tuple[float, int]],
    title: str,
    ax: Axes | None,
    size: tuple[float, float],
) -> Figure:
    """What :meth:`offload.observe.timeline.Timeline.plot` draws; spans and memory are sorted by start."""
    start_s = spans[0].start_s if spans else 0.0
    time = _TimeAxis(start_s, max((span.end_s for span in spans), default=0.0) - start_s)
    if ax is None and memory:
        figure = new_figure(size)
        ax, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
        _draw_memory(below, memory, time)
        _draw_streams(ax, spans, time, shown=False)
    else:
        ax = new_figure(size).subplots() if ax is None else ax
        _draw_streams(ax, spans, time)
    ax.set_title(title, color=INK, loc="left", fontsize=11, pad=20)
    return ax.figure.figure


class _TimeAxis:
    """Seconds of the timeline as places on the axis, in a unit that suits its length."""

    def __init__(self, start_s: float, duration_s: float) -> None:
        self.start_s = start_s
        self.duration_s = duration_s or 1.0
        units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
        self.unit = next((unit for unit, scale in units.items() if duration_s >= 3 * scale), "µs")
        self.scale = units[self.unit]
        self.end = self.duration_s / self.scale

    def at(self, time_s: float) -> float:
        return (time_s - self.start_s) / self.scale


def new_figure(size: tuple[float, float]) -> Figure:
    """A figure with a transparent background that a notebook shows once, when a cell returns it.

    Note:
        pyplot makes the figure, because that is what tells a notebook how to show one, and forgets
        it at once, because it would be shown a second time otherwise.
    """
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=size, layout="constrained", facecolor="none")
    plt.close(figure)
    return figure


def text_color(box: str) -> str:
    """White on blue, black on the others: a contrast of at least 5."""
    return "#ffffff" if box == COLORS["forward"] else "#000000"


def style_axes(ax: Axes) -> None:
    """Ink for ticks and the lower and left edge, no other edges, no background."""
    ax.set_facecolor("none")
    ax.tick_params(colors=INK, labelsize=9)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)


def _draw_streams(ax: Axes, spans: Sequence[Span], time: _TimeAxis, *, shown: bool = True) -> None:
    from matplotlib.patches import Patch, Rectangle

    def in_boxes(lane: Lane) -> list[Span]:
        return list(merged((span for span in spans if span.lane == lane), lambda _: 0.002 * time.duration_s))

    rows = [in_boxes(lane) for lane in reversed(LANES)]
    styles: dict[Kind, dict[str, Any]] = {kind: {"facecolor": color, "linewidth": 0} for kind, color in COLORS.items()}
    styles["stall"] = {"facecolor": "none", "edgecolor": INK, "hatch": "/////", "linewidth": 0.8}
    for row, boxes in enumerate(rows):
        for box in boxes:
            # A hair's breadth between neighbours: an outline in the page's colour, whatever that is.
            hair_s = min(0.0012 * time.duration_s, 0.2 * box.duration_s)
            width_s = max(box.duration_s - hair_s, 0.001 * time.duration_s)  # a pixel, or else it is not drawn
            corner = (time.at(box.start_s), row - BOX_HEIGHT / 2)
            ax.add_patch(Rectangle(corner, width_s / time.scale, BOX_HEIGHT, snap=False, **styles[box.kind]))
    style_axes(ax)
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_visible(False)
    ax.tick_params(length=0, labelbottom=shown)
    if shown:
        ax.set_xlabel(time.unit, color=INK, fontsize=9)
    ax.set_xlim(0, time.end)
    ax.set_ylim(-0.5, len(LANES) - 0.5)
    ax.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in reversed(LANES)])
    present = {span.kind for span in spans}
    keys = [Patch(label=kind, **style) for kind, style in styles.items() if kind in present]
    ax.legend(
        handles=keys,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=max(1, len(keys)),
        frameon=False,
        labelcolor=INK,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.2,
        borderaxespad=0.1,
    )
    # Only now are the boxes as wide as they will be.
    ax.figure.figure.draw_without_rendering()
    for row, boxes in enumerate(rows):
        for kind in COLORS:
            _draw_labels(ax, row, [box for box in boxes if box.kind == kind], time)


def _draw_labels(ax: Axes, row: int, boxes: list[Span], time: _TimeAxis) -> None:
    """Label boxes of one kind alike: as ``F12``, else as ``12``, else as ``F12`` upright, else not at all."""
    points_per_s = ax.get_window_extent().width / ax.figure.dpi * 72 / time.duration_s
    for box in boxes:
        room = box.duration_s * points_per_s
        for labels, rotation in ((_long_label, 0), (_short_label, 0), (_long_label, 90)):
            needed = LABEL_POINTS * (0.75 if rotation else max(0.66 * len(labels(box)) for box in boxes))
            if room >= needed:
                ax.text(
                    time.at((box.start_s + box.end_s) / 2),
                    row,
                    labels(box),
                    color=text_color(COLORS[box.kind]),
                    fontsize=LABEL_POINTS - bool(rotation),
                    rotation=rotation,
                    rotation_mode="anchor",
                    ha="center",
                    va="center_baseline",
                )
                break


def _long_label(box: Span) -> str:
    if box.layer is None:
        return box.label
    return {"forward": "F", "backward": "B"}.get(box.kind, "") + str(box.layer)


def _short_label(box: Span) -> str:
    return box.label if box.layer is None else str(box.layer)


def _draw_memory(ax: Axes, memory: Sequence[tuple[float, int]], time: _TimeAxis) -> None:
    peak_bytes = max(nbytes for _, nbytes in memory)
    in_bytes = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
    size_unit = next((name for name, size in in_bytes.items() if peak_bytes >= size), "B")
    times = [*(time.at(time_s) for time_s, _ in memory), time.end]
    held = [nbytes / in_bytes[size_unit] for _, nbytes in memory]
    held.append(held[-1])
    ax.fill_between(times, held, step="post", color=INK, alpha=0.3, linewidth=0)
    ax.step(times, held, where="post", color=INK, linewidth=1.2)
    peak = peak_bytes / in_bytes[size_unit]
    ax.axhline(peak, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    ax.annotate(
        f"peak {format_bytes(peak_bytes)}",
        (1.0, peak),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        color=INK,
        fontsize=9,
        ha="right",
        va="bottom",
    )
    style_axes(ax)
    ax.set_ylim(0, peak * 1.35 or 1.0)
    ax.set_ylabel(f"on device\n{size_unit}", color=INK, fontsize=9)
    ax.set_xlabel(time.unit, color=INK, fontsize=9)
