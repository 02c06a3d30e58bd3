"""The fastest choice within the memory that a limited search finds.

Layers are of one kind if their regions have the same names and bytes. A kind has ways, which are policies, each with
more bytes and fewer seconds than the one before. Layer by layer, those of the kind keep more that saves the most
seconds per byte: that is a list of positions, from nothing kept to all.

Three numbers make most choices: how many layers are offloaded, the position of those, and the position of the others.
The first two are tried on a grid. More that is kept on the device is never slower, so the third is found by bisection.
In the end single layers of the best choices are given other policies.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property
from itertools import accumulate, product, starmap
from operator import attrgetter, getitem, mul
from statistics import fmean
from typing import Any, NamedTuple

from offload.base.evenly import evenly
from offload.planning.layer_costs import (
    LayerCosts,
    RegionCosts,
    ends_of,
    inputs_of,
    layer_costs,
    peak_bytes,
    saved_of,
    step_s,
    ways_of,
)
from offload.planning.profile import LayerProfile, Link, Profile
from offload.recompute.costs import LayerPolicy

FEW = 2000  # so many choices of a small model are all tried
POSITIONS = 64  # about so many positions of offloaded layers are tried on the grid
COUNTS = 16  # so many numbers of offloaded layers are tried at most; of deeper models each second one, or third
SWEPT = 1000  # about so many policies of single layers are tried at most in the choices that were found
SWEEPS = 3  # how often each of those layers is tried with other policies
FARTHEST = 6  # so many policies away from its own, of those of its kind
BUT_SECONDS = attrgetter("name", "nbytes", "reads", "saved", "recomputable", "another_of", "only_with")
CLOSE = 0.02  # by what part of it a step may be longer than the shortest whose single layers are given other policies
ROUNDING = 1e-8  # by what part of it two steps may differ that are as long as each other


class Among(Enum):
    """What is kept, offloaded or recomputed in one piece. The fewer choices, the less a step costs the host."""

    REGIONS = "regions"
    LAYERS = "whole layers"
    CHECKPOINTS = "checkpoints"  # whole layers, or compiled ones at any level, and nothing is copied


class Choice(NamedTuple):
    """How many layers are offloaded, the first ones; and of each layer its way, by its number in those of its kind."""

    num_layers: int
    ways: tuple[int, ...]

    def with_way(self, number: int, way: int) -> Choice:
        return Choice(self.num_layers, (*self.ways[:number], way, *self.ways[number + 1 :]))


class Score(NamedTuple):
    """What a choice comes to; the least is the best."""

    step_s: float  # rounded, so that of equally fast choices that is best which recomputes and then offloads the least
    recompute_s: float  # free where the host binds the step, but the host may be faster than it was when measured
    host_bytes: int
    peak_bytes: int


class _Sums(NamedTuple):
    """What layers from each one on come to."""

    backward_s: list[float]
    held_bytes: list[int]


Found = tuple[Score, Choice]


def layers_of_kinds(profile: Profile) -> list[list[int]]:
    """The layers of each kind, by their numbers."""
    found: defaultdict[object, list[int]] = defaultdict(list)
    for number, layer in enumerate(profile.layers):
        found[tuple(map(BUT_SECONDS, layer.known_regions()))].append(number)
    return list(found.values())


def _convex(ways: Sequence[RegionCosts]) -> Iterator[tuple[float, int]]:
    """The ways on the convex hull above the first, each behind the seconds per byte saved since the one before."""
    way, last = 0, len(ways) - 1
    while way < last:
        now = ways[way]
        more = [(one.recompute_s - now.recompute_s, one.kept_bytes - now.kept_bytes) for one in ways[way + 1 :]]
        gained, way = max((-seconds / max(1, nbytes), number) for number, (seconds, nbytes) in enumerate(more, way + 1))
        yield gained, way


def _joined(num_layers: int, offloaded: tuple[int, ...], kept: tuple[int, ...]) -> Choice:
    """The first layers have these ways, and the others those."""
    return Choice(num_layers, offloaded[:num_layers] + kept[num_layers:])


def _all_but_shared(layer: LayerProfile) -> LayerPolicy | None:
    """What offloads everything of a layer but an input that all layers share, which stays; ``None`` without one."""
    shares = any(not layer.regions[number].nbytes for number in inputs_of(layer.regions))
    return LayerPolicy(saved_of(layer.regions), saved_of(layer.regions)) if shares else None


class Search:
    """A search among the policies of a profile's layers on a link."""

    def __init__(
        self,
        profile: Profile,
        link: Link,
        most_bytes: float,
        most_host_bytes: float = math.inf,
        among: Among = Among.REGIONS,
    ) -> None:
        self.profile = profile
        self.most_bytes = most_bytes
        self.most_host_bytes = most_host_bytes
        self.count = len(profile.layers)
        called = Counter(profile.order)
        self._times = [called[number] for number in range(self.count)]  # how often each layer is called
        # Unless all layers are called in order each time, some of what is offloaded would not be released.
        in_order = profile.calls == (*range(self.count),) * (len(profile.calls) // self.count)
        offloads = among is not Among.CHECKPOINTS and in_order
        self.counts = range(self.count if offloads else 1)  # how many layers may be offloaded
        self.ways: list[list[LayerPolicy | None]] = [[]] * self.count
        """Of each layer, its policies, fewest bytes first. The last one is ``None``: everything saved has one policy,
        and regions need not be told apart. For a layer without regions it is the only one."""
        # Of each layer, the costs of each of its ways if it is not offloaded, and if it is.
        self._kept: list[list[LayerCosts]] = [[]] * self.count
        self._offloaded: list[list[LayerCosts]] = [[]] * self.count
        rises: list[tuple[float, int, list[int]]] = []
        for numbers in layers_of_kinds(profile):
            alike = zip(*(profile.layers[number].known_regions() for number in numbers), strict=True)
            regions = tuple(replace(same[0], seconds=fmean(one.seconds for one in same)) for same in alike)
            # Each level of a compiled layer costs the host the same. Only copies cost it more.
            levels = among is Among.CHECKPOINTS and any(one.only_with is not None for one in regions)
            found = ways_of(regions) if levels or among is Among.REGIONS else ends_of(regions)
            ways = [*(LayerPolicy(way.kept, way.kept) for way in found[:-1]), None]
            resident = [(way, ()) for way in found]
            moved = [(way, [one for one in sorted(way.kept) if regions[one].nbytes]) for way in found]
            layers = {profile.layers[number] for number in numbers}  # most often all are equal
            kept = {layer: layer_costs(layer, resident, link, offloads=False) for layer in layers}
            offloaded = {layer: layer_costs(layer, moved, link, offloads=True) for layer in layers}
            for number in numbers:
                layer, self.ways[number] = profile.layers[number], ways
                self._kept[number], self._offloaded[number] = kept[layer], offloaded[layer]
            rises += ((gained, way, numbers) for gained, way in _convex(found))
        # Gains fall from way to way of a kind, so the ways of a kind come in their order.
        rises.sort(key=lambda rise: -rise[0])
        # At each position, the way of each layer. Of offloaded layers the first ones keep more first, as they are
        # offloaded for longest; of the others the last ones, whose backward is over first.
        self._offloaded_at = self._positions((number, way) for _, way, numbers in rises for number in numbers)
        self._kept_at = self._positions((number, way) for _, way, numbers in rises for number in reversed(numbers))
        self._others_s = profile.compute_s - math.fsum(profile.layers[number].backward_s for number in profile.order)

    def _positions(self, rises: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
        ways = [0] * self.count
        found = [tuple(ways)]
        for number, way in rises:
            ways[number] = max(ways[number], way)  # rounding may exchange two of equal gain
            found.append(tuple(ways))
        return found

    def costs(self, choice: Choice) -> list[LayerCosts]:
        layers = self._offloaded[: choice.num_layers] + self._kept[choice.num_layers :]
        return list(map(getitem, layers, choice.ways))

    def policies(self, choice: Choice) -> tuple[LayerPolicy | None, ...]:
        policies = [ways[way] for ways, way in zip(self.ways, choice.ways, strict=True)]
        pairs = zip(policies[: choice.num_layers], self.profile.layers, strict=False)
        kept = [one and LayerPolicy(one.kept) for one in policies[choice.num_layers :]]
        return (*(policy or _all_but_shared(layer) for policy, layer in pairs), *kept)

    def scored(self, choice: Choice) -> Found | None:
        """What a choice comes to; ``None`` if it does not fit."""
        costs = self.costs(choice)
        peak = peak_bytes(costs, choice.num_layers, self.profile.loss_bytes, self.profile.calls)
        host = self._host_bytes(costs)
        if peak > self.most_bytes or host > self.most_host_bytes:
            return None
        found_s = step_s(costs, choice.num_layers, self.profile.loss_s, self.profile.other_s, self.profile.calls)
        recompute_s = math.fsum(self._each("recompute_s", costs))
        return Score(float(f"{found_s:.9g}"), float(f"{recompute_s:.9g}"), host, peak), choice

    def best(self) -> Found | None:
        """The best choice that was found; ``None`` if the least peak does not fit."""
        kept = self.scored(Choice(0, self._kept_at[-1]))
        if kept is not None:
            return kept
        if self._every:
            return min(filter(None, map(self.scored, self._every)), default=None)
        fastest = self._on_grid() or [*filter(None, [self.scored(self.least_peak[1])])]
        if not fastest or fastest[0][0].step_s <= self.profile.compute_s * (1 + ROUNDING):
            return next(iter(fastest), None)  # nothing fits, or nothing is recomputed or waited for
        return min(map(self._swept, fastest[: max(2, SWEPT // sum(map(len, self.ways)))]))

    @cached_property
    def least_peak(self) -> tuple[int, Choice]:
        """The least peak that is known, and the choice that has it; of a small model the least of all."""
        if self._every:
            return min(self._peaks(self._every))

        def least(counts: Iterable[int], step: int) -> tuple[int, Choice]:
            tried = ([*at[:-1:step], at[-1]] for at in (self._offloaded_at, self._kept_at))
            return min(self._peaks(starmap(_joined, product(counts, *tried))))

        found = least(self.counts, len(self._kept_at))
        found = least([found[1].num_layers], self.count)
        for number, ways in enumerate(self.ways):
            found = min(self._peaks(found[1].with_way(number, way) for way in range(len(ways))))
        return found

    @cached_property
    def _every(self) -> list[Choice]:
        """All choices of a small model, which has so few that all of them are tried; none of other models."""
        if len(self.counts) * math.prod(map(len, self.ways)) > FEW:
            return []
        return [Choice(*one) for one in product(self.counts, product(*(range(len(ways)) for ways in self.ways)))]

    def _compute_s(self, costs: Iterable[LayerCosts]) -> float:
        """Seconds of a step that waits for no copy: all ways have the same forward."""
        backward_s: Iterable[float] = self._each("backward_s", costs)
        return self._others_s + sum(backward_s)

    def _each(self, name: str, costs: Iterable[LayerCosts]) -> Iterator[Any]:
        """What the first layers add to a step by all of their calls."""
        return map(mul, map(attrgetter(name), costs), self._times)

    def _host_bytes(self, costs: Iterable[LayerCosts]) -> int:
        """What is offloaded; all of it is on the host at once."""
        return sum(self._each("offloaded_bytes", costs))

    @cached_property
    def _costs_kept_at(self) -> list[list[LayerCosts]]:
        return [[*map(getitem, self._kept, ways)] for ways in self._kept_at]

    @cached_property
    def _sums_kept_at(self) -> list[_Sums]:
        return [
            _Sums(*([*accumulate(reversed([*self._each(name, costs)]), initial=0)][::-1] for name in _Sums._fields))
            for costs in self._costs_kept_at
        ]

    def _peaks(self, choices: Iterable[Choice]) -> Iterator[tuple[int, Choice]]:
        """The peak of each of these choices that the host has the memory for."""
        for choice in choices:
            costs = self.costs(choice)
            if self._host_bytes(costs) <= self.most_host_bytes:
                yield peak_bytes(costs, choice.num_layers, self.profile.loss_bytes, self.profile.calls), choice

    def _on_grid(self) -> list[Found]:
        """For each number of offloaded layers the best choice, fastest first; of deep models first for some only."""
        positions = self._offloaded_at[:: max(1, len(self._offloaded_at) // POSITIONS)]
        ordered = [positions[number] for number in evenly(len(positions))]
        stride = 1 + (self.count - 1) // COUNTS
        found: dict[int, Found] = {}

        def look(num_layers: int) -> None:
            for offloaded in dict.fromkeys(ways[:num_layers] for ways in ordered):
                known = found.get(num_layers)
                close_s = (1 + CLOSE) * min(found.values())[0].step_s if found else math.inf
                fastest_s = close_s if known is None else min(close_s, known[0].step_s)
                one = self._most_kept(num_layers, offloaded, fastest_s * (1 + ROUNDING))
                if one is not None:
                    found[num_layers] = one if known is None else min(known, one)

        for num_layers in self.counts[::stride]:
            look(num_layers)
        if found:
            best = min(found.values())[1].num_layers
            for num_layers in self.counts[max(0, best - stride + 1) : best + stride]:
                if num_layers % stride:
                    look(num_layers)
        return sorted(found.values())

    def _most_kept(self, num_layers: int, offloaded: tuple[int, ...], most_s: float) -> Found | None:
        """The choice that keeps the most in the layers that are not offloaded; ``None`` if that takes longer."""
        highest = len(self._kept_at) - 1
        first = [*map(getitem, self._offloaded, offloaded)]
        host_bytes = self._host_bytes(first)
        if host_bytes > self.most_host_bytes:
            return None
        first_s, loss_bytes, calls = self._compute_s(first), self.profile.loss_bytes, self.profile.calls
        between_bytes = sum(self._each("held_bytes", first)) - host_bytes + loss_bytes

        def is_fast(position: int) -> bool:
            return first_s + self._sums_kept_at[position].backward_s[num_layers] <= most_s

        def fits(position: int) -> bool:
            if between_bytes + self._sums_kept_at[position].held_bytes[num_layers] > self.most_bytes:
                return False  # while the loss is computed
            costs = first + self._costs_kept_at[position][num_layers:]
            return peak_bytes(costs, num_layers, loss_bytes, calls) <= self.most_bytes

        if not is_fast(highest):
            return None
        position = highest
        if not fits(highest):
            # Position 0 may be above others: recomputing all of a layer can need more for a moment than keeping some.
            # But nothing is found below the least peak that is known, which an error names.
            if self.least_peak[0] > self.most_bytes and not fits(0):
                return None
            least = bisect_left(range(highest), True, key=is_fast)
            position = bisect_left(range(highest), True, least, key=lambda one: not fits(one)) - 1
            if position < least:
                return None
        return self.scored(_joined(num_layers, offloaded, self._kept_at[position]))

    def _swept(self, best: Found) -> Found:
        """With other policies of single layers, as long as that is better."""
        seen, unchanged = best, 0  # so many layers were given other policies since the best choice was found
        for number in [*reversed(range(self.count))] * SWEEPS:
            if seen is not best:
                seen, unchanged = best, 0
            elif unchanged == self.count:
                break
            unchanged += 1
            now = seen[1].ways[number]
            near = range(max(0, now - FARTHEST), min(len(self.ways[number]), now + FARTHEST + 1))
            tried = (seen[1].with_way(number, way) for way in near if way != now)
            most_s = best[0].step_s * (1 + ROUNDING)
            fast = (choice for choice in tried if self._compute_s(self.costs(choice)) <= most_s)
            best = min([best, *filter(None, map(self.scored, fast))])
        return best
