"""What a command answers: lines for people, values for programs, and whether all is well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from offload.planning.as_json import to_json

WIDTH = 110
"""Of lines for people, at most."""


@dataclass(frozen=True)
class Answer:
    """The answer of one command.

    Args:
        command: Its name.
        lines: The answer as text.
        values: The same for JSON: numbers with their units in the names.
        ok: Whether all is well; if not, the exit status is 1.
    """

    command: str
    lines: Sequence[str]
    values: dict[str, Any]
    ok: bool = True

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def to_json(self) -> str:
        """JSON that says of which command it is, and in which version."""
        return to_json(self.command, {"ok": self.ok} | self.values)


def entries(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Names in a column, and beside each its text, broken into lines."""
    found = [*pairs]
    wide = max(len(name) for name, _ in found) + 2
    return [line for name, text in found for line in _entry(name, text, wide)]


def _entry(name: str, text: str, wide: int) -> list[str]:
    first, *others = wrap(text, WIDTH - wide, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{name:<{wide}}{first}".rstrip(), *(" " * wide + line for line in others)]
