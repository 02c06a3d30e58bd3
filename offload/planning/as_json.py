"""Plans and profiles as text: JSON that says what it is."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

VERSION = 1
"""Of the texts. A later version of the library may write texts of a higher version, which are refused."""


class Stored(ABC):
    """A class whose objects can be written as text, to a file for example."""

    _kind: ClassVar[str]

    @abstractmethod
    def _values(self) -> dict[str, Any]:
        """Everything that :meth:`_from_values` needs, as JSON has it."""

    @classmethod
    @abstractmethod
    def _from_values(cls, values: dict[str, Any]) -> Self:
        """The object with these values."""

    def to_json(self) -> str:
        """All of it as text, for :meth:`from_json`."""
        return to_json(self._kind, self._values())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The object of which :meth:`to_json` made a text.

        Raises:
            ValueError: ``text`` is of another kind or version, or no such text at all.
        """
        needed = f"text must be a {cls._kind} of version {VERSION} as its to_json() makes it"
        try:
            values = json.loads(text)
            found = (values.pop("offload"), values.pop("version"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{needed}, got {text[:40]!r}") from error
        if found != (cls._kind, VERSION):
            raise ValueError(f"{needed}, got a {found[0]} of version {found[1]}; save it again")
        try:
            return cls._from_values(values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{needed}, but something is missing or unknown: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` has written.

        Raises:
            ValueError: The file holds something else.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def to_json(kind: str, values: dict[str, Any]) -> str:
    """``values`` as text that says of which kind it is."""
    return json.dumps({"offload": kind, "version": VERSION} | values, indent=1)
