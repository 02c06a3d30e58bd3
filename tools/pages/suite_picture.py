"""The picture of what all contenders take, a panel for each workload: step time against activation peak."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drawing import NARROW_INCHES, WIDE_INCHES
from page_text import GIB, gib, image, ms

from offload.observe.plot import COLORS, INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = Path("docs/_static/results/suite.svg")

WORKLOADS = {
    "suite_decoder": "decoder",
    "suite_compiled": "compiled decoder",
    "suite_norm_mlp": "LayerNorm-MLP",
    "suite_llama": "Hugging Face Llama",
    "suite_long": "long sequence",
}
TIMES = (1, 1.25, 1.5, 2, 3, 4, 6, 8)
"""Where the axis of time has marks, as multiples of the step without anything."""

Row = dict[str, Any]


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


def curves_picture(record: Row, page: Path) -> str:
    """The picture, as an image with a path from ``page`` and a text for those who cannot see it."""
    own = [f"{name}: {_span(record, name)}" for name in _panels(record)]
    alt = f"Step time against activation peak of every contender. This library, {'; '.join(own)}."
    return image(alt, PICTURE, page)


def _span(record: Row, workload: str) -> str:
    rows = [row for row in points_of(record, workload) if row["family"] in ("nothing", "offload", "offload_checkpoint")]
    least, most = min(rows, key=lambda row: row["peak_bytes"]), max(rows, key=lambda row: row["peak_bytes"])
    return " to ".join(f"{ms(row['step_s'])} ms at {gib(row['peak_bytes'], 1)} GiB" for row in (most, least))


def draw(record: Row, *, narrow: bool = False) -> Figure:
    """Step time against activation peak of all contenders, a panel per workload; for phones, one below the other."""
    names = _panels(record)
    columns = 1 if narrow else 2
    rows = (len(names) + columns - 1) // columns
    figure = new_figure((NARROW_INCHES if narrow else WIDE_INCHES, (2.4 if narrow else 0.9) + 2.7 * rows))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in panels:
        ax.set_axis_off()
    for ax, name in zip(panels, names, strict=False):
        ax.set_axis_on()
        style_axes(ax)
        _draw_panel(ax, points_of(record, name))
        ax.set_title(name, color=INK, loc="left", fontsize=11)
    keys = {label: line for ax in figure.axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(
        keys.values(),
        keys.keys(),
        loc="outside lower center",
        ncols=1 if narrow else 3,
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )
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


def _panels(record: Row) -> list[str]:
    """The workloads that have something to be compared with."""
    kept = {row["workload"] for row in record["rows"] if row["family"] == "nothing" and "step_s" in row}
    return [name for name in WORKLOADS.values() if name in kept]


def points_of(record: Row, workload: str) -> list[Row]:
    """What was measured of a workload, contender by contender."""
    return [row for row in record["rows"] if row["workload"] == workload and "step_s" in row]
