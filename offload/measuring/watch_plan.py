"""Watch the microbatches of layers that follow a plan: when each begins, when its backward ends, and its peak."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from offload.activations.context import OffloadContext
from offload.activations.module_hooks import HookedLayers
from offload.base.checks import format_bytes, warn_caller
from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn
from offload.base.tensors import plain_memory, tensors_in
from offload.base.torch_private import address_of, before_backward, when_backward_ends
from offload.measuring.layer_times import LayerTimes
from offload.observe.memory import memory_peak
from offload.planning.plan import Plan

TOLERANCE = 0.02
"""By what part of the budget a peak may be above it without a warning."""


class WatchedLayers(HookedLayers):
    """Layers that tell when a microbatch begins and when its backward ends, whichever of them it skips."""

    def __init__(self, layers: list[nn.Module], context: OffloadContext) -> None:
        super().__init__(layers, context)
        self._peak = memory_peak(context.backend.device)
        self.awaits_end = False
        """Whether no layer of the microbatch has a hook yet that tells of the end of its backward."""
        self._begins = Attachment(layers, [_MicrobatchBegins(self, number) for number in range(len(layers))])
        self._ends = Attachment(layers, [_MicrobatchEnds(self) for _ in layers])

    def remove(self) -> None:
        super().remove()
        self._stop_watching()

    def _stop_watching(self) -> None:
        self._begins.remove()
        self._ends.remove()
        self._peak.stop()

    def begin_microbatch(self, inputs: list[torch.Tensor]) -> None:
        """A microbatch is about to enter the first layer that it runs, which is given these."""

    def end_backward(self) -> None:
        """A microbatch's backward has ended."""

    def _count_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Count what the step has allocated for the first layer, as an embedding's output: leaves outlive a step."""
        device = self.context.backend.device
        made = (one for one in inputs if one.device == device and not (one.is_leaf and one.requires_grad))
        storages = [storage for tensor in made if (storage := plain_memory(tensor)) is not None]
        self._peak.count({address_of(storage): storage for storage in storages}.values())


class _MicrobatchBegins(LayerListener):
    """Before anything else happens in the first layer that runs."""

    turn = Turn.WEIGHTS

    def __init__(self, watched: WatchedLayers, number: int) -> None:
        self._watched = watched
        self._number = number

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        watched = self._watched
        if watched.context.begins_round(self._number) and not watched.context.has_nothing_to_do():
            watched.awaits_end = True
            watched.begin_microbatch(list(tensors_in(inputs)))


class _MicrobatchEnds(LayerListener):
    """Once the backward is over that has come to the first layer whose output needs one."""

    turn = Turn.MEASURING

    def __init__(self, watched: WatchedLayers) -> None:
        self._watched = watched

    def forward_returned(self, call: LayerCall, output: object) -> None:
        watched = self._watched
        if watched.awaits_end and not call.recomputes and torch.is_grad_enabled():
            watched.awaits_end = not before_backward(tensors_in(output), call.first_node, self._begin)

    def _begin(self, _: object) -> None:
        when_backward_ends(self._watched.end_backward)


class WatchedPlan(WatchedLayers):
    """Layers that follow a given plan on the CPU: a budget that it breaks is said.

    The first microbatch counts that is not the very first, and learns nothing.

    An accelerator's allocator tells the peak to whoever asks; the CPU's peak is counted by nobody else.
    """

    def __init__(self, layers: list[nn.Module], context: OffloadContext, plan: Plan) -> None:
        self._times = LayerTimes(layers, context.backend)  # first, as in :class:`FollowPlan`
        super().__init__(layers, context)
        self._plan = plan
        self._learned = 0
        """How many forwards were learned when the microbatch began."""
        self._is_first = True
        """Whether nothing was counted before the microbatch, as what is saved before the first layer."""
        self._learning_bytes = 0
        """The most memory in a microbatch that learned something, without what is saved before the first layer."""
        self._peak_bytes: int | None = None
        """The most memory in a microbatch that learned nothing; ``None`` before its backward has ended."""

    def _stop_watching(self) -> None:
        super()._stop_watching()
        self._times.remove()

    def begin_microbatch(self, inputs: list[torch.Tensor]) -> None:
        if self._peak_bytes is not None:
            self._stop_watching()
            self._say(self._peak_bytes)
            return
        self._learned, self._is_first = self._count_learned(), not self._times.memory
        self._times.start(self._peak)
        self._times.forwards = 0
        self._count_inputs(inputs)

    def end_backward(self) -> None:
        before_bytes, most_bytes = self._times.before_bytes(), self._times.most_bytes()
        if self._is_first or self._learned != self._count_learned():
            self._learning_bytes = max(self._learning_bytes, most_bytes)
        else:
            self._peak_bytes = before_bytes + most_bytes
            self._learning_bytes += before_bytes

    def _count_learned(self) -> int:
        return sum(one.learned for one in self.context.policies if one is not None)

    def _say(self, peak_bytes: int) -> None:
        budget = self._plan.memory_budget
        expected = max(budget, self._plan.peak_bytes)  # a plan made by hand may predict more
        if peak_bytes <= (1 + TOLERANCE) * expected < self._learning_bytes:
            say_measured(expected, self._learning_bytes)
        if peak_bytes > (1 + TOLERANCE) * expected:
            warn_caller(
                f"memory_budget = {format_bytes(budget)} was not met by the plan, which predicted "
                f"{format_bytes(self._plan.peak_bytes)}: a microbatch needed {format_bytes(peak_bytes)}; plan with a "
                "smaller memory_budget, or give memory_budget to offload_layers, which corrects its plans."
            )


def say_measured(budget: int, needed_bytes: int) -> None:
    """Say that a budget is kept to, but not while layers were measured."""
    warn_caller(
        f"memory_budget = {format_bytes(budget)} is kept to from here on, but not while the layers were learned: a "
        f"microbatch needed up to {format_bytes(needed_bytes)}, as each layer ran twice, and what both runs saved was "
        "compared. Give more if the first steps do not fit."
    )
