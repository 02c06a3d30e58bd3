"""Watch the microbatches of layers: when each begins, when its backward ends, and its peak."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from offload.activations.context import OffloadContext
from offload.activations.module_hooks import HookedLayers
from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn
from offload.base.tensors import plain_memory, tensors_in
from offload.base.torch_private import address_of, before_backward, when_backward_ends
from offload.observe.memory import memory_peak


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
