"""What layers cost with inputs of any shape, from the shapes that were measured.

The bytes of a region grow with the number of the inputs' elements, or with a product of powers of their sides, as
attention's scores grow with the batch size and the square of the length. The shapes whose regions were learned tell
which. Seconds, and bytes that are no region's, have a part that no shape changes: gradients, the host's work. They
follow the line through two timings, over the bytes of the layer's regions, or over the elements outside of the layers.

One kind of inputs, whose lengths differ by a factor of up to 64, takes at most five measured steps: two to learn two
lengths, and a timing each of the first, beyond ``LARGER`` and beyond ``MUCH_LARGER``. Inputs that may be too much
are timed, too, where the timings do not tell: all is recomputed then in any case.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch

from offload.base.tensors import sides_of
from offload.measuring.profile_layers import recomputed_plan
from offload.planning.profile import LayerProfile, Link, Profile
from offload.recompute.costs import RegionProfile

LARGER = 1.5  # from this factor on, larger inputs than those of the only timing are timed, too
MUCH_LARGER = 6.6
"""The same, once two shapes were timed. A fourth timing needs inputs 1.5 × 6.6 × 6.6 > 64 times as large as the first.
"""

SIMILAR = 0.7  # from this part of a plan's size on, inputs follow the plan; smaller ones have one of their own

OF_LAYERS = (
    "forward_s", "backward_s", "workspace_bytes", "forward_workspace_bytes", "freed_sooner_bytes", "small_bytes",
    "after_second_run_bytes",
)  # fmt: skip
"""What of a layer follows a line over the bytes of its regions."""

WORKSPACE = ("workspace_bytes", "forward_workspace_bytes", "after_second_run_bytes")
"""The most of several moments. Some need the same for all inputs, as gradients and loaded weights do, and are the most
of small inputs. So larger inputs may need more than a line through two timings says: in proportion at most, and a byte
for each byte of the regions, as what is computed for a moment is not larger than what is saved."""

VAGUE = 0.05  # by what part of a peak these two may differ

BESIDE_LAYERS = ("loss_s", "other_s", "loss_bytes")  # follow a line over the elements of the inputs

Powers = tuple[int, ...]
"""Of each side, the power with which bytes grow; empty if bytes grow with the number of elements."""

Size = dict[Powers, float]  # all that bytes grow with: the number of elements, and the products of the powers of sides

Regions = Sequence[Sequence[RegionProfile]]  # of each layer

RegionNames = tuple[tuple[str, ...], ...]  # the names of the regions of each layer


class Inputs(NamedTuple):
    """What the first layer computes from in one microbatch: no masks, whose size is another power of lengths."""

    elements: int
    sides: tuple[int, ...]  # of all tensors, in order


class Timed(NamedTuple):
    """One timing."""

    inputs: Inputs
    profile: Profile
    missing_bytes: int  # what the microbatch needed outside of the layers
    kind: RegionNames
    gradients: Sequence[int]  # the new gradients, in bytes, that there were after the backward of each layer
    begun_bytes: int  # the gradients with which the microbatch began

    def like(self, other: Timed, number: int) -> LayerProfile:
        """A layer, as if the microbatch had begun with as many gradients as another one that was timed."""
        layer, more_bytes = self.profile.layers[number], other.gradients[number] - self.gradients[number]
        return replace(layer, workspace_bytes=max(0, layer.workspace_bytes + more_bytes)) if more_bytes else layer


class CostsBySize:
    """The costs of layers by the sizes of the first layer's inputs."""

    def __init__(self) -> None:
        self._learned: dict[RegionNames, dict[Inputs, Regions]] = {}  # of each kind of inputs; the last learned is last
        # With what the bytes of each region of each layer grow, and with what any do.
        self._powers: dict[RegionNames, list[list[Powers]]] = {}
        self._every: set[Powers] = set()
        self._timed: list[Timed] = []
        self._covered: list[Inputs] = []  # the inputs of which :attr:`largest` is the size
        self._more_bytes = 0.0  # for each element, what microbatches needed outside of the layers beyond what was timed

    def learn(self, inputs: Inputs, regions: Regions) -> None:
        """The regions of a microbatch with these inputs."""
        kind = _names_in(regions)
        self._learned[kind] = samples = self._learned.pop(kind, {}) | {inputs: regions}
        self._powers[kind] = _powers_of({one: it for one, it in samples.items() if len(one.sides) == len(inputs.sides)})
        self._every = {one for layers in self._powers.values() for layer in layers for one in layer}

    def regions_at(self, inputs: Inputs) -> list[list[RegionProfile]]:
        """The regions that were learned last, with the bytes that they have with these inputs."""
        kind, samples = next(reversed(self._learned.items()))
        known, regions = next(reversed(samples.items()))
        grown = self._grown(kind, regions, self.size_of(known), self.size_of(inputs))
        return [_with_bytes(*layer) for layer in zip(regions, grown, strict=True)]

    def add(
        self, inputs: Inputs, profile: Profile, missing_bytes: int, new_gradients: Sequence[int], begun_bytes: int = 0
    ) -> None:
        """What was timed with these inputs; the microbatch has made so many bytes of gradients for each layer."""
        kind = _names_in([one.regions for one in profile.layers])
        gradients = [*accumulate(reversed(new_gradients))]
        self._timed.append(Timed(inputs, profile, missing_bytes, kind, gradients[::-1], begun_bytes))
        self._more_bytes = 0.0
        self.cover(inputs)

    @property
    def last_timed(self) -> Inputs:
        """The inputs of the last timing; of no size, if there is none."""
        return self._timed[-1].inputs if self._timed else Inputs(1, ())

    def forget_times(self) -> None:
        self._timed, self._covered = [], []

    def need_more(self, nbytes: int) -> None:
        """A microbatch needed so many more bytes outside of the layers than inputs of the largest size were said to."""
        self._more_bytes += nbytes / self.largest[()]

    def lack(self, inputs: Inputs) -> bool:
        """Whether inputs have to be measured: much larger than what was timed, or longer in what never varied."""
        if not self._timed:
            return True
        sizes, now = [self.size_of(one.inputs) for one in self._timed], self.size_of(inputs)
        factor = LARGER if len(self._timed) < 2 else MUCH_LARGER
        for powers in (one for one in now if not one or max(one) > 1):
            most = max(size.get(powers, 0.0) for size in sizes)
            if now[powers] > factor ** max(powers, default=1) * most:
                return True
        last = self._timed[-1]
        known = [*self._learned.get(last.kind, ()), last.inputs]
        sides = [one.sides for one in known if len(one.sides) == len(inputs.sides)]
        return any(len({*seen}) == 1 and one > seen[0] for one, *seen in zip(inputs.sides, *sides, strict=True))

    def size_of(self, inputs: Inputs) -> Size:
        """All that bytes grow with, of these inputs."""
        products = {one: math.prod(map(pow, inputs.sides, one)) for one in self._every if len(one) == len(inputs.sides)}
        return {(): float(inputs.elements)} | products

    def cover(self, inputs: Inputs) -> None:
        """Count these inputs to the largest from here on."""
        self._covered.append(inputs)

    def uncover(self, planned: Size) -> None:
        """Count inputs beyond what is planned no more to the largest: the program has refused them."""
        self._covered = [one for one in self._covered if is_within(self.size_of(one), planned)]

    @property
    def largest(self) -> Size:
        """Of everything that bytes grow with, the most that inputs have had."""
        return self.largest_with()

    def largest_with(self, *more: Inputs) -> Size:
        """The same, as if ``more`` inputs were covered."""
        sizes = [self.size_of(one) for one in (*self._covered, *more)]
        return {powers: max(size.get(powers, 0.0) for size in sizes) for size in sizes for powers in size}

    def seem_too_much(self, size: Size, budget: int, gradient_bytes: int) -> bool:
        """Whether no plan fits inputs of this size by the most that they may need, and the timings tell no better."""
        profiles = (self.beside(*self.at(size, steep=steep), gradient_bytes) for steep in (True, False))
        most, least = (recomputed_plan(one, Link(1.0, 1.0, 1.0), budget, None).peak_bytes for one in profiles)
        return most > budget and least < (1 - VAGUE) * most

    def at(self, size: Size, *, steep: bool = True) -> tuple[Profile, int]:
        """The profile of inputs of this size, with the most that they may need, and the bytes outside of the layers."""
        last, profiles = self._timed[-1], [one.profile for one in self._timed]
        then = self.size_of(last.inputs)
        grown = self._grown(last.kind, [layer.regions for layer in last.profile.layers], then, size)
        elements_each = [one.inputs.elements for one in self._timed]
        layers = []
        for number, grown_bytes in enumerate(grown):
            timed = [one.like(last, number) for one in self._timed]
            # With a byte for each element, for layers without regions.
            pairs = zip(timed, elements_each, strict=True)
            points = [(elements + sum(region.nbytes for region in one.regions), one) for one, elements in pairs]
            most = 1.0 if any(grown_bytes) else math.inf
            later = last.gradients[number + 1] if number + 1 < len(last.gradients) else 0  # of no size
            grown_size = sum(grown_bytes) + size[()]
            found = {name: _on_line(name, points, grown_size) for name in OF_LAYERS}
            if steep:
                found |= {name: _on_line(name, points, grown_size, most, later) for name in WORKSPACE}
            longer = found["forward_s"] / timed[-1].forward_s if timed[-1].forward_s > 0 else size[()] / then[()]
            slower = _with_bytes(timed[-1].regions, grown_bytes, longer)
            layers.append(LayerProfile.from_regions(slower, host=timed[-1].host, **found))
        beside = [*zip(elements_each, profiles, strict=True)]
        values: dict[str, Any] = {name: _on_line(name, beside, size[()]) for name in BESIDE_LAYERS}
        missing_bytes = _on_line("missing_bytes", [*zip(elements_each, self._timed, strict=True)], size[()])
        missing_bytes += self._more_bytes * size[()]
        calls = max((one.calls for one in profiles), key=len)
        return Profile(tuple(layers), calls=calls, **values), math.ceil(missing_bytes)

    def beside(self, profile: Profile, missing_bytes: int, gradient_bytes: int) -> Profile:
        """A profile beside what is needed outside of the layers, and the gradients with which a microbatch begins."""
        # The timed one has made the gradients of later layers before it came to a layer: those that it began without.
        last = self._timed[-1]
        more_bytes = max(0, gradient_bytes - last.begun_bytes)
        layers = tuple(
            replace(layer, workspace_bytes=max(0, layer.workspace_bytes - min(made, more_bytes)))
            for layer, made in zip(profile.layers, (*last.gradients[1:], 0), strict=True)
        )
        return replace(profile, layers=layers).beside(missing_bytes + gradient_bytes)

    def _grown(self, kind: RegionNames, regions: Regions, then: Size, now: Size) -> list[list[int]]:
        """The bytes that the regions of inputs of one size have with inputs of another."""
        elsewhere = now[()] / then[()]  # of inputs with another number of sides
        ratios = {one: now[one] / then[one] if one in now and one in then else elsewhere for one in {**then, **now}}
        return [
            [round(ratios.get(power, elsewhere) * one.nbytes) for one, power in zip(*pair, strict=True)]
            for pair in zip(regions, self._powers[kind], strict=True)
        ]


def given_to(tensors: Sequence[torch.Tensor]) -> Inputs:
    """The size of a layer's arguments. The ragged side of a nested tensor is no number: the elements count it."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    computed = [tensor for tensor in floating if tensor.requires_grad] or floating[:1] or tensors[:1]
    elements = max(1, sum(tensor.numel() for tensor in computed))
    sides = (side for tensor in computed for side in sides_of(tensor) if isinstance(side, int))
    return Inputs(elements, tuple(max(1, side) for side in sides))


def with_skipped(
    profile: Profile, ran: Sequence[int], kinds: Sequence[Hashable], new_gradients: Sequence[int]
) -> Profile:
    """All layers: one that was skipped costs what the next one of its kind does, and its gradients' memory as well."""
    timed = dict(zip(ran, profile.layers, strict=True))
    like = {kinds[number]: layer for number, layer in timed.items()}
    layers, more_bytes = [], 0
    for number, kind in reversed([*enumerate(kinds)]):
        like[kind] = layer = timed.get(number, like[kind])
        more_bytes += 0 if number in timed else new_gradients[number]
        layers.append(replace(layer, workspace_bytes=layer.workspace_bytes + more_bytes))
    # Nobody knows when skipped layers are called: as all, as often as any.
    most = max(map(profile.calls.count, range(len(ran))))
    calls = profile.calls if len(ran) == len(kinds) else (*range(len(kinds)),) * most
    return replace(profile, layers=tuple(reversed(layers)), calls=calls)


def rounded_up(size: Size, largest: Size) -> Size:
    """A size of which nothing is much larger than of this one, or larger than of the largest: one of few."""
    if all(value > SIMILAR * largest[powers] for powers, value in size.items()):
        return largest
    steps = {powers: math.floor(math.log(value / largest[powers], SIMILAR)) for powers, value in size.items()}
    return {powers: largest[powers] * SIMILAR**step for powers, step in steps.items()}


def is_within(one: Size, other: Size) -> bool:
    """Whether nothing grows beyond another size."""
    return all(value <= other.get(powers, 0.0) for powers, value in one.items())


def _names_in(regions: Regions) -> RegionNames:
    return tuple(tuple(region.name for region in layer) for layer in regions)


def _with_bytes(regions: Sequence[RegionProfile], nbytes: Sequence[int], longer: float = 1.0) -> list[RegionProfile]:
    """Regions with other bytes, which take so many times as long."""
    pairs = zip(regions, nbytes, strict=True)
    return [
        replace(one, nbytes=each, seconds=longer * one.seconds, spared_bytes=round(one.spared_bytes * ratio))
        for one, each in pairs
        for ratio in (each / one.nbytes if one.nbytes else 1.0,)
    ]


def _powers_of(samples: dict[Inputs, Regions]) -> list[list[Powers]]:
    """With what regions grow, from their bytes with inputs of several sizes."""
    # Of powers that agree with all sizes alike, the number of elements is taken, and then the highest powers. A side
    # that never varied has the power 1. Sides that are always the same are one side.
    columns = [*zip(*(one.sides for one in samples), strict=True)]
    choices = [
        (0,) if column in columns[:place] else (1,) if len({*column}) == 1 else (2, 1, 0)
        for place, column in enumerate(columns)
    ]
    growths: dict[Powers, list[float]] = {(): [math.log(one.elements) for one in samples]}
    for powers in product(*choices):
        growths[powers] = [
            sum(p * math.log(side) for p, side in zip(powers, one.sides, strict=True)) for one in samples
        ]

    @cache
    def best(*sizes: int) -> Powers:
        """With what bytes grow that were of these sizes."""

        def error(powers: Powers) -> float:
            logs = [math.log(max(1, nbytes)) - growth for nbytes, growth in zip(sizes, growths[powers], strict=True)]
            return round(max(logs) - min(logs), 6)

        return min(growths, key=error)

    every = zip(*samples.values(), strict=True)
    return [[best(*(region.nbytes for region in same)) for same in zip(*layer, strict=True)] for layer in every]


def _on_line(
    name: str, timed: Sequence[tuple[float, object]], size: float, steepest: float = 0.0, fixed: int = 0
) -> float:
    """A value: on a line through two timed ones, which never falls, or in proportion if none are far apart.

    Beyond these two, the line is as steep as in proportion, but for what is ``fixed``, and at most ``steepest``, if it
    is not steeper itself.
    """
    points = sorted((one, float(getattr(value, name))) for one, value in timed)
    most, last = points[-1]
    smaller = [one for one in points if LARGER * one[0] <= most]
    before, first = smaller[-1] if smaller else (0.0, 0.0)
    slope = max(0.0, last - first) / (most - before)
    if size > most:
        slope = max(slope, min(max(0.0, last - fixed) / most, steepest))
    found = max(0.0, last + slope * (size - most))
    return round(found) if name.endswith("_bytes") else found
