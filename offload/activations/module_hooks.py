"""Offload the layers of a model whose forward cannot be edited, through module hooks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import nn

from offload.activations.context import OffloadContext
from offload.activations.what_moves import exclude_parameters
from offload.base.layer_events import Attachment, Handle, LayerCall, LayerListener, Turn
from offload.recompute.layer_policies import LayerPolicies


class HookedLayers(Handle):
    """An offload context driven by module hooks on the layers, until :meth:`remove`.

    Layers in whose forward there is nothing to do may have no hooks, neither for the context nor for listeners
    ``beside`` it, which the caller attaches to the layers.
    """

    def __init__(self, layers: list[nn.Module], context: OffloadContext, *beside: Sequence[LayerListener]) -> None:
        self.names = " and ".join(sorted({type(layer).__name__ for layer in layers}))
        self.context = context
        exclude_parameters(layers)
        listeners = [OffloadListener(context, number) for number in range(len(layers))]
        for listener in chain(listeners, *beside):
            listener.rests_by = context
        self._to_rest: list[int] = []  # the layers that are to have no hooks
        self._resting = 0  # how many have none
        self._attachment = Attachment(layers, listeners, self)

    def remove(self) -> None:
        self.context.abort()  # an interrupt in a layer has kept it from leaving the context
        self._attachment.remove()

    def begin_round(self, first: int, call: LayerCall) -> None:
        """A round begins with this layer. Behind it, kept layers have no hooks."""
        self.rest(behind=self.context.model_layers if call.from_compiled else first)

    def rest(self, behind: int) -> int:
        """Have no hooks on kept layers ``behind`` this one, and hooks on all others; returns how many have none."""
        asked = [layer for layer in self.context.kept_layers() if layer > behind]
        if asked != self._to_rest:
            self._to_rest, self._resting = asked, self._attachment.rest(asked)
        return self._resting

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
        begins_round = context.begins_round(self._number)
        context.begin_layer(self._number, inputs)
        if begins_round and isinstance(self.handle, HookedLayers):
            self.handle.begin_round(self._number, call)

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        if call.offloads and self._context.in_this_thread:
            self._context.end_layer(failed=failed)

    def forward_returned(self, call: LayerCall, output: object) -> None:
        if call.offloads and self._context.in_this_thread:
            self._context.mark(output)
