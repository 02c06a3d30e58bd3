"""What the planner may choose, and what a choice comes to in seconds and bytes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from offload.planning.estimate import Trips, peak_bytes, step_s, trips_of
from offload.planning.ladder import ladder_of
from offload.planning.link import Link
from offload.planning.passes import LayerPolicy, Passes, passes_of
from offload.planning.profile import Profile

Way = tuple[int, int, bool]
"""The number of a layer, its rung, and whether it travels."""


@dataclass(frozen=True)
class Choice:
    """What is done with each layer.

    Args:
        num_layers: How many layers travel, the first ones.
        rungs: On which rung of its kind each layer stands.
    """

    num_layers: int
    rungs: tuple[int, ...]


class Choices:
    """The choices for one profile and link.

    Three numbers make most of them: how many layers travel, the position of those, and that of the others. A position
    is a level of the ladder, times the number of layers, and how many layers have gone up to the next level.

    Args:
        profile: What the layers cost.
        link: How fast copies are.
        group: So many layers in a row hold one input, where the layers before can compute the others again.
    """

    def __init__(self, profile: Profile, link: Link, group: int = 1) -> None:
        self.profile = profile
        self.link = link
        self.ladder = ladder_of(profile)
        self.count = len(profile.layers)
        self.groups = groups_of(profile, group)
        """Of each layer, which one it is of how many that hold one input."""
        self.most = self.count - 1 if group == 1 else max(0, self.count - 1 - group)
        """The most layers that travel: a group's input has to come back before its last layer's backward."""
        self.highest = (len(self.ladder.levels) - 1) * self.count
        """The position where all layers stand on the highest level."""
        kinds = self.ladder.kinds
        self._rungs = [tuple(level[kind] for kind in kinds) for level in self.ladder.levels]
        """Of each level, the rung of each layer."""
        first: dict[object, int] = {}
        layers = zip(profile.layers, self.groups, strict=True)
        self._alike = [first.setdefault(layer, number) for number, layer in enumerate(layers)]
        """Of each layer, the first one that costs the same."""
        self._passes: dict[Way, Passes] = {}
        self._trips: dict[Way, Trips] = {}
        self._last: tuple[Choice | None, list[Way]] = (None, [])
        """The choice that was asked for last, as it is asked for several times."""
        self._peak: tuple[Choice | None, int] = (None, 0)
        """Its peak."""

    def of(self, num_layers: int, travelling: int, staying: int) -> Choice:
        """The choice that these three numbers make.

        Of those that travel, the first layers go up first; they are away for longest. Of those that stay, the last
        do: their backward is over first. The last layer of all keeps all, since its backward follows at once.
        """
        level, more = divmod(travelling, self.count)
        here, above = self._rungs[level], self._rungs[min(level + 1, len(self._rungs) - 1)]
        edge = min(more, num_layers)
        rungs = above[:edge] + here[edge:num_layers]
        level, more = divmod(staying, self.count)
        here, above = self._rungs[level], self._rungs[min(level + 1, len(self._rungs) - 1)]
        edge = min(max(self.count - more, num_layers), self.count - 1)
        rungs += here[num_layers:edge] + above[edge:-1] + self._rungs[-1][-1:]
        if self.most < self.count - 1:
            rungs = self._in_groups(num_layers, rungs)
        return Choice(num_layers, rungs)

    def _in_groups(self, num_layers: int, rungs: tuple[int, ...]) -> tuple[int, ...]:
        """The same rungs in another order: what runs twice again goes up before the last layers of groups."""
        found = list(rungs)
        alike = defaultdict[tuple[bool, int], list[int]](list)
        for number in range(self.count - 1):
            alike[number < num_layers, self.ladder.kinds[number]].append(number)
        for (travels, _), numbers in alike.items():
            onward = sorted(numbers, reverse=not travels)
            order = sorted(onward, key=lambda number: self.groups[number][0] == self.groups[number][1] - 1)
            for number, rung in zip(order, sorted((rungs[number] for number in numbers), reverse=True), strict=True):
                found[number] = rung
        return tuple(found)

    def policies(self, choice: Choice) -> tuple[LayerPolicy | None, ...]:
        """What happens to the regions of each layer."""
        return tuple(
            self._policy(number, rung, travels=number < choice.num_layers) for number, rung in enumerate(choice.rungs)
        )

    def rungs_of(self, number: int) -> int:
        """How many rungs a layer has."""
        return len(self.ladder.rungs[self.ladder.kinds[number]])

    def passes(self, choice: Choice) -> list[Passes]:
        """Forward and backward of each layer."""
        return [self._passes[way] for way in self._ways(choice)]

    def host_bytes(self, choice: Choice) -> int:
        """What travels; all of it is on the host at once."""
        return sum(layer.travelling_bytes for layer in self.passes(choice))

    def peak_bytes(self, choice: Choice) -> int:
        """The most on the device."""
        if choice is not self._peak[0]:
            self._peak = (choice, peak_bytes(self.passes(choice), choice.num_layers, self.profile.loss_bytes))
        return self._peak[1]

    def compute_s(self, choice: Choice) -> float:
        """Seconds of the step without waiting for copies."""
        layers_s = sum(layer.forward_s + layer.backward_s for layer in self.passes(choice))
        return layers_s + self.profile.loss_s + self.profile.other_s

    def step_s(self, choice: Choice) -> float:
        """Seconds of the step."""
        between_s, other_s = self.profile.loss_s, self.profile.other_s
        return step_s([self._trips[way] for way in self._ways(choice)], choice.num_layers, between_s) + other_s

    def _ways(self, choice: Choice) -> list[Way]:
        """The way of each layer, whose passes and trips are known from then on."""
        if choice is not self._last[0]:
            travelling = choice.num_layers
            ways = [
                (alike, rung, number < travelling)
                for number, (alike, rung) in enumerate(zip(self._alike, choice.rungs, strict=True))
            ]
            for way in ways:
                if way not in self._passes:
                    number, rung, travels = way
                    policy = self._policy(number, rung, travels=travels)
                    self._passes[way] = passes_of(self.profile.layers[number], policy, travels=travels)
                    self._trips[way] = trips_of(self._passes[way], self.link)
            self._last = (choice, ways)
        return self._last[1]

    def _policy(self, number: int, rung: int, *, travels: bool) -> LayerPolicy | None:
        policy = self.ladder.rungs[self.ladder.kinds[number]][rung]
        place, size = self.groups[number]
        if size > 1:
            regions = self.profile.layers[number].regions
            kept = frozenset(n for n, one in enumerate(regions) if one.saved) if policy is None else policy.kept
            kept -= {n for n, one in enumerate(regions) if one.from_before and place}
            return LayerPolicy(kept, kept if travels else frozenset(), (place, size))
        return policy if travels or policy is None else LayerPolicy(policy.kept)


def groups_of(profile: Profile, size: int) -> list[tuple[int, int]]:
    """Of each layer, which one it is of how many that hold one input, at most ``size``."""
    groups: list[int] = []
    for layer in profile.layers:
        if groups and groups[-1] < size and any(region.from_before for region in layer.regions):
            groups[-1] += 1
        else:
            groups.append(1)
    return [(place, many) for many in groups for place in range(many)]
