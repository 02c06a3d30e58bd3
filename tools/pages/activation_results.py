"""What offloading the first k layers takes and saves, for the pages: of the decoder and of the LayerNorm-MLP block.

``results.py`` writes it into the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawing import NARROW_INCHES, Maker
from page_text import GIB, day_of, gib, image, machine, markdown_table, ms
from suite_results import read_record, run_of

from offload.observe.plot import COLORS, INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = Path("docs/_static/results/tradeoff.svg")

FREE = 1.03
"""How much longer a step of a free number of layers is measured to be, at most: ``docs/how_it_works.md`` says why."""

Row = dict[str, Any]


def rows_of(record: Row, workload: str) -> list[Row]:
    """This library's rows of one workload, fewest offloaded layers first, those without any included.

    Raises:
        ValueError: There are none, or offloading changed a gradient in one of them.
    """
    own = (row for row in record["rows"] if row.get("family", "offload") in ("nothing", "offload"))
    rows = sorted((row for row in own if row["workload"] == workload), key=lambda row: row["k"])
    if not rows or rows[0]["k"]:
        raise ValueError(f"the record must have the workload {workload!r} with k = 0 in it")
    different = [row["k"] for row in rows if not row.get("bit_identical")]
    if different:
        raise ValueError(f"{workload}: gradients differ from those without offloading at k = {different}")
    return rows


def free_layers(rows: list[Row]) -> int:
    """The largest k up to which no step takes longer than ``FREE`` times the one without offloading."""
    free = 0
    for row in rows:
        if round(row["step_s"] / rows[0]["step_s"], 2) > FREE:  # as the tables show it
            break
        free = row["k"]
    return free


def activations_table(record: Row) -> str:
    """Time and memory of the reference decoder for each number of offloaded layers."""
    return f"{_setting(record)}\n\n{_table(rows_of(record, 'decoder'))}\n"


def norm_mlp_table(record: Row) -> str:
    """The same of the LayerNorm-MLP block."""
    return _table(rows_of(record, "LayerNorm-MLP")) + "\n"


def link_table(record: Row) -> str:
    """What the link moved in the record's machine."""
    link = run_of(record)["link"]
    columns = {"device to host": "d2h", "host to device": "h2d", "both at once, sum": "duplex"}
    speeds = {title: f"{link[f'{name}_bytes_per_s'] / 1e9:.1f} GB/s" for title, name in columns.items()}
    return markdown_table([{"GPU": record["hardware"]["gpu"], **speeds}], left=1) + "\n"


def tradeoff_picture(record: Row, page: Path) -> str:
    """The picture, as an image with a path from ``page`` and a text for those who cannot see it."""
    rows = rows_of(record, "decoder")
    free, most = rows[[row["k"] for row in rows].index(free_layers(rows))], rows[-1]
    peaks = [gib(row["peak_bytes"]) for row in (rows[0], free, most)]
    times = [ms(row["step_s"]) for row in (rows[0], free, most)]
    alt = (
        f"Step time against activation peak for 0 to {most['k']} offloaded layers: from {peaks[0]} to {peaks[1]} GiB "
        f"the time goes from {times[0]} to {times[1]} ms, then to {times[2]} ms at {peaks[2]} GiB."
    )
    return image(alt, PICTURE, page)


def draw(record: Row, *, narrow: bool = False) -> Figure:
    """Step time against activation peak of the reference decoder, and where the time hardly changes."""
    rows = rows_of(record, "decoder")
    figure = new_figure((NARROW_INCHES if narrow else 7.2, 3.9))
    ax = figure.subplots()
    style_axes(ax)
    peaks = [row["peak_bytes"] / GIB for row in rows]
    times_ms = [row["step_s"] * 1e3 for row in rows]
    top = 1.12 * max(times_ms)
    ax.plot(peaks, [row["link_s"] * 1e3 for row in rows], "--", color=COLORS["offload"], label="copies alone")
    ax.plot(peaks, times_ms, "o-", color=COLORS["forward"], label="measured step")
    _draw_free(ax, [peak for peak, row in zip(peaks, rows, strict=True) if row["k"] <= free_layers(rows)], top)
    for peak, time_ms, row in zip(peaks, times_ms, rows, strict=True):
        ax.annotate(
            f"k = {row['k']}" if row in (rows[0], rows[-1]) else str(row["k"]),
            (peak, time_ms),
            xytext=(3, 6),
            textcoords="offset points",
            color=INK,
            fontsize=9,
        )
    ax.set_xlim(0, 1.08 * max(peaks))
    ax.set_ylim(0, top)
    ax.set_xlabel("activation peak, GiB", color=INK, fontsize=9)
    ax.set_ylabel("step, ms", color=INK, fontsize=9)
    where = "" if narrow else f", {record['hardware']['gpu']}"
    ax.set_title(f"k of 20 decoder layers offloaded{where}", color=INK, loc="left", fontsize=11)
    ax.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower left")
    return figure


def _draw_free(ax: Axes, peaks: list[float], top: float) -> None:
    ax.axvspan(min(peaks), max(peaks), color=COLORS["reload"], alpha=0.2, linewidth=0)
    middle = (min(peaks) + max(peaks)) / 2
    ax.text(middle, 0.97 * top, f"at most {FREE - 1:.0%} longer", color=INK, fontsize=9, ha="center", va="top")


def _setting(record: Row) -> str:
    run = run_of(record)
    return f"{machine(record, run['link'], day_of(run))}. Gradients are bit-identical in every row."


def _table(rows: list[Row]) -> str:
    kept = rows[0]
    shown = [
        {
            "layers offloaded": row["k"],
            "step, ms": ms(row["step_s"]),
            "against none": _change(row["step_s"] / kept["step_s"]) if row["k"] else "",
            "activation peak, GiB": gib(row["peak_bytes"]),
            "less memory": f"{1 - row['peak_bytes'] / kept['peak_bytes']:.0%}" if row["k"] else "",
            "copied each way, GiB": gib(row["copied_bytes"]) if row["k"] else "",
            "copies alone, ms": ms(row["link_s"]) if row["k"] else "",
        }
        for row in rows
    ]
    return markdown_table(shown)


def _change(ratio: float) -> str:
    """``1.0004`` is ``+0.0%``; a step within the clock's noise can be faster, too."""
    return f"{ratio - 1:+.1%}".replace("-", "−")


BLOCKS: dict[tuple[str, str], Callable[[Path], str]] = {
    ("table", "activations"): lambda _: activations_table(read_record()),
    ("table", "norm_mlp"): lambda _: norm_mlp_table(read_record()),
    ("table", "link"): lambda _: link_table(read_record()),
    ("picture", "tradeoff"): lambda page: tradeoff_picture(read_record(), page),
}
"""A block's kind and name → its text, for a page at this path."""

PICTURES: dict[Path, Maker] = {PICTURE: lambda *, narrow: draw(read_record(), narrow=narrow)}
"""Path in the repository → what draws it."""
