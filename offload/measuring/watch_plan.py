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
from offload.observe.memory import memory_peak
from offload.planning.plan import Plan

TOLERANCE = 0.02
"""By what part of the budget a peak may be above it without a warning."""


class WatchedLayers(HookedLayers):
    """Layers whose first one tells when a microbatch begins, and the last one when its backward ends."""

    def __init__(self, layers: list[nn.Module], context: OffloadContext) -> None:
        super().__init__(layers, context)
        self._peak = memory_peak(context.backend.device)
        self._ends = Attachment([layers[0], layers[-1]], [_MicrobatchBegins(self), _MicrobatchEnds(self)])

    def remove(self) -> None:
        super().remove()
        self._ends.remove()
        self._peak.stop()

    def begin_microbatch(self, inputs: list[torch.Tensor]) -> None:
        """A microbatch is about to enter the first layer, which is given these."""

    def end_backward(self) -> None:
        """A microbatch's backward has ended."""

    def _count_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Count what the step has allocated for the first layer, as an embedding's output: leaves outlive a step."""
        device = self.context.backend.device
        made = (one for one in inputs if one.device == device and not (one.is_leaf and one.requires_grad))
        storages = [storage for tensor in made if (storage := plain_memory(tensor)) is not None]
        self._peak.count({address_of(storage): storage for storage in storages}.values())


class _MicrobatchBegins(LayerListener):
    """Before anything else happens in the first layer."""

    turn = Turn.WEIGHTS

    def __init__(self, watched: WatchedLayers) -> None:
        self._watched = watched

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        if not self._watched.context.has_nothing_to_do():
            self._watched.begin_microbatch(list(tensors_in(inputs)))


class _MicrobatchEnds(LayerListener):
    """Once the backward that has come to the last layer is over."""

    turn = Turn.MEASURING

    def __init__(self, watched: WatchedLayers) -> None:
        self._watched = watched

    def forward_returned(self, call: LayerCall, output: object) -> None:
        if not call.recomputes and torch.is_grad_enabled():
            before_backward(tensors_in(output), call.first_node, self._begin)

    def _begin(self, _: object) -> None:
        when_backward_ends(self._watched.end_backward)


class WatchedPlan(WatchedLayers):
    """Layers that follow a given plan on the CPU: of the first microbatch that learns nothing, a broken budget is said.

    An accelerator's allocator tells the peak to whoever asks; the CPU's peak is counted by nobody else.
    """

    def __init__(self, layers: list[nn.Module], context: OffloadContext, plan: Plan) -> None:
        super().__init__(layers, context)
        self._plan = plan
        self._learned = 0
        """How many forwards were learned when the microbatch began."""
        self._peak_bytes: int | None = None
        """The most memory in a microbatch that learned nothing; ``None`` before its backward has ended."""

    def begin_microbatch(self, inputs: list[torch.Tensor]) -> None:
        self._peak.stop()
        if self._peak_bytes is not None:
            self._ends.remove()
            self._say(self._peak_bytes)
            return
        self._learned = self._count_learned()
        if self._learned or not any(self.context.policies):
            self._peak.start()
            self._count_inputs(inputs)

    def end_backward(self) -> None:
        if (self._learned or not any(self.context.policies)) and self._learned == self._count_learned():
            self._peak_bytes = self._peak.most_bytes()
        self._peak.stop()

    def _count_learned(self) -> int:
        return sum(one.learned for one in self.context.policies if one is not None)

    def _say(self, peak_bytes: int) -> None:
        budget = self._plan.memory_budget
        if peak_bytes > (1 + TOLERANCE) * max(budget, self._plan.peak_bytes):  # a plan made by hand may predict more
            warn_caller(
                f"memory_budget = {format_bytes(budget)} was not met by the plan, which predicted "
                f"{format_bytes(self._plan.peak_bytes)}: a microbatch needed {format_bytes(peak_bytes)}; plan with a "
                "smaller memory_budget, or give memory_budget to offload_layers, which corrects its plans."
            )
