"""The fastest choice within the memory that a limited search finds.

Layers are of one kind if their regions have the same names and bytes. A kind has ways, which are policies, each with
more bytes and fewer seconds than the one before. A level has one way of each kind: from one level to the next, that
kind keeps more which saves the most seconds per byte.

Three numbers make most choices: how many layers are offloaded, the level of those, and the level of the others. The
first two are tried on a grid. More that is kept on the device is never slower, so the third is found by bisection. In
the end single layers of the best choices are given other policies.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property
from itertools import product
from operator import add, attrgetter, getitem
from statistics import fmean
from typing import NamedTuple

from offload.planning.layer_costs import (
    LayerCosts,
    RegionCosts,
    ends_of,
    gain,
    layer_costs,
    peak_bytes,
    step_s,
    ways_of,
)
from offload.planning.profile import Link, Profile
from offload.recompute.costs import LayerPolicy

FEW = 2000  # so many choices of a small model are all tried
STEPS = 4  # in how many steps of the grid the offloaded layers go from one level to the next
PEAK_LEVELS = 64  # about so many levels are tried at most for the least peak: layers of many kinds make many
POSITIONS = 256  # about so many positions are tried at most on the grid, for the same reason
COUNTS = 16  # so many numbers of offloaded layers are tried at most; of deeper models each second one, or third
SWEPT = 96  # how many layers have, in all, the choices of which single layers are given other policies
SWEEPS = 3  # how often each of those layers is tried with each other policy
BUT_SECONDS = attrgetter("name", "nbytes", "reads", "saved", "recomputable", "another_of", "only_with")
SECONDS = ("forward_s", "backward_s", "offload_s", "reload_s")  # they add up to a step in which nothing waits
ROUNDING = 1e-8  # by what part of it two steps may differ that are as long as each other


class Among(Enum):
    """What is kept, offloaded or recomputed in one piece. The fewer choices, the less a step costs the host."""

    REGIONS = "regions"
    LAYERS = "whole layers"
    CHECKPOINTS = "checkpoints"
    """Whole layers, and nothing is copied."""


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
        gained, way = max((gain(ways[way], ways[number]), number) for number in range(way + 1, last + 1))
        yield gained, way


def _host_bytes(costs: Sequence[LayerCosts]) -> int:
    """What is offloaded; all of it is on the host at once."""
    return sum(map(attrgetter("offloaded_bytes"), costs))


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
        self.counts = range(1 if among is Among.CHECKPOINTS else self.count)  # how many layers may be offloaded
        self.ways: list[list[LayerPolicy | None]] = [[]] * self.count
        """Of each layer, its policies, fewest bytes first. The last one is ``None``: everything saved has one policy,
        and regions need not be told apart. For a layer without regions it is the only one."""
        # Of each layer, the costs of each of its ways if it is not offloaded, and if it is.
        self._kept: list[list[LayerCosts]] = [[]] * self.count
        self._offloaded: list[list[LayerCosts]] = [[]] * self.count
        level = [0] * self.count
        self.levels = [tuple(level)]  # of each level, the way of each layer; the first way of all, to the last of all
        rises: list[tuple[float, int, list[int]]] = []
        for numbers in layers_of_kinds(profile):
            alike = zip(*(profile.layers[number].known_regions() for number in numbers), strict=True)
            regions = tuple(replace(same[0], seconds=fmean(one.seconds for one in same)) for same in alike)
            found = ways_of(regions) if among is Among.REGIONS else ends_of(regions)
            ways = [*(LayerPolicy(way.kept, way.kept) for way in found[:-1]), None]
            resident = [(way, ()) for way in found]
            moved = [(way, [one for one in sorted(way.kept) if regions[one].nbytes]) for way in found]
            for number in numbers:
                layer, self.ways[number] = profile.layers[number], ways
                self._kept[number] = layer_costs(layer, resident, link, offloads=False)
                self._offloaded[number] = layer_costs(layer, moved, link, offloads=True)
            rises += ((gained, way, numbers) for gained, way in _convex(found))
        # Gains fall from way to way of a kind, so the ways of a kind come in their order.
        for _, way, numbers in sorted(rises, key=lambda rise: -rise[0]):
            for number in numbers:
                level[number] = max(level[number], way)  # rounding may exchange two of equal gain
            self.levels.append(tuple(level))
        self.highest = (len(self.levels) - 1) * self.count  # the position at which all layers are on the highest level

    def costs(self, choice: Choice) -> list[LayerCosts]:
        layers = self._offloaded[: choice.num_layers] + self._kept[choice.num_layers :]
        return list(map(getitem, layers, choice.ways))

    def policies(self, choice: Choice) -> tuple[LayerPolicy | None, ...]:
        policies = [ways[way] for ways, way in zip(self.ways, choice.ways, strict=True)]
        return tuple(
            policy if number < choice.num_layers or policy is None else LayerPolicy(policy.kept)
            for number, policy in enumerate(policies)
        )

    def scored(self, choice: Choice) -> Found | None:
        """What a choice comes to; ``None`` if it does not fit."""
        costs, profile = self.costs(choice), self.profile
        peak, host = peak_bytes(costs, choice.num_layers, profile.loss_bytes), _host_bytes(costs)
        if peak > self.most_bytes or host > self.most_host_bytes:
            return None
        found_s = step_s(costs, choice.num_layers, profile.loss_s, profile.other_s)
        recompute_s = math.fsum(map(attrgetter("recompute_s"), costs))
        return Score(float(f"{found_s:.9g}"), float(f"{recompute_s:.9g}"), host, peak), choice

    def best(self) -> Found | None:
        """The best choice that was found; ``None`` if the least peak does not fit."""
        kept = self.scored(Choice(0, self.levels[-1]))
        if kept is not None:
            return kept
        if self._is_small:
            return min(filter(None, map(self.scored, self._every())), default=None)
        fastest = self._on_grid() or [*filter(None, [self._least])]
        if not fastest or fastest[0][0].step_s <= self.profile.compute_s * (1 + ROUNDING):
            return next(iter(fastest), None)  # nothing fits, or nothing is recomputed or waited for
        return min(map(self._swept, fastest[: max(1, SWEPT // self.count)]))

    def least_peak(self) -> tuple[int, Choice]:
        """The least peak that is known, and the choice that has it; of a small model the least of all."""

        def least(choices: Iterator[Choice]) -> tuple[int, Choice]:
            costs = ((one, self.costs(one)) for one in choices)
            fitting = ((one, of) for one, of in costs if _host_bytes(of) <= self.most_host_bytes)
            return min((peak_bytes(of, one.num_layers, self.profile.loss_bytes), one) for one, of in fitting)

        if self._is_small:
            return least(self._every())
        ends = (self.levels[0], self.levels[-1])
        corners = product(self.counts, ends, ends)
        found = least(Choice(k, offloaded[:k] + kept[k:]) for k, offloaded, kept in corners)
        k = found[1].num_layers
        levels = [*self.levels[: -1 : 1 + len(self.levels) // PEAK_LEVELS], self.levels[-1]]
        found = least(Choice(k, offloaded[:k] + kept[k:]) for offloaded, kept in product(levels, repeat=2))
        for number, ways in enumerate(self.ways):
            found = least(found[1].with_way(number, way) for way in range(len(ways)))
        return found

    @cached_property
    def _least(self) -> Found | None:
        return self.scored(self.least_peak()[1])

    @property
    def _is_small(self) -> bool:
        """Whether there are so few choices that all of them are tried."""
        return len(self.counts) * math.prod(map(len, self.ways)) <= FEW

    def _every(self) -> Iterator[Choice]:
        every = product(self.counts, product(*(range(len(ways)) for ways in self.ways)))
        return (Choice(*one) for one in every)

    def _at(self, num_layers: int, offloaded: int, kept: int) -> Choice:
        """The choice that these numbers make: a position is a level, times the layers, and how many are one above."""
        # Of the offloaded layers the first ones keep more first, as they are offloaded for longest; of the others the
        # last ones, whose backward is over first.
        level, more = divmod(offloaded, self.count)
        edge = min(more, num_layers)
        ways = self.levels[min(level + 1, len(self.levels) - 1)][:edge] + self.levels[level][edge:num_layers]
        level, more = divmod(kept, self.count)
        edge = max(self.count - more, num_layers)
        above = self.levels[min(level + 1, len(self.levels) - 1)]
        return Choice(num_layers, ways + self.levels[level][num_layers:edge] + above[edge:])

    def _on_grid(self) -> list[Found]:
        """For each number of offloaded layers the best choice, fastest first; of deep models first for some only."""
        positions = range(0, self.highest + 1, max(1, self.count // STEPS, self.highest // POSITIONS))
        stride = 1 + (self.count - 1) // COUNTS
        found: dict[int, Found] = {}

        def look(num_layers: int) -> None:
            for offloaded in positions if num_layers else positions[:1]:
                one = self._most_kept(num_layers, offloaded, min(found.values())[0].step_s if found else math.inf)
                if one is not None:
                    found[num_layers] = min(found.get(num_layers, one), one)

        for num_layers in self.counts[::stride]:
            look(num_layers)
        if found:
            best = min(found.values())[1].num_layers
            for num_layers in self.counts[max(0, best - stride + 1) : best + stride]:
                if num_layers % stride:
                    look(num_layers)
        return sorted(found.values())

    def _most_kept(self, num_layers: int, offloaded: int, fastest_s: float) -> Found | None:
        """The choice that keeps the most in the layers that are not offloaded; ``None`` if it cannot be the fastest."""
        most = self._at(num_layers, offloaded, self.highest)
        costs = self.costs(most)
        if not self._may_be_faster(costs, fastest_s) or _host_bytes(costs) > self.most_host_bytes:
            return None

        def fits(kept: int) -> bool:
            tried = self.costs(self._at(num_layers, offloaded, kept))
            return peak_bytes(tried, num_layers, self.profile.loss_bytes) <= self.most_bytes

        if fits(self.highest):
            return self.scored(most)
        # Position 0 may be above others: recomputing all of a layer can need more for a moment than keeping some. But
        # nothing is found below the least peak that is known, which an error names.
        if not fits(0) and self._least is None:
            return None
        fitting = bisect_left(range(self.highest), True, key=lambda kept: not fits(kept))
        return self.scored(self._at(num_layers, offloaded, fitting - 1)) if fitting else None

    def _may_be_faster(self, costs: Sequence[LayerCosts], fastest_s: float) -> bool:
        """Whether neither compute nor the copies nor the host alone take longer than the fastest step."""
        forward_s, backward_s, offload_s, reload_s = (map(attrgetter(name), costs) for name in SECONDS)
        compute_s, copies_s = math.fsum(map(add, forward_s, backward_s)), math.fsum(map(add, offload_s, reload_s))
        least_s = max(compute_s + self.profile.loss_s, copies_s) + self.profile.other_s
        return max(least_s, math.fsum(map(attrgetter("host_s"), costs))) <= fastest_s * (1 + ROUNDING)

    def _swept(self, best: Found) -> Found:
        """With other policies of single layers, as long as that is better."""
        for _ in range(SWEEPS):
            before = best
            for number, way in ((n, way) for n in reversed(range(self.count)) for way in range(len(self.ways[n]))):
                tried = best[1].with_way(number, way)
                if tried != best[1] and self._may_be_faster(self.costs(tried), best[0].step_s):
                    best = min(best, self.scored(tried) or best)
            if best is before:
                break
        return best
