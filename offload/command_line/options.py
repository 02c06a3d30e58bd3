"""Options that several commands take, and how their texts are read."""

from __future__ import annotations

import argparse
import math

import torch

from offload.base.checks import parse_bytes


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
