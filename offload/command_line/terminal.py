"""How the commands speak with a shell: texts of options in, and out an answer for people and for programs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import TextWrapper
from typing import Any, TypeVar

import torch

from offload.base.checks import parse_bytes

Number = TypeVar("Number", int, float)

WIDTH = 110
"""Of lines for people, at most."""


@dataclass(frozen=True)
class Answer:
    """The answer of one command.

    Args:
        rows: The answer for people: names, which stand in a column, and beside each its text.
        values: The same for JSON: numbers with their units in the names.
        ok: Whether all is well; if not, the exit status is 1.
        below: Lines below the rows.
    """

    rows: Sequence[tuple[str, str]]
    values: dict[str, Any]
    ok: bool = True
    below: Sequence[str] = ()

    def __str__(self) -> str:
        wide = max(len(name) for name, _ in self.rows) + 2
        lines = TextWrapper(WIDTH, subsequent_indent=" " * wide, break_long_words=False, break_on_hyphens=False)
        return "\n".join([*(lines.fill(f"{name:<{wide}}{text}") for name, text in self.rows), *self.below])


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device``."""
    parser.add_argument("--device", type=_device, help="such as cuda:1; by default the current accelerator, or the CPU")


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size(text: str) -> int:
    """Bytes, from a number alone or one with a unit."""
    try:
        return parse_bytes(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("value ")) from None


def _positive(kind: Callable[[str], Number], wanted: str) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        try:
            found = kind(text)
        except ValueError:
            found = kind("0")
        if not 0 < found < math.inf:
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return found

    return read


count = _positive(int, "a whole number, at least 1")
rate = _positive(float, "a number above 0, such as 630e12")
