"""What a layer's modules hold on the device instead of a user's parameter, while the layer computes.

Autograd finds the user's parameter from the loss: each stand-in is made from it by a node of the graph. When a
backward has added up a gradient, the node takes it away, so that it can travel while backward goes on, and
passes nothing on. Only where somebody needs the gradient at once (a hook on the parameter, ``torch.autograd.grad``)
it waits for a copy and passes that on. So these, ``backward(inputs=...)``, and uses outside of the layer mean what they
mean without streaming.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from offload.weights.host_parameter import HostParameter

_RUNS_FIRST = 2**64 - 1
"""The sequence number of autograd's own ``AccumulateGrad``: a node with it runs as soon as it can."""


class StandIn:
    """A parameter over a device slot; in truth one for each state that the user's can be in, frozen and trained.

    A graph that was made before the parameter was frozen keeps the one that it has.

    Args:
        of: The parameter.
        places: Containers, each with the key under which it holds the parameter.
        flat: The device memory, uint8.
    """

    def __init__(self, of: HostParameter, places: list[tuple[Any, Any]], flat: torch.Tensor) -> None:
        self.of = of
        self.places = places
        self.gradient: torch.Tensor | None = None
        """What backward has left here since the layer was entered."""
        self._flat = flat
        self._frozen = self.new()
        self._trained = self._frozen
        self._shown = self._frozen
        """What the modules hold, or last held."""
        self._version = 0
        self._swapped_in = False

    def new(self) -> nn.Parameter:
        """A parameter over the device memory, which wants no gradient."""
        return nn.Parameter(self.of.over(self._flat, self.of.parameter.dtype), requires_grad=False)

    def renew(self) -> None:
        """Make the trained one anew; autograd takes its gradient on the stream that is current now."""
        parameter = self.of.parameter
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        frozen = not parameter.requires_grad
        with torch.inference_mode(False), torch.enable_grad():
            trained: Any = _FromParameter.apply(parameter.requires_grad_(), self)
        parameter.requires_grad_(not frozen)
        # By its age its turn would come when all that is left in backward was done.
        trained.grad_fn._set_sequence_nr(_RUNS_FIRST)
        self.of.accumulator = trained.grad_fn.next_functions[0][0]
        self._trained = trained

    def swap_in(self) -> None:
        """Let the modules hold it; it wants a gradient if the parameter does by now."""
        self._shown = self._trained if self.of.parameter.requires_grad else self._frozen
        self._version = self._shown._version
        for container, key in self.places:
            container[key] = self._shown
        self._swapped_in = True

    def swap_out(self) -> None:
        """Let the modules hold the user's parameter again."""
        self._swapped_in = False
        for container, key in self.places:
            container[key] = self.of.parameter

    @property
    def written(self) -> bool:
        """Whether an in-place operation has changed it since it was swapped in."""
        return self._shown._version != self._version

    def take(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Take the gradient of one backward, on the device; returns what autograd adds to ``parameter.grad`` now.

        Raises:
            RuntimeError: The layer's weights were not there when the gradient was computed.
        """
        host = self.of
        if not self._swapped_in:
            raise RuntimeError(
                f"the gradient of {host.name} must be computed in its layer's backward, but the layer is not in "
                "backward; return every tensor that carries a gradient out of the layer from its forward."
            )
        if not host.parameter.requires_grad:
            return None  # frozen since: autograd drops it as well
        if host.has_hooks() or _is_captured(host.accumulator):
            return gradient.to("cpu")
        host.hold_gradient()
        # A tensor of its own: autograd may give the same one to several parameters.
        self.gradient = gradient.detach() if self.gradient is None else self.gradient + gradient
        return None


class _FromParameter(torch.autograd.Function):
    """The node between the user's parameter and its stand-in."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, stand_in: StandIn) -> nn.Parameter:
        ctx.variable = parameter  # as autograd's own nodes of leaves have it, for who walks the graph
        ctx.stand_in = weakref.ref(stand_in)  # it holds this node by what forward returns: no circle that never dies
        ctx.set_materialize_grads(False)
        return stand_in.new()  # made here: of an input autograd would return a view

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if gradient is None:
            return None, None
        stand_in = ctx.stand_in()
        if stand_in is None:
            raise RuntimeError("backward through a streamed layer must run while the layer is there, but it is gone.")
        return stand_in.take(gradient), None


def _is_captured(accumulator: Any) -> bool:
    """Whether ``torch.autograd.grad`` returns what arrives at this node, which is to run."""
    try:
        torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # so it says that the node's input is captured
        return True
    return False
