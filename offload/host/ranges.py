"""Parts of the host pool's slabs: which are free, and after which events they may be written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from offload.device.backend import Event
from offload.device.capture import current_capture


@dataclass(eq=False)
class Range:
    """Consecutive bytes of one slab, and the events after which they may be written."""

    slab: torch.Tensor
    start: int
    nbytes: int
    events: tuple[Event, ...] = ()


def joined(pieces: list[Range]) -> list[Range]:
    """The same memory in order, adjacent ranges as one."""
    found: list[Range] = []
    for piece in sorted(pieces, key=lambda piece: (piece.slab.data_ptr(), piece.start)):
        last = found[-1] if found else None
        if last and last.slab is piece.slab and last.start + last.nbytes == piece.start:
            last.nbytes += piece.nbytes
            last.events = pending((*last.events, *piece.events))
        else:
            found.append(piece)
    return found


def gaps(slabs: list[torch.Tensor], covered: list[Range]) -> list[Range]:
    """What ``covered``, in order and joined, leaves of the slabs."""
    found = []
    for slab in slabs:
        start = 0
        for piece in [*(piece for piece in covered if piece.slab is slab), Range(slab, len(slab), 0)]:
            if piece.start > start:
                found.append(Range(slab, start, piece.start - start))
            start = piece.start + piece.nbytes
    return found


def pieces_of(nbytes: int, ranges: list[Range]) -> list[torch.Tensor]:
    """The first ``nbytes`` bytes of the ranges, uint8, one tensor for each."""
    padding = sum(piece.nbytes for piece in ranges) - nbytes
    pieces = [piece.slab.narrow(0, piece.start, piece.nbytes) for piece in ranges]
    pieces[-1] = pieces[-1].narrow(0, 0, len(pieces[-1]) - padding)
    return pieces


def pending(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events that are still to come. Nobody may ask during a capture, which begins with all of them reached."""
    if current_capture() is not None:
        return ()
    return tuple(event for event in dict.fromkeys(events) if not event.query())
