"""The policies of one layer: patterns or a plan, and the ways through its forward that were learned with each input."""

from __future__ import annotations

import itertools
import logging
import math
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from operator import is_
from typing import Any

import torch
from torch import nn

from offload.base.checks import warn_caller
from offload.base.torch_private import state_of
from offload.recompute.costs import LayerPolicy, RegionProfile
from offload.recompute.layer_inputs import LayerInputs
from offload.recompute.learn import Clock
from offload.recompute.policies import RECOMPUTE, SOURCE, Policy, RegionPolicies, matches
from offload.recompute.prove import memories_of
from offload.recompute.second_run import SecondRun
from offload.recompute.state import Settings
from offload.recompute.way import MOST_SIZES, Sizes, Way, without_shared

InputKind = tuple[Hashable, Sizes]  # what tells one kind of input from another, and the sizes of its tensors

MOST_WAYS = 64  # so many kinds of input are remembered for a layer
MANY = 8  # once a layer has been learned so often, the log says why that may be

_logger = logging.getLogger(__name__)
_said_of = weakref.WeakSet[type[nn.Module]]()  # the classes of layers of which it has


class LayerPolicies(RegionPolicies):
    """What happens to the regions of one layer: learned once for each kind of input, looked up from then on.

    In place of patterns, ``planned`` says it of regions by their numbers, and has the regions of that plan.
    """

    runs_again = True  # whether the layer's forward runs a second time to recompute

    def __init__(
        self,
        patterns: Mapping[str, Policy],
        layer: nn.Module,
        *,
        measures: bool = False,
        planned: tuple[LayerPolicy, Sequence[RegionProfile]] | None = None,
    ) -> None:
        super().__init__(patterns, measures=measures)
        # Weakly, as what the layer's hooks hold must not keep the layer.
        self.layer = weakref.ref(layer)
        self.planned = planned
        self.ways: dict[InputKind, Way] = {}  # what was learned, by kind of input
        self._sized: tuple[InputKind, SecondRun] | None = None  # the last second run of a size that was not learned
        self.strange: set[InputKind] = set()
        """Inputs that have gone another way than any that was learned before, by their sizes, and by the evenness of
        these: then ways of the same evenness are more likely."""
        self.failures: Counter[InputKind] = Counter()  # how often each kind of input was learned for nothing
        self.costs: tuple[RegionProfile, ...] = ()  # what each region costs, where that was asked for
        self.given: list[Hashable] = []  # tell the memory of the inputs among those regions, which are the first ones
        self.shared_bytes: dict[Hashable, int] = {}  # of those of these memories that :meth:`share` does not count
        self.host_s: tuple[float, float] | None = None
        """The host's seconds for forward and backward, and what recomputing adds, where a trial has taken them."""
        self.learned = 0
        self.proofs = 0  # how often a second run was compared with forward, which holds what both save
        self.last: Way | None = None
        self._modules: list[nn.Module] = []  # those in the layer
        self._dicts: list[dict[str, Any]] = []  # the dictionaries of parameters and of submodules of it and of these
        self._parts: list[Any] = []  # what was in these when the modules were listed
        self._parameters: list[nn.Parameter] = []
        self.is_short: Callable[[int], bool] = lambda _: False  # whether the device has no room for so many bytes more
        self.holds = False  # whether what is recomputed is held as long as PyTorch holds what a node has saved
        self.clock: Clock | None = None  # marks points of the compute stream, while second runs are timed
        self.second_runs: list[tuple[Any, Any, float]] = []
        """The marks at begin and end of each second run since the clock was set, and the host's seconds."""
        self.said: set[str] = set()  # what was written into the log

    def ask(self, is_short: Callable[[int], bool]) -> None:
        """Ask this method whether there is room; weakly, as its object holds the policies."""
        found = weakref.WeakMethod(is_short)
        self.is_short = lambda nbytes: (answer := found()) is not None and answer(nbytes)

    def in_the_way(self, tensors: Sequence[torch.Tensor], nbytes: int) -> list[torch.Tensor]:
        """As few of the tensors as leave room for so many bytes: where the pool is full, to move them takes seconds."""
        found = set[int]()
        for address, memory in memories_of(tensors).items():
            if not self.is_short(nbytes):
                break
            found.add(address)
            nbytes -= memory.nbytes()
        return [one for one in tensors if found & memories_of([one]).keys()]

    @contextmanager
    def timed(self) -> Iterator[None]:
        clock = self.clock
        if clock is None:
            yield
            return
        begin, begin_s = clock(), time.perf_counter()
        yield
        self.second_runs.append((begin, clock(), time.perf_counter() - begin_s))

    def kind_of(self, layer: nn.Module, inputs: LayerInputs, settings: Settings) -> InputKind:
        """What tells whether the layer saves other tensors: its inputs, mode, and trained parameters, and settings."""
        there, parts = [one for held in self._dicts for one in held.values()], self._parts
        if not (self._dicts and len(there) == len(parts) and all(map(is_, there, parts))):
            self._list_parts(layer)
        trained = [parameter.requires_grad for parameter in self._parameters]
        return (*inputs.kind, layer.training, *settings.kind, *trained), tuple(inputs.sizes)

    def _list_parts(self, layer: nn.Module) -> None:
        """List what is in the layer. Where the program has replaced a module, what was learned is of another layer."""
        (_, *modules), parameters = layer.modules(), list(layer.parameters())
        if modules != self._modules or len(parameters) != len(self._parameters):
            self.ways.clear()
        self._modules, self._parameters = modules, parameters
        self._dicts = [held for module in (layer, *modules) for held in state_of(module)[1::2]]
        self._parts = [one for held in self._dicts for one in held.values()]
        for way in self.ways.values():
            if way.state.parameters:  # else they are gathered for each run
                way.state.parameters = [*parameters]
                way.find_reads()

    def find(self, key: InputKind) -> tuple[Way | None, SecondRun | None]:
        """What is known of a kind of input, learned with this size or with two others, and its second run."""
        way = self.ways.get(key)
        if way is not None and way.replay.wrong:
            self.forget(key)  # a second run has gone another way in backward
        elif way is not None:
            return way, way.replay
        known = self._of_kind(key[0])
        if self.measures and len(known) == 1:
            return None, None  # two sizes tell how the bytes of regions grow
        if self._sized is not None and self._sized[1].wrong:
            self.forget(self._sized[0])
        if key in self.strange:
            return None, None
        if (key[0], even := _evenness(key[1])) in self.strange:
            known = [one for one in known if _evenness(one.sizes) == even]
        found = ((other, other.at_size(key[1])) for other in known)
        way, run = next((pair for pair in found if pair[1] is not None), (None, None))
        self._sized = None if run is None else (key, run)
        return way, run

    def _of_kind(self, kind: Hashable) -> list[Way]:
        """What was learned with inputs of this kind, of whatever size."""
        return [way for (known, _), way in self.ways.items() if known == kind]

    def add(self, key: InputKind, way: Way) -> None:
        if len(self.ways) >= MOST_WAYS:
            del self.ways[next(iter(self.ways))]
        way.sizes = key[1]
        self.ways[key] = self.last = way
        self.learned += 1
        layer = self.layer()
        if self.learned == MANY and layer is not None and type(layer) not in _said_of:
            _said_of.add(type(layer))
            _logger.info(
                "%s was learned %d times, in each of which its forward ran again: a number among its arguments, a flag "
                "or the kind of an input is another each time. Pass a number that changes as a tensor.",
                type(layer).__name__,
                MANY,
            )

    def forget(self, key: InputKind) -> None:
        """A kind of input has taken another way than the learned one: it is learned anew."""
        self._sized = None
        if len(self.strange) >= MOST_SIZES:
            self.strange.clear()
        if self.ways.pop(key, None) is not None:
            self.failures[key] += 1
        else:
            self.strange.add((key[0], _evenness(key[1])))
        self.strange.add(key)

    @property
    def proven(self) -> bool:
        """Whether the way that was learned last is recomputed as it was proven to be."""
        return self.last is not None and self.last.proven

    def held(self) -> Iterator[tuple[int, Policy]]:
        """The bytes and the policy of each storage that the last learned forward has saved, and not dropped."""
        way, seen = self.last, set[int]()
        if way is None:
            return
        for saved, policy in zip(way.trace.saved, way.policies, strict=True):
            if saved.movable and saved.storage is not None and saved.storage not in seen and policy is not RECOMPUTE:
                seen.add(saved.storage)
                yield way.trace.storages[saved.storage].nbytes, policy

    @property
    def small_bytes(self) -> int:
        """Bytes of the saved tensors too small to be offloaded that the last learned forward has dropped."""
        return 0 if self.last is None else self.last.small_bytes

    def by_name(self) -> dict[str, str]:
        return {} if self.last is None else self.last.by_name(self)

    def share(self, memories: Collection[Hashable]) -> None:
        """Keep inputs that are in these memories on the device in any case, and count none of them."""
        inputs, before = zip(self.given, self.costs, strict=False), self.shared_bytes
        self.shared_bytes = {one: cost.nbytes or before.get(one, 0) for one, cost in inputs if one in memories}
        self.costs = without_shared(self.costs, self.given, memories)
        self.keep_uncounted(self.costs)
        self._settle_ways()

    def measure_again(self) -> None:
        """Follow the patterns again in place of a plan: what is recomputed as a whole goes more ways."""
        self.strange.clear()
        self.follow_patterns()
        self._settle_ways()

    def _settle_ways(self) -> None:
        for way in self.ways.values():
            way.captured = None
            way.settle(self)

    def follows(self, numbered: LayerPolicy | None, regions: Sequence[RegionProfile]) -> LayerPolicies | None:
        """Follow what a plan says of the layer; the policies of what the layer saves, if not all has the same."""
        if numbered is None:
            return None
        if numbered != self.numbered:
            self.follow(numbered, regions)
            self._settle_ways()
        return self

    def follow_plan(self) -> None:
        """Follow what was planned; the first forward was learned, or one with inputs of another kind."""
        if self.planned is None or self.numbered is not None:
            return
        numbered, regions = self.planned
        names, found = ([region.name for region in one] for one in (regions, self.costs))
        if 2 * len({*names} & {*found}) < len({*names} | {*found}):
            odd = next((pair for pair in zip_longest(names, found) if pair[0] != pair[1]), None)
            raise ValueError(
                f"the plan must be for these layers, but it has {len(names)} regions and the layer {len(found)}; the "
                f"first that differ are {odd}. Profile the layers again, as they are trained, and plan with that."
            )
        self.follows(numbered, regions)


def alike(policies: list[LayerPolicies]) -> list[LayerPolicies]:
    """Let layers of one class tell each other which inputs go another way: the next ones learn it at once."""
    strange = defaultdict[type, set[InputKind]](set)
    for one in policies:
        one.strange = strange[type(one.layer())]
    return policies


def _evenness(sizes: Sizes) -> Sizes:
    """Of each side, what kernels ask of one: attention pads a mask whose rows do not begin at multiples of 16 bytes.

    The ragged side of a nested tensor is no number.
    """
    return tuple(math.gcd(side, 8) for side in sizes if isinstance(side, int))


def check_patterns(layers: Iterable[LayerPolicies | None]) -> None:
    """Warn of patterns that match no region of any layer, once the layers have run; refuse them if none does."""
    known = [one for one in layers if one is not None and one.last is not None]
    ways = itertools.chain.from_iterable(one.ways.values() for one in known)
    names = dict.fromkeys([*itertools.chain.from_iterable(way.names.values() for way in ways), SOURCE])
    patterns = dict.fromkeys(itertools.chain.from_iterable(one.patterns for one in known))
    unmatched = [pattern for pattern in patterns if not any(matches(name, pattern) for name in names)]
    if unmatched:
        line = (
            f"policies has patterns that match no region: {', '.join(map(repr, unmatched))}. The layers have these "
            f"regions: {', '.join(map(repr, names))}. Write one of these names, or a pattern of them such as '*mm*'."
        )
        if len(unmatched) == len(patterns):
            raise ValueError(line)
        warn_caller(line)
