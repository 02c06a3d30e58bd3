"""Write measured results into the pages: tables and a picture, all from ``results/activations.json``.

python tools/results.py            rewrite the blocks in README.md, index.md and docs/, and the picture
python tools/results.py --check    write nothing; fail if a committed block or picture is out of date

A page says where a block belongs with two comments; what is between them is replaced::

    <!-- table: activations -->
    <!-- /table -->
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from figures import STYLE, is_up_to_date
from tabulate import tabulate

from offload.plot import COLORS, INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path("results/activations.json")
PICTURE = Path("docs/_static/results/tradeoff.svg")
PAGES = ("README.md", "index.md", "docs/*.md", "docs/howto/*.md", "docs/explanation/*.md")

GIB = 1 << 30
FREE = 1.02
"""Up to this multiple of the step without offloading, the time counts as hardly changed."""

BLOCK = re.compile(r"(<!-- (table|picture): (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)

Row = dict[str, Any]


def rows_of(record: Row, workload: str) -> list[Row]:
    """The rows of one workload, fewest offloaded layers first.

    Raises:
        ValueError: There are none, or offloading changed a gradient in one of them.
    """
    rows = sorted((row for row in record["rows"] if row["workload"] == workload), key=lambda row: row["k"])
    if not rows or rows[0]["k"]:
        raise ValueError(f"the record must have the workload {workload!r} with k = 0 in it")
    different = [row["k"] for row in rows if not row["bit_identical"]]
    if different:
        raise ValueError(f"{workload}: gradients differ from those without offloading at k = {different}")
    return rows


def free_layers(rows: list[Row]) -> int:
    """The largest k up to which no step takes longer than ``FREE`` times the one without offloading."""
    free = 0
    for row in rows:
        if row["step_s"] > FREE * rows[0]["step_s"]:
            break
        free = row["k"]
    return free


def activations_table(record: Row, _: Path) -> str:
    """Time and memory of the reference decoder for each number of offloaded layers."""
    return f"{_setting(record)}\n\n{_table(rows_of(record, 'decoder'))}\n"


def norm_mlp_table(record: Row, _: Path) -> str:
    """The same of the LayerNorm-MLP block."""
    return _table(rows_of(record, "LayerNorm-MLP")) + "\n"


def link_table(record: Row, _: Path) -> str:
    """What the link moved in the record's machine."""
    link = record["link"]
    columns = {"device to host": "d2h", "host to device": "h2d", "both at once, sum": "duplex"}
    speeds = {title: f"{link[f'{name}_bytes_per_s'] / 1e9:.1f} GB/s" for title, name in columns.items()}
    return tabulate([{"GPU": record["hardware"]["gpu"], **speeds}], headers="keys", tablefmt="github") + "\n"


def tradeoff_picture(record: Row, page: Path) -> str:
    """The picture, as an image with a path from ``page`` and a text for those who cannot see it."""
    rows = rows_of(record, "decoder")
    free, most = rows[[row["k"] for row in rows].index(free_layers(rows))], rows[-1]
    alt = (
        f"Step time against activation peak for 0 to {most['k']} offloaded layers: from {_peak(rows[0])} to "
        f"{_peak(free)} GiB the time goes from {_ms(rows[0])} to {_ms(free)} ms, then to {_ms(most)} ms at "
        f"{_peak(most)} GiB."
    )
    return f"![{alt}]({Path(os.path.relpath(ROOT / PICTURE, page.parent)).as_posix()})\n"


BLOCKS: dict[tuple[str, str], Callable[[Row, Path], str]] = {
    ("table", "activations"): activations_table,
    ("table", "norm_mlp"): norm_mlp_table,
    ("table", "link"): link_table,
    ("picture", "tradeoff"): tradeoff_picture,
}


def filled(text: str, page: Path, record: Row) -> str:
    """The page's text with every block between its comments.

    Raises:
        ValueError: The page names a block that this module does not know, or leaves one open.
    """
    found = [(match[2], match[3]) for match in BLOCK.finditer(text)]
    opened = re.findall(r"<!-- (table|picture): (\w+) -->", text)
    if found != opened or not set(opened) <= set(BLOCKS):
        known = ", ".join(f"'{kind}: {name}'" for kind, name in BLOCKS)
        raise ValueError(f"{page}: blocks must be closed, and be among {known}; got {opened}")
    return BLOCK.sub(lambda match: match[1] + BLOCKS[match[2], match[3]](record, page) + match[4], text)


def draw(record: Row) -> Figure:
    """Step time against activation peak of the reference decoder, and where the time hardly changes."""
    rows = rows_of(record, "decoder")
    figure = new_figure((7.2, 3.9))
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
    ax.set_title(f"k of 20 decoder layers offloaded, {record['hardware']['gpu']}", color=INK, loc="left", fontsize=11)
    ax.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower left")
    return figure


def _draw_free(ax: Axes, peaks: list[float], top: float) -> None:
    ax.axvspan(min(peaks), max(peaks), color=COLORS["reload"], alpha=0.2, linewidth=0)
    middle = (min(peaks) + max(peaks)) / 2
    ax.text(middle, 0.97 * top, f"at most {FREE - 1:.0%} longer", color=INK, fontsize=9, ha="center", va="top")


def _setting(record: Row) -> str:
    link, versions = record["link"], record["versions"]
    speeds = (f"{link[f'{name}_bytes_per_s'] / 1e9:.0f}" for name in ("d2h", "h2d"))
    return (
        f"{record['hardware']['gpu']}, link {' and '.join(speeds)} GB/s (to the host and back), "
        f"torch {versions['torch'].partition('+')[0]}, {record['date'].partition('T')[0]}. "
        "Gradients are bit-identical in every row."
    )


def _table(rows: list[Row]) -> str:
    kept = rows[0]
    shown = [
        {
            "layers offloaded": row["k"],
            "step, ms": _ms(row),
            "against none": _change(row["step_s"] / kept["step_s"]) if row["k"] else "",
            "activation peak, GiB": _peak(row),
            "less memory": f"{1 - row['peak_bytes'] / kept['peak_bytes']:.0%}" if row["k"] else "",
            "copied each way, GiB": f"{row['copied_bytes'] / GIB:.2f}" if row["k"] else "",
            "copies alone, ms": f"{row['link_s'] * 1e3:.0f}" if row["k"] else "",
        }
        for row in rows
    ]
    return tabulate(shown, headers="keys", tablefmt="pipe", disable_numparse=True, colalign=("right",) * len(shown[0]))


def _ms(row: Row) -> str:
    return f"{row['step_s'] * 1e3:.0f}"


def _peak(row: Row) -> str:
    return f"{row['peak_bytes'] / GIB:.2f}"


def _change(ratio: float) -> str:
    """``1.0004`` is ``+0.0%``; a step within the clock's noise can be faster, too."""
    return f"{ratio - 1:+.1%}".replace("-", "−")


def pages() -> list[Path]:
    """The pages that may hold blocks."""
    return sorted(page for pattern in PAGES for page in ROOT.glob(pattern))


def write_picture(record: Row, path: Path) -> None:
    """Draw the picture into ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        draw(record).savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def stale(record: Row) -> list[Path]:
    """Committed pages and pictures that the record would change."""
    changed = [page for page in pages() if filled(text := page.read_text("utf-8"), page, record) != text]
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / PICTURE.name
        write_picture(record, drawn)
        if not is_up_to_date(ROOT / PICTURE, drawn):
            changed.append(ROOT / PICTURE)
    return changed


def main() -> None:
    """Write the blocks and the picture, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    parser.add_argument("--record", type=Path, default=ROOT / RECORD, help="another record, to try this out")
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text("utf-8"))
    changed = [path.relative_to(ROOT).as_posix() for path in stale(record)]
    if arguments.check:
        if changed:
            sys.exit(f"out of date: {', '.join(changed)}; run python tools/results.py and commit the result.")
        return
    for page in pages():
        page.write_text(filled(page.read_text("utf-8"), page, record), "utf-8")
    write_picture(record, ROOT / PICTURE)
    print("\n".join(changed) or "all up to date")


if __name__ == "__main__":
    main()
