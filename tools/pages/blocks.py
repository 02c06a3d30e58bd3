"""What pages hold of the records: tables, pictures, and when their rows were measured; all blocks and pictures."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from drawing import Maker
from page_text import day_of, torch_of
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]

WORD = re.compile(r"\b[a-z]{4,}", re.IGNORECASE)
"""Longer than a unit, and no commit, which has figures."""

Row = dict[str, Any]
Column = tuple[str, str | Callable[[Any], str]] | Callable[[Mapping[str, Any]], str]
"""A cell's key and format, by a format specification or a function; or a function of the whole row."""
Columns = Mapping[str, Column]  # title → what stands below it
Text = Callable[[Path], str]  # makes a block's text for a page at this path

BLOCKS: dict[tuple[str, str], Text] = {}  # a block's kind and name → its text
PICTURES: dict[Path, Maker] = {}  # path in the repository → what draws it


def table(name: str) -> Callable[[Text], Text]:
    """Make the decorated function the text of the block ``table: NAME``."""

    def register(make: Text) -> Text:
        assert ("table", name) not in BLOCKS, name
        BLOCKS["table", name] = make
        return make

    return register


def picture(name: str, draw: Maker, alt: Callable[[], str], below: Text = lambda _page: "") -> None:
    """Make ``docs/_static/results/NAME.svg`` the block ``picture: NAME``, with a text for those who cannot see it.

    The text below the picture is for all. The site shows phones the narrow drawing by itself.
    """
    path = Path(f"docs/_static/results/{name}.svg")
    assert path not in PICTURES, name
    PICTURES[path] = draw
    BLOCKS["picture", name] = lambda page: f"![{alt()}]({link_to(path, page)})\n{below(page)}"


@cache
def read(name: str) -> Row:
    """A benchmark's record, ``results/NAME.json``.

    Raises:
        ValueError: It was run with ``--small``.
    """
    record: Row = json.loads((ROOT / "results" / f"{name}.json").read_text("utf-8"))
    if record.get("small"):
        raise ValueError(f"{name}.json must be of full size, got one of --small")
    return record


def markdown_table(rows: Sequence[Mapping[str, Any]], *, left: int = 0, answer: Sequence[str] = ()) -> str:
    """Rows of equal keys, as they are; the first ``left`` columns and those with words flush left, the others right.

    The columns of the ``answer`` come right behind those: a phone shows no more without scrolling.
    """
    names = list(rows[0]) if rows else []
    if not set(answer) <= set(names[left:]):
        raise ValueError(f"answer must name columns behind the first {left}, got {list(answer)} of {names}")
    names = [*names[:left], *answer, *(name for name in names[left:] if name not in answer)]
    in_words = {name for name in names if any(WORD.search(str(row[name])) for row in rows)}
    align = ["left" if name in {*names[:left], *in_words} else "right" for name in names]
    return tabulate(
        [{name: row[name] for name in names} for row in rows],
        headers="keys",
        tablefmt="pipe",
        disable_numparse=True,
        colalign=align,
    )


def cells(rows: Sequence[Mapping[str, Any]], columns: Columns) -> list[Row]:
    """Rows as people read them: by title, a value by its key and format, empty where the row lacks the value."""

    def cell(row: Mapping[str, Any], column: Column) -> str:
        if callable(column):
            return column(row)
        key, form = column
        value = row.get(key)
        return "" if value is None else form(value) if callable(form) else format(value, form)

    return [{title: cell(row, column) for title, column in columns.items()} for row in rows]


def row_of(rows: Sequence[Row], **wanted: Any) -> Row:
    """The one row in which these have these values."""
    [row] = [row for row in rows if wanted.items() <= row.items()]
    return row


def link_to(path: Path, page: Path) -> str:
    """A path in the repository, as ``page`` says it."""
    return Path(os.path.relpath(ROOT / path, page.parent)).as_posix()


def run_of(row: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[str, str]:
    """The day and the commit of a row, which are its record's where the row has none of its own."""
    run = {**record, **row}
    return day_of(run), str(run["commit"])[:7]


def runs_by_gpus(records: Sequence[Mapping[str, Any]]) -> str:
    """When the records of several GPUs were made, which differ in their number."""
    return "; ".join(
        f"{len(record['links'])} GPUs: {day} at commit {commit}"
        for record in records
        for day, commit in [run_of({}, record)]
    )


def with_runs(
    shown: Sequence[Row], rows: Sequence[Mapping[str, Any]], record: Mapping[str, Any], *, among: Sequence[Row] = ()
) -> list[Row]:
    """Rows as people read them, with a last column that says when each was measured, if they are of several runs.

    Of several runs of one day, which is in the table's sentence, it has the commits. ``shown`` are the rows of a table,
    ``rows`` what was measured, ``among`` rows in the table's sentences or other cells, which count as well.
    """
    runs = {run_of(row, record) for row in [*rows, *among]}
    if len(runs) == 1:
        return list(shown)
    own = [run_of(row, record) for row in rows]
    if len({day for day, _ in runs}) == 1:
        return [one | {"commit": commit} for one, (_, commit) in zip(shown, own, strict=True)]
    return [one | {"measured": ", ".join(run)} for one, run in zip(shown, own, strict=True)]


def measured_on(rows: Sequence[Mapping[str, Any]], record: Mapping[str, Any], *, by_row: bool = False) -> str:
    """The days on which the rows were measured; of several runs also their number, and their commits unless by row."""
    runs = sorted({run_of(row, record) for row in rows})
    if len(runs) == 1:
        return runs[0][0]
    if by_row:
        return f"{len(runs)} commits (last column), {', '.join(sorted({day for day, _ in runs}))}"
    commits: dict[str, list[str]] = {}
    for day, commit in runs:
        commits.setdefault(day, []).append(commit)
    return "; ".join(
        f"{day} at commit{'' if len(some) == 1 else 's'} {', '.join(some)}" for day, some in commits.items()
    )


def where(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = (), *, by_row: bool = True) -> str:
    """GPU, version and days of some rows, or of the whole record."""
    return f"{record['hardware']['gpu']}, {torch_of(record)}, {measured_on(rows or [record], record, by_row=by_row)}."
