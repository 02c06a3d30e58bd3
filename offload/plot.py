"""Timelines drawn with matplotlib, which is imported here and nowhere else in the library.

Every colour has a contrast of at least 3 to white and to a dark page, and the background is
transparent, so one picture serves both. No meaning rests on colour alone: streams have rows,
layers have numbers, stalls have hatching.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.timeline import LANES, Kind, Span, Timeline
from offload.units import format_bytes

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


def plot_timeline(timeline: Timeline, ax: Axes | None, *, title: str | None, size: tuple[float, float]) -> Figure:
    """What :meth:`offload.timeline.Timeline.plot` draws."""
    if ax is not None:
        _draw_streams(ax, timeline)
        ax.set_title(timeline.title if title is None else title, color=INK, loc="left", fontsize=11, pad=20)
        return ax.figure.figure
    figure = new_figure(size)
    if timeline.memory:
        streams, memory = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
        _draw_memory(memory, timeline)
        _draw_streams(streams, timeline, time_axis=False)
    else:
        streams = figure.subplots()
        _draw_streams(streams, timeline)
    streams.set_title(timeline.title if title is None else title, color=INK, loc="left", fontsize=11, pad=20)
    return figure


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


def contrast(a: str, b: str) -> float:
    """Contrast of two colours, 1 to 21, as WCAG 2 defines it."""
    lighter, darker = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def text_color(box: str) -> str:
    """Black or white, whichever is easier to read on ``box``."""
    return max("#000000", "#ffffff", key=lambda text: contrast(text, box))


def style_axes(ax: Axes) -> None:
    """Ink for ticks and the lower and left edge, no other edges, no background."""
    ax.set_facecolor("none")
    ax.tick_params(colors=INK, labelsize=9)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)


@dataclass
class _Box:
    """Spans of one kind and layer that follow each other closely, drawn as one rectangle."""

    kind: Kind
    layer: int | None
    start_s: float
    end_s: float
    label: str


def _boxes(spans: Iterable[Span], gap_s: float) -> Iterator[_Box]:
    box: _Box | None = None
    for span in spans:
        if box and (box.kind, box.layer) == (span.kind, span.layer) and span.start_s - box.end_s <= gap_s:
            box.end_s = max(box.end_s, span.end_s)
            continue
        if box:
            yield box
        box = _Box(span.kind, span.layer, span.start_s, span.end_s, span.label)
    if box:
        yield box


def _draw_streams(ax: Axes, timeline: Timeline, *, time_axis: bool = True) -> None:
    from matplotlib.patches import Patch, Rectangle

    scale, unit = _time_unit(timeline)
    duration_s = timeline.duration_s or 1.0
    rows = [list(_boxes(timeline.lane(lane), gap_s=0.002 * duration_s)) for lane in reversed(LANES)]
    for row, boxes in enumerate(rows):
        for box in boxes:
            length_s = box.end_s - box.start_s
            # A hair's breadth between neighbours: an outline in the page's colour, whatever that is.
            hair_s = min(0.0012 * duration_s, 0.2 * length_s)
            width_s = max(length_s - hair_s, 0.001 * duration_s)  # a pixel, or else it is not drawn
            corner = ((box.start_s - timeline.start_s) / scale, row - BOX_HEIGHT / 2)
            style: dict[str, Any] = (
                {"facecolor": "none", "edgecolor": INK, "hatch": "/////", "linewidth": 0.8}
                if box.kind == "stall"
                else {"facecolor": COLORS[box.kind], "linewidth": 0}
            )
            ax.add_patch(Rectangle(corner, width_s / scale, BOX_HEIGHT, snap=False, **style))
    style_axes(ax)
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_visible(False)
    ax.tick_params(length=0, labelbottom=time_axis)
    if time_axis:
        ax.set_xlabel(unit, color=INK, fontsize=9)
    ax.set_xlim(0, duration_s / scale)
    ax.set_ylim(-0.5, len(LANES) - 0.5)
    ax.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in reversed(LANES)])
    present = {span.kind for span in timeline.spans}
    keys = [Patch(facecolor=color, label=kind) for kind, color in COLORS.items() if kind in present]
    if "stall" in present:
        keys.append(Patch(facecolor="none", edgecolor=INK, hatch="/////", linewidth=0.8, label="stall"))
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
            _draw_labels(ax, row, [box for box in boxes if box.kind == kind], timeline)


def _draw_labels(ax: Axes, row: int, boxes: list[_Box], timeline: Timeline) -> None:
    """Label boxes of one kind alike: as ``F12``, else as ``12``, else as ``F12`` upright, else not at all."""
    scale, _ = _time_unit(timeline)
    points_per_s = ax.get_window_extent().width / ax.figure.dpi * 72 / (timeline.duration_s or 1.0)
    for box in boxes:
        room = (box.end_s - box.start_s) * points_per_s
        for labels, rotation in ((_long_label, 0), (_short_label, 0), (_long_label, 90)):
            needed = LABEL_POINTS * (0.75 if rotation else max(0.66 * len(labels(box)) for box in boxes))
            if room >= needed:
                center_s = (box.start_s + box.end_s) / 2 - timeline.start_s
                ax.text(
                    center_s / scale,
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


def _long_label(box: _Box) -> str:
    if box.layer is None:
        return box.label
    return {"forward": "F", "backward": "B"}.get(box.kind, "") + str(box.layer)


def _short_label(box: _Box) -> str:
    return box.label if box.layer is None else str(box.layer)


def _draw_memory(ax: Axes, timeline: Timeline) -> None:
    scale, unit = _time_unit(timeline)
    in_bytes = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
    size_unit = next((name for name, size in in_bytes.items() if timeline.peak_bytes >= size), "B")
    times = [(time_s - timeline.start_s) / scale for time_s, _ in timeline.memory]
    held = [nbytes / in_bytes[size_unit] for _, nbytes in timeline.memory]
    times.append(timeline.duration_s / scale)
    held.append(held[-1])
    ax.fill_between(times, held, step="post", color=INK, alpha=0.3, linewidth=0)
    ax.step(times, held, where="post", color=INK, linewidth=1.2)
    peak = timeline.peak_bytes / in_bytes[size_unit]
    ax.axhline(peak, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    ax.annotate(
        f"peak {format_bytes(timeline.peak_bytes)}",
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
    ax.set_xlabel(unit, color=INK, fontsize=9)


def _time_unit(timeline: Timeline) -> tuple[float, str]:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if timeline.duration_s >= 3 * scale:
            return scale, unit
    return 1e-6, "µs"


def _luminance(color: str) -> float:
    channels = (int(color[index : index + 2], 16) / 255 for index in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
