"""Layers that run compiled and follow a plan: each at the level that the plan has for it.

In the first microbatch each layer is tried at each level. A layer that does not compile, or not as one graph, has the
policies of layers that are not compiled from then on, and the log says so once.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn

from offload.activations.what_moves import Rules
from offload.base.checks import parse_bytes
from offload.base.layer_events import Attachment, LayerCall, Turn
from offload.base.torch_private import compiler_of, is_compiled
from offload.measuring.follow_plan import FollowPlan
from offload.measuring.layer_times import ForwardBegins
from offload.measuring.memory_left import MemoryLeft
from offload.measuring.profile_layers import learning_policies, learning_schedule
from offload.measuring.try_levels import NotCompiledError, try_levels
from offload.recompute.compiled_levels import CompiledForward, CompiledPolicies, Level, Runs, parse_compile
from offload.recompute.layer_inputs import LayerInputs
from offload.recompute.layer_policies import LayerPolicies

_logger = logging.getLogger(__name__)

MOST_TIMED = 4  # so many layers of a kind are timed at each level; others are only proven


class FollowCompiledPlan(FollowPlan):
    """Layers of which some run compiled, and that follow a plan as soon as there is one; undone by ``remove()``."""

    def __init__(
        self,
        layers: list[nn.Module],
        memory_budget: int | str | MemoryLeft,
        options: Mapping[str, Any] | None,  # of torch.compile for all layers; ``None``: each as it is compiled
        **others: Any,
    ) -> None:
        self._forwards: list[CompiledForward | None] = []  # of each layer, what runs it at a level, if it has levels
        self._whole: list[CompiledForward] = []  # what runs layers that have no levels, and are compiled as a whole
        self._logged: set[str] = set()
        self._seconds: defaultdict[Hashable, list[Mapping[Level, float]]] = defaultdict(list)
        """What layers of each kind that were timed take at each level."""
        runs, asked = Runs(), options is not None
        try:
            for layer in layers:
                compiles = compiler_of(layer) if options is None else partial(torch.compile, **options)
                forward = None if compiles is None else CompiledForward(layer, runs, compiles, asked=asked)
                self._forwards.append(forward)
            super().__init__(layers, memory_budget, **others)
        except BaseException:
            self._put_back()
            raise
        self._rules = Rules(self._backend.device, parse_bytes(others["min_bytes"], "min_bytes"))
        tries = [_TryLevels(partial(self._try_levels, number)) for number in range(len(layers))]
        self._tries = Attachment(layers, tries, self)

    def remove(self) -> None:
        super().remove()
        self._tries.remove()
        self._put_back()

    @property
    def policies(self) -> Sequence[LayerPolicies | None]:
        pairs = zip(self._policies, self.context.policies, strict=True)
        return [one if isinstance(one, CompiledPolicies) and one.numbered else other for one, other in pairs]

    def _try_levels(self, number: int, call: LayerCall, inputs: Any) -> None:
        """A layer's forward begins: try the layer at each level, unless that has been done."""
        if call.recomputes or self.context.has_nothing_to_do():
            return
        policies = self._policies[number]
        layer = policies.layer()
        if not isinstance(policies, CompiledPolicies) or layer is None or not policies.wants_trial(inputs):
            return
        timed = self._seconds[_kind_of(layer, inputs)]
        known = None
        if len(timed) >= MOST_TIMED:
            known = {level: fmean(one.get(level, 0.0) for one in timed) for level in Level}
        try:
            if call.in_checkpoint:
                raise NotCompiledError("the program checkpoints it")
            found = try_levels(layer, policies.forward, inputs, self._rules, self._backend, known)
        except NotCompiledError as error:
            self._give_up(number, layer, policies.forward, error)
            return
        if known is None:
            timed.append(found.seconds)
        policies.learn(inputs, found.costs)
        for line in found.said:
            self._log(logging.INFO, number, f"({type(layer).__name__}), compiled, {line}")

    def _give_up(self, number: int, layer: nn.Module, forward: CompiledForward, error: NotCompiledError) -> None:
        """A layer has no levels: it has the policies of other layers, and is compiled as a whole if it can be."""
        self._forwards[number] = None
        if forward.asked and not error.compiles:
            forward.remove()
            instead = "it is not compiled"
        else:
            # It stands in place of forward. Hooks inside of the compiled call could not change the dispatch modes.
            forward.level = Level.ALL
            self._whole.append(forward)
            instead = "it is recomputed as a whole"
        level = logging.WARNING if forward.asked else logging.INFO
        self._log(level, number, f"({type(layer).__name__}) has no compiled regions, so that {instead}: {error}")
        self._policies[number] = learned = learning_policies([layer])[0]
        learned.is_short = self._is_short
        self.context.set_policies(number, learned)

    def _log(self, level: int, number: int, line: str) -> None:
        """Say of the first layer what others may share."""
        if line not in self._logged:
            self._logged.add(line)
            _logger.log(level, "layer %d %s", number, line)

    def _learning_policies(self) -> list[LayerPolicies]:
        pairs = zip(self._layers, self._forwards, strict=True)
        return [
            learning_policies([layer])[0] if forward is None else CompiledPolicies(layer, forward)
            for layer, forward in pairs
        ]

    def _recompute_all(self) -> None:
        followed = [None if isinstance(one, CompiledPolicies) else one for one in self._policies]
        self.context.follow(learning_schedule(len(self._layers)), followed)

    def _put_back(self) -> None:
        for forward in (*self._forwards, *self._whole):
            if forward is not None:
                forward.remove()


class _TryLevels(ForwardBegins):
    """Lets a layer be tried before the hooks see what autograd saves in its forward."""

    turn = Turn.COMPILING


def _kind_of(layer: nn.Module, inputs: Any) -> Hashable:
    """What tells layers apart that take different times."""
    shapes = tuple((parameter.shape, parameter.dtype, parameter.requires_grad) for parameter in layer.parameters())
    return type(layer), shapes, tuple(LayerInputs(*inputs).sizes)


def follow_plan(
    layers: list[nn.Module], memory_budget: int | str | MemoryLeft, compiles: object = False, **others: Any
) -> FollowPlan:
    """Layers that follow a plan, to be compiled if ``compiles`` or compiled by the program, or not at all."""
    options = parse_compile(compiles)
    if options is None and not any(map(is_compiled, layers)):
        return FollowPlan(layers, memory_budget, **others)
    return FollowCompiledPlan(layers, memory_budget, options, **others)
