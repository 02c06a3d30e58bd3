"""Layers that run compiled and follow a plan: each at the level that the plan has for it.

In the first microbatch each layer is tried at each level: gradients are proven, what is saved is counted, and times are
taken. A layer that does not compile, or not as one graph, has the policies of layers that are not compiled from then
on, and the log says so once.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.activations.what_moves import Rules
from offload.base.checks import parse_bytes
from offload.base.layer_events import Attachment, ForwardBegins, LayerCall, Turn
from offload.base.torch_private import (
    compiler_of,
    is_compiled,
)
from offload.measuring.follow_plan import FollowPlan
from offload.measuring.memory_left import MemoryLeft
from offload.measuring.profile_layers import learning_policies
from offload.measuring.try_levels import TIMES, Levels, NotCompiledError, ToTry, costs_of_levels, try_levels
from offload.observe.compiled_memory import count_compiled
from offload.recompute.compiled_levels import CompiledForward, CompiledPolicies, Level, Runs, parse_compile
from offload.recompute.layer_inputs import LayerInputs
from offload.recompute.layer_policies import LayerPolicies

_logger = logging.getLogger(__name__)

MOST_TIMED = 4  # so many layers of a kind are timed at each level, of which the shortest counts for all


class FollowCompiledPlan(FollowPlan):
    """Layers of which some run compiled, and that follow a plan as soon as there is one; undone by ``remove()``."""

    def __init__(
        self,
        layers: list[nn.Module],
        memory_budget: int | str | MemoryLeft,
        options: Mapping[str, Any] | None,  # of torch.compile for all layers; ``None``: each as it is compiled
        **others: Any,
    ) -> None:
        self._forwards: list[CompiledForward | None] = []  # of each layer, what runs it compiled, if anything does
        self._logged: set[str] = set()
        self._tried: defaultdict[Hashable, list[tuple[CompiledPolicies, Levels]]] = defaultdict(list)
        """Layers of each kind, and what was found."""
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
        for forward in self._forwards if self._backend.device.type == "cpu" else ():
            if forward is not None:
                forward.counted = count_compiled
        self._rules = Rules(self._backend.device, parse_bytes(others["min_bytes"], "min_bytes"))
        # Before the hooks see what autograd saves in the layer's forward.
        tries = [ForwardBegins(partial(self._try_levels, number), Turn.COMPILING) for number in range(len(layers))]
        for one in tries:
            one.rests_by = self.context  # what follows a plan is not tried
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
        alike = self._tried[_kind_of(layer, inputs)]
        times = TIMES if len(alike) < MOST_TIMED else 0
        counts = self._peak.counts  # on the CPU not before the first layer, nor in a model that is compiled as a whole
        try:
            if call.in_checkpoint:
                raise NotCompiledError("the program checkpoints it")
            if not counts:
                self._peak.start()
            tried = ToTry(layer, policies.forward, inputs, self._rules, self._backend, self._peak)
            found = try_levels(tried, times)
        except NotCompiledError as error:
            self._give_up(number, layer, policies.forward, error)
            return
        finally:
            if not counts:
                self._peak.stop()
        alike.append((policies, found))
        policies.learn(inputs, found.input_bytes)
        # By times of its own, a layer that was lucky would be the one that a plan recomputes.
        seconds = _shortest(one.seconds for _, one in alike)
        host_s = _shortest(one.host_s for _, one in alike)
        kept_s = host_s.get(Level.ALL, 0.0)
        for one, levels in alike:
            one.costs = costs_of_levels(seconds, levels.saved, levels.needed)
            one.host_s = kept_s, max(0.0, host_s.get(Level.NOTHING, 0.0) - kept_s)
        for line in found.said:
            self._log(logging.INFO, number, f"({type(layer).__name__}), compiled, {line}")

    def _give_up(self, number: int, layer: nn.Module, forward: CompiledForward, error: NotCompiledError) -> None:
        """A layer has no levels: it has the policies of other layers, and is compiled as a whole if it can be."""
        if forward.asked and not error.compiles:
            forward.remove()
            instead = "it is not compiled"
        else:
            # It stands in place of forward. Hooks inside of the compiled call could not change the dispatch modes.
            forward.level = Level.ALL
            instead = "it is recomputed as a whole"
        level = logging.WARNING if forward.asked else logging.INFO
        self._log(level, number, f"({type(layer).__name__}) has no compiled regions, so that {instead}: {error}")
        self._policies[number] = learned = learning_policies([layer])[0]
        learned.ask(self._is_short)
        self.context.policies[number] = learned  # from the layer's next forward on, also in a round that has begun

    def _log(self, level: int, number: int, line: str) -> None:
        """Say of the first layer what others may share."""
        if line not in self._logged:
            self._logged.add(line)
            _logger.log(level, "layer %d %s", number, line)

    def _learning_policies(self, layers: list[nn.Module]) -> list[LayerPolicies]:
        pairs = zip(layers, self._forwards, strict=True)
        return [
            learning_policies([layer])[0] if forward is None else CompiledPolicies(layer, forward)
            for layer, forward in pairs
        ]

    def _put_back(self) -> None:
        for forward in self._forwards:
            if forward is not None:
                forward.remove()


def _shortest(each: Iterable[Mapping[Level, float]]) -> dict[Level, float]:
    found: dict[Level, float] = {}
    for level, took_s in (pair for one in each for pair in one.items()):
        found[level] = min(took_s, found.get(level, math.inf))
    return found


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
