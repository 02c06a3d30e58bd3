"""What a forward depends on beside inputs: PyTorch's settings and generators, attributes and buffers of its modules.

The second run sees what the first run saw. What has changed in between is put back for the second run, and afterwards
everything is as it was before the second run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.base.tensors import plain_memory, tensors_in
from offload.base.torch_private import (
    address_of,
    are_deterministic,
    attention_kernels,
    function_modes,
    state_of,
)

CLONED_BYTES = 1 << 20
"""Buffers up to this size, which forward writes into, are cloned before each forward."""

SPARE_BYTES = 1 << 16
"""Those up to this size are cloned, too, that forward may write into if it goes another way."""

Snapshot = list[dict[str, Any]]


_cuda: Any = torch.backends.cuda
_FLAGS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        lambda: (are_deterministic[0](), are_deterministic[1]()),
        lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
    ),
    *zip(
        attention_kernels,
        (_cuda.enable_flash_sdp, _cuda.enable_mem_efficient_sdp, _cuda.enable_math_sdp, _cuda.enable_cudnn_sdp),
        strict=True,
    ),
]
"""What tells a setting, and what sets it."""


class Settings(NamedTuple):
    """PyTorch's settings that decide what an operation computes."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool
    """Whether autocast keeps the copies of parameters that it casts."""
    nested: bool
    """Whether an autocast context surrounds the layer, switched on or not: then the copies outlive the layer."""
    device: torch.device | None
    flags: tuple[Any, ...]
    """The others, in the order of ``_FLAGS``."""

    @classmethod
    def now(cls, device: torch.device) -> Settings:
        """The settings of this thread."""
        is_on, dtype, kind = torch.is_autocast_enabled, torch.get_autocast_dtype, device.type
        autocast = ("cpu", is_on("cpu"), dtype("cpu"))
        return cls(
            (autocast,) if kind == "cpu" else (autocast, (kind, is_on(kind), dtype(kind))),
            torch.is_autocast_cache_enabled(),
            in_autocast(),
            torch.get_default_device() if function_modes() else None,
            tuple([get() for get, _ in _FLAGS]),
        )

    @property
    def casts(self) -> bool:
        """Whether autocast may have cast a parameter before: then the cast is no node of the layer's graph."""
        return self.nested or self.autocast[0][1] or self.autocast[-1][1]

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same settings once more."""
        now = Settings.now(torch.device(self.autocast[-1][0]))
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast if self != now else ():
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, self.cached))
            if self.device is not None:
                stack.enter_context(torch.device(self.device))
            for (_, switch), wanted, present in zip(_FLAGS, self.flags, now.flags, strict=True):
                if wanted != present:
                    stack.callback(switch, present)
                    switch(wanted)
            yield


def in_autocast() -> bool:
    """Whether an autocast context is entered, switched on or not."""
    nesting: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting > 1


# Generators of random numbers.


@contextmanager
def drawn_again(states: Mapping[torch.Generator, torch.Tensor]) -> Iterator[None]:
    """The generators draw what they drew from these states on; afterwards each goes on from where it is now."""
    present = {generator: generator.get_state() for generator in states}
    try:
        for generator, state in states.items():
            generator.set_state(state)
        yield
    finally:
        for generator, state in present.items():
            generator.set_state(state)


def states_of(
    generators: Iterable[torch.Generator], devices: Iterable[torch.device]
) -> dict[torch.Generator, torch.Tensor]:
    """The states of generators and of the default ones of devices."""
    every = [torch.default_generator, *generators]
    indices = [device.index for device in devices if device.type == "cuda"]
    every += [torch.cuda.default_generators[torch.cuda.current_device() if one is None else one] for one in indices]
    return {generator: generator.get_state() for generator in dict.fromkeys(every)}


# Modules.


class LayerState:
    """The attributes, parameters and buffers of a layer and its submodules.

    Parameters that are ``gathered`` for each run, by streaming or by FSDP, are not the layer's state.
    """

    def __init__(self, layer: nn.Module, *, gathered: bool) -> None:
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        for name, module in layer.named_modules():
            attributes, parameters, *rest = state_of(module)
            self._dicts += (attributes, *rest) if gathered else (attributes, parameters, *rest)
            self._names += [name] * (len(self._dicts) - len(self._names))
        self._parameters: list[torch.Tensor] = [] if gathered else list(layer.parameters())
        self._counts: dict[tuple[int, str], int] = {}
        """How often each tensor was changed in place when :meth:`begin_learning` was called."""
        self._cloned: list[tuple[int, str]] = []
        """Buffers that forward writes into, and small ones that it may write into if it goes another way."""
        self._forgotten: list[tuple[int, str]] = []
        """Attributes with a graph that forward replaces and does not read."""
        self._read: list[tuple[int, str]] = []
        """Attributes and buffers that must be the same in backward: forward does not write into them."""

    def begin_learning(self) -> None:
        for index, part in enumerate(self._dicts):
            for key, value in part.items():
                if isinstance(value, torch.Tensor) and not value.is_inference():
                    self._counts[index, key] = value._version

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self._parameters
        for part in self._dicts:
            for value in part.values():
                yield from tensors_in(value)

    def readings(self, snapshot: Snapshot, constants: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that forward reads: parameters, ``constants``, and what a snapshot holds."""
        read = [*self._parameters, *constants]
        for index, key in self._read:
            read += [tensor for tensor in tensors_in(snapshot[index].get(key)) if not tensor.is_inference()]
        return read

    def snapshot(self) -> Snapshot:
        """The state as it is now, with clones of what forward writes into."""
        found = [part.copy() if part else {} for part in self._dicts]  # most modules have no buffers and no submodules
        for index, key in self._cloned:
            if key in found[index]:
                found[index][key] = found[index][key].detach().clone()
        for index, key in self._forgotten:
            found[index].pop(key, None)
        return found

    @contextmanager
    def as_in(self, snapshot: Snapshot) -> Iterator[None]:
        """The state of a snapshot; afterwards everything is as it is now."""
        present, wanted = [part.copy() for part in self._dicts], list(snapshot)
        for index, key in self._cloned:
            if key in wanted[index]:  # the run writes into it, and there may be another run
                wanted[index] = {**wanted[index], key: wanted[index][key].clone()}
        self._set(wanted, keep=self._forgotten)
        try:
            yield
        finally:
            self._set(present, keep=())

    def _set(self, wanted: Snapshot, keep: Iterable[tuple[int, str]]) -> None:
        kept = set(keep)
        for index, (part, values) in enumerate(zip(self._dicts, wanted, strict=True)):
            if _same_objects(part, values):
                continue
            for key in [key for key in part if key not in values and (index, key) not in kept]:
                del part[key]
            for key, value in values.items():
                if key not in part or part[key] is not value:
                    part[key] = value

    def learn(
        self,
        before: Snapshot,
        clones: Mapping[int, torch.Tensor],
        was_read: Callable[[torch.Tensor], bool],
        *,
        may_change: bool,
    ) -> str | None:
        """See what one forward has changed; why it must not run again, if it must not.

        Args:
            before: The state when forward began; gets the ``clones``.
            clones: What forward has written into, as it was before, by address.
            was_read: Whether an operation has read or written a tensor.
            may_change: Whether the operations depend on data: another forward may write into what this one reads.
        """
        self._cloned, self._forgotten, self._read = [], [], []
        for index, (part, values) in enumerate(zip(self._dicts, before, strict=True)):
            for key, value in values.items():
                name = f"{self._names[index]}.{key}".removeprefix(".")
                address = _address(value)
                # Batch norm does not count as a change of its statistics; compiled code is seen by its changes alone.
                if isinstance(value, torch.Tensor) and (address in clones or self._written(index, key, value)):
                    if isinstance(value, nn.Parameter) or address not in clones:
                        return f"forward writes into {name}"
                    self._cloned.append((index, key))
                    values[key] = clones[address]
                elif part.get(key, self) is not value and isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    if was_read(value):
                        return f"forward reads and replaces {name}"
                    self._forgotten.append((index, key))
                elif key not in _OWN and not isinstance(value, nn.Parameter):
                    read = any(map(was_read, tensors_in(value)))
                    if _is_small(value) and (may_change or not read):
                        self._cloned.append((index, key))
                    elif read or isinstance(value, torch.Tensor):  # what is not read, another way may write into
                        self._read.append((index, key))
        return None

    def _written(self, index: int, key: str, value: torch.Tensor) -> bool:
        known = self._counts.get((index, key))
        return known is not None and known != value._version

    def contents(self) -> list[Any]:
        """What is in lists, dictionaries and sets among the attributes, to see whether forward changes it."""
        return [
            contents_of(value, 1)
            for part in self._dicts
            for key, value in part.items()
            if key not in _OWN and type(value) in (list, dict, set, deque)
        ]


def _same_objects(part: dict[str, Any], values: dict[str, Any]) -> bool:
    """Identity, as two tensors of one element may be equal, and have other graphs."""
    return list(part) == list(values) and all(map(is_, part.values(), values.values()))


def _is_small(value: Any) -> bool:
    """Whether a value is a tensor that can be cloned before each forward."""
    plain = isinstance(value, torch.Tensor) and plain_memory(value) is not None and not value.is_inference()
    return plain and value.grad_fn is None and not value.requires_grad and value.nbytes <= SPARE_BYTES


def _address(value: Any) -> int:
    plain = isinstance(value, torch.Tensor) and plain_memory(value) is not None
    return address_of(value.untyped_storage()) if plain else 0


_OWN = set(vars(nn.Module()))
"""What every module has."""


def contents_of(value: Any, depth: int = 8) -> Any:
    """What a value holds, as far as it can be looked into: two of these are equal if nothing was changed."""
    if isinstance(value, (bool, int, float, str, bytes, type(None), type, torch.dtype, torch.device)):
        return value
    if isinstance(value, (torch.Tensor, nn.Module)) or depth == 0 or callable(value):
        return id(value)
    if isinstance(value, dict):
        return [(contents_of(key, 1), contents_of(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [contents_of(item, depth - 1) for item in value]
    attributes = getattr(value, "__dict__", None)
    return id(value) if attributes is None else (id(value), contents_of(dict(attributes), depth - 1))
