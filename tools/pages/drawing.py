"""How the pages' figures and pictures are drawn and saved, and how a committed one is compared with a new one.

Each is drawn twice, by the same maker: as wide as the pages are, and as narrow as phones are, where ``NAME_narrow.svg``
stands for ``NAME.svg``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from offload.observe.timeline import INK, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from offload.observe.timeline import Timeline

WIDE_INCHES, NARROW_INCHES = 9.0, 3.8
"""Phones show a width of 3.7: text of 8 points is larger than 9 pixels there."""

Maker = Callable[..., "Figure"]
"""What draws a figure, asked with ``narrow=False`` and with ``narrow=True``."""

STYLE = {
    "svg.fonttype": "none",  # text stays text: small files, selectable, searchable
    "svg.hashsalt": "offload",  # the same element ids each time
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "hatch.linewidth": 0.8,
}


def save(draw: Callable[[], Figure], path: Path) -> None:
    """Draw a figure into ``path``, with nothing in it that differs from one run to the next."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        draw().savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def at_both_widths(makers: dict[Path, Maker]) -> dict[Path, Callable[[], Figure]]:
    """Path → what draws it, the paths of the narrow drawings among them."""
    wide = {path: partial(make, narrow=False) for path, make in makers.items()}
    narrow = {path.with_stem(f"{path.stem}_narrow"): partial(make, narrow=True) for path, make in makers.items()}
    return wide | narrow


def put_title(figure: Figure, title: str, *, narrow: bool = True) -> None:
    """The title above a figure's panel; a narrow figure's over all of its width, in as many lines as it takes."""
    if narrow:
        figure.suptitle(fill(title, 42), x=0.0, ha="left", color=INK, fontsize=10)
    else:
        figure.axes[0].set_title(title, color=INK, loc="left", fontsize=11)


def put_key(figure: Figure, columns: int) -> None:
    """What the colours of a figure with one panel, or of its first, stand for: below it."""
    panel = figure.axes[0]
    handles, names = panel.get_legend_handles_labels()
    if key := panel.get_legend():
        handles, names = key.legend_handles, [text.get_text() for text in key.get_texts()]
        key.remove()
    look: dict[str, Any] = {"frameon": False, "labelcolor": INK, "fontsize": 9, "handlelength": 1.2}
    figure.legend(handles, names, loc="outside lower center", ncols=columns, columnspacing=1.2, **look)


def plotted(timeline: Timeline, *, narrow: bool, height: float = 3.8) -> Figure:
    """A timeline; for phones higher, with its title across and its key below."""
    if not narrow:
        return timeline.plot(size=(WIDE_INCHES, height))
    figure = timeline.plot(title="", size=(NARROW_INCHES, 4.2))
    figure.axes[0].set_title("")  # without the room that it takes
    put_title(figure, timeline.title)
    put_key(figure, 3)
    return figure


def draw_bars(
    ax: Axes, names: Sequence[str], values: Sequence[float], colors: Sequence[str], said: Sequence[str], *, room: float
) -> None:
    """A bar to the right for each name, from below, with a text at its end; the axis is ``room`` × the longest."""
    style_axes(ax)
    for place, (value, color, text) in enumerate(zip(values, colors, said, strict=True)):
        ax.barh(place, value, height=0.62, color=color, linewidth=0)
        ax.text(value, place, f" {text}", color=INK, fontsize=9, va="center_baseline")
    ax.set_yticks(range(len(names)), names)
    ax.set_xlim(0, room * max(values))


def label_axes(ax: Axes, x: str, y: str = "", title: str = "") -> None:
    """What the axes of a panel are, and its title."""
    ax.set_xlabel(x, color=INK, fontsize=9)
    ax.set_ylabel(y, color=INK, fontsize=9)
    ax.set_title(title, color=INK, loc="left", fontsize=11)


TEXT = r"<text[^>]*[\s(](-?[\d.]+) (-?[\d.]+)\)\">([^<]*)</text>"
"""With its position in points: what a figure says, whatever drew its lines."""
MARK = r'<use [^>]*\sx="(-?[\d.]+)" y="(-?[\d.]+)"()'
"""The same of a figure's markers: its measured values, most of which no text names."""


def is_up_to_date(committed: Path, drawn: Path, tolerance: float = 4.0) -> bool:
    """Whether two files show the same figure; releases of matplotlib differ in details of the lines."""
    if not committed.exists():
        return False

    def found(pattern: str, svg: Path) -> list[tuple[str, float, float]]:
        return [(text, float(x), float(y)) for x, y, text in re.findall(pattern, svg.read_text("utf-8"))]

    def alike(pattern: str, within: float) -> bool:
        missing = ("missing", math.inf, math.inf)
        pairs = zip_longest(found(pattern, committed), found(pattern, drawn), fillvalue=missing)
        return all(a == b and math.dist(at_a, at_b) <= within for (a, *at_a), (b, *at_b) in pairs)

    return bool(found(TEXT, committed)) and alike(TEXT, tolerance) and alike(MARK, tolerance / 4)
