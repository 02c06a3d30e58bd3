"""What the links of several GPUs of one host reach, for the pages: from the records of pipelines.

``results.py`` writes it into the pages.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drawing import Maker
from page_text import GB, ROOT, day_of, markdown_table

RECORDS = [ROOT / "results" / f"pipeline_{ranks}.json" for ranks in (2, 4)]
DIRECTIONS = {"to the host": "d2h", "back": "h2d", "both at once, sum": "duplex"}

Row = dict[str, Any]


def read_records() -> list[Row]:
    """The records, fewest GPUs first."""
    return [json.loads(path.read_text("utf-8")) for path in RECORDS]


def links_table(records: list[Row]) -> str:
    """GB/s of one GPU, while the others of the host are idle, and while all copy."""
    rows = []
    for record in records:
        links, gpu = record["links"], record["hardware"]["gpu"]
        for when in ("alone", "all at once"):
            who = f"{len(links)} × {gpu}, {'one copies' if when == 'alone' else 'all copy'}"
            rows.append(
                {"GB/s of each GPU that copies": who}
                | {name: _median(links, when, key) for name, key in DIRECTIONS.items()}
            )
    days = sorted({day_of(record) for record in records})
    return f"{markdown_table(rows, left=1)}\n\nMedians over the GPUs; {', '.join(days)}.\n"


def _median(links: list[Row], when: str, key: str) -> str:
    return f"{statistics.median(link[when][f'{key}_bytes_per_s'] for link in links) / GB:.0f}"


BLOCKS: dict[tuple[str, str], Callable[[Path], str]] = {("table", "host_links"): lambda _: links_table(read_records())}
"""A block's kind and name → its text, for a page at this path."""

PICTURES: dict[Path, Maker] = {}
"""Path in the repository → what draws it."""
