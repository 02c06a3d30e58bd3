"""The parameters of layers, flat in pinned host memory, and the device slots that the layers share in turn.

The program's ``Parameter`` objects keep their identity and their names, on the host, in ordinary memory that an
optimizer changes. During the layer's forward and backward its modules hold stand-ins: parameters over a device slot,
which autograd computes with and saves; see :mod:`offload.weights.parameter`.

Layer i is always loaded into slot i modulo their number. So the tensors that autograd saved in forward find the same
bytes at the same address in backward, without a saved-tensor hook: hooks of the program, activation offload and
recomputation nest with weight streaming in any order. A load waits only for compute of the slot's previous layer, a
neighbour; and at the end of forward the slots hold the last layers, which backward needs first.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn

from offload.activations.what_moves import exclude
from offload.base import trace
from offload.base.tensors import aligned, check_values
from offload.base.torch_private import address_of, ddp_parameters, flat_weights, ordinary_apply, running_ddp
from offload.device.backend import Backend, Event
from offload.host.page_locked import page_locked
from offload.weights.parameter import Gradients, HostParameter, StandIn


class WeightWait(Enum):
    """The only places where weight streaming waits, and what would go wrong without."""

    # Waits of one stream for another.
    LOADED = "compute reads a weight before its load has finished"
    SLOT = "a load overwrites weights that compute still reads, or that are being copied to the host after a step"
    GRADIENT = "a copy to the host reads a gradient before compute has written it"
    SUM_LANDING = "a load of what gradients are added to overwrites memory that compute still uses"
    SUM = "a gradient is added to a sum that is still being copied to the device"
    AVERAGED = "a copy to the host reads a gradient before the ranks have averaged it"
    RELEASE = "compute reuses the memory of a gradient that is still being copied to the host"
    # Waits of the host: of the worker, of ``backward()`` at its end, and of an optimizer at the start of its step.
    STAGED = "the worker reads a gradient that has not arrived on the host"
    WRITTEN = "backward() returns before its last gradient has arrived in p.grad"
    UPDATED = "backward() returns before the weights that it has stepped are on the host"
    SOURCE = "the host changes a weight that is still being copied to the device"


class Slot:
    """Device memory for one layer at a time."""

    def __init__(self, nbytes: int, backend: Backend) -> None:
        self.flat = backend.empty(nbytes)
        self.rank = -1  # of the layer whose weights it holds, or will hold once loaded
        self.version = 0  # the layer's, when it was loaded
        self.epoch = -1  # that of WeightSlots, when it was loaded
        # After it, neither compute nor the copies of updated weights need what the slot holds.
        self.used = backend.compute_stream().record_event()
        self.updated: Event | None = None  # after it, the weights that a step has updated are on the host
        self.loaded = self.used  # after it, the slot holds the weights, and the copy reads the host no longer


class WeightLayer:
    """One layer's parameters on the host and, once bound to a slot, on the device."""

    slot: Slot
    rank: int  # the position among the layers that have parameters

    def __init__(
        self,
        number: int,
        module: nn.Module,
        backend: Backend,
        known: dict[nn.Parameter, HostParameter],  # of earlier layers; this layer's own are added
    ) -> None:
        self.number = number
        self.kind = type(module).__name__
        self.gradients: Gradients = {}  # of backward since the layer was entered, on the device
        # A load copies from pinned memory to the slot: one copy for all parameters that no earlier layer holds.
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        found = dict(module.named_parameters())  # each once
        own = {parameter: name for name, parameter in found.items() if parameter not in known}
        shared = [known[parameter] for parameter in found.values() if parameter in known]
        for host in shared:
            host.shared = True
        sizes = [aligned(parameter.nbytes) for parameter in own]
        memory = page_locked(sum(sizes), backend)
        for (parameter, name), flat in zip(own.items(), memory.split(sizes), strict=True):
            known[parameter] = HostParameter(parameter, f"layer {number}'s {name}", flat)
        # In their order in the slot.
        self.parameters = [*(known[parameter] for parameter in own), *shared]
        self.nbytes = sum(len(host.flat) for host in self.parameters)
        self.stand_ins = [StandIn(host, _places(module, host.parameter), self.gradients) for host in self.parameters]
        self._sources = [memory, *(host.flat for host in shared)]
        self._stream: object = None

    def bind(self, slot: Slot, rank: int) -> None:
        """Put the stand-ins over the slot that the layer is always loaded into."""
        self.slot = slot
        self.rank = rank
        exclude(slot.flat, "parameter")  # activation offload leaves the weights that autograd saves on the device
        flat = slot.flat[: self.nbytes]
        targets = flat.split([len(source) for source in self._sources])
        self.copies = [pair for pair in zip(targets, self._sources, strict=True) if len(pair[0])]
        sizes = [len(host.flat) for host in self.parameters]
        for stand_in, part in zip(self.stand_ins, flat.split(sizes), strict=True):
            stand_in.bind(part)

    def version(self) -> int:
        """A number that grows when an in-place operation changes a parameter."""
        return sum([host.parameter._version for host in self.parameters])  # several times per layer and step

    def check_reducers(self, *, averaged: bool) -> None:
        """Raise if something else reduces gradients."""
        # If gradients are ``averaged`` over ranks here, ``DistributedDataParallel`` may wrap the rest of the model.
        wrapper = running_ddp()
        reduced = () if wrapper is None else set(ddp_parameters(wrapper))
        if wrapper is not None and not (averaged and all(host.parameter not in reduced for host in self.parameters)):
            raise RuntimeError(
                f"{self} must be left alone by DistributedDataParallel, which reduces gradients before they have "
                "arrived; write streamed = stream_weights(layers, device, process_group=torch.distributed.group.WORLD) "
                "and then DistributedDataParallel(streamed.prepare_ddp(model)), in this order."
            )

    def check_held(self) -> None:
        """Raise if the modules no longer hold the parameters that are streamed."""
        for stand_in in self.stand_ins:
            host = stand_in.of
            try:
                held = all(container[key] is host.parameter for container, key in stand_in.places)
            except LookupError:
                held = False
            if not held or host.parameter.data_ptr() != host.address:
                raise RuntimeError(
                    f"{host.name} must keep the host memory that stream_weights gave it, but it was replaced (by "
                    "load_state_dict(assign=True), functional_call, pruning, fully_shard or .to() of a part of the "
                    "layer for example); call remove(), change the model, then stream the layers again."
                )

    def renew(self, stream: object) -> None:
        """Make the stand-ins anew if ``stream``, the current one, has changed."""
        # Autograd takes a gradient on the stream on which the node of its stand-in was made.
        if self._stream != stream:
            self._stream = stream
            for stand_in in self.stand_ins:
                stand_in.renew()

    def __repr__(self) -> str:
        return f"layer {self.number} ({self.kind})"


class WeightSlots:
    """The slots of all layers, and the h2d stream that fills them; ``layers`` are in the order of forward."""

    def __init__(self, backend: Backend, layers: list[WeightLayer], num_slots: int, counters: Counter[str]) -> None:
        self.slots: list[Slot] = []  # what settles at the end needs these two, also where there is no room for slots
        self._epoch = 0  # grows where the host may have changed weights: .data leaves their version as it is
        self._backend = backend
        self._layers = layers
        self._counters = counters
        self._h2d_stream = backend.weight_stream
        turns = (layers[number::num_slots] for number in range(min(num_slots, len(layers))))
        self.slots = [Slot(max(layer.nbytes for layer in sharing), backend) for sharing in turns]
        counters["slot_bytes"] = sum(len(slot.flat) for slot in self.slots)
        self.storages = {address_of(slot.flat.untyped_storage()) for slot in self.slots}
        for rank, layer in enumerate(layers):
            layer.bind(self.slots[rank % num_slots], rank)
        self._last = -1  # the rank of the layer whose forward began last

    def acquire(self, layer: WeightLayer, *, step: int) -> None:
        """Let compute wait for a layer's weights, and queue the loads of the next layers, one for each other slot."""
        # ``step`` is 1 in forward, which needs the weights that the host has now, and -1 in backward, which needs those
        # that forward had.
        if step > 0:
            self._epoch += layer.rank <= self._last  # a new forward of the model
            self._last = layer.rank
        if not self._holds(layer, fresh=step > 0):
            self._counters["late_loads"] += 1
            self._load(layer)
        trace.point("wait", layer.number)
        # Compute alone waits; the host continues and queues the layer's operations behind the load.
        self._backend.wait(self._backend.compute_stream(), layer.slot.loaded, WeightWait.LOADED)
        for distance in range(1, len(self.slots)):
            rank = layer.rank + step * distance
            if not 0 <= rank < len(self._layers):
                return
            coming = self._layers[rank]
            if not self._holds(coming, fresh=step > 0):
                self._load(coming)

    def settle(self) -> None:
        """Block until no copy reads host memory. The host may then change weights: the next forward loads them."""
        for slot in self.slots:
            if not slot.loaded.query():
                # Else the slot would hold a mixture of old and new values.
                self._backend.wait_on_host(slot.loaded, WeightWait.SOURCE)
        self._epoch += 1

    def _holds(self, layer: WeightLayer, *, fresh: bool) -> bool:
        """Whether the layer's weights are in its slot, or being loaded; with ``fresh``, as the host has them now."""
        slot = layer.slot
        current = slot.epoch == self._epoch or not fresh
        return slot.rank == layer.rank and slot.version == layer.version() and current

    def _load(self, layer: WeightLayer) -> None:
        slot = layer.slot
        slot.rank = -1  # an interrupt may leave a mixture of two layers there
        if self._backend.poison:
            if slot.updated is not None:  # other events are compute's own
                self._backend.wait(self._backend.compute_stream(), slot.updated, WeightWait.SLOT)
            slot.flat.fill_(0xFF)
            slot.used = self._backend.compute_stream().record_event()
        self._backend.wait(self._h2d_stream, slot.used, WeightWait.SLOT)
        with trace.mark("h2d", layer.number):
            for target, source in layer.copies:
                self._backend.copy(self._h2d_stream, target, source)
                self._counters["loaded_bytes"] += len(source)
        slot.loaded = self._h2d_stream.record_event()
        slot.rank, slot.version, slot.epoch = layer.rank, layer.version(), self._epoch
        slot.updated = None
        self._counters["loads"] += 1

    def __del__(self) -> None:
        # The device memory goes back to compute's allocator, and the host memory to the system.
        if not sys.is_finalizing():
            self.settle()


class InPlace:
    """In place of a layer's ``_apply``, which ``model.to(device)`` of trainers calls: it leaves all where it is."""

    def __init__(self, module: nn.Module, name: str, device: torch.device) -> None:
        self._module = weakref.ref(module)  # the module holds this
        self._name = name
        self._device = device
        self._dtypes = {tensor.dtype for tensor in (*module.parameters(), *module.buffers())}

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module | None:
        for dtype in self._dtypes:
            made = fn(torch.empty(0, dtype=dtype, device="cpu"))  # shows the request in a tensor without memory
            on_cpu = made.device.type == "cpu"
            if made.dtype is dtype and (not made.is_shared() if on_cpu else made.device == self._device):
                continue
            what = made.dtype if made.dtype is not dtype else "memory that processes share" if on_cpu else made.device
            raise RuntimeError(
                f"{self._name} must remain as it is while its weights are streamed to {self._device}, but is to become "
                f"{what} (by .to() for example); call remove(), change the model, then stream again."
            )
        return self._module()

    def __reduce__(self) -> tuple[Any, ...]:
        return ordinary_apply, (self._module(),)  # a copy of the module is not streamed


def check_parameters(modules: list[nn.Module]) -> None:
    """Raise if a parameter of these layers cannot be streamed; nothing has been changed by then."""
    seen: dict[int, nn.Parameter] = {}
    for number, module in enumerate(modules):
        for key, parameter in module.named_parameters():
            name = f"layer {number}'s {key}"
            check_values(name, parameter)
            kind = type(parameter.data) if type(parameter) is nn.Parameter else type(parameter)
            if kind is not torch.Tensor:
                sharded = (
                    " Let fully_shard keep DTensors on the host by itself, with offload_policy=CPUOffloadPolicy(); or "
                    "stream the layers of a model that is not sharded, with process_group for data parallelism."
                )
                raise TypeError(
                    f"{name} must be a plain nn.Parameter, got a {kind.__name__}; leave its layer out."
                    f"{sharded if hasattr(parameter, 'to_local') else ''}"
                )
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
    """Host memory that must be free before the parameters of these layers move there, one layer at a time."""
    # A layer whose parameters are in host memory already frees theirs once the layer has moved.
    coming = {parameter for module in modules for parameter in module.parameters() if parameter.device.type != "cpu"}
    largest = max(sum(aligned(parameter.nbytes) for parameter in module.parameters()) for module in modules)
    return sum(aligned(parameter.nbytes) for parameter in coming) + largest


def _places(module: nn.Module, parameter: nn.Parameter) -> list[tuple[Any, Any]]:
    """Where the layer's modules hold the parameter: containers, each with the key."""
    places: list[tuple[Any, Any]] = []
    for inner in module.modules():
        places += [(inner._parameters, name) for name, held in inner._parameters.items() if held is parameter]
        flat = flat_weights(inner)  # an LSTM computes with this list, not with its attributes
        places += [(flat, index) for index, held in enumerate(flat) if held is parameter]
    return places
