"""Warnings that point at the program's own line, however deep inside the library they are found."""

from __future__ import annotations

import sys
import warnings


def warn_caller(message: str) -> None:
    """Warn, as from the first frame that is neither this library's nor PyTorch's."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("offload", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
