"""Marks that a recording reads: which layer runs, which layer's bytes are copied, what waits.

While a profiler runs, each mark is a range with a stable name, such as ``offload::forward 3`` or ``offload::d2h 3``,
so that marks also show in traces that users take themselves. While a recording on the CPU backend runs, its recorder
gets the marks. At all other times a mark costs one check.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import torch

from offload.base.torch_private import profiling

PREFIX = "offload::"


class Mark(NamedTuple):
    """Something that begins."""

    what: str  # ``forward``, ``backward``, ``other``, ``wait``, ``d2h`` or ``h2d``
    layer: int | None

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.what}" if self.layer is None else f"{PREFIX}{self.what} {self.layer}"

    @classmethod
    def parse(cls, name: str) -> Mark:
        what, _, layer = name.removeprefix(PREFIX).partition(" ")
        return cls(what, int(layer) if layer else None)


@dataclass
class Recorder:
    """What a recording on the CPU backend has seen; times are in seconds of ``time.perf_counter``."""

    marks: list[tuple[float, Mark]] = field(default_factory=list)
    copies: list[tuple[float, float, Mark, int]] = field(default_factory=list)  # start, end, mark and bytes of each
    waits: list[tuple[float, float]] = field(default_factory=list)  # start and end of each wait of the compute stream


_recorders: list[Recorder] = []
_no_range: AbstractContextManager[object] = nullcontext()


def recorder() -> Recorder | None:
    """The recording that runs now on the CPU backend, if any."""
    return _recorders[-1] if _recorders else None


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record what the CPU backend does in the ``with`` block."""
    _recorders.append(made := Recorder())
    try:
        yield made
    finally:
        _recorders.remove(made)


def mark(what: str, layer: int | None = None) -> AbstractContextManager[object]:
    """Record that something begins; a range around the ``with`` block in a profiler's trace."""
    if _recorders:
        _recorders[-1].marks.append((perf_counter(), Mark(what, layer)))
    if profiling():
        return torch.profiler.record_function(Mark(what, layer).name)
    return _no_range


def point(what: str, layer: int | None = None) -> None:
    """Record that something begins, with no end of its own."""
    if is_on():
        with mark(what, layer):
            pass


def is_on() -> bool:
    """Whether anybody reads the marks."""
    return bool(_recorders) or profiling()
