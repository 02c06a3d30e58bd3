"""What happens to a layer's regions in its passes, but for the seconds: layers of one kind have that in common.

A planner asks for the passes of hundreds of layers in dozens of ways, and what depends on the kind alone is worked out
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from offload.recompute.costs import RegionProfile, Treated, operation_of


class ForwardPiece(NamedTuple):
    """One piece of a forward."""

    seconds: float
    taken_bytes: int
    """Device memory that it takes when it starts; goes to the host, too, if it ``travels``."""
    freed_bytes: int = 0
    """Device memory that is given back when it ends: what is computed again, and was read for the last time."""
    travels: bool = False


class BackwardPiece(NamedTuple):
    """One piece of a backward, with what is computed again for it."""

    seconds: float
    freed_bytes: int
    """Device memory that is given back when it ends."""
    awaits: int | None = None
    """Which of the layer's travelling pieces it waits for; those that were saved later are back before."""
    recompute_s: float = 0.0
    taken_bytes: int = 0
    """The most device memory that computing again takes."""
    passing_bytes: int = 0
    """What of it, and of what was computed again before, is given back when that is done: what nobody reads later."""


@dataclass(frozen=True)
class RegionPieces:
    """The pieces of both passes of a layer whose regions are treated in one way. No piece has its seconds yet.

    Args:
        forward: A piece for each region.
        backward: A piece for each region, the last one first.
        again: Of each piece of backward, the regions that are computed again before it.
        travelling: The bytes of each region that travels, in the order of saving.
        recomputed: The regions that are computed again.
        replay_bytes: The most on the device while all of them are computed in a row.
    """

    forward: tuple[ForwardPiece, ...]
    backward: tuple[BackwardPiece, ...]
    again: tuple[tuple[int, ...], ...]
    travelling: tuple[int, ...]
    recomputed: frozenset[int]
    replay_bytes: int


@lru_cache(maxsize=4096)
def region_pieces(regions: tuple[RegionProfile, ...], kept: frozenset[int], travelling: frozenset[int]) -> RegionPieces:
    """The pieces of a layer's passes.

    Args:
        regions: The layer's, without their seconds, so that all of a kind are equal.
        kept: The numbers of those that are there until backward.
        travelling: Of them, those that travel.
    """
    treated = Treated(regions, kept)
    moving = [number for number in sorted(travelling & treated.held) if regions[number].nbytes]
    places = {number: place for place, number in enumerate(moving)}
    let_go = _let_go(treated)
    forward = tuple(
        ForwardPiece(
            0.0,
            region.nbytes if number in treated.held or _passes(treated, number) else 0,
            sum(regions[other].nbytes for other in let_go[number]),
            number in places,
        )
        for number, region in enumerate(regions)
    )
    backward, again = zip(*_backward(treated, places), strict=True)
    sizes = tuple(regions[number].nbytes for number in moving)
    return RegionPieces(forward, backward, again, sizes, treated.recomputed, _replay_bytes(treated))


def _replay_bytes(treated: Treated) -> int:
    """The most on the device while all that is computed again runs in a row, each result until it was read."""
    last = {read: number for number in sorted(treated.recomputed) for read in treated.regions[number].reads}
    here_bytes = most_bytes = 0
    for number in sorted(treated.recomputed):
        here_bytes += treated.regions[number].nbytes
        most_bytes = max(most_bytes, here_bytes)
        done = [read for read in treated.regions[number].reads if last[read] == number and read in treated.recomputed]
        here_bytes -= sum(treated.regions[read].nbytes for read in done)
    return most_bytes


def _passes(treated: Treated, number: int) -> bool:
    """Whether a region would be saved, and is let go when forward has read it for the last time."""
    return number in treated.recomputed and treated.regions[number].saved


def _let_go(treated: Treated) -> list[list[int]]:
    """After which region of forward each that is computed again is let go: the last one that reads it."""
    last = list(range(len(treated.regions)))
    for number, region in enumerate(treated.regions):
        for read in region.reads:
            last[read] = number
    found: list[list[int]] = [[] for _ in last]
    for number, reader in enumerate(last):
        if _passes(treated, number):
            found[reader].append(number)
    return found


def _backward(treated: Treated, places: dict[int, int]) -> Iterator[tuple[BackwardPiece, tuple[int, ...]]]:
    """Each region's backward, the last one first, and what is computed again before it because it asks for that."""
    regions = treated.regions
    left = set(treated.recomputed)
    readers = Counter(read for again in left for read in regions[again].reads)
    """How many that are computed again have yet to read a region."""

    def let_go(number: int) -> int:
        """The bytes that are let go when a region was computed again."""
        for read in regions[number].reads:
            readers[read] -= 1
        done = (read for read in {number, *regions[number].reads} if read in treated.recomputed and not readers[read])
        return sum(regions[read].nbytes for read in done if not regions[read].saved)

    for number in reversed(range(len(regions))):
        again = _leading_to(regions, number, left) if regions[number].saved else []
        left.difference_update(again)
        here_bytes = most_bytes = 0
        for other in again:
            here_bytes += regions[other].nbytes
            most_bytes = max(most_bytes, here_bytes)
            here_bytes -= let_go(other)
        asked = {number, *again, *(read for other in again for read in regions[other].reads)}
        there = number in treated.held or _passes(treated, number)
        piece = BackwardPiece(
            0.0,
            regions[number].nbytes if there else 0,
            min((places[other] for other in asked if other in places), default=None),
            taken_bytes=most_bytes,
            passing_bytes=most_bytes - here_bytes,
        )
        yield piece, tuple(again)


def _leading_to(regions: tuple[RegionProfile, ...], number: int, left: set[int]) -> list[int]:
    """What has to be computed again before a region is there, of what is left to be."""
    found: set[int] = set()
    waiting = [number]
    while waiting:
        other = waiting.pop()
        if other in left and other not in found:
            found.add(other)
            waiting += regions[other].reads
            made = operation_of(regions, other)
            waiting += (result for result in left if operation_of(regions, result) == made)
    return sorted(found)
