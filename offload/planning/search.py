"""The fastest choice within the memory that a limited search finds.

Three numbers make most choices: how many layers are offloaded, how much those keep, and how much the others keep. The
first two are tried on a grid. More that stays on the device is never slower, so the third is found by bisection. In the
end single layers of the best choices are given other policies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from offload.planning.closed_form import LayerCosts, layer_costs, peak_bytes, step_s
from offload.planning.kinds import kinds_of
from offload.planning.layer_passes import LayerPolicy, layer_passes
from offload.planning.link import Link
from offload.planning.profile import Profile

FEW = 2000
"""So many choices of a small model are all tried."""

STEPS = 4
"""In how many steps of the grid the offloaded layers go from one level to the next."""

COUNTS = 16
"""Up to so many numbers of offloaded layers are tried; of deeper models each second one, or third, and so on."""

SWEPT = 96
"""How many layers have, in all, the choices of which single layers are given other policies."""

SWEEPS = 3
"""How often each of those layers is tried with each other policy."""

ROUNDING = 1e-8
"""By what part of it two steps may differ that are as long as each other."""


class Choice(NamedTuple):
    """What is done with each layer."""

    num_layers: int
    """How many layers are offloaded, the first ones."""
    ways: tuple[int, ...]
    """Of each layer, the number of its way among those of its kind."""


class Score(NamedTuple):
    """What a choice comes to; the least is the best."""

    step_s: float
    """Rounded, so that of equally fast choices that is best which offloads the fewest bytes."""
    host_bytes: int
    peak_bytes: int


Found = tuple[Score, Choice]


class Search:
    """A search among the policies of a profile's layers on a link.

    Args:
        profile: What the layers cost.
        link: How fast copies are.
        most_bytes: That may be on the device.
        most_host_bytes: That may be on the host.
    """

    def __init__(self, profile: Profile, link: Link, most_bytes: int = 0, most_host_bytes: float = math.inf) -> None:
        self.profile = profile
        self.most_bytes = most_bytes
        self.most_host_bytes = most_host_bytes
        self.count = len(profile.layers)
        kinds = kinds_of(profile)
        self.ways = [kinds.ways[kind] for kind in kinds.of_layers]
        """Of each layer, its policies."""
        self.levels = [tuple(level[kind] for kind in kinds.of_layers) for level in kinds.levels]
        """Of each level, the way of each layer."""
        self.highest = (len(self.levels) - 1) * self.count
        """The position at which all layers are on the highest level."""
        known: dict[object, list[list[LayerCosts]]] = {}
        for layer, ways in zip(profile.layers, self.ways, strict=True):
            if layer not in known:
                known[layer] = [
                    [layer_costs(layer_passes(layer, way, offloads=offloads), link) for way in ways]
                    for offloads in (False, True)
                ]
        self._resident = [known[layer][False] for layer in profile.layers]
        """Of each layer, the costs of each of its ways if it is not offloaded."""
        self._offloaded = [known[layer][True] for layer in profile.layers]

    def costs(self, choice: Choice) -> list[LayerCosts]:
        """The costs of each layer."""
        layers = self._offloaded[: choice.num_layers] + self._resident[choice.num_layers :]
        return [ways[way] for ways, way in zip(layers, choice.ways, strict=True)]

    def policies(self, choice: Choice) -> tuple[LayerPolicy | None, ...]:
        """The policy of each layer's regions."""
        policies = [ways[way] for ways, way in zip(self.ways, choice.ways, strict=True)]
        return tuple(
            policy if number < choice.num_layers or policy is None else LayerPolicy(policy.kept)
            for number, policy in enumerate(policies)
        )

    def whole(self, num_layers: int) -> Choice:
        """The choice that offloads all that the first layers save, and keeps all that the others do."""
        return Choice(num_layers, self.levels[-1])

    def scored(self, choice: Choice) -> Found | None:
        """What a choice comes to; ``None`` if it does not fit."""
        costs = self.costs(choice)
        peak, host = self.peak_bytes(choice, costs), self.host_bytes(choice, costs)
        if peak > self.most_bytes or host > self.most_host_bytes:
            return None
        return Score(self.step_s(choice, costs), host, peak), choice

    def step_s(self, choice: Choice, costs: Sequence[LayerCosts] = ()) -> float:
        """Seconds of the step, rounded to nine digits."""
        found_s = step_s(costs or self.costs(choice), choice.num_layers, self.profile.loss_s) + self.profile.other_s
        return float(f"{found_s:.9g}")

    def peak_bytes(self, choice: Choice, costs: Sequence[LayerCosts] = ()) -> int:
        """The most on the device."""
        return peak_bytes(costs or self.costs(choice), choice.num_layers, self.profile.loss_bytes)

    def host_bytes(self, choice: Choice, costs: Sequence[LayerCosts] = ()) -> int:
        """What is offloaded; all of it is on the host at once."""
        return sum(layer.offloaded_bytes for layer in costs or self.costs(choice))

    def best(self) -> Choice | None:
        """The best choice that was found; ``None`` if the least peak does not fit."""
        found = self.scored(self.whole(0))
        if found is not None:
            return found[1]
        if self._is_small:
            found = min(filter(None, map(self.scored, self._every())), default=None)
            return found and found[1]
        fastest = self._on_grid()
        if not fastest:
            _, choice = self.least_peak()
            found = self.scored(choice)
            if found is None:
                return None
            fastest = [found]
        if fastest[0][0].step_s <= self.profile.compute_s * (1 + ROUNDING):
            return fastest[0][1]  # nothing is recomputed or waited for
        starts = fastest[: max(1, SWEPT // self.count)]
        return min(map(self._swept, starts))[1]

    def fewest(self) -> Choice | None:
        """The choice with the fewest layers offloaded as they are; ``None`` if none fits."""
        return next((one for one in map(self.whole, range(self.count)) if self.scored(one)), None)

    def least_peak(self) -> tuple[int, Choice]:
        """The least peak that is known, and the choice that has it; of a small model the least of all."""
        if self._is_small:
            fitting = (one for one in self._every() if self.host_bytes(one) <= self.most_host_bytes)
            return min((self.peak_bytes(one), one) for one in fitting)
        corners = [
            Choice(num_layers, self.levels[offloaded][:num_layers] + self.levels[kept][num_layers:])
            for num_layers in range(self.count)
            for offloaded in (0, -1)
            for kept in (0, -1)
        ]
        least, best = min(
            (self.peak_bytes(one), one) for one in corners if self.host_bytes(one) <= self.most_host_bytes
        )
        for number, ways in enumerate(self.ways):
            for way in range(len(ways)):
                tried = _with_way(best, number, way)
                if self.host_bytes(tried) <= self.most_host_bytes:
                    least, best = min((least, best), (self.peak_bytes(tried), tried))
        return least, best

    @property
    def _is_small(self) -> bool:
        """Whether there are so few choices that all of them are tried."""
        return self.count * math.prod(map(len, self.ways)) <= FEW

    def _every(self) -> Iterator[Choice]:
        every = product(range(self.count), product(*(range(len(ways)) for ways in self.ways)))
        return (Choice(*one) for one in every)

    def _at(self, num_layers: int, offloaded: int, kept: int) -> Choice:
        """The choice that these numbers make: a position is a level, times the layers, and how many are one above.

        Of the offloaded layers the first ones keep more first, as they are offloaded for longest; of the others the
        last ones, whose backward is over first.
        """
        level, more = divmod(offloaded, self.count)
        here, above = self.levels[level], self.levels[min(level + 1, len(self.levels) - 1)]
        edge = min(more, num_layers)
        ways = above[:edge] + here[edge:num_layers]
        level, more = divmod(kept, self.count)
        here, above = self.levels[level], self.levels[min(level + 1, len(self.levels) - 1)]
        edge = max(self.count - more, num_layers)
        return Choice(num_layers, ways + here[num_layers:edge] + above[edge:])

    def _on_grid(self) -> list[Found]:
        """The best choice for each number of offloaded layers, fastest first."""
        positions = range(0, self.highest + 1, max(1, self.count // STEPS))
        stride = 1 + (self.count - 1) // COUNTS
        found: dict[int, Found] = {}

        def look(num_layers: int) -> None:
            for offloaded in positions if num_layers else positions[:1]:
                one = self._most_kept(num_layers, offloaded, min(found.values())[0].step_s if found else math.inf)
                if one is not None:
                    found[num_layers] = min(found.get(num_layers, one), one)

        for num_layers in range(0, self.count, stride):
            look(num_layers)
        if found:
            best = min(found.values())[1].num_layers
            for num_layers in range(max(0, best - stride + 1), min(self.count, best + stride)):
                if num_layers % stride:
                    look(num_layers)
        return sorted(found.values())

    def _most_kept(self, num_layers: int, offloaded: int, fastest_s: float) -> Found | None:
        """The choice that keeps the most in the layers that are not offloaded; ``None`` if it cannot be the fastest."""
        fit, misfit = 0, self.highest
        most = self._at(num_layers, offloaded, misfit)
        costs = self.costs(most)
        compute_s = math.fsum(layer.forward_s + layer.backward_s for layer in costs)
        copies_s = math.fsum(layer.offload_s + layer.reload_s for layer in costs)
        least_s = max(compute_s + self.profile.loss_s, copies_s) + self.profile.other_s
        if least_s > fastest_s * (1 + ROUNDING) or self.host_bytes(most, costs) > self.most_host_bytes:
            return None
        if self.peak_bytes(most, costs) <= self.most_bytes:
            return self.scored(most)
        if self.peak_bytes(self._at(num_layers, offloaded, fit)) > self.most_bytes:
            return None
        while misfit - fit > 1:
            middle = (fit + misfit) // 2
            if self.peak_bytes(self._at(num_layers, offloaded, middle)) <= self.most_bytes:
                fit = middle
            else:
                misfit = middle
        return self.scored(self._at(num_layers, offloaded, fit))

    def _swept(self, best: Found) -> Found:
        """With other policies of single layers, as long as that is better."""
        for _ in range(SWEEPS):
            before = best
            for number in reversed(range(self.count)):
                for way in range(len(self.ways[number])):
                    if way != best[1].ways[number]:
                        best = min(best, self._scored_if_faster(_with_way(best[1], number, way), best) or best)
            if best is before:
                break
        return best

    def _scored_if_faster(self, choice: Choice, best: Found) -> Found | None:
        """What a choice comes to, unless computing alone takes longer than the best step."""
        costs = self.costs(choice)
        compute_s = sum(layer.forward_s + layer.backward_s for layer in costs)
        if compute_s + self.profile.loss_s + self.profile.other_s > best[0].step_s * (1 + ROUNDING):
            return None
        return self.scored(choice)


def _with_way(choice: Choice, number: int, way: int) -> Choice:
    """The choice with another way of one layer."""
    return Choice(choice.num_layers, (*choice.ways[:number], way, *choice.ways[number + 1 :]))
