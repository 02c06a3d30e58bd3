"""A progress bar for long work: tqdm's, where tqdm is installed and a terminal or a notebook shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

DELAY_S = 2.0
"""Work that takes less time shows no bar."""


@contextmanager
def progress_bar(what: str, total: int, unit: str = "B") -> Iterator[Callable[[int], object]]:
    """Show the progress of the block; yields the function to call, from one thread, with each amount that is done."""
    shown = "ipykernel.kernelapp" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    try:
        from tqdm import tqdm
    except ImportError:
        shown = False
    if not shown:
        yield lambda _: None
        return
    scale: dict[str, Any] = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    with tqdm(desc=what, total=total, unit=unit, delay=DELAY_S, leave=False, **scale) as bar:
        yield bar.update
