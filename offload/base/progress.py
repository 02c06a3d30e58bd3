"""A progress bar for work that lasts: where somebody watches, tqdm is installed, and after two seconds.

What takes less, or is watched by nobody, costs a look at the clock for each of its parts. tqdm is imported when a bar
shows.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from contextlib import AbstractContextManager
from typing import Any, Literal

DELAY_S = 2.0
"""How long work lasts before it shows a bar."""


class LongWork(AbstractContextManager["LongWork"]):
    """Work of several parts, which several threads may do; a context manager around it.

    Args:
        what: What it is, for the bar.
        total: How much there is to do.
        unit: What is counted: bytes, or steps.
    """

    def __init__(self, what: str, total: int, unit: Literal["B", "steps"] = "B") -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._done = 0
        self._begin_s = time.perf_counter()
        self._bar: Any = None
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._begin_s

    def advance(self, amount: int) -> None:
        """So much more is done."""
        with self._lock:
            self._done += amount
            if self._bar is not None:
                self._bar.update(amount)
            elif self.seconds >= DELAY_S and self._done < self._total and somebody_watches():
                self._bar = self._new_bar()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _new_bar(self) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a notebook without widgets, which gets a bar of text
                from tqdm.auto import tqdm
        except ImportError:
            return None
        scale = {"unit": "B", "unit_scale": True, "unit_divisor": 1024} if self._unit == "B" else {"unit": " steps"}
        return tqdm(desc=self._what, total=self._total, initial=self._done, leave=False, **scale)


def somebody_watches() -> bool:
    """Whether standard error is a terminal, or this is a notebook's kernel."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    if kernel is not None and kernel.IPKernelApp.initialized():
        return True
    return sys.stderr is not None and sys.stderr.isatty()
