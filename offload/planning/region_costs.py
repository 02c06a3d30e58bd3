"""The policy of a layer's regions, what recomputation costs under it, and which regions to keep for fewer seconds.

Backward of a layer runs the layer's forward again once, hands over the regions that were kept, and skips each operation
that no dropped region depends on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from offload.recompute.costs import RegionProfile


class RegionCosts(NamedTuple):
    """What a layer's regions cost if some of them are kept."""

    kept: frozenset[int]
    """The regions that are kept or offloaded until backward: saved ones, and the layer's inputs if any is dropped."""
    dropped: frozenset[int]
    """The saved regions that backward recomputes."""
    rerun: tuple[int, ...]
    """The regions whose operations run again, in the order of forward: the dropped ones, and those they depend on."""
    kept_bytes: int
    recompute_s: float


@lru_cache(maxsize=4096)
def region_costs(regions: tuple[RegionProfile, ...], kept: frozenset[int]) -> RegionCosts:
    """What a layer's regions cost if ``kept`` are kept. A region that cannot be recomputed is kept, too."""
    inputs = inputs_of(regions)
    available: set[int] = set()  # in backward: kept, recomputed, or an input
    needed: set[int] = set()
    for number, region in enumerate(regions):
        can = region.recomputable and available.issuperset(region.reads)
        if not can:
            needed.add(number)
        if can or region.saved or number in inputs:
            available.add(number)
    saved = saved_of(regions)
    held = (kept | needed) & saved
    dropped = saved - held
    if dropped:
        held |= inputs
    rerun: set[int] = set()
    waiting = [*dropped]
    while waiting:
        number = waiting.pop()
        if number not in rerun and number not in held:
            rerun.add(number)
            waiting += regions[number].reads
    kept_bytes = sum(regions[number].nbytes for number in held)
    # Rounded once, so that neither the order of a set nor Python's version decides between equal ways.
    recompute_s = math.fsum(regions[first].seconds for first in {operation_of(regions, number) for number in rerun})
    return RegionCosts(held, dropped, tuple(sorted(rerun)), kept_bytes, recompute_s)


def saved_of(regions: Sequence[RegionProfile]) -> frozenset[int]:
    """The regions that autograd saves."""
    return frozenset(number for number, region in enumerate(regions) if region.saved)


def inputs_of(regions: Sequence[RegionProfile]) -> frozenset[int]:
    """The layer's inputs, which forward reads when it runs again."""
    return frozenset(number for number, region in enumerate(regions) if not region.recomputable and not region.reads)


def operation_of(regions: Sequence[RegionProfile], number: int) -> int:
    """The first result of the operation that makes a region: an operation makes all of its results at once."""
    first = regions[number].another_of
    return number if first is None else first


def ways_of(regions: tuple[RegionProfile, ...]) -> list[RegionCosts]:
    """Sets of kept regions from none to all saved ones, each with more bytes and fewer seconds than the one before.

    Greedy: from one set to the next, the results of that operation are added that save the most seconds per byte. All
    saved regions are the last set, even if the set before takes no longer.
    """
    everything = region_costs(regions, saved_of(regions))
    found = [region_costs(regions, frozenset())]
    while found[-1].recompute_s > 0:
        last = found[-1]
        results: defaultdict[int, set[int]] = defaultdict(set)
        for number in sorted(last.dropped):  # of equally good operations the first is taken
            if regions[number].only_with not in last.dropped:
                results[operation_of(regions, number)].add(number)
        more = [region_costs(regions, last.kept | made) for made in results.values()]
        found.append(max(more, key=partial(gain, last)))
    best: list[RegionCosts] = []
    for way in sorted([*found, everything], key=lambda way: (way.kept_bytes, way.recompute_s)):
        if not best or way.recompute_s < best[-1].recompute_s:
            best.append(way)
    return best if best[-1].kept == everything.kept else [*best, everything]


def gain(before: RegionCosts, after: RegionCosts) -> float:
    """Seconds saved per byte kept."""
    return (before.recompute_s - after.recompute_s) / max(1, after.kept_bytes - before.kept_bytes)
