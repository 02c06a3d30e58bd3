"""Offload the layers of a model whose forward cannot be edited, through module hooks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from offload.activations.context import OffloadContext
from offload.activations.what_moves import exclude_parameters
from offload.base.layer_events import Attachment, Handle, LayerCall, LayerListener, Turn
from offload.recompute.layer_policies import LayerPolicies


class HookedLayers(Handle):
    """An offload context driven by module hooks on the layers, until :meth:`remove`.

    Where there is nothing to do in a forward, neither the context is told of it, nor listeners ``beside``, which the
    caller attaches to the layers.
    """

    def __init__(self, layers: list[nn.Module], context: OffloadContext, *beside: Sequence[LayerListener]) -> None:
        self.names = " and ".join(sorted({type(layer).__name__ for layer in layers}))
        self.context = context
        exclude_parameters(layers)
        listeners = [OffloadListener(context, number) for number in range(len(layers))]
        for number, each in enumerate(zip(listeners, *beside, strict=True)):
            passes = partial(self.passes_by, number)
            for listener in each:
                listener.passes = passes
        self._attachment = Attachment(layers, listeners, self)

    def remove(self) -> None:
        self.context.abort()  # an interrupt in a layer has kept it from leaving the context
        self._attachment.remove()

    def passes_by(self, layer: int) -> bool:
        """Whether there is nothing to do in a layer's forward, which begins."""
        return self.context.passes_by(layer)

    @property
    def policies(self) -> Sequence[LayerPolicies | None]:
        """What happens to the regions of each layer; where there is none, the same to all."""
        return self.context.policies

    @property
    def active(self) -> bool:
        return bool(self._attachment)


class OffloadListener(LayerListener):
    """Enters the context where the layer's forward begins, leaves it where it ends, and marks its output."""

    turn = Turn.ACTIVATIONS

    def __init__(self, context: OffloadContext, number: int) -> None:
        self._context = context
        self._number = number

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        context = self._context
        if call.recomputes or context.has_nothing_to_do():
            return
        context.check_thread(self._number)
        call.offloads = True
        context.abort()  # a forward that an interrupt has cut off, of this layer or another
        context.begin_layer(self._number, inputs)

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        if call.offloads and self._context.in_this_thread:
            self._context.end_layer(failed=failed)

    def forward_returned(self, call: LayerCall, output: object) -> None:
        if call.offloads and self._context.in_this_thread:
            self._context.mark(output)
