"""How the pages' figures and pictures are saved, and how a committed one is compared with a new one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def texts(svg: Path) -> list[tuple[str, float, float]]:
    """Every text in a figure with its position in points: what a figure says, whatever drew its lines."""
    found = re.findall(r"<text[^>]*\s(-?[\d.]+) (-?[\d.]+)\)\">([^<]*)</text>", svg.read_text("utf-8"))
    return [(text, float(x), float(y)) for x, y, text in found]


def marks(svg: Path) -> list[tuple[str, float, float]]:
    """Where a figure's markers are, in points: its measured values, most of which no text names."""
    found = re.findall(r'<use [^>]*\sx="(-?[\d.]+)" y="(-?[\d.]+)"', svg.read_text("utf-8"))
    return [("", float(x), float(y)) for x, y in found]


def is_up_to_date(committed: Path, drawn: Path, tolerance: float = 4.0) -> bool:
    """Whether two files show the same figure; releases of matplotlib differ in details of the lines."""
    if not committed.exists():
        return False

    def alike(find: Callable[[Path], list[tuple[str, float, float]]], within: float) -> bool:
        pairs = zip_longest(find(committed), find(drawn), fillvalue=("missing", math.inf, math.inf))
        return all(a == b and math.dist(at_a, at_b) <= within for (a, *at_a), (b, *at_b) in pairs)

    return bool(texts(committed)) and alike(texts, tolerance) and alike(marks, tolerance / 4)
