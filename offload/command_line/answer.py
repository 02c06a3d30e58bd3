"""The answer of a command, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import TextWrapper
from typing import Any, NamedTuple

LINE_LENGTH = 110


class Answer(NamedTuple):
    """The answer of one command."""

    rows: Sequence[tuple[str, str]]
    """For people: a name, which stands in a column, and the text beside it."""
    values: dict[str, Any]
    """For JSON: numbers with their units in the names."""
    ok: bool = True
    """Whether all is well; otherwise the exit status is 1."""
    below: Sequence[str] = ()
    """Lines below the rows."""

    def __str__(self) -> str:
        wide = max(len(name) for name, _ in self.rows) + 2
        lines = TextWrapper(LINE_LENGTH, subsequent_indent=" " * wide, break_long_words=False, break_on_hyphens=False)
        return "\n".join([*(lines.fill(f"{name:<{wide}}{text}") for name, text in self.rows), *self.below])
