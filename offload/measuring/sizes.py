"""What layers cost with inputs of any size, from the sizes that were measured.

A region's bytes are in proportion to the inputs' elements, or to their square as a mask is, or the same for all. Two
sizes whose regions were learned tell which. Seconds, and bytes that are no region's, have a part that no size changes:
gradients, the host's work. They follow the line through two sizes that were timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from offload.planning.profile import LayerProfile, Profile
from offload.recompute.costs import RegionProfile

LARGER = 1.5
"""From this factor on, larger inputs than those of the only timing are timed, too."""

MUCH_LARGER = 5
"""The same, once two sizes were timed."""

Regions = Sequence[Sequence[RegionProfile]]
"""Of each layer."""


class Timed(NamedTuple):
    """One timing."""

    elements: int
    profile: Profile
    missing_bytes: int
    """What the microbatch needed outside of the layers."""


class CostsBySize:
    """The costs of layers by the number of elements of the first layer's inputs."""

    def __init__(self) -> None:
        self._learned: tuple[int, Regions] = (1, ())
        self._powers: dict[tuple[int, int], int] = {}
        """With which power of the elements the bytes of a region grow, by layer and number, where that is not 1."""
        self._timed: list[Timed] = []
        self._more_bytes = 0.0
        """For each element, what microbatches needed outside of the layers beyond what was timed."""

    @property
    def elements(self) -> int:
        """Those that were timed last."""
        return self._timed[-1].elements if self._timed else 0

    def learn(self, elements: int, regions: Regions) -> None:
        elements, (before, known) = max(1, elements), self._learned
        names = [[[region.name for region in layer] for layer in one] for one in (regions, known)]
        if known and names[0] == names[1] and elements != before:
            pairs = {
                (number, index): (region.nbytes, known[number][index].nbytes)
                for number, layer in enumerate(regions)
                for index, region in enumerate(layer)
            }
            logs = {key: math.log(now / then) for key, (now, then) in pairs.items() if min(now, then) > 0}
            powers = {key: round(log / math.log(elements / before)) for key, log in logs.items()}
            self._powers = {key: min(2, max(0, power)) for key, power in powers.items() if power != 1}
        elif names[0] != names[1]:
            self._powers = {}
        self._learned = elements, regions

    def regions_at(self, elements: int) -> list[list[RegionProfile]]:
        """The regions as they were learned, with the bytes that they have with so many elements."""
        ratio = elements / self._learned[0]
        return [self._grown(number, layer, ratio, ratio) for number, layer in enumerate(self._learned[1])]

    def add(self, elements: int, profile: Profile, missing_bytes: int) -> None:
        self._timed.append(Timed(max(1, elements), profile, missing_bytes))
        self._more_bytes = 0.0

    def need_more(self, elements: int, nbytes: int) -> None:
        """A microbatch needed so many more bytes outside of the layers."""
        self._more_bytes += nbytes / elements

    def lack(self, elements: int) -> bool:
        """Whether inputs of so many elements are too large for what was timed."""
        return elements > (LARGER if len(self._timed) < 2 else MUCH_LARGER) * self.elements

    def most(self, limit: int, fits: Callable[[int], bool]) -> int:
        """The most elements, to within one or a hundredth of a limit, that fit; 0 if none do."""
        low, high = 0, limit
        while high - low > max(1, limit / 100):
            middle = (low + high) // 2
            low, high = (middle, high) if middle and fits(middle) else (low, middle)
        return low

    def at(self, elements: int) -> tuple[Profile, int]:
        """The profile of inputs of so many elements, and the bytes that are needed outside of the layers."""
        last, ratio = self._timed[-1], elements / self.elements
        other = self._timed[-2] if len(self._timed) > 1 and self._timed[-2].elements < last.elements else None

        def field(name: str, now: object, before: object) -> float:
            value: float = getattr(now, name)
            if other is None:
                return ratio * value
            grown: float = max(0.0, value - getattr(before, name))
            return max(0.0, value + grown * (elements - last.elements) / (last.elements - other.elements))

        profile, earlier = last.profile, other and other.profile
        layers = []
        for number, layer in enumerate(profile.layers):
            before = earlier and earlier.layers[number]
            forward_s, backward_s = (field(name, layer, before) for name in ("forward_s", "backward_s"))
            longer = forward_s / layer.forward_s if layer.forward_s > 0 else ratio
            regions = self._grown(number, layer.regions, ratio, longer)
            grown = {name: round(field(name, layer, before)) for name in ("workspace_bytes", "forward_workspace_bytes")}
            layers.append(LayerProfile.from_regions(regions, forward_s, backward_s, **grown))
        loss_s, other_s, loss_bytes = (field(name, profile, earlier) for name in ("loss_s", "other_s", "loss_bytes"))
        missing_bytes = math.ceil(field("missing_bytes", last, other) + self._more_bytes * elements)
        return Profile(tuple(layers), loss_s, other_s, round(loss_bytes)), missing_bytes

    def _grown(self, number: int, layer: Sequence[RegionProfile], ratio: float, longer: float) -> list[RegionProfile]:
        """The regions of a layer with so many times as many elements, which take so many times as long."""
        powers = [self._powers.get((number, index), 1) for index in range(len(layer))]
        return [
            replace(region, nbytes=round(ratio**power * region.nbytes), seconds=longer * region.seconds)
            for region, power in zip(layer, powers, strict=True)
        ]


def elements_of(inputs: Sequence[torch.Tensor]) -> int:
    """The size of a layer's inputs: of what it computes from, not of masks, whose size is another power of lengths."""
    return max(1, sum(tensor.numel() for tensor in _computed(inputs)))


class LongestSides:
    """The longest sides of inputs so far: in attention, as many elements need more memory where one side is longer."""

    def __init__(self) -> None:
        self._sides: tuple[int, ...] = ()

    def grow(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a side is longer than any before."""
        sides = tuple(side for tensor in _computed(inputs) for side in tensor.shape)
        before = self._sides if len(self._sides) == len(sides) else (0,) * len(sides)
        self._sides = tuple(map(max, before, sides))
        return self._sides != before


def _computed(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    floating = [tensor for tensor in inputs if tensor.is_floating_point()]
    return [tensor for tensor in floating if tensor.requires_grad] or floating[:1] or inputs[:1]
