"""A parameter of the program in pinned host memory, and its stand-in on the device.

A node of the graph makes the stand-in from the parameter, so that autograd finds the parameter from the loss. Once a
backward has summed the stand-in's gradient, the node takes the gradient and passes nothing on: its copy to the host
runs beside backward. For a hook on the parameter and for ``torch.autograd.grad`` the node waits for a copy and passes
it on. So hooks, ``backward(inputs=...)`` and uses outside the layer work as without streaming.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.base.tensors import own_storage
from offload.base.torch_private import has_gradient_hooks, is_captured, run_first
from offload.optimizer.proof import gradient_dtype


class HostParameter:
    """A parameter of the program, whose data moves into ``flat``; all layers that hold the parameter share this."""

    def __init__(self, parameter: nn.Parameter, name: str, flat: torch.Tensor) -> None:
        self.parameter = parameter
        self.name = name  # for messages: layer 3's up.weight
        self.flat = flat  # pinned, uint8, of the aligned size
        self.size = parameter.size()
        # The parameter's order of dimensions, without gaps.
        self.stride = torch.empty_like(parameter, device="meta").stride()
        self.accumulator: Any = None  # autograd's node that adds to parameter.grad
        self.refusals: list[RemovableHandle] = []  # of refuse_outside()
        # Whether one backward may give several gradients: several layers hold it, or the loss uses it by itself.
        self.shared = False
        self.held = False  # whether parameter.grad is kept here: from the first gradient of a backward to its end
        self.total: torch.Tensor | None = None  # while held: what gradients are added to
        self.before: torch.Tensor | None = None  # while held: what the total is added to at the end
        # While gradients are averaged over ranks: whether the next one is an average that contains the total.
        self.replaces = False
        gradient, parameter.grad = parameter.grad, None
        data = self.over(own_storage(flat[: parameter.nbytes]), parameter.dtype)
        data.copy_(parameter.data)
        parameter.data = data
        self.address = data.data_ptr()
        parameter.grad = None if gradient is None else gradient.to("cpu")

    def over(self, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the parameter's geometry over the first bytes of ``flat``, with a version of its own."""
        view = torch.empty(0, dtype=dtype, device=flat.device)
        return view.set_(flat.untyped_storage(), flat.storage_offset() // dtype.itemsize, self.size, self.stride)

    @property
    def gradient_dtype(self) -> torch.dtype:
        return gradient_dtype(self.parameter)

    def hold_gradient(self) -> None:
        """Keep ``parameter.grad`` here from the first gradient of a backward on: copies and the worker write to it."""
        # Autograd finds ``None`` there, so that gradients from outside the layers get a tensor of their own.
        if self.held:
            return
        if self.shared:
            # Autograd sums the gradients of one backward before it adds the sum to p.grad: the same rounding.
            self.before = self.parameter.grad
        else:
            self.total = self.parameter.grad
        self.replaces = False
        self.held = True
        self.parameter.grad = None  # last: an interrupt before leaves the gradient where it is

    def refuse_outside(self) -> None:
        """Raise for gradients from outside the layer, until :attr:`refusals` are removed."""
        # Weak: a node holds its hooks, and a parameter on the host its node. Python does not collect such a circle.
        this = weakref.ref(self)

        def see(gradients: tuple[torch.Tensor | None]) -> None:
            host = this()
            if host is not None and gradients[0] is not None:  # None: the layer's node has taken the gradient
                raise host.outside_error()

        if self.accumulator is not None:
            self.refusals.append(self.accumulator.register_prehook(see))

    def outside_error(self) -> RuntimeError:
        """The error for a gradient that would not be averaged, or would arrive after the parameter's step."""
        return RuntimeError(
            f"{self.name} must get its gradient from its layer alone if process_group is given or it is stepped in "
            "backward, but it has a hook, or the loss uses it by itself; leave its layer out, or do without."
        )

    def second_gradient_error(self) -> NotImplementedError:
        """The error for a second gradient before the first one has left the layer."""
        return NotImplementedError(
            f"{self.name} must get one gradient while backward is in its layer, but reentrant checkpoints gave "
            "several; write checkpoint(..., use_reentrant=False)."
        )

    def give_back_gradient(self) -> None:
        """Set ``parameter.grad`` to the sum, once every gradient has arrived."""
        # Autograd must not add to ``parameter.grad`` meanwhile: backward has ended, or ``refuse_outside`` was called.
        if not self.held:
            return
        total, outside = self.total, self.parameter.grad
        if outside is not None and outside is not total:
            self.shared = True  # from the next backward on, its sum is made before it is added
            total = outside if total is None else total.add_(outside)
        if self.before is not None:
            total = self.before if total is None else self.before.add_(total)
        self.total, self.before = total, None  # an interrupt from here on adds nothing twice
        self.parameter.grad = total
        self.total, self.held = None, False

    def drop_gradient(self) -> None:
        """The parameter has been stepped with the gradient that is held, which is ``None`` then."""
        self.total = self.before = None
        self.held = False


Gradients = dict[HostParameter, torch.Tensor]


class StandIn:
    """A parameter over a device slot: a frozen one and a trained one, for the program may freeze its parameter.

    A graph keeps the one that it was made with.
    """

    shown: nn.Parameter  # what the modules hold, or last held
    version: int  # of that, when it was swapped in

    def __init__(self, of: HostParameter, places: list[tuple[Any, Any]], gradients: Gradients) -> None:
        self.of = of
        self.places = places  # containers of the layer's modules, each with the key under which it holds the parameter
        self._gradients = gradients  # the layer's
        self._swapped_in = False

    def bind(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self._frozen = self._trained = self.shown = self.new()
        self.version = self.shown._version

    @property
    def weights(self) -> torch.Tensor:
        """The device memory, with a version of its own."""
        return self.of.over(self._flat, self.of.parameter.dtype)

    def new(self) -> nn.Parameter:
        """A frozen parameter over the device memory."""
        return nn.Parameter(self.weights, requires_grad=False)

    def renew(self) -> None:
        """Make the trained one anew; autograd takes its gradient on the stream that is current now."""
        parameter = self.of.parameter
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        frozen = not parameter.requires_grad
        with torch.inference_mode(False), torch.enable_grad():
            trained: Any = _FromParameter.apply(parameter.requires_grad_(), self)
        parameter.requires_grad_(not frozen)
        run_first(trained.grad_fn)  # in the order of their making, it would run after all layers
        self.of.accumulator = trained.grad_fn.next_functions[0][0]
        self._trained = trained

    def swap_in(self) -> None:
        """Let the modules hold the stand-in: the trained one if the parameter requires a gradient now."""
        self.shown = self._trained if self.of.parameter.requires_grad else self._frozen
        self.version = self.shown._version
        for container, key in self.places:
            container[key] = self.shown
        self._swapped_in = True

    def swap_out(self) -> None:
        self._swapped_in = False
        for container, key in self.places:
            container[key] = self.of.parameter

    def take(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Take the gradient of one backward, on the device; returns what autograd adds to ``parameter.grad`` now."""
        host = self.of
        if not self._swapped_in:
            raise RuntimeError(
                f"the gradient of {host.name} must be computed in its layer's backward, but the layer is not in "
                "backward; return every tensor that carries a gradient out of the layer from its forward."
            )
        parameter = host.parameter
        if not parameter.requires_grad:
            return None  # frozen since: autograd drops it as well
        hooked = has_gradient_hooks(parameter)
        if hooked and host.refusals:
            raise host.outside_error()  # here, after the same collectives on all ranks
        if hooked or is_captured(host.accumulator):
            return gradient.to("cpu")
        if host in self._gradients:  # autograd would add each to p.grad by itself: a sum here would round otherwise
            self._gradients.clear()  # no part of a gradient is left in p.grad
            raise host.second_gradient_error()
        if gradient.layout is not torch.strided:
            raise NotImplementedError(
                f"{host.name} must have a dense gradient, got {gradient.layout}; build the embedding with "
                "sparse=False, or leave the layer out of the streamed ones."
            )
        host.hold_gradient()
        gradient = gradient.detach()  # a tensor of its own: autograd may give the same one to several parameters
        if gradient.stride() != host.stride:  # so that its copy is one transfer
            gradient = gradient.new_empty_strided(host.size, host.stride).copy_(gradient)
        self._gradients[host] = gradient
        return None


class _FromParameter(torch.autograd.Function):
    """The node between the program's parameter and its stand-in."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, stand_in: StandIn) -> nn.Parameter:
        ctx.variable = parameter  # as autograd's own nodes of leaves have it, for code that reads the graph
        ctx.stand_in = weakref.ref(stand_in)  # it holds this node by what forward returns: no circle that never dies
        ctx.set_materialize_grads(False)
        return stand_in.new()  # made here: of an input autograd would return a view

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if gradient is None:
            return None, None
        stand_in = ctx.stand_in()
        if stand_in is None:
            raise RuntimeError(
                "backward through a streamed layer must run while the layer is there, but it is gone; keep the model."
            )
        return stand_in.take(gradient), None
