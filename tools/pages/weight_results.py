"""Tables and a picture of weight streaming for the pages, all from ``results/weight_streaming.json``."""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from drawing import NARROW_INCHES, WIDE_INCHES
from page_text import GB, Row, day_of, gb, markdown_table, ms, picture, read, table, torch_of

from offload.observe.plot import COLORS, INK, new_figure, style_axes, text_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINDS = {"few": "link", "many": "compute"}
"""What a case's limit is, mostly."""


@cache
def measured() -> Row:
    """The record, if it shows what the pages say about it.

    Raises:
        ValueError: The host was blocked before the end of backward, FSDP2 did not finish a case, a training went
            astray, or losses differ though the host has made the steps in both.
    """
    record = read("weight_streaming")
    for row in record["rows"]:
        blocking = record[f"blocking_calls_{row['case']}"]
        if blocking:
            raise ValueError(f"{row['case']}: nothing must block host or device, but there were {blocking}")
        if row["fsdp_s"] is None:
            raise ValueError(f"{row['case']}: FSDP2 must have finished, to be compared with")
    for row in record["loss_curves"]:
        name, first, last = row["optimizer"], row["first"], row["last"]
        if not last < first:
            raise ValueError(f"{name}: the loss must fall, but it went from {first} to {last}")
        if "stepped on the host" in name and not row["identical"]:
            raise ValueError(f"{name}: losses must be identical, but they differ")
    return record


@table("weight_streaming")
def weight_streaming_table(_page: Path) -> str:
    """Step, limit and FSDP2 for each number of tokens."""
    record = measured()
    shown = [
        {
            "tokens": f"{row['tokens']:,}",
            "compute alone": _phases(row["compute_forward_s"], row["compute_backward_s"]),
            "link alone": _phases(row["link_forward_s"], row["link_backward_s"]),
            "limit": ms(row["limit_s"]),
            "streamed": ms(row["step_s"]),
            "over the limit": f"{row['ratio_to_limit']:.3f} ×",
            "FSDP2": ms(row["fsdp_s"]),
            "device peak": gb(row["peak_device_bytes"]),
        }
        for row in record["rows"]
    ]
    told = markdown_table(shown, answer=("tokens", "streamed", "over the limit", "limit"))
    return (
        f"{record['hardware']['gpu']}, {torch_of(record)}, {day_of(record)}: "
        f"{record['parameters'] / GB:.1f} billion parameters in bfloat16, {gb(record['weight_bytes'])}, on a device "
        f"limited to {gb(record['memory_limit_bytes'])}. Forward + backward, ms.\n\n{told}\n"
    )


@table("weight_memory")
def weight_memory_table(_page: Path) -> str:
    """What the host holds, by the library's counters and by the system's."""
    record = measured()
    stats = record["stats"]
    counted = {
        "weights": stats["weight_bytes"],
        "gradients": stats["gradient_host_bytes"],
        "staging": stats["staging_bytes"],
    }
    shown = {
        **{name: gb(nbytes) for name, nbytes in counted.items()},
        "sum": gb(sum(counted.values())),
        "process grew by": f"{gb(record['host_bytes'])} ({record['host_ratio']:.3f} ×)",
    }
    return markdown_table([shown], answer=("sum", "process grew by")) + "\n"


@table("weight_seconds")
def weight_seconds_table(_page: Path) -> str:
    """What comes on top of a step: once, with microbatches, with an optimizer."""
    record = measured()
    few, many = (next(row for row in record["rows"] if row["case"] == case) for case in ("few", "many"))
    shown = [
        {"what": what, "tokens": f"{row['tokens']:,}", "s": f"{seconds:.2f}"}
        for what, row, seconds in (
            ("`stream_weights` itself, once", few, record["setup_s"]),
            ("the first step, which allocates the gradients' memory", few, few["first_s"]),
            ("every other step", few, few["step_s"]),
            ("a later microbatch: its gradients are added on the host", few, record["accumulating_s"]),
            ("a step", many, many["step_s"]),
            ("a step and then SGD on the host", many, record["optimizer_after_s"]),
            ("a step with SGD on the device in backward", many, record.get("optimizer_in_backward_s")),
        )
        if seconds is not None
    ]
    return markdown_table(shown, left=1) + "\n"


@table("weight_losses")
def weight_losses_table(_page: Path) -> str:
    """Last losses on the device and streamed, for each optimizer."""
    shown = [
        {
            "optimizer": row["optimizer"],
            "steps": row["steps"],
            "first loss": f"{row['first']:.4f}",
            "last, on the device": f"{row['last']:.4f}",
            "last, streamed": f"{row['last_streamed']:.4f}",
            "losses": "identical" if row["identical"] else f"differ by up to {row['largest_difference']:.2g}",
        }
        for row in measured()["loss_curves"]
    ]
    return markdown_table(shown, left=1, answer=("losses",)) + "\n"


def said() -> str:
    """The picture in words."""
    cases = "; ".join(
        f"{row['tokens']:,} tokens: limit {ms(row['limit_s'])}, streamed {ms(row['step_s'])}, FSDP2 "
        f"{ms(row['fsdp_s'])} ms"
        for row in measured()["rows"]
    )
    return f"Bars of forward and backward times. {cases}."


def draw(*, narrow: bool = False) -> Figure:
    """Forward and backward of each case: the limits of a step hollow, real steps filled."""
    rows = measured()["rows"]
    figure = new_figure((NARROW_INCHES, 2.6 * len(rows)) if narrow else (WIDE_INCHES, 3.0))
    panels = figure.subplots(*((len(rows), 1) if narrow else (1, len(rows))), sharey=True)
    for ax, row in zip(panels, rows, strict=True):
        style_axes(ax)
        _draw_case(ax, row, next(other for other in measured()["fsdp"] if other["case"] == row["case"]))
    panels[0].invert_yaxis()
    return figure


def _draw_case(ax: Axes, row: Row, fsdp: Row) -> None:
    _draw_step(ax, "compute alone", row["compute_forward_s"], row["compute_backward_s"], filled=False)
    _draw_step(ax, "link alone", row["link_forward_s"], row["link_backward_s"], filled=False)
    _draw_step(ax, "streamed", row["forward_s"], row["step_s"] - row["forward_s"], filled=True)
    fsdp_forward_s = statistics.median(fsdp["times"]["forward_s"])
    _draw_step(ax, "FSDP2, CPU offload", fsdp_forward_s, row["fsdp_s"] - fsdp_forward_s, filled=True)
    ax.axvline(row["limit_s"] * 1e3, color=INK, linestyle="--", linewidth=1.0)
    ax.set_xlim(0, 1.15 * row["fsdp_s"] * 1e3)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("ms; dashed: the limit, phase by phase", color=INK, fontsize=9)
    ax.set_title(f"{row['tokens']:,} tokens: {BINDS[row['case']]} binds", color=INK, loc="left", fontsize=11)


def _draw_step(ax: Axes, label: str, forward_s: float, backward_s: float, *, filled: bool) -> None:
    for name, color, start_s, seconds in (
        ("F", COLORS["forward"], 0.0, forward_s),
        ("B", COLORS["backward"], forward_s, backward_s),
    ):
        face, ink = (color, text_color(color)) if filled else ("none", INK)
        ax.barh(label, seconds * 1e3, left=start_s * 1e3, height=0.62, facecolor=face, edgecolor=color, linewidth=1.2)
        _note(ax, start_s, label, name, ink)
    end_s = forward_s + backward_s
    _note(ax, end_s, label, ms(end_s), INK)


def _note(ax: Axes, at_s: float, row: str, text: str, color: str) -> None:
    """A text a little to the right of that time."""
    style = {"xytext": (5, 0), "textcoords": "offset points", "fontsize": 9, "va": "center_baseline"}
    ax.annotate(text, (at_s * 1e3, row), color=color, **style)


def _phases(forward_s: float, backward_s: float) -> str:
    return f"{ms(forward_s)} + {ms(backward_s)}"


picture("weight_streaming", draw, said)
