"""The picture of what all contenders take, a panel for each workload: step time against activation peak."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from drawing import NARROW_INCHES, WIDE_INCHES
from page_text import GIB, Row, gib, ms, picture, read

from offload.observe.plot import COLORS, INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORKLOADS = {
    "suite_decoder": "decoder",
    "suite_compiled": "compiled decoder",
    "suite_norm_mlp": "LayerNorm-MLP",
    "suite_llama": "Hugging Face Llama",
    "suite_long": "long sequence",
}
TIMES = (1, 1.25, 1.5, 2, 3, 4, 6, 8)
"""Where the axis of time has marks, as multiples of the step without anything."""


class Look(NamedTuple):
    """How a family's points are drawn. Its marker says which it is, whatever becomes of the colour."""

    label: str
    line: str
    color: str
    hollow: bool = False


LOOKS = {
    "nothing": Look("nothing", "*", INK),
    "checkpoint": Look("torch.utils.checkpoint", "s", COLORS["reload"]),
    "checkpoint_on_cpu": Look("checkpoint under save_on_cpu", "D", COLORS["offload"]),
    "save_on_cpu": Look("save_on_cpu", "^", COLORS["offload"]),
    "trl": Look("TRL", "v", COLORS["backward"]),
    "te": Look("Transformer Engine", "P:", COLORS["backward"]),
    "offload": Look("this library", "o-", COLORS["forward"]),
    "offload_checkpoint": Look("this library around checkpoints", "o--", COLORS["forward"], hollow=True),
}


def said() -> str:
    """The picture in words."""
    own = [f"{name}: {_span(name)}" for name in _panels()]
    return f"Step time against activation peak of every contender. This library, {'; '.join(own)}."


def _span(workload: str) -> str:
    rows = [row for row in points_of(workload) if row["family"] in ("nothing", "offload", "offload_checkpoint")]
    least, most = min(rows, key=lambda row: row["peak_bytes"]), max(rows, key=lambda row: row["peak_bytes"])
    return " to ".join(f"{ms(row['step_s'])} ms at {gib(row['peak_bytes'], 1)} GiB" for row in (most, least))


def draw(*, narrow: bool = False) -> Figure:
    """Step time against activation peak of all contenders, a panel per workload; for phones, one below the other."""
    names = _panels()
    columns = 1 if narrow else 2
    rows = (len(names) + columns - 1) // columns
    figure = new_figure((NARROW_INCHES if narrow else WIDE_INCHES, (2.4 if narrow else 0.9) + 2.7 * rows))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax, name in zip(panels, names, strict=False):
        style_axes(ax)
        _draw_panel(ax, points_of(name))
        ax.set_title(name, color=INK, loc="left", fontsize=11)
    for ax in panels[len(names) :]:
        ax.set_axis_off()
    keys = {label: line for ax in figure.axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    look = {"frameon": False, "labelcolor": INK, "fontsize": 9}
    figure.legend(keys.values(), keys.keys(), loc="outside lower center", ncols=1 if narrow else 3, **look)
    return figure


def _draw_panel(ax: Axes, rows: list[Row]) -> None:
    kept_s = next(row["step_s"] for row in rows if row["family"] == "nothing")
    for family, look in LOOKS.items():
        points = sorted((row for row in rows if row["family"] == family), key=lambda row: row["peak_bytes"])
        peaks = [row["peak_bytes"] / GIB for row in points]
        times = [row["step_s"] / kept_s for row in points]
        face = "none" if look.hollow else look.color
        if points:
            ax.plot(
                peaks,
                times,
                look.line,
                color=look.color,
                markerfacecolor=face,
                markeredgewidth=1.6 if look.hollow else 1.0,  # an edge that is seen in the dark
                markersize=7 if look.hollow else 6,
                label=look.label,
            )
        if family == "offload" and points:  # its ends; the table has those between
            for index in sorted({0, len(points) - 1}):
                text = f"{'' if len(points) > 1 and not index else 'k = '}{points[index]['k']}"
                at = (peaks[index], times[index])
                # The first, with the least memory, has the axis on its left and others' markers above.
                beside = {"xytext": (4, 6)} if index else {"xytext": (-6, -3), "ha": "right"}
                ax.annotate(text, at, textcoords="offset points", color=INK, fontsize=8, **beside)
    slowest = max(row["step_s"] for row in rows) / kept_s
    ax.set_yscale("log")
    ax.set_yticks(TIMES, [f"{time:g} ×" for time in TIMES])
    ax.minorticks_off()
    ax.set_ylim(0.92, 1.15 * slowest)
    ax.set_xlim(0, 1.1 * max(row["peak_bytes"] for row in rows) / GIB)
    ax.set_xlabel("activation peak, GiB", color=INK, fontsize=9)
    ax.set_ylabel("step, against nothing", color=INK, fontsize=9)


def _panels() -> list[str]:
    """The workloads that have something to be compared with."""
    return [name for name in WORKLOADS.values() if any(row["family"] == "nothing" for row in points_of(name))]


def points_of(workload: str) -> list[Row]:
    """What was measured of a workload, contender by contender."""
    return [row for row in read("suite")["rows"] if row["workload"] == workload and "step_s" in row]


picture("suite", draw, said)
