"""Options that several commands take, and how their texts are read."""

from __future__ import annotations

import argparse

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
