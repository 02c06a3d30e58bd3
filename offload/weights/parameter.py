"""One parameter: the user's, on the host, and what stands in for it on the device.

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
from torch.multiprocessing.reductions import StorageWeakRef

_FIRST = 2**64 - 1
"""The sequence number of autograd's own ``AccumulateGrad``: run as soon as it can be."""


class HostParameter:
    """One of the user's parameters, in host memory that a layer's copy covers.

    Args:
        parameter: The user's; its data moves into ``flat``.
        name: For messages, such as ``layer 3's mlp.up.weight``.
        flat: Pinned, uint8, of the parameter's size.
    """

    def __init__(self, parameter: nn.Parameter, name: str, flat: torch.Tensor) -> None:
        self.parameter = parameter
        self.name = name
        self.flat = flat
        self.size = parameter.size()
        self.stride = _dense_stride(parameter)
        self.shared = False
        """Whether one backward may bring several gradients: several layers use it, or the loss does by itself."""
        self.total: torch.Tensor | None = None
        """What ``parameter.grad`` will be, while backward goes on."""
        self.apart: torch.Tensor | None = None
        """The sum of several gradients, to be added to :attr:`total`."""
        self._held = False
        self.gradient_memory = torch.empty(0, dtype=torch.uint8)
        """For ``parameter.grad``, uint8, kept from step to step."""
        self._given: StorageWeakRef | None = None
        gradient, parameter.grad = parameter.grad, None
        data = self.over(own_storage(flat), parameter.dtype)
        data.copy_(parameter.data)
        parameter.data = data
        parameter.grad = None if gradient is None else gradient.to("cpu")
        self._address = data.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.parameter.numel() * self.parameter.element_size()

    def over(self, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the parameter's geometry over the first bytes of ``flat``, with a version of its own."""
        view = torch.empty(0, dtype=dtype, device=flat.device)
        offset = flat.storage_offset() // dtype.itemsize
        return view.set_(flat.untyped_storage(), offset, self.size, self.stride)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What ``parameter.grad`` is made of."""
        return self.parameter.grad_dtype or self.parameter.dtype

    def use_gradient_dtype(self, dtype: torch.dtype) -> None:
        """Keep ``parameter.grad`` in ``dtype`` if that is more precise than the parameter."""
        parameter = self.parameter
        if parameter.is_floating_point() and parameter.element_size() < dtype.itemsize:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = dtype
            parameter.grad = None if gradient is None else gradient.to(dtype)

    def has_hooks(self) -> bool:
        """Whether hooks of the user's wait for a gradient."""
        return bool(self.parameter._backward_hooks or self.parameter._post_accumulate_grad_hooks)

    def hold_gradient(self) -> None:
        """Take ``parameter.grad`` over as :attr:`total` when the first gradient of a backward is there.

        Copies and the worker write to :attr:`total` while backward goes on. Autograd finds ``None`` meanwhile, and so
        has a tensor of its own for what comes from outside of the layers: the loss may use a parameter by itself.
        """
        if not self._held:
            self.total = self.parameter.grad
            self._held = True
            self.parameter.grad = None

    def give_back_gradient(self) -> None:
        """All has arrived: let ``parameter.grad`` be the sum."""
        if not self._held:
            return
        total, apart, outside = self.total, self.apart, self.parameter.grad
        if outside is not None and outside is not total:
            self.shared = True  # from now on, the sum of one backward is made before it is added
            apart = outside if apart is None else apart + outside
        if total is None:
            total = apart
        elif apart is not None:
            total.add_(apart)
        self.parameter.grad = total
        self.total = self.apart = None
        self._held = False

    def can_give(self) -> bool:
        """Whether there is memory for a gradient that no tensor looks into."""
        if len(self.gradient_memory) < self.parameter.numel() * self.gradient_dtype.itemsize:
            return False
        return self._given is None or self._given.expired()

    def give_gradient(self) -> torch.Tensor:
        """A tensor for ``parameter.grad`` over the memory for it, whose values are whatever is there."""
        gradient = self.over(own_storage(self.gradient_memory), self.gradient_dtype)
        self._given = StorageWeakRef(gradient.untyped_storage())
        return gradient

    def check(self) -> None:
        """Raise if the data is no longer in the memory that is copied.

        Raises:
            RuntimeError: Something has replaced ``parameter.data``.
        """
        if self.parameter.data_ptr() != self._address:
            raise RuntimeError(
                f"{self.name} must stay in the host memory that stream_weights gave it, but its data was replaced "
                "(by .to(), .cuda() or .half() for example); call remove(), move the model, then stream again."
            )


class StandIn:
    """What a layer's modules hold instead of a parameter while the layer computes.

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
        # One for each state: a graph that was made before the parameter was frozen keeps what it has.
        self._frozen = nn.Parameter(self._new(), requires_grad=False)
        self._trained = self._frozen
        self._version = 0
        self.device = self._frozen
        """What the modules hold."""
        self._swapped_in = False

    def renew(self) -> None:
        """Make the one that wants a gradient anew; autograd takes its gradient on the stream that is current now."""
        parameter = self.of.parameter
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        frozen = not parameter.requires_grad
        with torch.inference_mode(False), torch.enable_grad():
            trained: Any = _Lend.apply(parameter.requires_grad_(), self)
        parameter.requires_grad_(not frozen)
        # It is as old as the stand-in, but its turn is before all that is left to do.
        trained.grad_fn._set_sequence_nr(_FIRST)
        self._trained = trained

    def swap_in(self) -> None:
        """Let the modules hold it; it wants a gradient if the parameter does by now."""
        self.device = self._trained if self.of.parameter.requires_grad else self._frozen
        self._version = self.device._version
        for container, key in self.places:
            container[key] = self.device
        self._swapped_in = True

    def swap_out(self) -> None:
        """Let the modules hold the user's parameter again."""
        self._swapped_in = False
        for container, key in self.places:
            container[key] = self.of.parameter

    @property
    def written(self) -> bool:
        """Whether an in-place operation has changed it since it was swapped in."""
        return self.device._version != self._version

    def take(self, gradient: torch.Tensor, accumulator: Any) -> torch.Tensor | None:
        """What the user's parameter gets of a gradient now.

        Args:
            gradient: That of one backward, on the device.
            accumulator: Autograd's node that adds to ``parameter.grad``.

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
        if host.has_hooks() or _is_asked_for(accumulator):
            return gradient.to("cpu")
        host.hold_gradient()
        # A tensor of its own: autograd may give the same one to several parameters.
        self.gradient = gradient.detach() if self.gradient is None else self.gradient + gradient
        return None

    def _new(self) -> torch.Tensor:
        return self.of.over(self._flat, self.of.parameter.dtype)


class _Lend(torch.autograd.Function):
    """Makes the stand-in from the user's parameter, and takes the gradient off on the way back."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, stand_in: StandIn) -> nn.Parameter:
        ctx.variable = parameter  # as autograd's own nodes of leaves have it
        ctx.stand_in = weakref.ref(stand_in)  # which holds this node, by what forward returns
        ctx.set_materialize_grads(False)
        return nn.Parameter(stand_in._new(), requires_grad=False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if gradient is None:
            return None, None
        stand_in = ctx.stand_in()
        if stand_in is None:
            raise RuntimeError("backward through a streamed layer must run while the layer is there, but it is gone.")
        return stand_in.take(gradient, ctx.next_functions[0][0]), None


def _is_asked_for(accumulator: Any) -> bool:
    """Whether ``torch.autograd.grad`` returns what arrives at this node, which is to run."""
    try:
        torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # so it says that the node's input is captured
        return True
    return False


def own_storage(flat: torch.Tensor) -> torch.Tensor:
    """The same memory, uint8, as a tensor with a storage of just its bytes, which keeps that of ``flat`` alive.

    So ``torch.save`` of one parameter writes that parameter, not the flat memory of its layer.
    """
    if not len(flat):
        return flat.clone()
    own: torch.Tensor = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(flat))  # type: ignore[attr-defined]  # public
    return own


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride in which ``torch.empty_like`` keeps the tensor's order of dimensions without gaps."""
    return torch.empty_like(tensor, device="meta").stride()
