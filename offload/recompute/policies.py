"""What a user wants of a layer's regions: which are kept, which travel, which are computed again.

A region is told by the operation that made it, by which of that operation's calls in the layer it was, and by which of
its results it is. For a user it has a name: the module that ran the operation, and the operation.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from itertools import pairwise, zip_longest
from typing import NamedTuple, Protocol

from torch import nn

from offload.base.torch_private import is_compiled
from offload.recompute.costs import RegionProfile
from offload.recompute.operations import Operation
from offload.recompute.record import Value


class Policy(Enum):
    """What happens to a region's memory until backward."""

    KEEP = "keep"
    """It stays on the device."""
    OFFLOAD = "offload"
    """It travels with its layer; where the layer does not, it stays."""
    RECOMPUTE = "recompute"
    """It is let go, and computed again when backward asks for it."""


KEEP, OFFLOAD, RECOMPUTE = Policy


class Region(NamedTuple):
    """One result of one operation of a layer's forward."""

    operation: Operation
    time: int
    """Which call of this operation in the layer, counted from 0."""
    place: int
    """Which of its results."""


def region_of(value: Value) -> Region | None:
    """The region of what a call has made; ``None`` for a source."""
    call = value.call
    return None if call is None else Region(call.operation, call.time, 0 if call.one_region else value.place)


class Numbered(Protocol):
    """A policy of a layer's regions by their numbers, as a planner makes it."""

    @property
    def kept(self) -> frozenset[int]:
        """What is on the device or on the host until backward."""

    @property
    def offloaded(self) -> frozenset[int]:
        """What of that is offloaded, if the layer is."""


class LayerPolicies:
    """What happens to the regions of one layer: learned in its first forward, looked up from then on.

    Args:
        patterns: Of regions' names; the first that matches decides.
        layer: The layer, whose submodules give the regions their names; without, they are named by operation alone.
        measures: Whether the first forward also measures what each region costs.
        planned: What happens to the regions by their numbers, in place of patterns, and the names that they have there.
    """

    def __init__(
        self,
        patterns: Mapping[str, Policy],
        layer: nn.Module | None = None,
        *,
        measures: bool = False,
        planned: tuple[Numbered, Sequence[str]] | None = None,
    ) -> None:
        # Weakly, as what the layer's hooks hold must not keep the layer.
        self._layer = None if layer is None else weakref.ref(layer)
        self.measures = measures
        self.planned = planned
        self.joined = self.joins = False
        """Whether the layer before computes this one's input again, where it can; whether this one does for the next.

        A first forward that measures only asks who can.
        """
        self.learned = False
        self.names: dict[Region, str] = {}
        """Of the regions that were seen in the first forward."""
        self.differing: set[Region] = set()
        """Those that did not come out the same when they were computed again, and so are not."""
        self.proven: set[Region] = set()
        """Those that were computed again and compared: a first forward may not have saved all that later ones do."""
        self.proven_outputs: set[Region] = set()
        """Those that the layer returns, and that come out the same where the next layer asks for them."""
        self.unsaved: set[Region] = set()
        """Those that recomputation reads, and that are kept or travel although autograd does not save them."""
        self.sources_read: set[int] = set()
        """Of what the layer was given, counted as it is read: what recomputation has read in an earlier forward."""
        self.draws = False
        """Of a layer that is one region: whether its first forward has drawn random numbers."""
        self.costs: tuple[RegionProfile, ...] = ()
        """What each region costs, where that was asked for."""
        self.order: list[Region | None] = []
        """The regions of :attr:`costs`; ``None`` for what the layer was given."""
        self._patterns = patterns
        self._source = policy_of(SOURCE, patterns)
        self._known: dict[Region, Policy] = {}
        self._dropped: set[Region] = set()
        """What is to be computed again, and is known to come out the same."""
        self._named: Counter[str] = Counter()

    def begin(self) -> None:
        """A first forward begins: forget what one that failed has left."""
        self.names, self.differing, self.order = {}, set(), []
        self._known, self._named = {}, Counter()

    @property
    def layer(self) -> nn.Module | None:
        """The layer, if it was given and is still there."""
        return None if self._layer is None else self._layer()

    @property
    def whole(self) -> bool:
        """Whether the layer is one region, since nobody sees what it does: it is compiled."""
        layer = self.layer
        return layer is not None and is_compiled(layer)

    @property
    def lists_all(self) -> bool:
        """Whether the first forward has to list and prove all regions, and not only those to be computed again."""
        return self.measures or self.planned is not None

    def of(self, region: Region | None) -> Policy:
        """What happens to a region. A source cannot be computed again; what the first forward did not do is kept."""
        if region is None:
            return OFFLOAD if self._source is RECOMPUTE else self._source
        return self._known.get(region, KEEP)

    def drops(self, value: Value) -> bool:
        """Whether it is to be computed again, and is known to come out the same."""
        call = value.call
        if call is None:
            return False
        return (
            call.operation,
            call.time,
            0 if call.one_region else value.place,
        ) in self._dropped  # a Region, but sooner

    def settle(self) -> None:
        """What was learned is complete for now."""
        self._dropped = {region for region in self.proven if self._known.get(region) is RECOMPUTE}

    def awaits_proof(self, region: Region | None) -> bool:
        """Whether it is to be computed again, and nobody knows yet that it comes out the same."""
        return region not in self.proven and self.of(region) is RECOMPUTE

    def by_name(self) -> dict[str, str]:
        """What happens to each region, by its name."""
        return {name: self.of(region).value for region, name in self.names.items()}

    def name(self, region: Region, module: str) -> None:
        """The module of this name has made the region."""
        operation = region.operation.function._schema.name.removeprefix("aten::")
        name = f"{module}: {operation}" if module else operation
        self._named[name] += 1
        times = f" #{self._named[name]}" if self._named[name] > 1 else ""
        self.names[region] = name + times
        self._known[region] = policy_of(name, self._patterns)

    def follow(self, numbered: Numbered) -> None:
        """Treat the regions by their numbers from now on."""
        self.unsaved, self.sources_read = set(), set()
        self._source = KEEP
        for number, (region, cost) in enumerate(zip(self.order, self.costs, strict=True)):
            held = OFFLOAD if number in numbered.offloaded else KEEP
            if region is None:
                self._source = OFFLOAD if held is OFFLOAD else self._source
            elif number in numbered.kept or not cost.recomputable:
                self._known[region] = held
                if not cost.saved:
                    self.unsaved.add(region)
            else:
                self._known[region] = RECOMPUTE
        self.settle()

    def follow_plan(self) -> None:
        """Treat the regions as was planned.

        Raises:
            ValueError: They are not those that were planned for.
        """
        if self.planned is None:
            return
        numbered, names = self.planned
        found = [cost.name for cost in self.costs]
        if found != list(names):
            odd = next((pair for pair in zip_longest(names, found) if pair[0] != pair[1]), None)
            raise ValueError(
                f"the plan must be for these layers, but it has {len(names)} regions and the layer {len(found)}; the "
                f"first that differ are {odd}. Profile the layers again, as they are trained, and plan with that."
            )
        self.follow(numbered)

    def differs(self, region: Region) -> None:
        """It comes out with other bits: it travels with its layer, or is kept, and is not computed again."""
        self.differing.add(region)
        self._known[region] = OFFLOAD


def join(layers: Sequence[LayerPolicies], size: int) -> None:
    """Let groups of ``size`` layers hold one input: those of the others are computed again by the layer before."""
    for number, (before, layer) in enumerate(pairwise(layers), start=1):
        layer.joined = before.joins = number % size > 0


SOURCE = "input"
"""The name of what a layer was given, and of what nobody saw being computed."""


def parse_policies(policies: Mapping[str, Policy | str]) -> dict[str, Policy]:
    """Patterns of regions' names, each with what is to happen to them.

    Raises:
        TypeError: ``policies`` is no mapping of texts.
        ValueError: It names no policy there is.
    """
    if not isinstance(policies, Mapping) or not all(isinstance(pattern, str) for pattern in policies):
        raise TypeError(
            'policies must map patterns of regions to policies, such as {"*dot_product*": "offload", "*": '
            f'"recompute"}}, got {policies!r}'
        )
    try:
        return {pattern: Policy(policy) for pattern, policy in policies.items()}
    except ValueError as error:
        known = ", ".join(repr(policy.value) for policy in Policy)
        raise ValueError(f"a policy must be one of {known}, got {policies!r}") from error


def policy_of(name: str, patterns: Mapping[str, Policy]) -> Policy:
    """What the first pattern that matches a region's name, or its part after the module, says; else it is kept."""
    operation = name.rpartition(": ")[2]
    for pattern, policy in patterns.items():
        if fnmatchcase(name, pattern) or fnmatchcase(operation, pattern):
            return policy
    return KEEP
