"""Host memory in pieces: ranges of the pool's slabs, and buffers made of them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

import torch

from offload.device.backend import Event


class Range:
    """Consecutive bytes of one slab."""

    __slots__ = ("nbytes", "slab", "start")

    # No dataclass, whose generated __init__ is in no file: the compiler would compile it.
    def __init__(self, slab: torch.Tensor, start: int, nbytes: int) -> None:
        self.slab = slab
        self.start = start
        self.nbytes = nbytes

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.start + self.nbytes

    def overlaps(self, other: Range) -> bool:
        return self.slab is other.slab and self.start < other.end and other.start < self.end


class HostBuffer:
    """Host memory for one storage: uint8 pieces, in order, and the events after which they may be written."""

    __slots__ = ("events", "graph", "nbytes", "pieces", "ranges")

    def __init__(self, nbytes: int, ranges: Sequence[Range]) -> None:
        self.nbytes = nbytes
        self.graph: Ready | None = None  # what belongs to the CUDA graph that copies to and from it, if any
        self.ranges = ranges
        self.events: tuple[Event, ...] = ()
        self.pieces = [piece.slab[piece.start : piece.end] for piece in ranges]
        padding = sum(piece.nbytes for piece in ranges) - nbytes
        self.pieces[-1] = self.pieces[-1][: ranges[-1].nbytes - padding]


Ready = defaultdict[int, deque[HostBuffer]]  # buffers to hand out again as they are, by size


def gaps(slabs: Iterable[torch.Tensor], covered: Iterable[Range]) -> list[Range]:
    """The ranges of the slabs that are not covered."""
    in_slab: defaultdict[int, list[Range]] = defaultdict(list)
    for piece in covered:
        in_slab[id(piece.slab)].append(piece)
    found = []
    for slab in slabs:
        start = 0
        for piece in [*sorted(in_slab[id(slab)], key=lambda piece: piece.start), Range(slab, len(slab), 0)]:
            if piece.start > start:
                found.append(Range(slab, start, piece.start - start))
            start = piece.end
    return found
