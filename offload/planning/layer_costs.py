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
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, repeat
from typing import NamedTuple

from offload.observe.timeline import Kind
from offload.planning.profile import LayerProfile, Link, Profile
from offload.recompute.costs import LayerPolicy, RegionProfile
from offload.schedule.schedule import released_before

# Regions.


class RegionCosts(NamedTuple):
    """What a layer's regions cost if some of them are kept."""

    kept: frozenset[int]  # or offloaded until backward: saved regions, and the layer's inputs if any is dropped
    dropped: frozenset[int]  # the saved regions that backward recomputes
    rerun: tuple[int, ...]  # the regions whose operations run again, in order: dropped ones, and what these depend on
    operations: frozenset[int]  # by their first results
    whole: bool  # nothing is kept but inputs
    kept_bytes: int
    forward_bytes: int  # the most that forward has on the device
    second_run_bytes: int  # the most that the second run adds to what is kept
    spared_bytes: int  # so much less than all regions backward needs, of what is dropped; or more if negative
    recompute_s: float


class LayerRegions:
    """The regions of a layer, with all that does not depend on which of them are kept."""

    def __init__(self, regions: tuple[RegionProfile, ...]) -> None:
        self._regions, self._inputs, self._saved = regions, inputs_of(regions), saved_of(regions)
        # The first result of the operation that makes each region: an operation makes all of its results at once.
        self._first = [number if one.another_of is None else one.another_of for number, one in enumerate(regions)]
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
        held |= self._inputs if dropped else frozenset()
        rerun: set[int] = set()
        waiting = [*dropped]
        while waiting:
            number = waiting.pop()
            if number not in rerun and number not in held:
                rerun.add(number)
                waiting += regions[number].reads
        operations = frozenset(self._first[number] for number in rerun)
        # Results of skipped operations take memory in the second run, too, unless they are handed over. A result that
        # is not dropped is freed after the last operation that reads it.
        last = max(rerun, default=-1)
        made = {one for one in range(last + 1) if one not in held or self._first[one] in operations}
        dropped_bytes = sum(regions[number].nbytes for number in dropped)
        return RegionCosts(
            held,
            dropped,
            tuple(sorted(rerun)),
            operations,
            held <= self._inputs,
            sum(regions[number].nbytes for number in held),
            self._most_bytes(held | dropped, self.freed_after(dropped, len(regions) - 1)),
            self._most_bytes(made, self.freed_after(made - dropped, last)),
            min(sum(regions[number].spared_bytes for number in held), dropped_bytes),
            # Rounded once, so that neither the order of a set nor Python's version decides between equal ways.
            math.fsum(regions[first].seconds for first in operations),
        )

    def ranked(self, costs: RegionCosts) -> list[set[int]]:
        """The dropped results of each operation, those first that save the most seconds per byte if they are kept."""
        # That saves the operations that run again for these results alone; -1 stands for several.
        regions, results, needed_by = self._regions, defaultdict[int, set[int]](set), dict[int, int]()
        for number in reversed(costs.rerun):
            first, needing = self._first[number], {self._first[reader] for reader in self._readers[number]}
            if number in costs.dropped and regions[number].only_with not in costs.dropped:
                results[first].add(number)
            needing = {needed_by.get(one, -1) for one in needing & costs.operations}
            for one in {first} if number in costs.dropped else needing:
                needed_by[first] = one if needed_by.get(first, one) == one else -1
        saved_s: defaultdict[int, float] = defaultdict(float)
        for first, one in needed_by.items():
            saved_s[one] += regions[first].seconds
        nbytes = {first: sum(regions[number].nbytes for number in made) for first, made in results.items()}
        # Of equally good operations the first is taken.
        return [results[one] for one in sorted(results, key=lambda one: (-saved_s[one] / max(1, nbytes[one]), one))]

    def freed_after(self, numbers: Iterable[int], last: int) -> list[int]:
        """The bytes of regions of these numbers, by the last operation that reads them, if ``last`` is the last one."""
        freed = [0] * (last + 1)
        for number in numbers:
            readers = self._readers[number]
            place = bisect_right(readers, last)
            freed[readers[place - 1] if place else number] += self._regions[number].nbytes
        return freed

    def _most_bytes(self, made: Collection[int], freed: Iterable[int]) -> int:
        """The most on the device while operations make some of the regions, and free what ``freed`` says after each."""
        held = most = 0
        for number, nbytes in enumerate(freed):
            if number in made:
                held += self._regions[number].nbytes
                most = max(most, held)
            held -= nbytes
        return most


layer_regions = lru_cache(maxsize=256)(LayerRegions)


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


MOST_SINGLY = 64  # of more operations than these, a third is ranked once: a layer may run a loop of hundreds


def ways_of(regions: tuple[RegionProfile, ...]) -> list[RegionCosts]:
    """Sets of kept regions from none to all saved ones, each with more bytes and fewer seconds than the one before."""
    # Greedy: from one set to the next, the results of that operation are added that save the most seconds per byte. All
    # saved regions are the last set, even if the set before takes no longer.
    known = layer_regions(regions)
    costs = known.costs
    everything, found = costs(saved_of(regions)), [costs(frozenset())]
    while found[-1].recompute_s > 0:
        last, ranked = found[-1], known.ranked(found[-1])
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


def costs_under(layer: LayerProfile, policy: LayerPolicy | None, *, offloads: bool) -> tuple[RegionCosts, list[int]]:
    """What a layer's regions cost under a policy, and the regions that are offloaded, in the order of saving."""
    # Without a policy, all that the layer saves is kept, or offloaded. Of a layer that is not, the device has all.
    regions = layer.known_regions()
    if policy is None or not layer.regions:
        policy = LayerPolicy(saved_of(regions), saved_of(regions))
    costs = region_costs(regions, policy.kept)
    moving = sorted(policy.offloaded & costs.kept) if offloads else []
    return costs, [number for number in moving if regions[number].nbytes]


def _beside(layer: LayerProfile, costs: RegionCosts, *, offloads: bool) -> tuple[int, int, float]:
    """A layer's small bytes, what else its backward needs, or below zero what less, and the host's seconds."""
    host, whole = layer.host, costs.whole
    # PyTorch holds what a node has saved while it sums the node's gradients, but not what is recomputed for it.
    workspace_bytes = max(0, layer.workspace_bytes - (layer.freed_sooner_bytes if whole else 0)) - costs.spared_bytes
    host_s = host.kept_s + (host.policy_s if offloads or costs.dropped else 0.0)
    host_s += (host.second_run_s if costs.dropped else 0.0) + (host.copies_s if offloads else 0.0)
    return 0 if whole else layer.small_bytes, workspace_bytes, host_s


def _in_second_run(layer: LayerProfile, costs: RegionCosts, workspace_bytes: int) -> int:
    """The most that a layer's second run adds to what is kept, and to what else its backward needs."""
    return costs.second_run_bytes - max(0, min(layer.after_second_run_bytes, workspace_bytes, costs.second_run_bytes))


@lru_cache(maxsize=256)
def layer_pieces(layer: LayerProfile, policy: LayerPolicy | None = None, *, offloads: bool) -> LayerPieces:
    """Forward and backward of a layer in pieces."""
    regions = layer.known_regions()
    costs, moving = costs_under(layer, policy, offloads=offloads)
    small_bytes, workspace_bytes, host_s = _beside(layer, costs, offloads=offloads)
    places = {number: place for place, number in enumerate(moving)}
    held = costs.kept | costs.dropped
    freed = layer_regions(regions).freed_after(costs.dropped, len(regions) - 1)
    spared, left_bytes = dict[int, int](), -workspace_bytes  # the first: of dropped regions, what backward never needs
    for number in sorted(costs.dropped, reverse=True):
        spared[number] = max(0, min(regions[number].nbytes, left_bytes))
        left_bytes -= spared[number]
    forward = [Piece("forward", 0.0, small_bytes)]
    backward = [Piece("backward", 0.0, freed_bytes=small_bytes)]
    for number, (region, share) in enumerate(zip(regions, shares_of(regions), strict=True)):
        nbytes = region.nbytes if number in held else 0
        forward.append(Piece("forward", share * layer.forward_s, nbytes, freed[number], number in places))
        saved_bytes, awaits = (nbytes - spared.get(number, 0), places.get(number)) if region.saved else (0, None)
        backward.append(Piece("backward", share * layer.backward_s, freed_bytes=saved_bytes, awaits=awaits))
    if costs.dropped:
        # It ends with the last dropped region, and with the layer's inputs, which are freed unless autograd saves them.
        awaits = 0 if moving and moving[0] < costs.rerun[-1] else None  # all of the reload
        more = sum(regions[number].nbytes for number in costs.dropped)
        more -= sum(regions[number].nbytes for number in costs.kept if not regions[number].saved)
        most = _in_second_run(layer, costs, workspace_bytes)
        backward.append(Piece("recompute", costs.recompute_s, most - sum(spared.values()), most - more, awaits=awaits))
    moved = [regions[number].nbytes for number in moving]
    return LayerPieces(forward, backward[::-1], moved, max(0, workspace_bytes), host_s)


def shares_of(regions: Sequence[RegionProfile]) -> list[float]:
    """The part of a layer's forward and backward that each region takes: as its operation shares the seconds."""
    total_s = math.fsum(region.seconds for region in regions)
    return [region.seconds / total_s if total_s else 1 / len(regions) for region in regions]


def layer_costs(
    layer: LayerProfile, ways: Iterable[tuple[RegionCosts, Sequence[int]]], link: Link, *, offloads: bool
) -> list[LayerCosts]:
    """What the pieces of a layer add up to, whenever they start, for what its regions cost and which are offloaded."""
    regions = layer.known_regions()
    over = [*accumulate(shares_of(regions))]  # the part of forward that is over once each region is made

    def costs_of_way(costs: RegionCosts, moving: Sequence[int]) -> LayerCosts:
        small_bytes, workspace_bytes, host_s = _beside(layer, costs, offloads=offloads)
        recompute_s = math.fsum([regions[number].seconds for number in costs.operations])
        backward_s, held_bytes = layer.backward_s + recompute_s, small_bytes + costs.kept_bytes
        second_bytes = _in_second_run(layer, costs, workspace_bytes)
        # Each offloaded tensor, last one first, with the bytes from there on: so many are left to copy to the host once
        # it is made, or have been reloaded before its backward.
        last_first = moving[::-1]
        moved = [*zip(last_first, accumulate([regions[number].nbytes for number in last_first]), strict=True)]
        offloaded_bytes = moved[-1][1] if moved else 0
        reload_s = offloaded_bytes / link.h2d_bytes_per_s
        sent_s = [over[one] * layer.forward_s + nbytes / link.d2h_bytes_per_s for one, nbytes in moved]
        reloaded_s = [
            over[one] * layer.backward_s + nbytes / link.h2d_bytes_per_s for one, nbytes in moved if regions[one].saved
        ]
        if moved and costs.dropped and moving[0] < costs.rerun[-1]:  # the second run waits for all of them
            reloaded_s.append(reload_s + backward_s)
        return LayerCosts(
            layer.forward_s,
            backward_s,
            recompute_s,
            offloaded_bytes / link.d2h_bytes_per_s,
            max(sent_s, default=-math.inf),
            reload_s,
            max(reloaded_s, default=-math.inf),
            held_bytes,
            offloaded_bytes,
            (layer.forward_workspace_bytes or 0) + small_bytes + costs.forward_bytes,
            max(held_bytes, workspace_bytes + max(small_bytes + layer.saved_bytes, held_bytes + second_bytes)),
            host_s,
        )

    return [costs_of_way(*way) for way in ways]


def costs_of(
    profile: Profile, link: Link, offloaded: Collection[int], policies: Sequence[LayerPolicy | None] = ()
) -> list[LayerCosts]:
    """The costs of each layer of a profile if these layers are offloaded."""
    found: list[LayerCosts] = []
    for number, layer in enumerate(profile.layers):
        policy, offloads = policies[number] if policies else None, number in offloaded
        found += layer_costs(layer, [costs_under(layer, policy, offloads=offloads)], link, offloads=offloads)
    return found


# Steps under the default schedule.


@lru_cache(maxsize=256)
def _released(calls: Sequence[int], resident: int) -> list[tuple[int, ...]]:
    return released_before(calls, lambda number: (number - resident,))


class Peaks(NamedTuple):
    """The most bytes on the device in each forward, before the last backward, and in each backward."""

    forward: list[int]
    between: int
    backward: list[int]  # in the order of the forwards


def peak_bytes(layers: Sequence[LayerCosts], num_layers: int, loss_bytes: int, calls: tuple[int, ...]) -> int:
    """The most bytes on the device if the first ``num_layers`` are offloaded, and the loss needs ``loss_bytes``."""
    forward, between, backward = peaks_of(layers, num_layers, calls)
    return max(between + loss_bytes, *forward, *backward)


def peaks_of(layers: Sequence[LayerCosts], num_layers: int, calls: tuple[int, ...]) -> Peaks:
    """The most on the device in each part of a step with these calls if the first ``num_layers`` are offloaded."""
    resident, held = len(layers) - num_layers, 0
    called, released = layers, [0] * resident + [one.offloaded_bytes for one in layers[:num_layers]]
    if calls:
        called = [layers[number] for number in calls]
        released = [sum(layers[one].offloaded_bytes for one in before) for before in _released(calls, resident)]
    forward: list[int] = []
    backward: list[int] = []
    for layer, nbytes in zip(called, released, strict=False):
        held -= nbytes
        # As much is held when the layer's forward starts as when its backward does.
        forward.append(held + layer.forward_peak_bytes)
        backward.append(held + layer.backward_peak_bytes)
        held += layer.held_bytes
    return Peaks(forward, held, backward)


def step_s(
    layers: Sequence[LayerCosts], num_layers: int, loss_s: float, other_s: float, calls: tuple[int, ...]
) -> float:
    """Seconds of a step, with ``loss_s`` of compute between the passes and ``other_s`` after them."""
    order = calls or range(len(layers))
    releases = _released(order, len(layers) - num_layers)
    now_s = copied_s = 0.0
    offloaded_s = [0.0] * num_layers  # when each layer and those before it are on the host
    for number, released in zip(order, releases, strict=False):
        layer = layers[number]
        for one in released:
            now_s = max(now_s, offloaded_s[one])
        if number < num_layers:
            copied_s = max(copied_s + layer.offload_s, now_s + layer.offloaded_after_s)
            offloaded_s[number] = copied_s
        now_s += layer.forward_s
    now_s += loss_s
    reloads_s = offloaded_s  # from here on, when the reload of each layer starts
    for number, reloaded in zip(reversed(order), reversed(releases), strict=False):
        layer = layers[number]
        for one in reloaded:
            reloads_s[one] = max(copied_s, now_s)
            copied_s = reloads_s[one] + layers[one].reload_s
        now_s += layer.backward_s
        if number < num_layers and reloads_s[number] + layer.backward_after_s > now_s:
            now_s = reloads_s[number] + layer.backward_after_s
    # The host runs ahead, also into the next step.
    return max(now_s + other_s, math.fsum([layers[number].host_s for number in order]))


def with_workspace(
    profile: Profile,
    measured: Peaks,
    num_layers: int = 0,
    policies: Sequence[LayerPolicy | None] = (),
    released: Collection[int] | None = None,
) -> Profile:
    """A profile with the memory that layers and loss need beside the layers' activations."""
    # It was ``measured`` in a step under the default schedule, with ``num_layers`` offloaded, under these policies. Of
    # them, only ``released`` found memory on the host; by default, all.
    instant = Link(1.0, 1.0, 1.0)  # peaks do not depend on it
    costs = costs_of(profile, instant, range(num_layers) if released is None else released, policies)
    expected = peaks_of(costs, num_layers, profile.calls)

    def beside(measured: Sequence[int], expected: Sequence[int]) -> list[int]:
        return [max(0, one - other) for one, other in zip(measured, expected, strict=True)]

    def most(peaks: Iterable[int]) -> list[int]:  # of all calls of each layer
        found = [0] * len(costs)
        for number, nbytes in zip(profile.order, peaks, strict=True):
            found[number] = max(found[number], nbytes)
        return found

    # Nobody has seen when the peak of a backward was: in the second run, or later, when all that the layer saves is
    # there, and nothing else of that run. So it counts for both.
    pairs = zip(profile.layers, policies or repeat(None), strict=False)
    saved = [layer.saved_bytes - costs_under(layer, one, offloads=False)[0].spared_bytes for layer, one in pairs]
    later = beside([one.backward_peak_bytes for one in costs], saved)
    back = beside(measured.backward, most(expected.backward))
    forth = beside(measured.forward, most(expected.forward))
    layers = (
        replace(layer, workspace_bytes=backward + after, forward_workspace_bytes=forward, after_second_run_bytes=after)
        for layer, backward, forward, after in zip(profile.layers, back, forth, later, strict=True)
    )
    return replace(profile, layers=tuple(layers), loss_bytes=max(0, measured.between - expected.between))
