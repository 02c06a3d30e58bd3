"""A layer's forward and backward piece by piece: what computes, what is on the device meanwhile, and what travels.

A piece is a region of the layer, or one of its tensors where the profile has no regions. The simulator plays pieces one
by one, and the planner adds them up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from offload.planning.profile import LayerProfile
from offload.recompute.costs import RegionProfile, Treated, operation_of, seconds_of


@dataclass(frozen=True)
class LayerTreatment:
    """What happens to the regions of one layer. Those that are neither kept nor needless are computed again.

    Args:
        kept: The numbers of the regions that are there until backward, on the device or on the host.
        travelling: Of them, those that go to the host and come back.
        group: Which layer it is of how many that hold one input, that of the first. The layers before compute those of
            the others again.

    Raises:
        ValueError: A region is to travel and not to be kept.
    """

    kept: frozenset[int]
    travelling: frozenset[int] = frozenset()
    group: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if not self.travelling <= self.kept:
            missing = sorted(self.travelling - self.kept)
            raise ValueError(f"travelling must be some of the kept regions, got {missing} beside them; keep them too")


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
class Passes:
    """Both passes of one layer.

    Args:
        forward: The pieces of its forward.
        backward: Those of its backward, the last of forward first.
        travelling: The bytes of each piece that travels, in the order of saving.
        workspace_bytes: What else is on the device while either runs.
    """

    forward: tuple[ForwardPiece, ...]
    backward: tuple[BackwardPiece, ...]
    travelling: tuple[int, ...]
    workspace_bytes: int

    @cached_property
    def forward_s(self) -> float:
        """Compute seconds of forward."""
        return math.fsum(piece.seconds for piece in self.forward)

    @cached_property
    def recompute_s(self) -> float:
        """Seconds of backward in which forward's operations run again."""
        return math.fsum(piece.recompute_s for piece in self.backward)

    @cached_property
    def backward_s(self) -> float:
        """Compute seconds of backward, with what is computed again."""
        return math.fsum(piece.seconds for piece in self.backward) + self.recompute_s

    @cached_property
    def sends(self) -> tuple[tuple[float, int], ...]:
        """Of each piece that travels: how long after forward's start it is ready, and its bytes."""
        ready_s = accumulate(piece.seconds for piece in self.forward)
        return tuple(
            (ready, piece.taken_bytes) for ready, piece in zip(ready_s, self.forward, strict=True) if piece.travels
        )

    @cached_property
    def stretches(self) -> tuple[tuple[int | None, float], ...]:
        """Backward cut where it waits: which travelling piece it waits for, and how long it computes from there."""
        found: list[tuple[int | None, float]] = []
        for piece in self.backward:
            awaits, seconds = piece.awaits, piece.recompute_s + piece.seconds
            if found and (awaits is None or found[-1][0] == awaits):
                awaits, seconds = found[-1][0], found.pop()[1] + seconds
            found.append((awaits, seconds))
        return tuple(found)

    @cached_property
    def travelling_bytes(self) -> int:
        """What goes to the host."""
        return sum(self.travelling)

    @cached_property
    def held_bytes(self) -> int:
        """What is on the device after forward, before anything of it is released."""
        return sum(piece.taken_bytes - piece.freed_bytes for piece in self.forward)

    @cached_property
    def left_bytes(self) -> int:
        """What is on the device after backward, for the layers before it; less than nothing if they have left it."""
        changes = (piece.taken_bytes - piece.passing_bytes - piece.freed_bytes for piece in self.backward)
        return self.held_bytes + sum(changes)

    @cached_property
    def forward_peak_bytes(self) -> int:
        """The most that forward has on the device."""
        changes = (change for piece in self.forward for change in (piece.taken_bytes, -piece.freed_bytes))
        return self.workspace_bytes + max(accumulate(changes), default=0)

    @cached_property
    def backward_peak_bytes(self) -> int:
        """The most that backward has on the device, with what forward has left or was reloaded."""
        changes = (
            change
            for piece in self.backward
            for change in (piece.taken_bytes, -piece.passing_bytes, -piece.freed_bytes)
        )
        return self.workspace_bytes + max(accumulate(changes, initial=self.held_bytes))


def passes_of(layer: LayerProfile, treatment: LayerTreatment | None = None, *, travels: bool) -> Passes:
    """Both passes of a layer.

    Args:
        layer: What it costs.
        treatment: Of its regions; everything that it saves is treated alike, and nothing recorded, if left out.
        travels: Whether the layer's set moves. If not, all that is kept stays.
    """
    if not layer.regions:
        return _of_tensors(layer, travels=travels)
    forward_s = layer.recorded_s
    if treatment is None:
        saved = frozenset(number for number, region in enumerate(layer.regions) if region.saved)
        treatment, forward_s = LayerTreatment(saved, saved), layer.forward_s
    travelling = treatment.travelling if travels else frozenset()
    if treatment.group[1] > 1:
        return _in_group(layer, treatment, travelling)
    return _of_regions(layer, Treated(layer.regions, treatment.kept), travelling, forward_s)


def _of_tensors(layer: LayerProfile, *, travels: bool) -> Passes:
    """The n-th of m tensors is ready after the fraction n/m of forward, and used in the mirrored part of backward."""
    tensors = layer.pieces()
    travels = travels and bool(tensors)
    parts = tensors or (0,)
    forward_s, backward_s = layer.forward_s / len(parts), layer.backward_s / len(parts)
    forward = tuple(ForwardPiece(forward_s, nbytes, travels=travels) for nbytes in parts)
    backward = tuple(
        BackwardPiece(backward_s, nbytes, number if travels else None)
        for number, nbytes in reversed([*enumerate(parts)])
    )
    return Passes(forward, backward, tensors if travels else (), layer.workspace_bytes)


def _of_regions(layer: LayerProfile, treated: Treated, travelling: frozenset[int], forward_s: float) -> Passes:
    """Regions share the seconds of forward and backward as their operations share those of forward."""
    regions = treated.regions
    total_s = math.fsum(region.seconds for region in regions)
    shares = [region.seconds / total_s if total_s else 1 / len(regions) for region in regions]
    moving = [number for number in sorted(travelling & treated.held) if regions[number].nbytes]
    places = {number: place for place, number in enumerate(moving)}
    let_go = _let_go(treated)
    forward = tuple(
        ForwardPiece(
            share * forward_s,
            region.nbytes if number in treated.held or _passes(treated, number) else 0,
            sum(regions[other].nbytes for other in let_go[number]),
            number in places,
        )
        for number, (region, share) in enumerate(zip(regions, shares, strict=True))
    )
    backward = tuple(_backward(treated, places, [share * layer.backward_s for share in shares]))
    return Passes(forward, backward, tuple(regions[number].nbytes for number in moving), layer.workspace_bytes)


def _in_group(layer: LayerProfile, treatment: LayerTreatment, travelling: frozenset[int]) -> Passes:
    """The passes of a layer of a group. What each runs for the next one's input counts to its own backward.

    What that has on the device counts to the last one's backward, with which it begins, as if the layers were alike.
    """
    place, size = treatment.group
    joined = frozenset(number for number, region in enumerate(layer.regions) if region.from_before and place)
    regions = tuple(
        replace(region, nbytes=0) if number in joined else region for number, region in enumerate(layer.regions)
    )
    treated = Treated(regions, treatment.kept)
    alone = _of_regions(layer, treated, travelling - joined, layer.recorded_s)
    input_bytes = sum(layer.regions[number].nbytes for number in joined)
    begin: list[BackwardPiece] = []
    if place == size - 1:
        on_the_way = _replay_bytes(treated) + input_bytes
        begin.append(BackwardPiece(0.0, 0, taken_bytes=place * input_bytes + on_the_way, passing_bytes=on_the_way))
    else:
        others_s = layer.forward_s - math.fsum(region.seconds for region in regions)
        begin.append(BackwardPiece(0.0, 0, recompute_s=treated.recompute_s + max(0.0, others_s)))
    return replace(
        alone,
        forward=(ForwardPiece(0.0, input_bytes), *alone.forward, ForwardPiece(0.0, 0, input_bytes)),
        backward=(*begin, *alone.backward, BackwardPiece(0.0, input_bytes)),
    )


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


def _backward(treated: Treated, places: dict[int, int], seconds: list[float]) -> Iterator[BackwardPiece]:
    """Each region's backward, the last one first, and before it what is computed again because it asks for that."""
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
        yield BackwardPiece(
            seconds[number],
            regions[number].nbytes if there else 0,
            min((places[other] for other in asked if other in places), default=None),
            seconds_of(regions, again),
            most_bytes,
            most_bytes - here_bytes,
        )


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
