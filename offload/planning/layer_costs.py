"""The cost of a layer under a policy, and the seconds and peak of a step of such layers under the default schedule.

Backward of a layer runs the layer's forward again once, hands over the regions that were kept, and skips each operation
that no dropped region depends on. Forward and backward come in pieces: the operation of a region, or the share of one
saved tensor where the profile has no regions. The simulator runs the pieces one by one; the search uses their sums.

The default schedule, k of N, never copies in both directions at once: what is offloaded is on the host before the last
forward begins. So each stream is one sum, without a timeline, and as exact as the simulation. And memory is taken and
freed in the order of compute, whenever that is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from operator import add, attrgetter, sub
from typing import NamedTuple

from offload.observe.timeline import Kind
from offload.planning.profile import LayerProfile, Link, Profile
from offload.recompute.costs import LayerPolicy, RegionProfile

# Regions.


class RegionCosts(NamedTuple):
    """What a layer's regions cost if some of them are kept."""

    kept: frozenset[int]  # or offloaded until backward: saved regions, and the layer's inputs if any is dropped
    dropped: frozenset[int]  # the saved regions that backward recomputes
    rerun: tuple[int, ...]  # the regions whose operations run again, in order: dropped ones, and what these depend on
    kept_bytes: int
    recompute_s: float


class LayerRegions:
    """The regions of a layer, with all that does not depend on which of them are kept."""

    def __init__(self, regions: tuple[RegionProfile, ...]) -> None:
        self._regions, self._inputs, self._saved = regions, inputs_of(regions), saved_of(regions)
        self._first = [operation_of(regions, number) for number in range(len(regions))]
        self._readers: list[list[int]] = [[] for _ in regions]
        for number, region in enumerate(regions):
            for read in region.reads:
                self._readers[read].append(number)
        available: set[int] = set()  # in backward: kept, recomputed, or an input
        needed: set[int] = set()
        for number, region in enumerate(regions):
            can = region.recomputable and available.issuperset(region.reads)
            if not can:
                needed.add(number)
            if can or region.saved or number in self._inputs:
                available.add(number)
        self._needed = needed & self._saved

    def costs(self, kept: frozenset[int]) -> RegionCosts:
        """What the regions cost if ``kept`` are kept. A region that cannot be recomputed is kept, too."""
        regions = self._regions
        held = kept & self._saved | self._needed
        dropped = self._saved - held
        if dropped:
            held |= self._inputs
        rerun: set[int] = set()
        waiting = [*dropped]
        while waiting:
            number = waiting.pop()
            if number not in rerun and number not in held:
                rerun.add(number)
                waiting += regions[number].reads
        kept_bytes = sum(regions[number].nbytes for number in held)
        # Rounded once, so that neither the order of a set nor Python's version decides between equal ways.
        recompute_s = math.fsum(regions[first].seconds for first in {self._first[number] for number in rerun})
        return RegionCosts(held, dropped, tuple(sorted(rerun)), kept_bytes, recompute_s)

    def freed_after(self, numbers: Iterable[int], last: int) -> list[int]:
        """The bytes of regions of these numbers, by the last operation that reads them, if ``last`` is the last one."""
        freed = [0] * (last + 1)
        for number in numbers:
            reader = next((one for one in reversed(self._readers[number]) if one <= last), number)
            freed[reader] += self._regions[number].nbytes
        return freed

    def second_run(self, costs: RegionCosts, places: dict[int, int]) -> Piece:
        """The second run of forward: up to the last dropped region, once everything before that is reloaded."""
        # Results of skipped operations take memory, too, unless they are handed over. A result that is not dropped is
        # freed after the last operation that reads it, and the layer's inputs at the end, unless autograd saves them.
        regions, last = self._regions, costs.rerun[-1]
        operations = {self._first[number] for number in costs.rerun}
        made = {one for one in range(last + 1) if one not in costs.kept or self._first[one] in operations}
        freed = self.freed_after(made - costs.dropped, last)
        held = most = 0
        for number in range(last + 1):
            held += regions[number].nbytes if number in made else 0
            most = max(most, held)
            held -= freed[number]
        inputs = sum(regions[number].nbytes for number in costs.kept if not regions[number].saved)
        awaited = [place for number, place in places.items() if number < last]
        return Piece("recompute", costs.recompute_s, most, most - held + inputs, awaits=min(awaited, default=None))


@lru_cache(maxsize=256)
def layer_regions(regions: tuple[RegionProfile, ...]) -> LayerRegions:
    """The same, found once."""
    return LayerRegions(regions)


@lru_cache(maxsize=4096)
def region_costs(regions: tuple[RegionProfile, ...], kept: frozenset[int]) -> RegionCosts:
    """What a layer's regions cost if ``kept`` are kept. A region that cannot be recomputed is kept, too."""
    return layer_regions(regions).costs(kept)


def saved_of(regions: Sequence[RegionProfile]) -> frozenset[int]:
    """The regions that autograd saves."""
    return frozenset(number for number, region in enumerate(regions) if region.saved)


def inputs_of(regions: Sequence[RegionProfile]) -> frozenset[int]:
    """The layer's inputs, which forward reads when it runs again."""
    return frozenset(number for number, region in enumerate(regions) if not region.recomputable and not region.reads)


def operation_of(regions: Sequence[RegionProfile], number: int) -> int:
    """The first result of the operation that makes a region: an operation makes all of its results at once."""
    return number if (first := regions[number].another_of) is None else first


MOST_SINGLY = 64
"""Of more operations than these, a third is ranked once: a layer may run a loop of hundreds."""


def ways_of(regions: tuple[RegionProfile, ...]) -> list[RegionCosts]:
    """Sets of kept regions from none to all saved ones, each with more bytes and fewer seconds than the one before."""
    # Greedy: from one set to the next, the results of that operation are added that save the most seconds per byte. All
    # saved regions are the last set, even if the set before takes no longer.
    costs = LayerRegions(regions).costs
    everything, found = costs(saved_of(regions)), [costs(frozenset())]
    while found[-1].recompute_s > 0:
        last = found[-1]
        results: defaultdict[int, set[int]] = defaultdict(set)
        for number in sorted(last.dropped):  # of equally good operations the first is taken
            if regions[number].only_with not in last.dropped:
                results[operation_of(regions, number)].add(number)
        ranked = sorted(results.values(), key=lambda made: -gain(last, costs(last.kept | made)))
        count = len(ranked) // 3 if len(ranked) > MOST_SINGLY else 1
        step = max(1, count // 8)
        found += [costs(last.kept.union(*ranked[:number])) for number in (*range(step, count, step), count)]
    best: list[RegionCosts] = []
    for way in sorted([*found, everything], key=lambda way: (way.kept_bytes, way.recompute_s)):
        if not best or way.recompute_s < best[-1].recompute_s:
            best.append(way)
    return best if best[-1].kept == everything.kept else [*best, everything]


def ends_of(regions: tuple[RegionProfile, ...]) -> list[RegionCosts]:
    """The first and the last of these sets: nothing is kept, and all that is saved; that alone if it is no larger."""
    nothing, everything = region_costs(regions, frozenset()), region_costs(regions, saved_of(regions))
    return [nothing, everything] if nothing.kept_bytes < everything.kept_bytes else [everything]


def gain(before: RegionCosts, after: RegionCosts) -> float:
    """Seconds saved per byte kept."""
    return (before.recompute_s - after.recompute_s) / max(1, after.kept_bytes - before.kept_bytes)


# Layers.


class Piece(NamedTuple):
    """A stretch of compute of one layer, with the device memory that is allocated at its start and freed at its end."""

    kind: Kind
    seconds: float
    taken_bytes: int = 0
    freed_bytes: int = 0
    offloads: bool = False  # in forward: whether ``taken_bytes`` are copied to the host once the piece has ended
    awaits: int | None = None  # in backward: the offloaded tensor that is waited for; later ones are reloaded before


class LayerPieces(NamedTuple):
    """Forward and backward of one layer."""

    forward: list[Piece]
    backward: list[Piece]  # recomputation first, if anything was dropped; then the last operation of forward first
    offloaded: list[int]  # the bytes of each offloaded tensor, in the order of saving
    workspace_bytes: int  # what else backward needs
    host_s: float  # the host's seconds


class LayerCosts(NamedTuple):
    """What a layer under one policy adds to a step.

    The pieces of a layer wait for the layer's start or for the link, and then for each other. So the last piece ends at
    the later of two times: when the link is free plus all their seconds, or the start plus the longest way from there.
    """

    forward_s: float
    backward_s: float  # with recomputation
    recompute_s: float
    offload_s: float  # seconds of the copies to the host, one after the other
    offloaded_after_s: float  # the last copy to the host ends no sooner than so long after forward's start
    reload_s: float  # seconds of the reload's copies
    backward_after_s: float  # backward ends no sooner than so long after the reload's start
    held_bytes: int  # on the device after forward, before anything is released
    offloaded_bytes: int
    forward_peak_bytes: int  # the most that forward has on the device
    backward_peak_bytes: int  # the most that backward has on the device, with what forward has left or was reloaded
    host_s: float  # the host's seconds, beside those of the device


@lru_cache(maxsize=64)  # of more, those of layers with hundreds of regions would be many objects for the collector
def layer_pieces(layer: LayerProfile, policy: LayerPolicy | None = None, *, offloads: bool) -> LayerPieces:
    """Forward and backward of a layer in pieces, whose seconds are shared as the operations share those of forward."""
    # Without a policy, everything that the layer saves is kept, or offloaded. If the layer is not offloaded, all that
    # is kept is on the device.
    regions, host = layer.known_regions(), layer.host
    if policy is None or not layer.regions:
        policy = LayerPolicy(saved_of(regions), saved_of(regions))
    known = layer_regions(regions)
    costs = known.costs(policy.kept)
    total_s = math.fsum(region.seconds for region in regions)
    shares = [region.seconds / total_s if total_s else 1 / len(regions) for region in regions]
    moving = [number for number in sorted(policy.offloaded & costs.kept) if offloads and regions[number].nbytes]
    places = {number: place for place, number in enumerate(moving)}
    held = costs.kept | costs.dropped
    freed = known.freed_after(costs.dropped, len(regions) - 1)
    whole = not costs.kept - inputs_of(regions)
    small_bytes = 0 if whole else layer.small_bytes
    forward = [Piece("forward", 0.0, small_bytes)]
    backward = [Piece("backward", 0.0, freed_bytes=small_bytes)]
    for number, (region, share) in enumerate(zip(regions, shares, strict=True)):
        nbytes = region.nbytes if number in held else 0
        forward.append(Piece("forward", share * layer.forward_s, nbytes, freed[number], number in places))
        saved_bytes, awaits = (nbytes, places.get(number)) if region.saved else (0, None)
        backward.append(Piece("backward", share * layer.backward_s, freed_bytes=saved_bytes, awaits=awaits))
    if costs.dropped:
        backward.append(known.second_run(costs, places))
    return LayerPieces(
        forward,
        backward[::-1],
        [regions[number].nbytes for number in moving],
        # PyTorch holds what a node has saved while it sums the node's gradients, but not what is recomputed for it.
        max(0, layer.workspace_bytes - (layer.freed_sooner_bytes if whole else 0)),
        host.kept_s
        + (host.policy_s if offloads or costs.dropped else 0.0)
        + (host.second_run_s if costs.dropped else 0.0),
    )


def _held_bytes(pieces: Sequence[Piece]) -> int:
    """By how much the pieces change the memory on the device."""
    return sum(piece.taken_bytes - piece.freed_bytes for piece in pieces)


def _peak_bytes(pieces: Sequence[Piece], held_bytes: int = 0) -> int:
    """The most on the device while the pieces run, with ``held_bytes`` at their start."""
    changes = (change for piece in pieces for change in (piece.taken_bytes, -piece.freed_bytes))
    return max(accumulate(changes, initial=held_bytes))


def layer_costs(layer: LayerProfile, policy: LayerPolicy | None, link: Link, *, offloads: bool) -> LayerCosts:
    """What the pieces of a layer add up to, whenever they start."""
    forward, backward, offloaded, workspace_bytes, host_s = layer_pieces(layer, policy, offloads=offloads)
    held = _held_bytes(forward)
    ready_s = accumulate(piece.seconds for piece in forward)
    sent = [(ready, piece.taken_bytes) for ready, piece in zip(ready_s, forward, strict=True) if piece.offloads]
    offload_s = rest_s = 0.0
    offloaded_after_s = backward_after_s = -math.inf
    for ready, nbytes in reversed(sent):
        offload_s += nbytes / link.d2h_bytes_per_s
        offloaded_after_s = max(offloaded_after_s, ready + offload_s)
    reloaded_after_s = [*accumulate((nbytes / link.h2d_bytes_per_s for nbytes in reversed(offloaded)), initial=0.0)]
    for piece in reversed(backward):
        rest_s += piece.seconds
        if piece.awaits is not None:
            backward_after_s = max(backward_after_s, reloaded_after_s[-1 - piece.awaits] + rest_s)
    return LayerCosts(
        math.fsum(piece.seconds for piece in forward),
        math.fsum(piece.seconds for piece in backward),
        math.fsum(piece.seconds for piece in backward if piece.kind == "recompute"),
        offload_s,
        offloaded_after_s,
        reloaded_after_s[-1],
        backward_after_s,
        held,
        sum(offloaded),
        (layer.forward_workspace_bytes or 0) + _peak_bytes(forward),
        workspace_bytes + _peak_bytes(backward, held),
        host_s,
    )


def costs_of(
    profile: Profile, link: Link, offloaded: Collection[int], policies: Sequence[LayerPolicy | None] = ()
) -> list[LayerCosts]:
    """The costs of each layer of a profile if these layers are offloaded."""
    layers = zip(profile.layers, policies or (None,) * len(profile.layers), strict=True)
    return [layer_costs(*layer, link, offloads=number in offloaded) for number, layer in enumerate(layers)]


# Steps under the default schedule.


class Peaks(NamedTuple):
    """The most bytes on the device while each layer runs forward, before the last backward, and in each backward."""

    forward: list[int]
    between: int
    backward: list[int]  # by the layers' numbers


def peak_bytes(layers: Sequence[LayerCosts], num_layers: int, loss_bytes: int = 0) -> int:
    """The most bytes on the device if the first ``num_layers`` are offloaded, and the loss needs ``loss_bytes``."""
    forward, between, backward = peaks_of(layers, num_layers)
    return max(between + loss_bytes, *map(max, (forward, backward)))


def peaks_of(layers: Sequence[LayerCosts], num_layers: int) -> Peaks:
    """The most that the layers have on the device in each part of a step if the first ``num_layers`` are offloaded."""
    # The functions of ``operator`` and ``itertools`` do this in a quarter of a loop's time; a search asks often.
    held = accumulate(map(attrgetter("held_bytes"), layers), initial=0)
    released = accumulate(map(attrgetter("offloaded_bytes"), layers[:num_layers]))
    gone = [*[0] * (len(layers) - num_layers), *released]
    # When each layer's forward starts, and as much when its backward does; last: between both.
    *before, between = map(sub, held, [*gone, gone[-1]])
    peaks = (map(attrgetter(name), layers) for name in ("forward_peak_bytes", "backward_peak_bytes"))
    forward, backward = (list(map(add, before, each)) for each in peaks)
    return Peaks(forward, between, backward)


def step_s(layers: Sequence[LayerCosts], num_layers: int, loss_s: float = 0.0, other_s: float = 0.0) -> float:
    """Seconds of a step, with ``loss_s`` of compute between the passes and ``other_s`` after them."""
    resident = len(layers) - num_layers
    now_s = copied_s = 0.0
    offloaded_s: list[float] = []  # when each layer and those before it are on the host
    for number, layer in enumerate(layers):
        if number >= resident:
            now_s = max(now_s, offloaded_s[number - resident])
        copied_s = max(copied_s + layer.offload_s, now_s + layer.offloaded_after_s)
        offloaded_s.append(copied_s)
        now_s += layer.forward_s
    now_s += loss_s
    reloads_s = [0.0] * len(layers)  # when the reload of each layer starts
    for number in reversed(range(len(layers))):
        reloaded = number - resident + 1
        if 0 <= reloaded < num_layers:
            reloads_s[reloaded] = max(copied_s, now_s)
            copied_s = reloads_s[reloaded] + layers[reloaded].reload_s
        now_s += layers[number].backward_s
        if number < num_layers:
            now_s = max(now_s, reloads_s[number] + layers[number].backward_after_s)
    # The host runs ahead, also into the next step.
    return max(now_s + other_s, math.fsum(map(attrgetter("host_s"), layers)))


def with_workspace(
    profile: Profile, measured: Peaks, num_layers: int = 0, policies: Sequence[LayerPolicy | None] = ()
) -> Profile:
    """A profile with the memory that layers and loss need beside the layers' activations."""
    # It was ``measured`` in a step under the default schedule, with ``num_layers`` offloaded, under these policies.
    instant = Link(1.0, 1.0, 1.0)  # peaks do not depend on it
    expected = peaks_of(costs_of(profile, instant, range(num_layers), policies), num_layers)

    def beside(measured: Sequence[int], expected: Sequence[int]) -> list[int]:
        return [max(0, one - other) for one, other in zip(measured, expected, strict=True)]

    more = zip(beside(measured.backward, expected.backward), beside(measured.forward, expected.forward), strict=True)
    layers = (
        replace(layer, workspace_bytes=backward, forward_workspace_bytes=forward)
        for layer, (backward, forward) in zip(profile.layers, more, strict=True)
    )
    return replace(profile, layers=tuple(layers), loss_bytes=max(0, measured.between - expected.between))
