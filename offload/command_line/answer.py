"""The answer of a command, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import TextWrapper
from typing import Any

LINE_LENGTH = 110


@dataclass(frozen=True)
class Answer:
    """The answer of one command.

    Args:
        rows: For people: a name, which stands in a column, and the text beside it.
        values: For JSON: numbers with their units in the names.
        ok: Whether all is well; otherwise the exit status is 1.
        below: Lines below the rows.
    """

    rows: Sequence[tuple[str, str]]
    values: dict[str, Any]
    ok: bool = True
    below: Sequence[str] = ()

    def __str__(self) -> str:
        wide = max(len(name) for name, _ in self.rows) + 2
        lines = TextWrapper(LINE_LENGTH, subsequent_indent=" " * wide, break_long_words=False, break_on_hyphens=False)
        return "\n".join([*(lines.fill(f"{name:<{wide}}{text}") for name, text in self.rows), *self.below])
