"""How the commands speak with a shell: texts of options in, and out an answer for people and for programs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import TextWrapper
from typing import Any

import torch

from offload.base.checks import parse_bytes

WIDTH = 110
"""Of lines for people, at most."""


@dataclass(frozen=True)
class Answer:
    """The answer of one command.

    Args:
        lines: The answer as text.
        values: The same for JSON: numbers with their units in the names.
        ok: Whether all is well; if not, the exit status is 1.
    """

    lines: Sequence[str]
    values: dict[str, Any]
    ok: bool = True

    def __str__(self) -> str:
        return "\n".join(self.lines)


def entries(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Names in a column, and beside each its text, broken into lines."""
    wide = max(len(name) for name, _ in pairs) + 2
    breaking = TextWrapper(WIDTH, subsequent_indent=" " * wide, break_long_words=False, break_on_hyphens=False)
    found: list[str] = []
    for name, text in pairs:
        breaking.initial_indent = f"{name:<{wide}}"
        found += breaking.wrap(text) or [name]
    return found


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


def count(text: str) -> int:
    """A whole number, at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, got {text!r}")
    return int(text)


def rate(text: str) -> float:
    """A number above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not (found > 0 and math.isfinite(found)):
        raise argparse.ArgumentTypeError(f"must be a number above 0, such as 630e12, got {text!r}")
    return found
