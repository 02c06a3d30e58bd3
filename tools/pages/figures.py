"""The figures of the docs that the library's own schedules and simulator say: ``results.py`` draws them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from blocks import PICTURES
from drawing import NARROW_INCHES, WIDE_INCHES, label_axes, plotted, put_key, put_title
from matplotlib.patches import FancyBboxPatch, Rectangle
from page_text import GIB

from offload import OffloadState
from offload.observe.timeline import COLORS, INK, Timeline, new_figure, style_axes, text_color
from offload.planning.profile import LayerProfile, Link, Profile
from offload.planning.simulate import simulate
from offload.schedule.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A layer that saves 1 GiB, on a link that takes 18 ms for it: longer than a forward, shorter than a backward.
LAYER = LayerProfile(forward_s=0.010, backward_s=0.020, saved_bytes=GIB)
LINK = Link(d2h_bytes_per_s=60e9, h2d_bytes_per_s=60e9, duplex_bytes_per_s=110e9)


def schedule_figure(num_layers: int, model_layers: int, title: str, *, narrow: bool) -> Figure:
    """The default schedule, simulated."""
    schedule = Schedule.default(num_layers, model_layers)
    timeline = simulate(schedule, Profile((LAYER,) * model_layers), LINK, title=title)
    return plotted(timeline, narrow=narrow)


# A decoder layer of the start page: a twentieth of its step and of what it saves. The page of hardware says where each
# link's figures are from.
DECODER = LayerProfile(forward_s=6.3e-3, backward_s=12.6e-3, saved_bytes=int(1.2 * GIB))
LINKS = {
    "PCIe Gen4 x16, by its specification": (Link(31.5e9, 31.5e9, 63e9), COLORS["backward"], "s"),
    "H200, PCIe Gen5 x16, one of four at once": (Link(34e9, 39.7e9, 39e9), COLORS["offload"], "v"),
    "H200, PCIe Gen5 x16, alone": (Link(55e9, 55e9, 100e9), COLORS["forward"], "o"),
    "NVLink-C2C, at 88% of its specification": (Link(396e9, 396e9, 450e9), COLORS["reload"], "D"),
}
"""Name → the link, its colour and its marker."""


def links_figure(*, narrow: bool) -> Figure:
    """The step against the number of offloaded layers, for each link, by the simulator."""
    profile = Profile((DECODER,) * 20)
    kept_s = simulate(Schedule.default(0, 20), profile, next(iter(LINKS.values()))[0]).duration_s
    figure = new_figure((NARROW_INCHES, 4.6) if narrow else (WIDE_INCHES, 3.8))
    ax = figure.subplots()
    style_axes(ax)
    for name, (link, color, marker) in LINKS.items():
        steps = [simulate(Schedule.default(k, 20), profile, link).duration_s / kept_s for k in range(19)]
        ax.plot(range(19), steps, color=color, marker=marker, markersize=4, linewidth=1.6, label=name)
    ax.set_xticks(range(0, 19, 2))
    ax.set_xlim(0, 18.4)
    ax.set_ylim(0.9, None)
    ax.set_yticks((1, 2, 3, 4), ("1 ×", "2 ×", "3 ×", "4 ×"))
    label_axes(ax, "layers offloaded, of 20", "step")
    put_title(figure, "simulated, not measured: what each link carries", narrow=narrow)
    if narrow:
        put_key(figure, 1)
    else:
        ax.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper left")
    return figure


def link_figure(name: str, title: str, *, narrow: bool) -> Figure:
    """Five of eight layers over one of the links; each is drawn as one tensor."""
    profile = Profile((replace(DECODER, tensors=(DECODER.saved_bytes,)),) * 8)
    timeline = simulate(Schedule.default(5, 8), profile, LINKS[name][0], title=title)
    return plotted(timeline, narrow=narrow, height=3.4)


# The dictionary of the page about declared schedules, microbatches on one pipeline rank.
ORDER = ["F0", "F1", "F2", "F3", "B0", "F4", "B1", "F5", "B2", "F6", "B3", "F7", "B4", "B5", "B6", "B7"]
MOVES = {
    1: (False, 0, True, 4),
    2: (False, 0, True, 5),
    3: (True, 4, True, 6),
    4: (True, 5, True, 7),
    5: (True, 6, False, 4),
    6: (True, 7, False, 5),
}


def declared_figure(*, narrow: bool) -> Figure:
    """A schedule that was written as a dictionary, simulated."""
    schedule = Schedule.from_synchronization_dict(MOVES, model_layers=8, order=ORDER)
    profile = Profile((replace(LAYER, tensors=(GIB,)),) * 8)
    title = "simulated: microbatches 1 to 6 are offloaded and reloaded, as the dictionary says"
    return plotted(simulate(schedule, profile, LINK, title=title), narrow=narrow, height=3.4)


def streams_figure(*, narrow: bool) -> Figure:
    """The copies of one layer, with an arrow wherever one stream waits for another."""
    backward_s = 0.013 if narrow else 0.020  # the shorter the step, the more room for what happens in it
    layer = LayerProfile(0.010, backward_s, GIB, tensors=(3 * GIB // 8, 2 * GIB // 8, 3 * GIB // 8))
    title = "layer 0: three tensors, copied to the host and to the device, and what waits for what"
    timeline = simulate(Schedule.default(1, 3), Profile((layer,) * 3), LINK, title=title)
    figure = new_figure((NARROW_INCHES, 6.0) if narrow else (WIDE_INCHES, 3.6))
    panels = figure.subplots(2 if narrow else 1, height_ratios=(5, 3.2) if narrow else None, squeeze=False)
    ax = panels[0, 0]
    look: dict[str, Any] = {"color": INK, "fontsize": 8.5, "linespacing": 1.5}
    if narrow:
        timeline.plot(ax, title="")
        ax.set_title("")
        ax.set_yticks(range(3), ("h2d", "d2h", "compute"))
        put_title(figure, title)
        put_key(figure, 3)
        notes = "\n".join(fill(note, 48, subsequent_indent="    ") for note in WAITS)
        panels[1, 0].set_axis_off()
        ax.set_xlabel("ms", color=INK, fontsize=9)
        panels[1, 0].text(-0.2, 1.0, notes, va="top", **look).set_in_layout(False)
    else:
        timeline.plot(ax)
        ax.text(2.0, 0.0, "\n".join(WAITS), va="center", **look)
    _draw_waits(ax, timeline, layer)
    return figure


WAITS = (
    "1  ready: a tensor's copy waits until the tensor is computed",
    "2  release: F2 waits for the copies, then may reuse the memory",
    "3  reload: its copies wait until compute has come to B1",
    "4  reloaded: B0 waits for the one tensor that it needs next",
)


def _draw_waits(ax: Axes, timeline: Timeline, layer: LayerProfile) -> None:
    top, middle, bottom = 2.0, 1.0, 0.0
    start_s = {span.label: span.start_s for span in timeline.lane("compute")}
    offloads, reloads = timeline.lane("d2h"), timeline.lane("h2d")
    for index, (there, back) in enumerate(zip(offloads, reloads, strict=True)):
        ready_s = layer.forward_s * (index + 1) / len(offloads)
        needed_s = start_s["B0"] + layer.backward_s * index / len(reloads)
        _arrow(ax, (ready_s, top), (there.start_s, middle), "1" if index == 0 else "")
        _arrow(ax, (back.end_s, bottom), (needed_s, top), "4" if index == len(reloads) - 1 else "")
        for row, copy in ((middle, there), (bottom, back)):
            if index:
                ax.vlines(copy.start_s * 1e3, row - 0.36, row + 0.36, color="#000000", linewidth=0.8)
    _arrow(ax, (offloads[-1].end_s, middle), (start_s["F2"], top), "2")
    _arrow(ax, (start_s["B1"], top), (reloads[0].start_s, bottom), "3")


def _arrow(ax: Axes, source: tuple[float, float], target: tuple[float, float], number: str) -> None:
    """From the edge of one stream's box to another's, in seconds and rows; a number beside its middle."""
    edge = 0.36 if source[1] > target[1] else -0.36
    (from_x, from_y), (to_x, to_y) = (source[0] * 1e3, source[1] - edge), (target[0] * 1e3, target[1] + edge)
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", xy=(to_x, to_y), xytext=(from_x, from_y), arrowprops=style)
    middle = ((from_x + to_x) / 2, (from_y + to_y) / 2)
    beside: dict[str, Any] = {"xytext": (9 if middle[0] > 4 else -9, 0), "textcoords": "offset points"}
    ax.annotate(number, middle, color=INK, fontsize=9, weight="bold", ha="center", va="center_baseline", **beside)


# What device and host memory hold in each state.
MEMORY = {
    OffloadState.RESIDENT: ("held", "free"),
    OffloadState.OFFLOADING: ("held", "being written"),
    OffloadState.OFFLOADED: ("free", "held"),
    OffloadState.RELOADING: ("being written", "held"),
}
VERBS = ("start_offload", "release", "start_reload")  # from each state to the next


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
        _put(ax, x + width / 2, y + 0.3, state.name, weight="bold")
        for held, color, (right, up) in zip(MEMORY[state], ("forward", "offload"), (device_at, host_at), strict=True):
            _draw_memory(ax, x + right, y + up, 1.35 if narrow else width, held, COLORS[color])
    first_x, first_y = corner[OffloadState.RESIDENT]
    for name, (right, up) in (("device", device_at), ("host", host_at)):
        if narrow:
            _put(ax, first_x + right + 0.68, first_y + 0.8, name)
        else:
            _put(ax, first_x - 0.15, first_y + up + 0.2, name, ha="right")
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 2, "shrinkB": 2}
    for verb, (source, target) in zip(VERBS, pairwise(OffloadState), strict=True):
        (from_x, from_y), (to_x, to_y) = corner[source], corner[target]
        if narrow:
            start, end = (from_x + width / 2, from_y), (to_x + width / 2, to_y + 0.6)
            label = verb.replace("_", " ")
            _put(ax, start[0] + 0.1, (start[1] + end[1]) / 2, label, fontsize=8.5, ha="left", va="center")
        else:
            start, end = (from_x + width, from_y + 0.3), (to_x, to_y + 0.3)
            label = verb.replace("_", "\n")
            _put(ax, (start[0] + end[0]) / 2, start[1] + 0.12, label, fontsize=8.5, va="bottom")
        ax.annotate("", xy=end, xytext=start, arrowprops=style)
    ax.set_xlim(*((-0.05, 4.65) if narrow else (-0.8, 3 * across + width + 0.05)))
    ax.set_ylim(*((1.1 + 3 * down, 2.15) if narrow else (-0.05, 2.3)))
    return figure


def _draw_memory(ax: Axes, x: float, y: float, width: float, holds: str, color: str) -> None:
    face = color if holds == "held" else "none"
    edge, dashes = (INK, (0.0, (2.0, 2.0))) if holds == "free" else (color, (0.0, ()))
    box = Rectangle((x, y), width, 0.4, facecolor=face, edgecolor=edge, linestyle=dashes, linewidth=1.4)
    ax.add_patch(box)
    _put(ax, x + width / 2, y + 0.2, holds, color=text_color(color) if holds == "held" else INK, fontsize=8.5)


def _put(ax: Axes, x: float, y: float, text: str, **look: Any) -> None:
    """A text at its middle, unless told otherwise."""
    ax.text(x, y, text, **{"color": INK, "fontsize": 9, "ha": "center", "va": "center_baseline", **look})


for figure_name, maker in {
    "schedule_2_of_5": partial(schedule_figure, 2, 5, "2 of 5 layers offloaded: the copies hide behind compute"),
    "schedule_3_of_5": partial(schedule_figure, 3, 5, "3 of 5 layers offloaded: compute waits for releases"),
    "links": links_figure,
    "link_pcie": partial(
        link_figure,
        "H200, PCIe Gen5 x16, alone",
        "simulated: 5 of 8 decoder layers over PCIe Gen5; compute waits for copies",
    ),
    "link_c2c": partial(
        link_figure,
        "NVLink-C2C, at 88% of its specification",
        "simulated: the same over NVLink-C2C; each copy ends before the next layer does",
    ),
    "declared": declared_figure,
    "streams": streams_figure,
    "states": states_figure,
}.items():
    PICTURES[Path(f"docs/_static/figures/{figure_name}.svg")] = maker
