"""The policy of each region of a layer, keep, offload or recompute, as a user or a plan says it by the regions' names.

A region is the output of one operation within a layer. Its name is the module that ran the operation, and the
operation. Only a saved tensor can be kept. Where an output that autograd does not save is to be kept, the first saved
tensor that is computed from it is kept in its place.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Protocol

import torch
from torch import nn

from offload.base.checks import warn_caller
from offload.recompute.costs import RegionProfile
from offload.recompute.learn import Trace
from offload.recompute.operations import EMPTY
from offload.recompute.run_again import NOTHING, Replay
from offload.recompute.second_run import SecondRun, second_run
from offload.recompute.state import LayerState

SOURCE = "input"
"""The name of what a layer was given."""
UNSEEN = "compiled forward"
"""The name of what was computed where no operation was seen, as in compiled code: it is recomputed as one."""


class Policy(Enum):
    """What happens to a region's memory until backward."""

    KEEP = "keep"
    """It stays on the device."""
    OFFLOAD = "offload"
    """It is offloaded with its layer; where the layer is not offloaded, it stays."""
    RECOMPUTE = "recompute"
    """It is dropped, and recomputed when backward asks for it."""


KEEP, OFFLOAD, RECOMPUTE = Policy.KEEP, Policy.OFFLOAD, Policy.RECOMPUTE


class Numbered(Protocol):
    """A policy of a layer's regions by their numbers, as a planner makes it."""

    @property
    def kept(self) -> frozenset[int]:
        """What is on the device or on the host until backward."""

    @property
    def offloaded(self) -> frozenset[int]:
        """What of that is offloaded, if the layer is."""


class Way:
    """One way through a layer's forward, as it was learned, and what happens to each saved tensor.

    Args:
        trace: What forward has done.
        state: The layer's attributes, and which of them forward changes.
        names: The regions' names, by storage.
    """

    def __init__(self, trace: Trace, state: LayerState, names: Mapping[int, str]) -> None:
        self.trace = trace
        self.state = state
        self.names = names
        self.forced: set[int] = set()
        """Numbers of saved tensors that come out with other bits, or were written after they were saved."""
        self.differing: set[int] = set()
        """Numbers of saved tensors that come out with other bits when all operations run again."""
        self.impossible: set[int] = set()
        """Numbers of saved tensors that depend on what must not run twice."""
        self.hands_over = True
        """Whether a second run may skip operations: where it gave other bits, all of them run."""
        self.reason: str | None = None
        """Why the layer must not be run again."""
        self.draws_unseen = False
        """Whether forward draws random numbers where no operation was seen to."""
        self.instead = OFFLOAD
        """What happens to what cannot be recomputed."""
        self.again = False
        """Whether the next forward may find no such reason: what runs for the first time may prepare something."""
        self.proven = False
        """Whether the second run, as it is executed now, has given the same bits as a forward without a mode."""
        self.policies: list[Policy] = []
        """Of each saved tensor."""
        self.replay: Replay = NOTHING
        self.expected: list[tuple[int, torch.Size, Policy]] = []
        """Of each saved tensor, how many autograd nodes the forward had made, its shape, and what happens to it."""
        self.nodes = [saved.node for saved in trace.saved]
        self.limit = trace.dynamic_from
        self.saved_inputs: frozenset[int] = frozenset()
        """Numbers of the inputs that autograd saves, and that are offloaded."""
        self.rest = KEEP
        """What happens to what is saved after the operation from which the way depends on data."""
        self.captured: Way | None = None
        """The same in a CUDA graph, where no random numbers are drawn again."""

    def constants(self) -> list[tuple[torch.Tensor, int]]:
        """What counts the changes of tensors from outside that forward reads, and how often each was changed."""
        return [(counter, counter._version) for counter in self.trace.constants.values()]

    def droppable(self) -> list[int]:
        """The numbers of the saved tensors that may be dropped, where the layer can be run again."""
        return [number for number, saved in enumerate(self.trace.saved) if saved.movable and self._made(number)]

    def names_of(self, numbers: Iterable[int]) -> set[str]:
        """The names of the regions that saved tensors look into."""
        storages = (self.trace.saved[number].storage for number in numbers)
        return {self.names[storage] for storage in storages if storage is not None and storage in self.names}

    def _made(self, number: int) -> bool:
        storage = self.trace.saved[number].storage
        return storage is not None and storage in self.names

    def settle(self, policies: LayerPolicies, *, draws: bool = True) -> None:
        """Find what happens to each saved tensor."""
        trace = self.trace
        wanted = [self._wanted(number, policies) for number in range(len(trace.saved))]
        rest = [policy for number, policy in enumerate(wanted[self.limit :], self.limit) if trace.saved[number].movable]
        if RECOMPUTE in rest and any(policy is not RECOMPUTE for policy in rest):
            wanted[self.limit :] = [OFFLOAD if one is RECOMPUTE else one for one in wanted[self.limit :]]
        while True:
            dropped = [number for number, policy in enumerate(wanted) if policy is RECOMPUTE]
            run = second_run(trace, dropped, draws=draws)
            self.impossible |= run.impossible
            changes = dict.fromkeys(run.impossible, self.instead) or self._instead(run, policies)
            if not changes:
                break
            for number, policy in changes.items():
                wanted[number] = policy
        self.policies = wanted
        self.expected = [
            (saved.node, saved.shape, policy if saved.movable else KEEP)
            for saved, policy in zip(trace.saved, wanted, strict=True)
        ]
        offloaded = {
            saved.storage for saved, one in zip(trace.saved, wanted, strict=True) if one is OFFLOAD and saved.movable
        }
        self.saved_inputs = frozenset(number for number, one in enumerate(trace.given) if one in offloaded)
        held = [policy for number, policy in enumerate(wanted) if number >= self.limit and trace.saved[number].movable]
        self.rest = RECOMPUTE if RECOMPUTE in held else OFFLOAD if OFFLOAD in held else KEEP
        self.replay = Replay(trace, run, hands_over=self.hands_over) if run.dropped else NOTHING
        self.proven = not self.replay.hands_over

    def _wanted(self, number: int, policies: LayerPolicies) -> Policy:
        saved = self.trace.saved[number]
        if saved.storage is None or not saved.movable:
            return OFFLOAD
        name = self.names.get(saved.storage)
        if name is None:
            return policies.source
        policy = policies.of(name)
        if policy is RECOMPUTE and (self.reason is not None or number in self.forced):
            return self.instead
        return policy

    def _instead(self, run: SecondRun, policies: LayerPolicies) -> dict[int, Policy]:
        """Saved tensors that are kept in place of outputs which they are computed from, and which are not saved."""
        trace = self.trace
        saved = {one.storage for one in trace.saved}
        changes: dict[int, Policy] = {}
        if policies.numbered is not None:
            return changes
        for time in sorted(run.needed):
            for storage in trace.steps[time].makes:
                policy = policies.of(self.names[storage]) if storage in self.names else RECOMPUTE
                if storage in saved or policy is RECOMPUTE:
                    continue
                nearest = self._computed_from(storage, time, run.needed, saved)
                for number in run.dropped:
                    if trace.saved[number].storage in nearest:
                        changes[number] = policy
        return changes

    def _computed_from(self, storage: int, time: int, needed: frozenset[int], saved: set[int | None]) -> set[int]:
        """The saved storages that are computed from one that is not, with no saved one in between."""
        unsaved, nearest = {storage}, set[int]()
        for later in range(time + 1, len(self.trace.steps)):
            step = self.trace.steps[later]
            if later in needed and unsaved & set(step.reads):
                for made in {*step.makes, *step.writes} - unsaved:
                    (nearest if made in saved else unsaved).add(made)
        return nearest

    def by_name(self, policies: LayerPolicies) -> dict[str, str]:
        """The policy of each region, by name."""
        found = {name: policies.of(name) for name in self.names.values()}
        for number, saved in enumerate(self.trace.saved):
            if saved.storage is not None and saved.storage in self.names and saved.movable:
                found[self.names[saved.storage]] = self.policies[number]
        return {name: policy.value for name, policy in found.items()}


def names_of(trace: Trace) -> dict[int, str]:
    """The name of each region, by the storage that it is in."""
    counts: Counter[str] = Counter()
    names: dict[int, str] = {}

    def add(storage: int, name: str) -> None:
        counts[name] += 1
        names[storage] = name if counts[name] == 1 else f"{name} #{counts[name]}"

    for step in trace.steps:
        for storage in step.makes:
            writers = trace.storages[storage].writers
            only_allocates = len(writers) > 1 and step.operation.effect is EMPTY
            maker = trace.steps[writers[1]] if only_allocates else step
            add(storage, f"{maker.module}: {maker.operation.name}" if maker.module else maker.operation.name)
    for saved in trace.saved:
        if saved.storage is not None and trace.storages[saved.storage].unseen and saved.storage not in names:
            names[saved.storage] = UNSEEN
    return names


class LayerPolicies:
    """What happens to the regions of one layer: learned once for each kind of input, looked up from then on.

    Args:
        patterns: Of regions' names; the first that matches decides.
        layer: The layer, whose submodules give the regions their names; without, they are named by operation alone.
        measures: Whether learning also measures what each region costs.
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
        self.numbered: Numbered | None = None
        """What is followed in place of patterns."""
        self.ways: dict[Hashable, Way] = {}
        """What was learned, by kind of input."""
        self.failures: Counter[Hashable] = Counter()
        """How often each kind of input was learned in vain."""
        self.costs: tuple[RegionProfile, ...] = ()
        """What each region costs, where that was asked for."""
        self.last: Way | None = None
        """The way that was learned last."""
        self.patterns = patterns
        self._known: dict[str, Policy] = {}
        self._parameters: list[nn.Parameter] | None = None
        self.source = _held(policy_of(SOURCE, patterns))
        """What happens to the layer's inputs, which cannot be recomputed."""
        self.said: set[str] = set()
        """What was written into the log."""

    @property
    def layer(self) -> nn.Module | None:
        """The layer, if it was given and is still there."""
        return None if self._layer is None else self._layer()

    def kind_of_layer(self, layer: nn.Module) -> list[bool]:
        """What tells whether the layer saves other tensors: its mode, and which parameters require gradients."""
        if self._parameters is None:
            self._parameters = list(layer.parameters())
        return [layer.training, *[parameter.requires_grad for parameter in self._parameters]]

    def of(self, name: str) -> Policy:
        """The policy of a region."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = KEEP if self.numbered is not None else policy_of(name, self.patterns)
        return known

    def add(self, key: Hashable, way: Way) -> None:
        """A way was learned."""
        if len(self.ways) >= MOST_WAYS:
            del self.ways[next(iter(self.ways))]
        self.ways[key] = self.last = way

    def forget(self, key: Hashable) -> None:
        """A kind of input has taken another way than the learned one: it is learned anew."""
        if self.ways.pop(key, None) is not None:
            self.failures[key] += 1

    @property
    def proven(self) -> bool:
        """Whether the way that was learned last is recomputed as it was proven to be."""
        return self.last is not None and self.last.proven

    @property
    def wants_proof(self) -> bool:
        """Whether anything may be recomputed."""
        return self.measures or self.planned is not None or RECOMPUTE in self.patterns.values()

    def held(self) -> Iterator[tuple[int, Policy]]:
        """The bytes and the policy of each storage that the last learned forward has saved, and not dropped."""
        way, seen = self.last, set[int]()
        if way is None:
            return
        for saved, policy in zip(way.trace.saved, way.policies, strict=True):
            if saved.movable and saved.storage is not None and saved.storage not in seen and policy is not RECOMPUTE:
                seen.add(saved.storage)
                yield way.trace.storages[saved.storage].nbytes, policy

    def names(self) -> list[str]:
        """The names of the regions of all ways that were learned."""
        return [name for way in self.ways.values() for name in way.names.values()]

    def by_name(self) -> dict[str, str]:
        """What happens to each region, by its name."""
        return {} if self.last is None else self.last.by_name(self)

    def follow(self, numbered: Numbered) -> None:
        """Follow a plan for the regions by their numbers from now on."""
        self.numbered, self._known, self.source = numbered, {}, KEEP
        for number, cost in enumerate(self.costs):
            held = OFFLOAD if number in numbered.offloaded else KEEP
            if cost.name == SOURCE:
                self.source = OFFLOAD if held is OFFLOAD else self.source
            else:
                self._known[cost.name] = held if number in numbered.kept and cost.saved else RECOMPUTE
        for way in self.ways.values():
            way.captured = None
            way.settle(self)

    def follow_plan(self) -> None:
        """Follow what was planned.

        Raises:
            ValueError: The regions are not those that were planned for.
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


MOST_WAYS = 64
"""So many kinds of input are remembered for a layer."""


def _held(policy: Policy) -> Policy:
    return OFFLOAD if policy is RECOMPUTE else policy


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
    if not policies:
        raise ValueError(
            'policies must hold a pattern, such as {"*": "recompute"}, got none; leave it out to keep all.'
        )
    try:
        return {pattern: Policy(policy) for pattern, policy in policies.items()}
    except ValueError as error:
        known = ", ".join(repr(policy.value) for policy in Policy)
        raise ValueError(f"a policy must be one of {known}, got {policies!r}") from error


def policy_of(name: str, patterns: Mapping[str, Policy]) -> Policy:
    """What the first pattern that matches a region's name, or its part after the module, says; else it is kept."""
    return next((policy for pattern, policy in patterns.items() if _matches(name, pattern)), KEEP)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(": ")[2], pattern)


def warn_of_unmatched(layers: Iterable[LayerPolicies | None]) -> None:
    """Warn of patterns that match no region of any layer, once the layers have run."""
    known = [one for one in layers if one is not None and one.last is not None]
    names = dict.fromkeys([*itertools.chain.from_iterable(one.names() for one in known), SOURCE])
    patterns = dict.fromkeys(itertools.chain.from_iterable(one.patterns for one in known))
    unmatched = [pattern for pattern in patterns if not any(_matches(name, pattern) for name in names)]
    if unmatched:
        warn_caller(
            f"policies has patterns that match no region: {', '.join(map(repr, unmatched))}. The layers have these "
            f"regions: {', '.join(map(repr, names))}. Write one of these names, or a pattern of them such as '*mm*'."
        )
