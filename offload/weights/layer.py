"""One layer's parameters: flat in pinned host memory, with stand-ins on the device while the layer computes.

The user's ``Parameter`` objects stay what they were, on the host: same identity, same keys, ordinary
memory that an optimizer changes. During the layer's forward and backward its modules hold stand-ins:
parameters over a device slot. Autograd computes with these. It saves them and views of them (``weight.t()`` in
every ``Linear``), and adds up the gradients of one backward on the device; see :mod:`offload.weights.parameter`.

A layer is always loaded into the same slot. So what autograd saved in forward finds the same bytes at
the same address in backward, without a saved-tensor hook: any hooks of the user's, activation offload
and recomputation nest with weight streaming in any order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from offload.activations.what_moves import exclude
from offload.base.torch_private import APPLY, ddp_parameters, flat_weights, ordinary_apply, running_ddp
from offload.device.backend import Backend
from offload.host.page_locked import page_locked
from offload.weights.parameter import Gradients, HostParameter, StandIn, aligned


class Slot:
    """Device memory for one layer at a time."""

    def __init__(self, nbytes: int, backend: Backend) -> None:
        self.flat = backend.empty(nbytes)
        self.rank = -1  # of the layer whose weights it holds, or will hold once loaded
        self.version = 0  # the layer's, when it was loaded
        # Whether nothing can have changed the weights on the host since the load: .data leaves the version as it is.
        self.fresh = False
        self.used = backend.compute_stream().record_event()  # after it, compute no longer needs what the slot holds
        self.loaded = self.used  # after it, the slot holds the weights, and the copy reads the host no longer


class WeightLayer:
    """One layer's parameters on the host and, once bound to a slot, on the device.

    Parameters that earlier layers hold are in ``known``, and this layer's own are added there.
    """

    slot: Slot
    rank: int  # the position among the layers that have parameters

    def __init__(
        self,
        number: int,
        module: nn.Module,
        backend: Backend,
        known: dict[nn.Parameter, HostParameter],
        grad_dtype: torch.dtype | None,
    ) -> None:
        self.number = number
        self.kind = type(module).__name__
        self.needs_backward = True  # whether the last training forward gave an output that needs a gradient
        # What backward has computed since the layer was entered, on the device; see StandIn.take().
        self.gradients: list[Gradients] = []
        self.stand_ins: list[StandIn] = []
        # What a load copies, to the slot from pinned memory: all that no earlier layer holds is one copy.
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        found = dict(module.named_parameters())  # each once
        own = {parameter: name for name, parameter in found.items() if parameter not in known}
        shared = [known[parameter] for parameter in found.values() if parameter in known]
        for host in shared:
            host.shared = True
        sizes = [aligned(parameter.nbytes) for parameter in own]
        memory = page_locked(sum(sizes), backend) if sum(sizes) else torch.empty(0, dtype=torch.uint8)
        for (parameter, name), flat in zip(own.items(), memory.split(sizes), strict=True):
            known[parameter] = HostParameter(parameter, f"layer {number}'s {name}", flat, grad_dtype)
        # Each once, in the order in which they lie in the slot.
        self.parameters = [*(known[parameter] for parameter in own), *shared]
        self.nbytes = sum(len(host.flat) for host in self.parameters)
        self._sources = [memory, *(host.flat for host in shared)]
        self._users = [host.parameter for host in self.parameters]
        self._places = [_places(module, parameter) for parameter in self._users]
        self._stream: object = None

    def bind(self, slot: Slot, rank: int) -> None:
        """Make the stand-ins over the slot that the layer is always loaded into."""
        self.slot = slot
        self.rank = rank
        exclude(slot.flat, "parameter")  # or the offloading of activations would move weights that autograd saves
        flat = slot.flat[: self.nbytes]
        targets = flat.split([len(source) for source in self._sources])
        self.copies = [pair for pair in zip(targets, self._sources, strict=True) if len(pair[0])]
        parts = flat.split([len(host.flat) for host in self.parameters])
        for host, places, part in zip(self.parameters, self._places, parts, strict=True):
            self.stand_ins.append(StandIn(host, places, part, self.gradients))

    def version(self) -> int:
        """A number that grows when an in-place operation changes a parameter."""
        return sum([parameter._version for parameter in self._users])  # several times per layer and step

    def check(self, *, averaged: bool) -> None:
        """Raise if the modules no longer hold the parameters that are streamed, or something else reduces gradients.

        If gradients are ``averaged`` over ranks here, ``DistributedDataParallel`` may wrap the rest of the model.
        """
        wrapper = running_ddp()
        if wrapper is not None and not (averaged and set(ddp_parameters(wrapper)).isdisjoint(self._users)):
            raise RuntimeError(
                f"{self} must be left alone by DistributedDataParallel, which reduces gradients before they have "
                "arrived; write streamed = stream_weights(layers, device, process_group=torch.distributed.group.WORLD) "
                "and then DistributedDataParallel(streamed.prepare_ddp(model)), in this order."
            )
        for host, places in zip(self.parameters, self._places, strict=True):
            if any(container[key] is not host.parameter for container, key in places):
                raise RuntimeError(
                    f"{host.name} was replaced by another parameter (by load_state_dict(assign=True) or "
                    "fully_shard for example); call remove() on the handle and stream the layers again."
                )
            if host.parameter.data_ptr() != host.address:
                raise RuntimeError(
                    f"{host.name} must stay in the host memory that stream_weights gave it, but its data was replaced "
                    "(by .to() of a part of the layer for example); call remove(), move the model, then stream again."
                )

    def renew(self, stream: object) -> None:
        """Make the stand-ins anew if ``stream``, the current one, is another than before.

        Autograd takes a gradient on the stream on which the node of its stand-in was made.
        """
        if self._stream != stream:
            self._stream = stream
            for stand_in in self.stand_ins:
                stand_in.renew()

    def written(self) -> str | None:
        """The name of a parameter whose stand-in was changed in place since forward began."""
        changed = (stand_in.of.name for stand_in in self.stand_ins if stand_in.shown._version != stand_in.version)
        return next(changed, None)

    def __repr__(self) -> str:
        return f"layer {self.number} ({self.kind})"


class _InPlace:
    """In place of the ``_apply`` of one layer: it leaves parameters on the host and buffers on the device.

    ``to``, ``cuda``, ``half`` and their like call ``_apply`` of every module in a model, and trainers call
    ``model.to(device)`` on what they are given.
    """

    def __init__(self, module: nn.Module, name: str, device: torch.device) -> None:
        self._module = weakref.ref(module)  # the module holds this
        self._name = name
        self._device = device
        self._dtypes = {tensor.dtype for tensor in (*module.parameters(), *module.buffers())}

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module | None:
        for dtype in self._dtypes:
            made = fn(torch.empty(0, dtype=dtype))  # what is asked for shows in a tensor without memory
            on_cpu = made.device.type == "cpu"
            if made.dtype is dtype and (not made.is_shared() if on_cpu else made.device == self._device):
                continue
            what = made.dtype if made.dtype is not dtype else "memory that processes share" if on_cpu else made.device
            raise RuntimeError(
                f"{self._name} must stay what and where it is while its weights are streamed to {self._device}, but is "
                f"to become {what} (by .to(), .half() or share_memory() for example); call remove(), change the model, "
                "then stream again."
            )
        return self._module()

    def __reduce__(self) -> tuple[Any, ...]:
        return ordinary_apply, (self._module(),)  # a copy of the module is not streamed


def keep_in_place(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Keep these layers where they are when the model that they are a part of moves."""
    for number, module in enumerate(modules):
        # In the dictionary itself: a compiled module hands what is set on to the module that it was made of.
        vars(module)[APPLY] = _InPlace(module, f"layer {number} ({type(module).__name__})", device)


def let_move(modules: Iterable[nn.Module]) -> None:
    """Undo :func:`keep_in_place`."""
    for module in modules:
        vars(module).pop(APPLY, None)


def check_parameters(modules: list[nn.Module]) -> None:
    """Raise if a parameter of these layers cannot be streamed; nothing has been changed by then."""
    seen: dict[int, nn.Parameter] = {}
    for number, module in enumerate(modules):
        for key, parameter in module.named_parameters():
            name = f"layer {number}'s {key}"
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(f"{name} must have a shape, got a lazy parameter; run one forward before streaming.")
            kind = type(parameter.data) if type(parameter) is nn.Parameter else type(parameter)
            if kind is not torch.Tensor:
                raise TypeError(
                    f"{name} must be a plain nn.Parameter, got a {kind.__name__}; leave its layer out. Let "
                    "fully_shard keep DTensors on the host by itself, with offload_policy=CPUOffloadPolicy(); or "
                    "stream the layers of a model that is not sharded, with process_group for data parallelism."
                )
            if parameter.is_meta:
                raise ValueError(f"{name} must have values, got a meta tensor; materialise the model on the CPU first.")
            if parameter.layout is not torch.strided:
                raise TypeError(f"{name} must be dense, got layout {parameter.layout}; leave its layer out.")
            if parameter.numel() and seen.setdefault(parameter.data_ptr(), parameter) is not parameter:
                raise ValueError(
                    f"{name} must have memory of its own, but it shares that of another parameter; "
                    "to tie two weights, let both modules hold the same nn.Parameter."
                )
    if not seen:
        raise ValueError(f"layers must hold parameters, got {len(modules)} modules without any")


def missing_bytes(modules: list[nn.Module]) -> int:
    """Host memory that must be free before the parameters of these layers move there.

    What is in the host's memory already makes room for itself, one layer at a time.
    """
    known: set[nn.Parameter] = set()
    coming = largest = 0
    for module in modules:
        sizes = {parameter: aligned(parameter.nbytes) for parameter in module.parameters() if parameter not in known}
        known.update(sizes)
        largest = max(largest, sum(sizes.values()))
        coming += sum(size for parameter, size in sizes.items() if parameter.device.type != "cpu")
    return coming + largest


def _places(module: nn.Module, parameter: nn.Parameter) -> list[tuple[Any, Any]]:
    """Where the layer's modules hold the parameter: containers, each with the key."""
    places: list[tuple[Any, Any]] = []
    for inner in module.modules():
        places += [(inner._parameters, name) for name, held in inner._parameters.items() if held is parameter]
        # What an LSTM computes with is this list, not its attributes.
        flat = flat_weights(inner)
        places += [(flat, index) for index, held in enumerate(flat) if held is parameter]
    return places
