"""One layer's parameters: flat in pinned host memory, with stand-ins on the device while the layer computes.

The user's ``Parameter`` objects stay what they were, on the host: same identity, same keys, ordinary
memory that an optimizer changes. During the layer's forward and backward its modules hold stand-ins:
parameters over a device slot. Autograd computes with these. It saves them and views of them (``weight.t()`` in
every ``Linear``), and adds up the gradients of one backward on the device; see :mod:`offload.weights.stand_in`.

A layer is always loaded into the same slot. So what autograd saved in forward finds the same bytes at
the same address in backward, without a saved-tensor hook: any hooks of the user's, activation offload
and recomputation nest with weight streaming in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offload.activations.what_moves import exclude
from offload.device.backend import Backend
from offload.host.page_locked import page_locked
from offload.weights.host_parameter import HostParameter, aligned, nbytes_of
from offload.weights.stand_in import StandIn


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
        self.needs_backward = True
        """Whether the last training forward gave an output that needs a gradient."""
        found = dict(module.named_parameters())  # each once
        own = {name: parameter for name, parameter in found.items() if parameter not in known}
        self._shared = [known[parameter] for parameter in found.values() if parameter in known]
        for host in self._shared:
            host.shared = True
        nbytes = sum(aligned(nbytes_of(parameter)) for parameter in own.values())
        self._own = page_locked(nbytes, backend) if nbytes else torch.empty(0, dtype=torch.uint8)
        start = 0
        for name, parameter in own.items():
            flat = self._own[start : start + nbytes_of(parameter)]
            known[parameter] = HostParameter(parameter, f"layer {number}'s {name}", flat)
            start += aligned(len(flat))
        self.parameters = [*(known[parameter] for parameter in own.values()), *self._shared]
        """Each parameter of the layer once, in the order in which they lie in the slot."""
        self._users = [host.parameter for host in self.parameters]
        self._places = [_places(module, host.parameter) for host in self.parameters]
        self.nbytes = sum(aligned(host.nbytes) for host in self.parameters)
        """Bytes of the slot that the layer needs."""
        self.stand_ins: list[StandIn] = []
        self._stream: object = None

    def bind(self, flat: torch.Tensor) -> None:
        """Make the stand-ins over ``flat``, the device memory of the slot that the layer is always loaded into."""
        exclude(flat, "parameter")  # or the offloading of activations would move weights that autograd saves
        start = 0
        for host, places in zip(self.parameters, self._places, strict=True):
            self.stand_ins.append(StandIn(host, places, flat[start : start + host.nbytes]))
            start += aligned(host.nbytes)

    def sources(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What a load copies: pinned host memory, and where it begins in the slot.

        All parameters that no earlier layer holds are one copy.
        """
        start = len(self._own)
        if start:
            yield 0, self._own
        for host in self._shared:
            yield start, host.flat
            start += aligned(host.nbytes)

    def version(self) -> int:
        """A number that grows when an in-place operation changes a parameter."""
        return sum([parameter._version for parameter in self._users])  # several times per layer and step

    def check(self) -> None:
        """Raise if the modules no longer hold the parameters that are streamed.

        Raises:
            RuntimeError: A parameter was replaced, or its data was, or DistributedDataParallel has it.
        """
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is not None and not set(wrapper._module_parameters).isdisjoint(self._users):
            raise RuntimeError(
                f"{self} must not be a part of what DistributedDataParallel wraps, which reduces gradients before they "
                "have arrived; wrap the rest of the model, and all-reduce p.grad of the streamed layers after backward."
            )
        for host, places in zip(self.parameters, self._places, strict=True):
            if any(container[key] is not host.parameter for container, key in places):
                raise RuntimeError(
                    f"{host.name} was replaced by another parameter (by load_state_dict(assign=True) or "
                    "fully_shard for example); call remove() on the handle and stream the layers again."
                )
            host.check()

    def renew(self, stream: object) -> None:
        """Make the stand-ins anew if ``stream``, the current one, is another than before.

        Autograd takes a gradient on the stream on which the node of its stand-in was made.
        """
        if self._stream != stream:
            self._stream = stream
            for stand_in in self.stand_ins:
                stand_in.renew()

    def swap_in(self) -> None:
        """Let the modules hold the stand-ins."""
        for stand_in in self.stand_ins:
            stand_in.swap_in()

    def swap_out(self) -> None:
        """Let the modules hold the user's parameters again."""
        for stand_in in self.stand_ins:
            stand_in.swap_out()

    def take_gradients(self) -> list[tuple[HostParameter, torch.Tensor]]:
        """The gradients that backward has left in the stand-ins, which forget them.

        Each has the stride of its host memory, so that a copy is one transfer.

        Raises:
            NotImplementedError: A gradient is sparse.
        """
        taken = []
        for stand_in in self.stand_ins:
            gradient, stand_in.gradient = stand_in.gradient, None
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
        changed = (item.of.name for item in self.stand_ins if item.written)
        return next(changed, None)

    def drop_gradients(self) -> None:
        """Let the stand-ins forget their gradients."""
        for stand_in in self.stand_ins:
            stand_in.gradient = None

    def __repr__(self) -> str:
        return f"layer {self.number} ({self.kind})"


def check_parameters(modules: list[nn.Module]) -> None:
    """Raise if a parameter of these layers cannot be streamed; nothing has been changed by then.

    Raises:
        ValueError: There are none, or one has no values or lies over the memory of another.
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


def missing_bytes(modules: list[nn.Module]) -> int:
    """Host memory that must be free before the parameters of these layers move there.

    What is in the host's memory already makes room for itself, one layer at a time.
    """
    known: set[nn.Parameter] = set()
    coming = largest = 0
    for module in modules:
        new = [parameter for parameter in module.parameters() if parameter not in known]
        known.update(new)
        sizes = [aligned(nbytes_of(parameter)) for parameter in new]
        largest = max(largest, sum(sizes))
        coming += sum(size for parameter, size in zip(new, sizes, strict=True) if parameter.device.type != "cpu")
    return coming + largest


def _places(module: nn.Module, parameter: nn.Parameter) -> list[tuple[Any, Any]]:
    places: list[tuple[Any, Any]] = []
    for inner in module.modules():
        places += [(inner._parameters, name) for name, held in inner._parameters.items() if held is parameter]
        # What an LSTM computes with is this list, not its attributes.
        flat_weights = getattr(inner, "_flat_weights", None) if isinstance(inner, nn.RNNBase) else None
        places += [(flat_weights, index) for index, held in enumerate(flat_weights or ()) if held is parameter]
    return places


def _check(parameter: nn.Parameter, name: str) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"{name} must have a shape, got a lazy parameter; run one forward before streaming.")
    if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
        kind = type(parameter.data if type(parameter) is nn.Parameter else parameter).__name__
        instead = "leave its layer out"
        if kind == "DTensor":
            instead = (
                "fully_shard keeps sharded weights on the host by itself, with offload_policy=CPUOffloadPolicy(); or "
                "stream the layers of a model that is not wrapped, and all-reduce p.grad after backward"
            )
        raise TypeError(f"{name} must be a plain nn.Parameter, got a {kind}; {instead}.")
    if parameter.is_meta:
        raise ValueError(f"{name} must have values, got a meta tensor; materialise the model on the CPU first.")
    if parameter.layout is not torch.strided:
        raise TypeError(f"{name} must be dense, got layout {parameter.layout}; leave its layer out.")
