"""A layer that is one region: its forward is one call, which backward runs again, as checkpointing does.

Nobody sees the operations of compiled code. So what is written down is what the layer was given, and how much autograd
has saved, in order; the call runs the layer itself once more, and takes what autograd saves then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from offload.base.layer_events import unheard
from offload.base.tensors import Geometry
from offload.base.torch_private import in_backward
from offload.recompute.operations import Operation
from offload.recompute.random import RandomState, default_generator
from offload.recompute.record import Call, Value, tensors_given, with_default_dtype
from offload.recompute.recorder import Given, Recorder, UnseenError
from offload.recompute.replay import ABOVE


class _Forward:
    """What a dispatch mode would be given for the operation of such a call."""

    tags = ()
    _schema = SimpleNamespace(name="compiled forward")


FORWARD = Operation(_Forward())


class ChangedError(RuntimeError):
    """A layer does something else when it runs again."""


class ForwardCall(Call):
    """A layer's forward.

    Args:
        layer: The layer.
        inputs: What it is given, each tensor once, with a value or a look in its place; whether that needs a gradient.
        places: Which of these each of its arguments is.
        spec: How the arguments are nested.
        reads: The values among the inputs.
        device: Where it computes.
        states: Of the generators that it may draw from.
    """

    one_region = True
    __slots__ = ("_autocast", "_layer", "_needs", "_places", "_spec", "saved", "states")

    def __init__(
        self,
        layer: nn.Module,
        inputs: tuple[Sequence[Any], Sequence[bool]],
        places: Sequence[int],
        spec: Any,
        reads: dict[Value, None],
        device: torch.device,
        states: Sequence[RandomState],
    ) -> None:
        given, self._needs = inputs
        super().__init__(1, 0, FORWARD, given, {}, reads, None)
        self._layer = layer
        self._places = places
        self._spec = spec
        cached = torch.is_autocast_cache_enabled()
        self._autocast = [
            partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cached)
            for kind in {"cpu", device.type}
        ]
        self.states = states
        self.saved: list[int] = []
        """Bytes of the storages that autograd saves, in order."""

    def _again(self, look: Callable[[Value, Geometry], torch.Tensor], _: Any) -> list[torch.Tensor]:
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor if tensor.is_leaf else tensor.detach())
            return saved[-1]

        with ExitStack() as stack:
            # Calls are run below autograd and autocast, where most of them were seen.
            exclude = torch._C._dispatch_tls_local_exclude_set() - ABOVE
            stack.enter_context(torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude))
            contexts: tuple[AbstractContextManager[Any], ...] = (
                *self.states,
                *(autocast() for autocast in self._autocast),
            )
            for context in contexts:
                stack.enter_context(context)
            stack.enter_context(with_default_dtype(self.dtype))
            if not in_backward():
                stack.enter_context(unheard())
            given = [
                item.detach().requires_grad_(needs) if isinstance(item, torch.Tensor) else item
                for item, needs in zip(tensors_given(self.args, look), self._needs, strict=True)
            ]
            args, kwargs = tree_unflatten([given[place] for place in self._places], self._spec)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
            self._layer(*args, **kwargs)
        found = [nbytes_of(tensor) for tensor in saved]
        if found != self.saved:
            raise ChangedError(
                "a compiled layer that is recomputed must save the same when it runs again, but "
                f"{type(self._layer).__name__} has saved {len(found)} tensors of {sum(found)} bytes, and before "
                f"{len(self.saved)} of {sum(self.saved)} bytes; keep or offload it."
            )
        return saved


class ForwardRecorder(Recorder):
    """Writes down one forward of a layer as one call. It is not entered, since it has to see no operations."""

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self.call: ForwardCall | None = None

    def begin(self, layer: nn.Module, inputs: Any, device: torch.device, *, draws: bool) -> None:
        """The forward begins; with ``draws``, it may draw random numbers."""
        leaves, spec = tree_flatten(inputs)
        numbers: dict[int, int] = {}
        places = [numbers.setdefault(id(leaf), len(numbers)) for leaf in leaves]
        once = list({id(leaf): leaf for leaf in leaves}.values())
        reads: dict[Value, None] = {}
        try:
            given = self._written_down(once, reads)
        except UnseenError:
            return
        needs = [isinstance(item, torch.Tensor) and item.requires_grad for item in once]
        generators = {default_generator(one) for one in (torch.device("cpu"), device)} if draws else ()
        states = [RandomState(generator) for generator in generators]
        self.call = ForwardCall(layer, (given, needs), places, spec, reads, device, states)

    def count(self, tensor: torch.Tensor) -> None:
        """Autograd saves one more tensor."""
        if self.call is not None:
            self.call.saved.append(nbytes_of(tensor))

    def read(self, tensor: torch.Tensor) -> Value:
        storage = tensor.untyped_storage()
        known = self.holds(tensor)
        if known is not None or self.call is None:
            return known or super().read(tensor)
        return self._add(self.call, len(self.call.saved) - 1, storage)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Of the storage of a plain tensor; others are told by none."""
    return tensor.untyped_storage().nbytes() if type(tensor) is torch.Tensor else 0
