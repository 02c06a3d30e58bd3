"""How the pages say what was measured: tables, times, sizes, shares, the machine, and where a picture lies."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from drawing import narrow_path
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
GB = 1e9


def full_record(path: Path) -> dict[str, Any]:
    """What a benchmark has written.

    Raises:
        ValueError: It was run with ``--small``.
    """
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if record["small"]:
        raise ValueError(f"{path.name} must be of full size, got one of --small")
    return record


def markdown_table(rows: Sequence[Mapping[str, Any]], *, left: int = 0) -> str:
    """Rows of equal keys, as they are; the first ``left`` columns flush left, the others right."""
    align = ["left"] * left + ["right"] * (len(rows[0]) - left) if rows else []
    return tabulate([dict(row) for row in rows], headers="keys", tablefmt="pipe", disable_numparse=True, colalign=align)


def image(alt: str, picture: Path, page: Path) -> str:
    """A picture of the repository, as ``page`` shows it, with a text for those who cannot see it.

    The site shows phones the narrow drawing by itself; the file that is read where it lies has to name it.
    """
    where = Path(os.path.relpath(ROOT / picture, page.parent))
    if page != ROOT / "README.md":
        return f"![{alt}]({where.as_posix()})\n"
    source = f'<source media="(max-width: 47em)" srcset="{narrow_path(where).as_posix()}">'
    return f'<picture>\n  {source}\n  <img alt="{escape(alt)}" src="{where.as_posix()}">\n</picture>\n'


def ms(seconds: float, digits: int = 0) -> str:
    """Milliseconds, without the unit."""
    return f"{seconds * 1e3:,.{digits}f}"


def gib(nbytes: float, digits: int = 2) -> str:
    """GiB, without the unit."""
    return f"{nbytes / GIB:.{digits}f}"


def gb(nbytes: float) -> str:
    """``gb(1.5e9)`` is ``"1.5 GB"``."""
    return f"{nbytes / GB:.1f} GB"


def percent(share: float) -> str:
    """One digit, and no minus before zero."""
    return f"{round(100 * share, 1) + 0.0:.1f}%".replace("-", "−")


def torch_of(record: Mapping[str, Any]) -> str:
    """PyTorch's version in a record, without what it was built for."""
    version: str = record["versions"]["torch"]
    return f"torch {version.partition('+')[0]}"


def day_of(run: Mapping[str, Any]) -> str:
    """When it was measured."""
    date: str = run["date"]
    return date.partition("T")[0]


def machine(record: Mapping[str, Any], link: Mapping[str, float], *more: str) -> str:
    """GPU, link and versions."""
    speeds = " and ".join(f"{link[f'{name}_bytes_per_s'] / GB:.0f}" for name in ("d2h", "h2d"))
    gpu = record["hardware"]["gpu"]
    return ", ".join([gpu, f"link {speeds} GB/s (to the host and back)", torch_of(record), *more])
