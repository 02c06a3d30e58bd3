"""The figures that show how things hang together: no time runs in them, and nothing in them was measured."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from drawing import NARROW_INCHES, WIDE_INCHES, Maker
from matplotlib.patches import FancyBboxPatch, Rectangle

from offload import OffloadState
from offload.observe.timeline import COLORS, INK, new_figure, text_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What device and host memory hold in each state.
MEMORY = {
    OffloadState.RESIDENT: ("held", "free"),
    OffloadState.OFFLOADING: ("held", "being written"),
    OffloadState.OFFLOADED: ("free", "held"),
    OffloadState.RELOADING: ("being written", "held"),
}
VERBS = ("start_offload", "release", "start_reload")
"""From each state to the next."""


def states_figure(*, narrow: bool) -> Figure:
    """The four states in a row, for phones in a column; the verbs between them, and who holds the memory in each."""
    figure = new_figure((NARROW_INCHES, 3.55) if narrow else (WIDE_INCHES, 2.2))
    ax = figure.subplots()
    ax.set_axis_off()
    across, down = (0.0, -1.25) if narrow else (2.25, 0.0)
    width = 1.45
    corner = {state: (index * across, 1.2 + index * down) for index, state in enumerate(OffloadState)}
    device_at, host_at = ((1.75, 0.1), (3.25, 0.1)) if narrow else ((0.0, -0.65), (0.0, -1.15))
    for state, (x, y) in corner.items():
        shape = "round,pad=0,rounding_size=0.12"
        ax.add_patch(FancyBboxPatch((x, y), width, 0.6, shape, facecolor="none", edgecolor=INK, linewidth=1.4))
        _centered(ax, x + width / 2, y + 0.3, state.name, INK, 9.0, "bold")
        for held, color, (right, up) in zip(MEMORY[state], ("forward", "offload"), (device_at, host_at), strict=True):
            _draw_memory(ax, x + right, y + up, 1.35 if narrow else width, held, COLORS[color])
    first_x, first_y = corner[OffloadState.RESIDENT]
    for name, (right, up) in (("device", device_at), ("host", host_at)):
        if narrow:
            _centered(ax, first_x + right + 0.68, first_y + 0.8, name, INK, 9.0)
        else:
            ax.text(first_x - 0.15, first_y + up + 0.2, name, color=INK, fontsize=9, ha="right", va="center_baseline")
    for verb, (source, target) in zip(VERBS, pairwise(OffloadState), strict=True):
        (from_x, from_y), (to_x, to_y) = corner[source], corner[target]
        style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 2, "shrinkB": 2}
        if narrow:
            start, end = (from_x + width / 2, from_y), (to_x + width / 2, to_y + 0.6)
            place: dict[str, Any] = {"ha": "left", "va": "center"}
            ax.text(start[0] + 0.1, (start[1] + end[1]) / 2, verb.replace("_", " "), color=INK, fontsize=8.5, **place)
        else:
            start, end = (from_x + width, from_y + 0.3), (to_x, to_y + 0.3)
            place = {"ha": "center", "va": "bottom"}
            label = verb.replace("_", "\n")
            ax.text((start[0] + end[0]) / 2, start[1] + 0.12, label, color=INK, fontsize=8.5, **place)
        ax.annotate("", xy=end, xytext=start, arrowprops=style)
    if narrow:
        ax.set_xlim(-0.05, 4.65)
        ax.set_ylim(1.1 + 3 * down, 2.15)
    else:
        ax.set_xlim(-0.8, 3 * across + width + 0.05)
        ax.set_ylim(-0.05, 2.3)
    return figure


def _draw_memory(ax: Axes, x: float, y: float, width: float, holds: str, color: str) -> None:
    face = color if holds == "held" else "none"
    edge, dashes = (INK, (0.0, (2.0, 2.0))) if holds == "free" else (color, (0.0, ()))
    box = Rectangle((x, y), width, 0.4, facecolor=face, edgecolor=edge, linestyle=dashes, linewidth=1.4)
    ax.add_patch(box)
    _centered(ax, x + width / 2, y + 0.2, holds, text_color(color) if holds == "held" else INK, 8.5)


def _centered(ax: Axes, x: float, y: float, text: str, color: str, size: float, weight: str = "normal") -> None:
    ax.text(x, y, text, color=color, fontsize=size, weight=weight, ha="center", va="center_baseline")


DIAGRAMS: dict[str, Maker] = {"states": states_figure}
"""Name of a figure → what draws it."""
