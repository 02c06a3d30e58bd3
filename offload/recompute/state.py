"""What a forward depends on beside inputs: PyTorch's settings and generators, attributes and buffers of its modules.

The second run sees what the first run saw. What has changed in between is put back for the second run, and afterwards
everything is as it was before the second run.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from offload.base.layer_events import compute_device, is_sharded
from offload.base.tensors import plain_address, plain_memory, tensors_in
from offload.base.torch_private import (
    are_deterministic,
    attention_kernels,
    forward_hooks,
    function_modes,
    state_of,
)

CLONED_BYTES = 1 << 20  # buffers up to this size, which forward writes into, are cloned before each forward

SPARE_BYTES = 1 << 16  # those up to this size are cloned, too, that forward may write into if it goes another way

StateKey = tuple[int, str]  # where a module holds a value: the number of the dictionary, and the key

Snapshot = tuple[list[StateKey], list[Any]]
"""Places and what they hold: two lists take a third of a dictionary's time, and each forward of a layer makes them."""


def _matmul_precision() -> str | None:
    """``None`` where it was set by the options of one backend: then this one raises, and those are not restored."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _choose(backend: Any, name: str, value: bool) -> None:
    """Also where a program has forbidden to set attributes, by ``torch.backends.disable_global_flags()``."""
    backend.set_flags(**{f"_{name}": value})


_cuda: Any = torch.backends.cuda
_CHOICES = (
    *((torch.backends.cudnn, name) for name in ("enabled", "deterministic", "benchmark")),
    (torch.backends.mkldnn, "enabled"),
)
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
    *((partial(getattr, *choice), partial(_choose, *choice)) for choice in _CHOICES),
    (_matmul_precision, _set_matmul_precision),
]
"""What tells a setting, and what sets it."""


class Settings(NamedTuple):
    """PyTorch's settings that decide what an operation computes."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool  # whether autocast keeps the copies of parameters that it casts
    nested: bool
    """Whether an autocast context surrounds the layer, switched on or not: then the copies outlive the layer."""
    flags: tuple[Any, ...]  # the others, in the order of ``_FLAGS``
    modes: tuple[Any, ...]
    """What sees calls of PyTorch's functions, the outermost first; one mode of PyTorch sets the default device."""

    @classmethod
    def now(cls, device: torch.device) -> Settings:
        """The settings of this thread."""
        is_on, dtype, kind = torch.is_autocast_enabled, torch.get_autocast_dtype, device.type
        autocast = ("cpu", is_on("cpu"), dtype("cpu"))
        nesting: int = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        return cls(
            (autocast,) if kind == "cpu" else (autocast, (kind, is_on(kind), dtype(kind))),
            torch.is_autocast_cache_enabled(),
            nesting > 1,
            tuple([get() for get, _ in _FLAGS]),
            tuple(function_modes()),
        )

    @property
    def kind(self) -> Iterator[Hashable]:
        """All of it, without the modes themselves, of which a program may make one in each step."""
        yield from self[:-1]
        if self.modes:
            yield from (torch.get_default_device(), *map(type, self.modes))

    @property
    def casts(self) -> bool:
        """Whether autocast may have cast a parameter before: then the cast is no node of the layer's graph."""
        return self.nested or self.autocast[0][1] or self.autocast[-1][1]

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same settings once more."""
        now = Settings.now(torch.device(self.autocast[-1][0]))
        if self == now:
            yield
            return
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, self.cached))
            if self.modes != now.modes:
                stack.callback(_see_by, now.modes)
                _see_by(self.modes)
            for (_, switch), wanted, present in zip(_FLAGS, self.flags, now.flags, strict=True):
                if wanted != present:
                    stack.callback(switch, present)
                    switch(wanted)
            yield


def _see_by(modes: Iterable[Any]) -> None:
    """Let these modes see calls of PyTorch's functions in this thread, and no others."""
    for mode in function_modes():  # not by their own methods, which count how often the program has entered them
        TorchFunctionMode.__exit__(mode, None, None, None)
    for mode in modes:
        TorchFunctionMode.__enter__(mode)


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

    Parameters that are gathered for each run, by streaming or by FSDP, are not the layer's state.
    """

    def __init__(self, layer: nn.Module) -> None:
        gathered = compute_device([layer]) is not None or any(map(is_sharded, layer.modules()))
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        for name, module in layer.named_modules():
            attributes, parameters, *rest = state_of(module)
            self._dicts += (attributes, *rest) if gathered else (attributes, parameters, *rest)
            self._names += [name] * (len(self._dicts) - len(self._names))
        self.parameters: list[torch.Tensor] = [] if gathered else list(layer.parameters())
        self._sizes: list[int] = []  # of the dictionaries, when :attr:`_places` were found in them
        self._places: list[StateKey] = []
        self._holders: list[tuple[dict[str, Any], str]] = []  # the dictionary and the key of each
        self._counts: dict[StateKey, int] = {}
        """How often each tensor was changed in place when :meth:`begin_learning` was called."""
        self._cloned: list[StateKey] = []
        """Buffers that forward writes into, and small ones that it may write into if it goes another way."""
        self._forgotten: list[StateKey] = []  # attributes with a graph that forward replaces and does not read
        self._read: list[StateKey] = []
        """Attributes and buffers that must be the same in backward: forward does not write into them."""

    def _now(self) -> Snapshot:
        """The state as it is now. Most of what a module's own dictionary holds is every module's, and is passed by."""
        sizes = [*map(len, self._dicts)]
        try:
            if sizes == self._sizes:
                return self._places, [part[key] for part, key in self._holders]
        except KeyError:  # a key has gone, and another one has come
            pass
        self._sizes = sizes
        self._places = [
            (index, key) for index, part in enumerate(self._dicts) for key, _ in part.items() if key not in _OWN
        ]
        self._holders = [(self._dicts[index], key) for index, key in self._places]
        return self._places, [part[key] for part, key in self._holders]

    def begin_learning(self) -> None:
        for place, value in zip(*self._now(), strict=True):
            if isinstance(value, torch.Tensor) and not value.is_inference():
                self._counts[place] = value._version

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is there, but for parameters that are gathered."""
        for value in self._now()[1]:
            yield from tensors_in(value)

    def readings(self, snapshot: Snapshot, others: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that forward reads: ``others``, and what a snapshot holds."""
        read = [*others]
        if self._read:
            held = dict(zip(*snapshot, strict=True))
            for place in self._read:
                read += [tensor for tensor in tensors_in(held.get(place)) if not tensor.is_inference()]
        return read

    def snapshot(self) -> Snapshot:
        """The state as it is now, with clones of what forward writes into."""
        if not (self._cloned or self._forgotten):
            return self._now()
        found = dict(zip(*self._now(), strict=True))
        for place in self._cloned:
            if isinstance(found.get(place), torch.Tensor):  # the program may have put something else there
                found[place] = found[place].detach().clone()
        for place in self._forgotten:
            found.pop(place, None)
        return [*found], [*found.values()]

    @contextmanager
    def as_in(self, snapshot: Snapshot) -> Iterator[None]:
        """The state of a snapshot; afterwards everything is as it is now."""
        present, wanted = self._now(), snapshot
        if self._cloned:  # the run writes into them, and there may be another run
            places, values = snapshot
            wanted = (
                places,
                [
                    value.clone() if place in self._cloned and isinstance(value, torch.Tensor) else value
                    for place, value in zip(places, values, strict=True)
                ],
            )
        self._set(present, wanted, keep=self._forgotten)
        try:
            yield
        finally:
            self._set(self._now(), present)

    def _set(self, now: Snapshot, wanted: Snapshot, keep: Iterable[StateKey] = ()) -> None:
        # By identity, as two tensors of one element may be equal, and have other graphs.
        if now[0] == wanted[0] and all(map(is_, now[1], wanted[1])):
            return
        present = dict(zip(*now, strict=True))
        for index, key in present.keys() - {*wanted[0]} - {*keep}:
            del self._dicts[index][key]
        for (index, key), value in zip(*wanted, strict=True):
            if present.get((index, key), self) is not value:
                self._dicts[index][key] = value

    def learn(
        self,
        before: Snapshot,  # the state when forward began; gets the ``clones``
        clones: Mapping[int, torch.Tensor],  # what forward has written into, as it was before, by address
        was_read: Callable[[torch.Tensor], bool],  # whether an operation has read or written a tensor
        *,
        may_change: bool,  # whether another forward may write into what this one reads, as its way depends on data
    ) -> str | None:
        """See what one forward has changed; why it must not run again, if it must not."""
        self._cloned, self._forgotten, self._read = [], [], []
        now = dict(zip(*self._now(), strict=True))
        for number, (place, value) in enumerate(zip(*before, strict=True)):
            index, key = place
            name = f"{self._names[index]}.{key}".removeprefix(".")
            address = plain_address(value)
            # Batch norm does not count as a change of its statistics; compiled code is seen by its changes alone.
            if isinstance(value, torch.Tensor) and (address in clones or self._written(place, value)):
                if isinstance(value, nn.Parameter) or address not in clones:
                    return f"forward writes into {name}"
                self._cloned.append(place)
                before[1][number] = clones[address]
            elif not isinstance(value, torch.Tensor) and any(plain_address(one) in clones for one in tensors_in(value)):
                return f"forward writes into a tensor in {name}"
            elif now.get(place, self) is not value and isinstance(value, torch.Tensor) and value.grad_fn is not None:
                if was_read(value):
                    return f"forward reads and replaces {name}"
                self._forgotten.append(place)
            elif not isinstance(value, nn.Parameter):
                read = any(map(was_read, tensors_in(value)))
                if _is_small(value) and (may_change or not read):
                    self._cloned.append(place)
                elif read or isinstance(value, torch.Tensor):  # what is not read, another way may write into
                    self._read.append(place)
        return None

    def _written(self, place: StateKey, value: torch.Tensor) -> bool:
        known = self._counts.get(place)
        return known is not None and known != value._version

    def contents(self) -> list[Any]:
        """What is in lists, dictionaries and sets among the attributes, to see whether forward changes it."""
        return [contents_of(value, 1) for value in self._now()[1] if type(value) in (list, dict, set, deque)]


_OWN = vars(nn.Module()).keys() - {"training"}  # what every module has, and forward does not change


def _is_small(value: Any) -> bool:
    """Whether a value is a tensor that can be cloned before each forward."""
    plain = isinstance(value, torch.Tensor) and plain_memory(value) is not None and not value.is_inference()
    return plain and value.grad_fn is None and not value.requires_grad and value.nbytes <= SPARE_BYTES


def contents_of(value: Any, depth: int = 8) -> Any:
    """What a value holds, as far as it can be looked into: two of these are equal if nothing was changed."""
    if isinstance(value, (bool, int, float, str, bytes, type(None), type, torch.dtype, torch.device)):
        return value
    if isinstance(value, (torch.Tensor, nn.Module)) or depth == 0 or callable(value):
        return id(value), value  # an address alone may be another object's by the time of a comparison
    if isinstance(value, dict):
        return [(contents_of(key, 1), contents_of(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [contents_of(item, depth - 1) for item in value]
    attributes = getattr(value, "__dict__", None)
    return (id(value), value, None if attributes is None else contents_of(dict(attributes), depth - 1))


# What hooks hold.

MOST_FOUND = 10_000  # objects among which tensors are looked for


def kept_by_hooks(layer: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that the program's forward hooks on a layer and in it hold, as far as they can be found."""
    found: list[Any] = [hook for one in layer.modules() for hooks in forward_hooks(one) for hook in hooks.values()]
    known = {id(one): one for one in found}
    for one in found:  # grows
        if issubclass(type(one), torch.Tensor):  # to ask an instance may raise: a proxy of what is gone
            yield one
        elif len(found) < MOST_FOUND:
            newest = _held_by(one)[-MOST_FOUND:]
            new = {id(other): other for other in newest if id(other) not in known}
            known |= new
            found += new.values()


def _held_by(one: Any) -> list[Any]:
    """What an object holds of the program's: a module holds the model too, and its attributes alone are looked at."""
    kind = type(one)
    if issubclass(kind, type | ModuleType) or str(kind.__module__).startswith("offload."):
        return []
    if issubclass(kind, nn.Module):
        return [held for name, held in vars(one).items() if not name.startswith("_")]
    if kind is FunctionType:
        read = [one.__globals__.get(name) for name in one.__code__.co_names]
        return [*read, *gc.get_referents(*(one.__closure__ or ())), one.__defaults__, one.__kwdefaults__]
    return gc.get_referents(one)
