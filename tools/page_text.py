"""Tables for the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate


def markdown_table(rows: Sequence[Mapping[str, Any]], *, left: int = 0) -> str:
    """Rows of equal keys, as they are; the first ``left`` columns flush left, the others right."""
    align = ["left"] * left + ["right"] * (len(rows[0]) - left) if rows else []
    return tabulate([dict(row) for row in rows], headers="keys", tablefmt="pipe", disable_numparse=True, colalign=align)
