"""Tell when a microbatch enters the first layer and when its backward ends, and what its step has allocated by then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from offload.activations.context import OffloadContext
from offload.base.layer_events import LayerCall, LayerListener, Turn
from offload.base.tensors import plain_memory, tensors_in
from offload.base.torch_private import address_of, before_backward, when_backward_ends


def allocated_for(inputs: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """What the step has allocated for the first layer's inputs, as an embedding's output: leaves outlive a step."""
    made = (tensor for tensor in inputs if tensor.device == device and not (tensor.is_leaf and tensor.requires_grad))
    storages = [storage for tensor in made if (storage := plain_memory(tensor)) is not None]
    return list({address_of(storage): storage for storage in storages}.values())


class Planned(Protocol):
    """What the listeners below tell."""

    context: OffloadContext

    def begin_microbatch(self, inputs: Sequence[torch.Tensor]) -> None:
        """A microbatch is about to enter the first layer, which is given these."""

    def end_backward(self) -> None:
        """A microbatch's backward has ended."""


class MicrobatchBegins(LayerListener):
    """Tells when a microbatch enters the first layer, before anything else happens there."""

    turn = Turn.WEIGHTS

    def __init__(self, planned: Planned) -> None:
        self._planned = planned

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        if not self._planned.context.has_nothing_to_do():
            self._planned.begin_microbatch(list(tensors_in(inputs)))


class MicrobatchEnds(LayerListener):
    """Tells when the backward that has come to the last layer is over."""

    turn = Turn.MEASURING

    def __init__(self, planned: Planned) -> None:
        self._planned = planned

    def forward_returned(self, call: LayerCall, output: object) -> None:
        if not call.recomputes and torch.is_grad_enabled():
            before_backward(tensors_in(output), call.first_node, self._begin)

    def _begin(self, _: object) -> None:
        when_backward_ends(self._planned.end_backward)
