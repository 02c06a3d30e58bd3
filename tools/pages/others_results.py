"""What one may come from, beside this library, on one model: the picture, from ``results/suite.json``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from drawing import NARROW_INCHES, WIDE_INCHES, Maker
from page_text import GIB, gib, image, ms
from suite_picture import LOOKS, Row, points_of
from suite_results import read_record

from offload.observe.plot import INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = Path("docs/_static/results/others.svg")


def picture(record: Row, page: Path) -> str:
    """The picture of :func:`draw`, with a text for those who cannot see it."""
    said = "; ".join(
        f"{row['contender']}: {ms(row['step_s'])} ms, {gib(row['peak_bytes'], 1)} GiB" for row in _others(record)
    )
    return image(f"Bars of step time and activation peak of a Hugging Face Llama. {said}.", PICTURE, page)


def draw(record: Row, *, narrow: bool = False) -> Figure:
    """Step and peak of one model in what one may come from, and in this library."""
    rows = _others(record)[::-1]
    figure = new_figure((NARROW_INCHES, 6.6) if narrow else (WIDE_INCHES, 3.4))
    panels = figure.subplots(*((2, 1) if narrow else (1, 2)), sharey=not narrow)
    for ax, key, unit, title in zip(
        panels, ("step_s", "peak_bytes"), (1e-3, GIB), ("step, ms", "activation peak, GiB"), strict=True
    ):
        style_axes(ax)
        values = [row[key] / unit for row in rows]
        for place, (row, value) in enumerate(zip(rows, values, strict=True)):
            ax.barh(place, value, height=0.62, color=LOOKS[row["family"]].color, linewidth=0)
            text = f" {value:,.0f}" if key == "step_s" else f" {value:.1f}"
            ax.text(value, place, text, color=INK, fontsize=9, va="center_baseline")
        ax.set_xlim(0, 1.16 * max(values))
        ax.set_yticks(range(len(rows)), [fill(row["contender"], 24) if narrow else row["contender"] for row in rows])
        ax.set_title(title, color=INK, loc="left", fontsize=10)
    return figure


def _others(record: Row) -> list[Row]:
    """What is drawn of the Llama's rows: the library with fewest and with most layers."""
    rows = points_of(record, "Hugging Face Llama")
    own = {family: [row for row in rows if row["family"] == family] for family in ("offload", "offload_checkpoint")}
    between = [row for found in own.values() for row in found[1:-1]] + own["offload_checkpoint"][:-1]
    return [row for row in rows if row not in between]


BLOCKS: dict[tuple[str, str], Callable[[Path], str]] = {
    ("picture", "others"): lambda page: picture(read_record(), page),
}
"""A block's kind and name → its text, for a page at this path."""

PICTURES: dict[Path, Maker] = {PICTURE: lambda *, narrow: draw(read_record(), narrow=narrow)}
"""Path in the repository → what draws it."""
