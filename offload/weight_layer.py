"""One layer's parameters: flat in pinned host memory, with stand-ins on the device while the layer computes.

The user's ``Parameter`` objects stay what they were, on the host: same identity, same keys, ordinary
memory that an optimizer changes. During the layer's forward and backward its modules hold stand-ins:
parameters over a device slot. Autograd sees only these. It saves them and views of them (``weight.t()`` in
every ``Linear``), and adds up the gradients of one backward in them, on the device.

A layer is always loaded into the same slot. So what autograd saved in forward finds the same bytes at
the same address in backward, without a saved-tensor hook: any hooks of the user's, activation offload
and recomputation nest with weight streaming in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.backend import Backend
from offload.exclusions import exclude

ALIGNMENT_BYTES = 256
"""Where a parameter may start in its layer's memory: what CUDA's own allocator guarantees, at least."""


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
        """Whether several layers use it."""
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


@dataclass(eq=False, slots=True)
class StandIn:
    """What a layer's modules hold instead of a parameter while the layer computes."""

    of: HostParameter
    places: list[tuple[Any, Any]]
    """Containers, each with the key under which it holds the parameter."""
    device: nn.Parameter
    version: int = 0
    """What the version was when forward began."""


class WeightLayer:
    """One layer's parameters on the host and, once bound to a slot, on the device.

    Args:
        number: The layer's position.
        module: The layer.
        backend: What allocates pinned memory.
        known: The parameters that earlier layers hold already; this layer's own are added.
    """

    def __init__(
        self, number: int, module: nn.Module, backend: Backend, known: dict[nn.Parameter, HostParameter]
    ) -> None:
        self.number = number
        self.kind = type(module).__name__
        self.rank = -1
        """The position among the layers that have parameters."""
        self.slot = -1
        """The number of the slot that the layer is always loaded into."""
        self.needs_backward = True
        """Whether the last training forward gave an output that needs a gradient."""
        found = dict.fromkeys(module.parameters())
        shared = [parameter for parameter in found if parameter in known]
        own = [parameter for parameter in found if parameter not in known]
        self._own = _move(own, number, module, backend, known)
        for parameter in shared:
            known[parameter].shared = True
        self._shared = [known[parameter] for parameter in shared]
        self.parameters = [*(known[parameter] for parameter in own), *self._shared]
        """Each parameter of the layer once, in the order in which they lie in the slot."""
        self._places = [_places(module, host.parameter) for host in self.parameters]
        self.nbytes = sum(aligned(host.nbytes) for host in self.parameters)
        """Bytes of the slot that the layer needs."""
        self.stand_ins: list[StandIn] = []
        self._swapped_in = False

    def bind(self, slot: int, flat: torch.Tensor) -> None:
        """Make the stand-ins over ``flat``, the device memory of slot number ``slot``."""
        self.slot = slot
        exclude(flat, "parameter")
        start = 0
        for host, places in zip(self.parameters, self._places, strict=True):
            memory = host.over(flat[start : start + host.nbytes], host.parameter.dtype)
            stand_in = nn.Parameter(memory, requires_grad=host.parameter.requires_grad)
            self.stand_ins.append(StandIn(host, places, stand_in))
            start += aligned(host.nbytes)

    def sources(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What a load copies: pinned host memory, and where it begins in the slot.

        All parameters that no earlier layer holds are one copy.
        """
        start = 0
        if self._own is not None:
            yield 0, self._own
            start = len(self._own)
        for host in self._shared:
            yield start, host.flat
            start += aligned(host.nbytes)

    def version(self) -> int:
        """A number that grows when an in-place operation changes a parameter."""
        return sum(host.parameter._version for host in self.parameters)

    def check(self) -> None:
        """Raise if the modules no longer hold the parameters that are streamed.

        Raises:
            RuntimeError: A parameter was replaced, or its data was.
        """
        for host, places in zip(self.parameters, self._places, strict=True):
            if any(container[key] is not host.parameter for container, key in places):
                raise RuntimeError(
                    f"{host.name} was replaced by another parameter (by load_state_dict(assign=True) for example); "
                    "call remove() on the handle and stream the layers again."
                )
            host.check()

    def swap_in(self, *, sync: bool = False) -> None:
        """Let the modules hold the stand-ins.

        Args:
            sync: Let the stand-ins need gradients where the user's parameters do by now.
        """
        self._swapped_in = True
        for stand_in in self.stand_ins:
            if sync:
                stand_in.version = stand_in.device._version
                if stand_in.device.requires_grad != stand_in.of.parameter.requires_grad:
                    stand_in.device.requires_grad_(stand_in.of.parameter.requires_grad)
            for container, key in stand_in.places:
                container[key] = stand_in.device

    def swap_out(self) -> None:
        """Let the modules hold the user's parameters again."""
        if self._swapped_in:
            self._swapped_in = False
            for stand_in in self.stand_ins:
                for container, key in stand_in.places:
                    container[key] = stand_in.of.parameter

    def take_gradients(self) -> list[tuple[HostParameter, torch.Tensor]]:
        """The gradients that backward has left in the stand-ins, which forget them.

        Each has the stride of its host memory, so that a copy is one transfer.

        Raises:
            NotImplementedError: A gradient is sparse.
        """
        taken = []
        for stand_in in self.stand_ins:
            gradient, stand_in.device.grad = stand_in.device.grad, None
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise NotImplementedError(
                    f"{stand_in.of.name} must have a dense gradient, got {gradient.layout}; build the embedding with "
                    "sparse=False, or leave the layer out of the streamed ones."
                )
            if gradient.stride() != stand_in.of.stride:
                gradient = torch.empty_strided(
                    stand_in.of.size, stand_in.of.stride, dtype=gradient.dtype, device=gradient.device
                ).copy_(gradient)
            taken.append((stand_in.of, gradient))
        return taken

    def written(self) -> str | None:
        """The name of a parameter whose stand-in was changed in place since forward began."""
        changed = (item.of.name for item in self.stand_ins if item.device._version != item.version)
        return next(changed, None)

    def drop_gradients(self) -> None:
        """Let the stand-ins forget their gradients."""
        for stand_in in self.stand_ins:
            stand_in.device.grad = None

    def __repr__(self) -> str:
        return f"layer {self.number} ({self.kind})"


def own_storage(flat: torch.Tensor) -> torch.Tensor:
    """The same memory, uint8, as a tensor with a storage of just its bytes, which keeps that of ``flat`` alive.

    So ``torch.save`` of one parameter writes that parameter, not the flat memory of its layer.
    """
    if not len(flat):
        return flat.clone()
    own: torch.Tensor = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(flat))  # type: ignore[attr-defined]  # public
    return own


def check_parameters(modules: list[nn.Module]) -> None:
    """Raise if a parameter of these layers cannot be streamed; nothing has been changed by then.

    Raises:
        ValueError: There are none, or one has no values, has gradient hooks, or lies over the memory of another.
        TypeError: A parameter is not a plain, dense ``nn.Parameter``.
    """
    seen: dict[int, nn.Parameter] = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            _check(parameter, f"layer {number}'s {name}")
            if parameter.numel() and seen.setdefault(parameter.data_ptr(), parameter) is not parameter:
                raise ValueError(
                    f"layer {number}'s {name} must have memory of its own, but it shares that of another parameter; "
                    "to tie two weights, let both modules hold the same nn.Parameter."
                )
    if not seen:
        raise ValueError(f"layers must hold parameters, got {len(modules)} modules without any")


def _places(module: nn.Module, parameter: nn.Parameter) -> list[tuple[Any, Any]]:
    places: list[tuple[Any, Any]] = []
    for inner in module.modules():
        places += [(inner._parameters, name) for name, held in inner._parameters.items() if held is parameter]
        # What an LSTM computes with is this list, not its attributes.
        flat_weights = getattr(inner, "_flat_weights", None) if isinstance(inner, nn.RNNBase) else None
        places += [(flat_weights, index) for index, held in enumerate(flat_weights or ()) if held is parameter]
    return places


def _move(
    parameters: list[nn.Parameter],
    number: int,
    module: nn.Module,
    backend: Backend,
    known: dict[nn.Parameter, HostParameter],
) -> torch.Tensor | None:
    """Move ``parameters`` into new flat pinned memory."""
    names = {parameter: f"layer {number}'s {name}" for name, parameter in module.named_parameters()}
    nbytes = sum(aligned(parameter.numel() * parameter.element_size()) for parameter in parameters)
    flat = backend.pinned(nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
    start = 0
    for parameter in parameters:
        end = start + parameter.numel() * parameter.element_size()
        known[parameter] = HostParameter(parameter, names[parameter], flat[start:end])
        start = aligned(end)
    return flat if nbytes else None


def _check(parameter: nn.Parameter, name: str) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"{name} must have a shape, got a lazy parameter; run one forward before streaming.")
    if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
        kind = type(parameter.data if type(parameter) is nn.Parameter else parameter).__name__
        raise TypeError(f"{name} must be a plain nn.Parameter, got a {kind}; stream the layers before wrapping.")
    if parameter.is_meta:
        raise ValueError(f"{name} must have values, got a meta tensor; materialise the model on the CPU first.")
    if parameter.layout is not torch.strided:
        raise TypeError(f"{name} must be dense, got layout {parameter.layout}; leave its layer out.")
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"{name} must have no gradient hooks, which would never run; remove them, and see "
            "StreamedWeights.step_in_backward for optimizer steps beside backward."
        )


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride in which ``torch.empty_like`` keeps the tensor's order of dimensions without gaps."""
    return torch.empty_like(tensor, device="meta").stride()


def aligned(nbytes: int) -> int:
    """``nbytes`` and the gap up to where the next parameter may start."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
