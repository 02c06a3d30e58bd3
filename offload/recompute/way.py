"""One way through a layer's forward, as it was learned, and what happens to each tensor that is saved on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain

import torch

from offload.recompute.costs import RegionProfile
from offload.recompute.layer_inputs import same_layout
from offload.recompute.learn import Trace
from offload.recompute.policies import KEEP, OFFLOAD, RECOMPUTE, REST, SOURCE, UNSEEN, Policy, RegionPolicies
from offload.recompute.second_run import NOTHING, SecondRun
from offload.recompute.state import LayerState

Sizes = tuple[int, ...]  # the dimensions of all tensors among a layer's inputs, in order

PROVEN_SIZES = 2  # so many of the sizes that were not learned are compared bit by bit before the next ones are trusted

MOST_SIZES = 1024  # so many second runs of other sizes are remembered for a layer


Expected = tuple[int, torch.Size, "tuple[int, ...] | None", torch.dtype, Policy]
"""Of a saved tensor: how many autograd nodes the forward had made, its shape, its strides if it is handed over, its
dtype, and what happens to it."""


class Way:
    """One way through a layer's forward, as it was learned, and what happens to each saved tensor."""

    def __init__(self, trace: Trace, state: LayerState, names: Mapping[int, str]) -> None:
        self.trace = trace
        self.state = state
        self.names = names
        self.forced: set[int] = set()
        """Numbers of saved tensors that come out with other bits, or were written after they were saved."""
        self.differing: set[int] = set()
        """Numbers of saved tensors that come out with other bits when all operations run again."""
        self.differing_small: set[int] = set()
        """The same of those that are too small to be offloaded: they are kept. Some matter to nobody, such as the state
        of a generator that attention without dropout leaves as it found the memory."""
        self.impossible: set[int] = set()  # numbers of saved tensors that depend on what must not run twice
        self.hands_over = True  # whether a second run may skip operations: where it gave other bits, all of them run
        self.reason: str | None = None  # why the layer must not be run again
        self.draws_unseen = False  # whether forward draws random numbers where no operation was seen to
        self.instead = OFFLOAD  # what happens to what cannot be recomputed
        self.again = False
        """Whether the next forward may find no such reason: what runs for the first time may prepare something."""
        self.proven = False
        """Whether the second run, as it is executed now, has given the same bits as a forward without a mode."""
        self.lacks = 0  # how often the device had no memory to prove that in backward
        self.policies: list[Policy] = []  # of each saved tensor
        self.replay: SecondRun = NOTHING
        self.reads: list[torch.Tensor] = []
        """Whose versions tell of changes: what a second run reads, and is no input or state."""
        self.expected: list[Expected] = []  # what is looked at of each saved tensor
        self.dropped: dict[int, tuple[torch.Size, torch.dtype]] = {}
        """Shape and dtype of each saved tensor that is dropped before :attr:`limit`, by number."""
        self.keeps_all = False  # whether nothing is dropped or offloaded
        self.nodes = [saved.node for saved in trace.saved]
        self.limit = trace.dynamic_from
        before = {saved.storage for saved in trace.saved[: self.limit]}
        self.rest_numbers = frozenset(
            number
            for number, one in enumerate(trace.saved[self.limit :], self.limit)
            if one.movable and one.storage in names and one.storage not in before
        )
        """Numbers of the tensors behind it whose memory the layer has computed, and not saved before."""
        self.saved_inputs: frozenset[int] = frozenset()
        """Numbers of the inputs that autograd saves, and that are offloaded."""
        self.resident: set[int] = set()  # the storages of inputs that are kept on the device in any case
        self.rest = KEEP  # what happens to what is saved after the operation from which the way depends on data
        self.unproven_sizes = PROVEN_SIZES  # how many sizes that were not learned are still to be proven
        self.sizes: Sizes = ()
        self._replays: dict[Sizes, SecondRun | None] = {}
        self.captured: Way | None = None  # the same in a CUDA graph, where no random numbers are drawn again

    def in_capture(self, policies: RegionPolicies) -> Way:
        """What a CUDA graph does, which draws other random numbers in each replay: none are drawn again."""
        if not self.draws_unseen and not any(step.draws for step in self.trace.steps):
            return self
        if self.captured is None:
            captured = self.captured = Way(self.trace, self.state, self.names)
            captured.forced, captured.hands_over = self.forced, self.hands_over
            captured.differing_small = self.differing_small
            # The capture has the host memory that its warm-up needed: what was recomputed there is kept here.
            captured.instead = KEEP
            captured.reason = "its random numbers are drawn unseen" if self.draws_unseen else self.reason
            captured.settle(policies, draws=False)
            captured.proven = True
        return self.captured

    def saves(self, tensors: Sequence[torch.Tensor], nodes: Sequence[int], *, sized: bool) -> bool:
        """Whether a forward that has saved these tensors, behind so many autograd nodes, has gone this way."""
        same = len(tensors) == len(self.nodes) or self.trace.zone >= 0
        same = same and nodes[: self.limit] == self.nodes[: self.limit]
        return same and all(
            tensor.dtype is expected[3]
            and (sized or tensor.shape == expected[1])
            and (expected[2] is None or same_layout(tensor, expected[1], expected[2], sized))
            for tensor, expected in zip(tensors, self.expected[: self.limit], strict=False)
        )

    def at_size(self, sizes: Sizes) -> SecondRun | None:
        """The second run for inputs of a size that was not learned; ``None`` where that must be learned."""
        if sizes not in self._replays:
            if len(self._replays) >= MOST_SIZES:
                self._replays.clear()
            # A side of 1 may be expanded, or need no copy to be flattened: then the operations are others, which only
            # a second run that hands over something would see.
            alike = self.replay.hands_over or [one == 1 for one in sizes] == [one == 1 for one in self.sizes]
            self._replays[sizes] = self.replay.at_other_size() if alike else None
        found = self._replays[sizes]
        return None if found is None or found.wrong else found

    @property
    def saved_bytes(self) -> int:
        """What may be offloaded of all that the learned forward has saved."""
        return self._bytes_of(number for number, one in enumerate(self.trace.saved) if one.movable)

    def most_bytes(self, sizes: Sizes) -> int:
        """The same of a forward with inputs of other sizes: at most, if it grows with the square of a side."""
        sides = zip(self.sizes, sizes, strict=False)  # the ragged side of a nested tensor is no number
        grown = {(then, now) for then, now in sides if isinstance(now, int) and now > then > 0}
        return round(self.saved_bytes * math.prod((now / then) ** 2 for then, now in grown))

    def run_bytes_like(self, nbytes: int, numbers: Collection[int]) -> int:
        """What another run needs of which nothing is held, where the saved tensors of these numbers have so many bytes.

        Others have grown as they have.
        """
        return round(max(self.saved_bytes, self._run_bytes) * nbytes / max(1, self._bytes_of(numbers)))

    @cached_property
    def _run_bytes(self) -> int:
        """The most that there is at once, if all that is computed is freed behind its last operation."""
        last = {storage: time for time, step in enumerate(self.trace.steps) for storage in (*step.reads, *step.makes)}
        changes = [0] * (len(self.trace.steps) + 1)
        for storage, time in last.items():
            made = self.trace.storages[storage]
            if made.writers:
                changes[made.writers[0]] += made.nbytes
                changes[time + 1] -= made.nbytes
        return max(accumulate(changes))

    def _bytes_of(self, numbers: Iterable[int]) -> int:
        storages = {self.trace.saved[number].storage for number in numbers}
        return sum(self.trace.storages[one].nbytes for one in storages if one is not None)

    @cached_property
    def sources(self) -> list[int]:
        """The storages of what the layer was given and may be offloaded: the first regions of :func:`list_regions`."""
        trace = self.trace
        read = trace.movable_inputs & {one for step in trace.steps for one in step.reads}
        given = [one for one in trace.given if one is not None and one in read]
        others = [one.storage for one in trace.saved if one.movable and one.storage is not None]
        others = [one for one in others if not trace.storages[one].writers and one not in self.names]
        return list(dict.fromkeys([*given, *others]))

    @property
    def can_repeat_all(self) -> bool:
        """Whether all operations have given the same bits when they ran again, and may run again in backward."""
        return not (self.differing or self.forced or self.replay.communicates)

    def run_all(self, policies: RegionPolicies) -> None:
        """Let second runs skip nothing from now on: handing over gave other bits."""
        self.hands_over = False
        self.forced |= self.differing
        if self.replay.communicates:
            self.reason = "it communicates, and handing over gave other bits"
        self.settle(policies)

    def droppable(self) -> list[int]:
        """The numbers of the saved tensors that may be dropped, where the layer can be run again."""
        saved = enumerate(self.trace.saved)
        return [number for number, one in saved if one.movable and self.name_at(number) is not None]

    def _small(self) -> list[int]:
        """The numbers of the saved tensors that are dropped where all that :meth:`droppable` names is."""
        steps, storages = self.trace.steps, self.trace.storages
        saved = enumerate(self.trace.saved[: self.limit])
        return [
            number
            for number, one in saved
            if one.small
            and one.storage is not None
            and (storages[one.storage].writers or not steps)
            and number not in self.forced | self.differing_small
        ]

    @property
    def small_bytes(self) -> int:
        """What is dropped of them."""
        saved = (self.trace.saved[number] for number in self.replay.dropped)
        small = {one.storage for one in saved if one.small and one.storage is not None}
        return sum(self.trace.storages[one].nbytes for one in small)

    def names_of(self, numbers: Iterable[int]) -> set[str]:
        """The names of the regions that saved tensors look into."""
        return {name for name in map(self.name_at, numbers) if name is not None}

    def name_at(self, number: int) -> str | None:
        """The name of the region that a saved tensor looks into; ``None`` for what the layer was given."""
        storage = self.trace.saved[number].storage
        return None if storage is None else self.names.get(storage)

    def settle(self, policies: RegionPolicies, *, draws: bool = True) -> None:
        """Find what happens to each saved tensor."""
        trace = self.trace
        # Inputs of another kind are not numbered as those that the plan is for.
        alike = len(self.sources) == len(policies.resident)
        self.resident = {one for one, stays in zip(self.sources, policies.resident, strict=False) if alike and stays}
        wanted = [self._wanted(number, policies) for number in range(len(trace.saved))]
        self._unify_rest(wanted, OFFLOAD)
        if {wanted[number] for number in self.droppable()} == {RECOMPUTE}:
            for number in self._small():
                wanted[number] = RECOMPUTE
        while True:
            dropped = [number for number, policy in enumerate(wanted) if policy is RECOMPUTE]
            run = SecondRun(trace, dropped, draws=draws, skips=self.hands_over)
            self.impossible |= run.impossible
            changes = dict.fromkeys(run.impossible, self.instead) or self._instead(run, policies)
            if not changes:
                break
            for number, policy in changes.items():
                wanted[number] = policy
            self._unify_rest(wanted, self.instead)
        self.policies = wanted
        offloaded = {saved.storage for saved, one in zip(trace.saved, wanted, strict=True) if one is OFFLOAD}
        self.saved_inputs = frozenset(number for number, one in enumerate(trace.given) if one in offloaded)
        held = [wanted[number] for number in self.rest_numbers]
        self.rest = RECOMPUTE if RECOMPUTE in held else OFFLOAD if OFFLOAD in held else KEEP
        whole = {wanted[number] for number in self.droppable()} == {RECOMPUTE}
        if (whole or (policies.measures and policies.numbered is None)) and draws and not run.communicates:
            # As under a checkpoint, and as it is timed: a mode takes the host longer than operations that nobody needs.
            run = SecondRun(trace, run.dropped, skips=False)
        self.replay = run if run.dropped else NOTHING
        self.find_reads()
        run.unlike = {number for number, one in enumerate(trace.saved) if not one.movable}
        self.expected = [
            (one.node, one.shape, one.stride if number in self.replay.numbers else None, one.dtype, policy)
            for number, (one, policy) in enumerate(zip(trace.saved, wanted, strict=True))
        ]
        dropped = [number for number in self.replay.dropped if number < self.limit]
        self.dropped = {number: (trace.saved[number].shape, trace.saved[number].dtype) for number in dropped}
        self.keeps_all = self.rest is KEEP and all(one is KEEP for one in wanted)
        self._replays.clear()
        self.proven = not self.replay.hands_over

    def find_reads(self) -> None:
        """Find what a second run reads: the layer's parameters as they are now, and what else was there before."""
        # A parameter that is read behind the last dropped tensor may have made its step in backward by then.
        pairs = zip(self.state.parameters, self.trace.parameters_read, strict=True)
        read = [one for one, first in pairs if first < self.replay.reads_until or first == math.inf]
        self.reads = [*read, *self.trace.constants.values()]

    def _wanted(self, number: int, policies: RegionPolicies) -> Policy:
        saved = self.trace.saved[number]
        if saved.storage is None or not saved.movable:
            return KEEP
        name = self.name_at(number)
        if name is None:
            return KEEP if saved.storage in self.resident else policies.source
        planned = policies.numbered is not None and number in self.rest_numbers
        policy = policies.of(REST if planned else name)
        if policy is RECOMPUTE and (self.reason is not None or number in self.forced):
            return self.instead
        return policy

    def _unify_rest(self, wanted: list[Policy], instead: Policy) -> None:
        """Recompute all that is saved behind what depends on data, or nothing of it: what it is cannot be foreseen."""
        rest = {wanted[number] for number in self.rest_numbers}
        if RECOMPUTE in rest and len(rest) > 1:
            wanted[self.limit :] = [instead if one is RECOMPUTE else one for one in wanted[self.limit :]]
        elif RECOMPUTE in rest:  # also of what is kept under a number before: in the second run that is handed over
            behind = enumerate(self.trace.saved[self.limit :], self.limit)
            for number in [n for n, one in behind if one.movable and one.storage is not None]:
                wanted[number] = RECOMPUTE

    def _instead(self, run: SecondRun, policies: RegionPolicies) -> dict[int, Policy]:
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

    def _computed_from(self, storage: int, time: int, needed: set[int], saved: set[int | None]) -> set[int]:
        """The saved storages that are computed from one that is not, with no saved one in between."""
        unsaved, nearest = {storage}, set[int]()
        for later in range(time + 1, len(self.trace.steps)):
            step = self.trace.steps[later]
            if later in needed and unsaved & set(step.reads):
                for made in {*step.makes, *step.writes} - unsaved:
                    (nearest if made in saved else unsaved).add(made)
        return nearest

    def by_name(self, policies: RegionPolicies) -> dict[str, str]:
        found = {name: policies.of(name) for name in self.names.values()}
        # What is also saved behind what depends on data is held as it was the first time.
        found |= {name: self.policies[n] for n in reversed(self.droppable()) if (name := self.name_at(n)) is not None}
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
            only_allocates = len(writers) > 1 and step.operation.allocates
            maker = trace.steps[writers[1]] if only_allocates else step
            add(storage, f"{maker.module}: {maker.operation.name}" if maker.module else maker.operation.name)
    for saved in trace.saved:
        if saved.storage is not None and trace.storages[saved.storage].unseen and saved.storage not in names:
            names[saved.storage] = UNSEEN
    return names


def list_regions(way: Way, seconds: Sequence[float], forward_s: float) -> tuple[RegionProfile, ...]:
    """The layer's inputs, the regions that autograd saves, and those that lead to them, in the order of forward.

    Each operation took its ``seconds``, and the whole forward ``forward_s``, which what was computed unseen has.
    """
    trace, zone, storages = way.trace, way.trace.zone, way.trace.storages
    movable = list(dict.fromkeys(one.storage for one in trace.saved if one.storage is not None and one.movable))
    rest = {storage for number in way.rest_numbers if (storage := trace.saved[number].storage) is not None}
    forced = {trace.saved[number].storage for number in way.forced}
    saved = set(movable) - rest
    numbers: dict[int, int] = {}
    costs: list[RegionProfile] = []

    def add(name: str, made: Collection[int], took_s: float, reads: Iterable[int], first: int | None = None) -> None:
        held = name == REST or not saved.isdisjoint(made)
        again = name != SOURCE and way.reason is None and not (held and forced & {*made})
        read = sorted({numbers[one] for one in reads if one in numbers})
        numbers.update(dict.fromkeys(made, len(costs)))
        nbytes = sum(storages[one].nbytes for one in made)
        costs.append(RegionProfile(name, nbytes, took_s, tuple(read), held, again, first))

    for storage in way.sources:
        add(SOURCE, [storage], 0.0, ())
    unseen = [one for one in movable if way.names.get(one) == UNSEEN and one in saved]
    if unseen:
        add(UNSEEN, unseen, forward_s, list(numbers))
    firsts: dict[int, int] = {}
    made = [one for one in _leading_to(trace, movable) if storages[one].writers and one in way.names]
    for storage in sorted({*made} - numbers.keys(), key=lambda one: (storages[one].writers[-1], one)):
        writers = storages[storage].writers
        if 0 <= zone <= writers[-1]:
            continue
        first = firsts.get(writers[0])
        took_s = sum(seconds[writer] for writer in writers) if first is None else 0.0
        add(way.names[storage], [storage], took_s, [one for time in writers for one in trace.steps[time].reads], first)
        firsts.setdefault(writers[0], numbers[storage])
    if rest:
        read = [one for step in trace.steps[zone:] for one in step.reads]
        add(REST, rest, math.fsum(seconds[zone:]), [*read, *rest])
    return tuple(costs)


def shared_inputs(given: Sequence[Iterable[Hashable]]) -> set[Hashable]:
    """Of the memories that each layer is given, those that one of the last two is given and others too, as a mask is.

    Layers may be given two masks in turns. The last two are not offloaded while layers are measured, so that such
    memory is on the device then.
    """
    counts = Counter(chain.from_iterable({*each} for each in given))
    return {one for one in chain(*given[-2:]) if counts[one] > 1}


def without_shared(
    costs: Sequence[RegionProfile], given: Iterable[Hashable], shared: Container[Hashable]
) -> tuple[RegionProfile, ...]:
    """The regions of a layer that is given these memories, which come first, and counts none of those shared."""
    places = {place for place, memory in enumerate(given) if memory in shared}
    return tuple(replace(one, nbytes=0) if place in places else one for place, one in enumerate(costs))


def _leading_to(trace: Trace, storages: list[int]) -> set[int]:
    found: set[int] = set()
    waiting = [*storages]
    while waiting:
        storage = waiting.pop()
        if storage not in found:
            found.add(storage)
            for writer in trace.storages[storage].writers:
                waiting += [*trace.steps[writer].reads, *trace.steps[writer].makes]
    return found
