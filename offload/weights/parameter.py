"""One of the user's parameters: in pinned host memory, and what stands in for it on the device.

Autograd finds the user's parameter from the loss: each stand-in is made from it by a node of the graph. When a
backward has added up a gradient, the node takes it away, so that its copy can run while backward goes on, and
passes nothing on. Only where somebody needs the gradient at once (a hook on the parameter, ``torch.autograd.grad``)
it waits for a copy and passes that on. So these, ``backward(inputs=...)``, and uses outside of the layer mean what they
mean without streaming.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.base.torch_private import has_gradient_hooks, is_captured, run_first

ALIGNMENT_BYTES = 256
"""Where a parameter may start in flat memory: what CUDA's own allocator guarantees, at least."""

"""The sequence number of autograd's own ``AccumulateGrad``: a node with it runs as soon as it can."""


class HostParameter:
    """One of the user's parameters, whose data moves into ``flat``; all layers that hold the parameter share this.

    Args:
        parameter: The user's.
        name: For messages, such as ``layer 3's mlp.up.weight``.
        flat: Pinned, uint8, of the parameter's aligned size.
        grad_dtype: What ``parameter.grad`` is to be made of, if that is more precise than the parameter.
    """

    def __init__(self, parameter: nn.Parameter, name: str, flat: torch.Tensor, grad_dtype: torch.dtype | None) -> None:
        self.parameter = parameter
        self.name = name
        self.flat = flat
        self.nbytes = parameter.nbytes
        self.size = parameter.size()
        # The parameter's order of dimensions, without gaps.
        self.stride = torch.empty_like(parameter, device="meta").stride()
        self.accumulator: Any = None  # autograd's node that adds to parameter.grad
        # Whether one backward may bring several gradients: several layers use it, or the loss uses it by itself.
        self.shared = False
        self.held = False  # whether parameter.grad is kept here: from the first gradient of a backward to its end
        self.total: torch.Tensor | None = None  # what gradients are added up in, while it is held
        self.before: torch.Tensor | None = None  # what that sum is to be added to at the end, if it is one of its own
        self.refusal: RemovableHandle | None = None  # what refuses gradients that do not come from a layer
        # While parameter.grad is held: see begin_average().
        self.averaged = False
        self.used = False  # whether there is a gradient of this rank's in it
        self.replaces = False  # whether the gradient that comes next replaces the total, which it contains
        gradient, parameter.grad = parameter.grad, None
        data = self.over(own_storage(flat[: self.nbytes]), parameter.dtype)
        data.copy_(parameter.data)
        parameter.data = data
        self.address = data.data_ptr()
        if grad_dtype and parameter.is_floating_point() and parameter.element_size() < grad_dtype.itemsize:
            parameter.grad_dtype = grad_dtype
            gradient = None if gradient is None else gradient.to(grad_dtype)
        parameter.grad = None if gradient is None else gradient.to("cpu")

    def over(self, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the parameter's geometry over the first bytes of ``flat``, with a version of its own."""
        view = torch.empty(0, dtype=dtype, device=flat.device)
        return view.set_(flat.untyped_storage(), flat.storage_offset() // dtype.itemsize, self.size, self.stride)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What ``parameter.grad`` is made of."""
        return self.parameter.grad_dtype or self.parameter.dtype

    def hold_gradient(self) -> None:
        """Take ``parameter.grad`` over, now that the first gradient of a backward is there.

        Copies and the worker write to :attr:`total` while backward goes on. Autograd finds ``None`` meanwhile, so it
        makes a tensor of its own for what comes from outside the layers: the loss may use a parameter by itself.
        """
        if self.held:
            return
        if self.shared:
            # Autograd sums what one backward gives before it adds the sum to p.grad: rounding demands the same.
            self.before = self.parameter.grad
        else:
            self.total = self.parameter.grad
        self.averaged = self.used = self.replaces = False
        self.held = True
        self.parameter.grad = None  # last: an interrupt before leaves the gradient where it is

    def refuse_outside(self) -> None:
        """Raise where a gradient does not come from a layer alone, until :meth:`allow_outside`."""
        # A node holds its hooks, and a parameter on the host its node: a strong reference would close a circle through
        # autograd's memory, where Python's collector does not look.
        this = weakref.ref(self)

        def see(gradients: tuple[torch.Tensor | None]) -> None:
            host = this()
            if host is not None and gradients[0] is not None:  # None: the layer's node has taken the gradient
                raise host.outside_error()

        if self.accumulator is not None:
            self.refusal = self.accumulator.register_prehook(see)

    def allow_outside(self) -> None:
        """Let gradients come from anywhere."""
        if self.refusal is not None:
            self.refusal.remove()
            self.refusal = None

    def outside_error(self) -> RuntimeError:
        """What to raise where a gradient would not be averaged, or come after the parameter's step."""
        return RuntimeError(
            f"{self.name} must get its gradient from its layer alone if process_group or step_in_backward is given, "
            "but it has a hook, or the loss uses it by itself; leave its layer out, or give neither argument."
        )

    def begin_average(self, *, used: bool) -> torch.Tensor | None:
        """A gradient, there if ``used``, is about to be averaged over ranks; returns what is to be averaged with it.

        That is what ``parameter.grad`` was when backward began. Later averages of one backward are added.
        """
        self.hold_gradient()
        self.used |= used
        if self.averaged:
            return None
        self.averaged = True
        if self.before is not None:
            self.total, self.before = self.before, None
        self.replaces = self.total is not None
        self.used |= self.replaces
        return self.total

    def give_back_gradient(self) -> None:
        """All has arrived: let ``parameter.grad`` be the sum.

        Autograd must not add to ``parameter.grad`` meanwhile: backward has ended, or :meth:`refuse_outside` was called.
        """
        if not self.held:
            return
        total, outside = self.total, self.parameter.grad
        if outside is not None and outside is not total:
            self.shared = True  # from now on, the sum of one backward is made before it is added
            total = outside if total is None else total.add_(outside)
        if self.before is not None:
            total = self.before if total is None else self.before.add_(total)
        self.total, self.before = total, None  # an interrupt from here on has nothing added twice
        self.parameter.grad = total
        self.total, self.held = None, False


Gradients = dict[HostParameter, torch.Tensor]


class StandIn:
    """A parameter over a device slot: one for when the user's parameter is frozen, and another for when it is trained.

    A graph keeps the one that it was made with.

    Args:
        of: The parameter.
        places: Containers of the layer's modules, each with the key under which it holds the parameter.
        flat: The device memory, uint8.
        gradients: The layer's, one dictionary for each run of autograd's engine: this one's is left there.
    """

    def __init__(
        self, of: HostParameter, places: list[tuple[Any, Any]], flat: torch.Tensor, gradients: list[Gradients]
    ) -> None:
        self.of = of
        self.places = places
        self._flat = flat
        self._gradients = gradients
        self._frozen = self._trained = self.new()
        self.shown = self._frozen  # what the modules hold, or last held
        self.version = 0  # what that had when it was swapped in
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
        run_first(trained.grad_fn)
        self.of.accumulator = trained.grad_fn.next_functions[0][0]
        self._trained = trained

    def swap_in(self) -> None:
        """Let the modules hold it; it wants a gradient if the parameter does by now."""
        self.shown = self._trained if self.of.parameter.requires_grad else self._frozen
        self.version = self.shown._version
        for container, key in self.places:
            container[key] = self.shown
        self._swapped_in = True

    def swap_out(self) -> None:
        """Let the modules hold the user's parameter again."""
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
        if hooked and host.refusal is not None:
            raise host.outside_error()  # here, after the same collectives on all ranks
        if hooked or is_captured(host.accumulator):
            return gradient.to("cpu")
        if gradient.layout is not torch.strided:
            raise NotImplementedError(
                f"{host.name} must have a dense gradient, got {gradient.layout}; build the embedding with "
                "sparse=False, or leave the layer out of the streamed ones."
            )
        host.hold_gradient()
        gradient = gradient.detach()  # a tensor of its own: autograd may give the same one to several parameters
        if gradient.stride() != host.stride:  # so that its copy is one transfer
            gradient = gradient.new_empty_strided(host.size, host.stride).copy_(gradient)
        # Each run of the engine, such as a reentrant checkpoint's, adds to p.grad by itself: a sum here would round
        # otherwise.
        free = next((each for each in self._gradients if host not in each), None)
        if free is None:
            self._gradients.append(free := {})
        free[host] = gradient
        return None


class _FromParameter(torch.autograd.Function):
    """The node between the user's parameter and its stand-in."""

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
            raise RuntimeError("backward through a streamed layer must run while the layer is there, but it is gone.")
        return stand_in.take(gradient), None


def aligned(nbytes: int) -> int:
    """``nbytes`` and the gap up to where the next parameter may start."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def own_storage(flat: torch.Tensor) -> torch.Tensor:
    """The same memory, uint8, as a tensor with a storage of just its bytes, which keeps that of ``flat`` alive.

    So ``torch.save`` of one parameter writes that parameter, not the flat memory of its layer.
    """
    if not len(flat):
        return flat.clone()
    own: torch.Tensor = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(flat))  # type: ignore[attr-defined]  # public
    return own
