"""What the regions of a layer cost, and which of them to compute again: fewer bytes against more seconds.

Pure data. A region is one result of one operation; what it is computed from are other regions, and what the layer was
given. To compute regions again costs the seconds of all operations that lead to them from what is kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class RegionProfile:
    """What one region costs.

    Args:
        name: The module that computes it, and the operation, such as ``"mlp.up_proj: mm"``.
        nbytes: Of its memory.
        seconds: Compute seconds of its operation; zero for ``another_of``.
        reads: What the operation reads, by the numbers of regions in the layer, all lower than its own.
        saved: Whether autograd saves it.
        recomputable: Whether it comes out the same when it is computed again. What the layer was given never does.
        another_of: Where an operation has several results, the number of the first; ``None`` for that itself.
        from_before: Of what the layer was given: whether the layer before has computed it, and can do so again.
    """

    name: str
    nbytes: int
    seconds: float
    reads: tuple[int, ...] = ()
    saved: bool = True
    recomputable: bool = True
    another_of: int | None = None
    from_before: bool = False


@dataclass(frozen=True)
class Treated:
    """One way to treat a layer's regions.

    Args:
        regions: The layer's.
        kept: The numbers of those that are not computed again, and stay or travel.
    """

    regions: tuple[RegionProfile, ...]
    kept: frozenset[int]

    @cached_property
    def recomputed(self) -> frozenset[int]:
        """The regions whose operations run again: those that backward asks for, and those that lead to them."""
        found: set[int] = set()
        waiting = [number for number, region in enumerate(self.regions) if region.saved]
        while waiting:
            number = waiting.pop()
            if number not in found and number not in self.kept and self.regions[number].recomputable:
                found.add(number)
                waiting += self.regions[number].reads
        return frozenset(found)

    @cached_property
    def held(self) -> frozenset[int]:
        """What is on the device or on the host until backward, saved by autograd or read by what runs again."""
        read = {number for region in self.recomputed for number in self.regions[region].reads}
        saved = {number for number, region in enumerate(self.regions) if region.saved}
        return frozenset((read | saved) - self.recomputed)

    @cached_property
    def recompute_s(self) -> float:
        """Seconds that backward spends on computing again."""
        return seconds_of(self.regions, self.recomputed)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that are kept, or travel, until backward."""
        return sum(self.regions[number].nbytes for number in self.held)


def operation_of(regions: Sequence[RegionProfile], number: int) -> int:
    """The first result of the operation that makes a region."""
    first = regions[number].another_of
    return number if first is None else first


def seconds_of(regions: Sequence[RegionProfile], numbers: Collection[int]) -> float:
    """What computing regions takes: each operation makes all of its results at once."""
    if not numbers:
        return 0.0
    # Rounded once, so that neither the order of a set nor Python's version decides between equal ways.
    return math.fsum(regions[first].seconds for first in {operation_of(regions, number) for number in numbers})


def ways(regions: Sequence[RegionProfile]) -> list[Treated]:
    """Ways to treat a layer's regions, from all computed again to all kept, none worse than another in both respects.

    Greedy: from one way to the next, what is kept in addition is what saves the most seconds per byte.
    """
    regions = tuple(regions)
    found = [Treated(regions, frozenset())]
    while found[-1].recompute_s > 0:
        last = found[-1]
        found.append(max(_steps(last), key=lambda way: _gain(last, way)))
    found.append(Treated(regions, frozenset(number for number, region in enumerate(regions) if region.saved)))
    return _undominated(found)


def _steps(way: Treated) -> Iterable[Treated]:
    """The same with the results of one more operation kept, of those that run again now."""
    results: defaultdict[int, set[int]] = defaultdict(set)
    for number in sorted(way.recomputed):  # of equally good ones the first is taken
        results[operation_of(way.regions, number)].add(number)
    return (Treated(way.regions, way.kept | made) for made in results.values())


def _gain(before: Treated, after: Treated) -> float:
    """Seconds saved per byte kept."""
    return (before.recompute_s - after.recompute_s) / max(1, after.saved_bytes - before.saved_bytes)


def _undominated(found: Iterable[Treated]) -> list[Treated]:
    """Without those that another one beats in bytes and in seconds."""
    best: list[Treated] = []
    for way in sorted(found, key=lambda way: (way.saved_bytes, way.recompute_s)):
        if not best or way.recompute_s < best[-1].recompute_s:
            best.append(way)
    return best
