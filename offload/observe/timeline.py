"""Timelines, as data: what the compute, d2h and h2d streams did when, and the memory; and drawn with matplotlib.

Every colour of a drawing has a contrast of at least 3 to white and to a dark page, and the background is transparent,
so one picture serves both. Nothing is told by colour alone: streams have rows, layers have numbers, stalls have
hatching.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from offload.base.checks import format_bytes, format_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lane = Literal["compute", "d2h", "h2d"]
Kind = Literal["forward", "backward", "recompute", "other", "stall", "late", "offload", "reload"]
LANES: tuple[Lane, ...] = get_args(Lane)
COPY_LANES: tuple[Lane, ...] = ("d2h", "h2d")


@dataclass(frozen=True)
class Span:
    """One stream busy with one thing, or waiting (kinds ``"stall"`` and ``"late"``)."""

    lane: Lane  #: ``"compute"``, ``"d2h"`` or ``"h2d"``.
    kind: Kind
    """``"forward"``, ``"backward"``, ``"recompute"``, ``"other"``, ``"stall"`` (waits for copies) or ``"late"`` (waits
    for the host, which has not queued more) on the compute stream, ``"offload"`` or ``"reload"`` on copy streams."""
    start_s: float  #: Seconds since the timeline's start.
    end_s: float  #: Not before ``start_s``.
    label: str = ""  #: A few words for people.
    layer: int | None = None  #: Number of its layer; for a stall, of the layer whose copies compute waits for.
    nbytes: int = 0  #: Bytes copied.

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


def merged(spans: Iterable[Span], gap_s: Callable[[Span], float]) -> Iterator[Span]:
    """Spans of one stream, by start; neighbours of one kind and layer are one if the pause is at most ``gap_s``."""
    last: Span | None = None
    for span in spans:
        if last and (last.kind, last.layer) == (span.kind, span.layer) and span.start_s - last.end_s <= gap_s(span):
            end_s, nbytes = max(last.end_s, span.end_s), last.nbytes + span.nbytes
            last = Span(last.lane, last.kind, last.start_s, end_s, last.label, last.layer, nbytes)
            continue
        if last:
            yield last
        last = span
    if last:
        yield last


def covered_s(spans: Iterable[Span]) -> float:
    """Seconds in which at least one span runs, of spans sorted by start."""
    seconds, until_s = 0.0, -math.inf
    for span in spans:
        seconds += max(0.0, span.end_s - max(span.start_s, until_s))
        until_s = max(until_s, span.end_s)
    return seconds


@dataclass(frozen=True, repr=False)
class Timeline:
    """The spans of one step, and its memory over time."""

    spans: tuple[Span, ...]  #: In any order; they are kept sorted by start.
    memory: tuple[tuple[float, int], ...] = ()  #: ``(seconds, bytes on the device from then on)``.
    title: str = ""  #: A line for the table and the plot.

    def __post_init__(self) -> None:
        spans = sorted(self.spans, key=lambda span: (span.start_s, span.end_s))
        memory = sorted(self.memory, key=lambda sample: sample[0])
        object.__setattr__(self, "spans", tuple(spans))
        object.__setattr__(self, "memory", tuple(memory))

    def lane(self, lane: Lane) -> tuple[Span, ...]:
        """The spans of one stream, by start."""
        return tuple(span for span in self.spans if span.lane == lane)

    @property
    def start_s(self) -> float:
        """When the first span starts."""
        return self.spans[0].start_s if self.spans else 0.0

    @property
    def duration_s(self) -> float:
        """Seconds from the first span's start to the last one's end."""
        return max((span.end_s for span in self.spans), default=0.0) - self.start_s

    @property
    def stall_s(self) -> float:
        """Seconds that the compute stream waited for copies."""
        return covered_s(span for span in self.spans if span.kind == "stall")

    @property
    def late_s(self) -> float:
        """Seconds that the compute stream waited for the host, which had not queued more."""
        return covered_s(span for span in self.spans if span.kind == "late")

    def busy_s(self, *lanes: Lane) -> float:
        """Seconds in which the stream, or one of several, did something; waiting does not count."""
        return covered_s(span for span in self.spans if span.lane in lanes and span.kind not in ("stall", "late"))

    def copied_bytes(self, lane: Lane) -> int:
        """Bytes that the stream copied."""
        return sum(span.nbytes for span in self.lane(lane))

    @property
    def overlap(self) -> float:
        """Fraction of the copies' time that ran beside busy compute, 0 to 1; 1 where nothing was copied."""
        copies_s = sum(self.busy_s(lane) for lane in COPY_LANES)
        beside_s = sum(self.busy_s(lane) + self.busy_s("compute") - self.busy_s(lane, "compute") for lane in COPY_LANES)
        return max(0.0, beside_s / copies_s) if copies_s else 1.0  # a difference of sums may be rounded to less

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were on the device at once."""
        return max((nbytes for _, nbytes in self.memory), default=0)

    def plot(
        self, ax: Axes | None = None, *, title: str | None = None, size: tuple[float, float] = (9.0, 3.8)
    ) -> Figure:
        """Draw the three streams, labelled by layer, with stalls hatched, and the memory curve below.

        The figure is readable on light and dark pages. In a notebook it shows itself; in a script call its ``savefig``.

        Args:
            ax: Draw the streams here, without the memory curve; a new figure if left out.
            title: In place of the timeline's own.
            size: Inches of the new figure.
        """
        start_s, duration_s = self.start_s, self.duration_s
        unit, unit_s = next((item for item in TIME_UNITS.items() if duration_s >= 3 * item[1]), ("µs", 1e-6))

        def on_axis(time_s: float) -> float:
            return (time_s - start_s) / unit_s

        boxes = [replace(span, start_s=on_axis(span.start_s), end_s=on_axis(span.end_s)) for span in self.spans]
        end = duration_s / unit_s or 1.0
        if ax is None and self.memory:
            ax, lowest = new_figure(size).subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
            times, nbytes = zip(*self.memory, strict=True)
            _draw_memory(lowest, [*map(on_axis, times)], [*nbytes], end)
        else:
            ax = lowest = new_figure(size).subplots() if ax is None else ax
        _draw_streams(ax, boxes, end)
        lowest.set_xlabel(unit, color=INK, fontsize=9)
        ax.set_title(self.title if title is None else title, color=INK, loc="left", fontsize=11, pad=20)
        return ax.figure.figure

    def __repr__(self) -> str:
        return (
            f"<Timeline {self.title!r}: {format_s(self.duration_s)}, stalled {format_s(self.stall_s)}, "
            f"overlap {self.overlap:.0%}, peak {format_bytes(self.peak_bytes)}>"
        )

    def __str__(self) -> str:
        """A small table: what each stream did for how long, and the step's figures."""
        lines = [f"{'stream':<8}{'busy':>10}{'of step':>9}{'copied':>12}{'GB/s':>8}"]
        for lane in LANES:
            busy_s, copied = self.busy_s(lane), self.copied_bytes(lane)
            line = f"{lane:<8}{format_s(busy_s):>10}{busy_s / (self.duration_s or 1.0):>9.0%}"
            if copied and busy_s:
                line += f"{format_bytes(copied):>12}{copied / busy_s / 1e9:>8.1f}"
            lines.append(line)
        lines.append(
            f"step {format_s(self.duration_s)}, stalled {format_s(self.stall_s)}, "
            f"{self.overlap:.0%} of the copies beside compute, peak {format_bytes(self.peak_bytes)}"
        )
        return "\n".join([self.title] * bool(self.title) + lines)


INK = "#7b7b7b"  # text and lines: as far from white as from a dark page (#131416), contrast 4.2 to both

# Okabe and Ito's palette for colour-blind readers, without the colours too pale for white, and their orange darker.
COLORS: dict[Kind, str] = {
    "forward": "#0072b2",
    "backward": "#cc79a7",
    "recompute": "#a67c00",
    "other": "#8c8c8c",
    "offload": "#d55e00",
    "reload": "#009e73",
}

LANE_NAMES = {"compute": "compute", "d2h": "d2h\ndevice → host", "h2d": "h2d\nhost → device"}
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
SIZE_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
LABEL_POINTS = 8.0
BOX_HEIGHT = 0.72


def new_figure(size: tuple[float, float]) -> Figure:
    """A figure with a transparent background that a notebook shows once, when a cell returns it."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=size, layout="constrained", facecolor="none")  # notebooks know figures of pyplot
    plt.close(figure)  # or a notebook would show it twice
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


def _draw_streams(ax: Axes, spans: Sequence[Span], end: float) -> None:
    """The three streams up to ``end``; seconds of the spans are units of the axis here."""
    from matplotlib.patches import Patch, Rectangle

    rows = [list(merged((span for span in spans if span.lane == lane), lambda _: 0.002 * end)) for lane in LANES[::-1]]
    styles: dict[Kind, dict[str, Any]] = {kind: {"facecolor": color, "linewidth": 0} for kind, color in COLORS.items()}
    waiting = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.8}
    styles |= {"stall": waiting | {"hatch": "/////"}, "late": waiting | {"hatch": "....."}}
    for row, boxes in enumerate(rows):
        for box in boxes:
            # A hair's breadth between neighbours: an outline in the page's colour, whatever that is.
            hair = min(0.0012 * end, 0.2 * box.duration_s)
            width = max(box.duration_s - hair, 0.001 * end)  # a pixel, or else it is not drawn
            corner = (box.start_s, row - BOX_HEIGHT / 2)
            ax.add_patch(Rectangle(corner, width, BOX_HEIGHT, snap=False, **styles[box.kind]))
    style_axes(ax)
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_visible(False)
    ax.tick_params(length=0)
    ax.set_xlim(0, end)
    ax.set_ylim(-0.5, len(LANES) - 0.5)
    ax.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in reversed(LANES)])
    present = {span.kind for span in spans}
    keys = [Patch(label=kind, **style) for kind, style in styles.items() if kind in present]
    look: dict[str, Any] = {"frameon": False, "labelcolor": INK, "fontsize": 9}
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
    place |= {"handlelength": 1.2, "columnspacing": 1.2, "borderaxespad": 0.1}
    ax.legend(handles=keys, ncols=max(1, len(keys)), **look, **place)
    # Only now are the boxes as wide as they will be.
    ax.figure.figure.draw_without_rendering()
    for row, boxes in enumerate(rows):
        for kind in COLORS:
            _draw_labels(ax, row, [box for box in boxes if box.kind == kind], end)


def _draw_labels(ax: Axes, row: int, boxes: list[Span], end: float) -> None:
    """Label boxes of one kind alike: as ``F12``, else as ``12``, else upright if that is no higher, else not at all."""
    letters = {"forward": "F", "backward": "B", "recompute": "R"}
    numbers = [box.label if box.layer is None else str(box.layer) for box in boxes]
    names = [box.label if box.layer is None else f"{letters.get(box.kind, '')}{box.layer}" for box in boxes]
    longest_name, longest_number = (0.66 * max(map(len, texts), default=0) for texts in (names, numbers))
    area = ax.get_window_extent()
    wide, high = (points * 72 / ax.figure.dpi / LABEL_POINTS for points in (area.width, area.height))
    room_upright = BOX_HEIGHT * high / len(LANES)
    look: dict[str, Any] = {"rotation_mode": "anchor", "ha": "center", "va": "center_baseline"}
    for box, name, number in zip(boxes, names, numbers, strict=True):
        room = box.duration_s / end * wide
        upright = 0.75 if 0.66 * len(name) <= room_upright else math.inf
        for text, needed, rotation in ((name, longest_name, 0), (number, longest_number, 0), (name, upright, 90)):
            if room >= needed:
                look |= {"color": text_color(COLORS[box.kind]), "fontsize": LABEL_POINTS - bool(rotation)}
                ax.text((box.start_s + box.end_s) / 2, row, text, rotation=rotation, **look)
                break


def _draw_memory(ax: Axes, times: list[float], nbytes: list[int], end: float) -> None:
    size_unit, unit_bytes = next((item for item in SIZE_UNITS.items() if max(nbytes) >= item[1]), ("B", 1))
    held = [size / unit_bytes for size in nbytes]
    peak = max(held)
    times, held = [*times, end], [*held, held[-1]]
    ax.fill_between(times, held, step="post", color=INK, alpha=0.3, linewidth=0)
    ax.step(times, held, where="post", color=INK, linewidth=1.2)
    ax.axhline(peak, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    ax.text(end, peak, f"peak {format_bytes(max(nbytes))}", color=INK, fontsize=9, ha="right", va="bottom")
    style_axes(ax)
    ax.set_ylim(0, peak * 1.35 or 1.0)
    ax.set_ylabel(f"on device\n{size_unit}", color=INK, fontsize=9)
