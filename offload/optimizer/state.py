"""The state of an optimizer on the host: one pinned tensor for each state tensor of each parameter, its *home*.

The program finds the homes in ``optimizer.state``, in their parameters' shapes, so that ``state_dict()`` copies
nothing. Their memory is the device's pool's. It returns there when nobody holds the tensor any more, neither the
optimizer nor a ``state_dict`` that the program has kept.

Master weights are the state of a bfloat16 parameter, in 2 bytes beside the weight's 2: a float32 number is the nearest
bfloat16 number and a remainder of 16 bits. Of two that are equally near, the larger in magnitude is taken, so that the
remainder, the difference of the bits, fits int16.

:mod:`offload.weights`, above this folder, registers what holds weights on the host: these are stepped on the device.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Protocol

import torch

from offload.base.checks import warn_caller
from offload.base.evenly import evenly
from offload.base.head import number_of_head
from offload.base.tensors import own_storage
from offload.device.backend import Backend, Event
from offload.host.page_locked import check_room
from offload.host.pool import HostBuffer, HostPool, get_host_pool
from offload.optimizer.proof import Proof, dtype_of_step, gradient_dtype, is_large, of_shape

REMAINDER = "master_remainder"  # the name of the remainders in the state of a parameter
REMAINDER_BYTES = 2  # of a weight
_TIE = 1 << 15


def join(nearest: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 numbers that :func:`split` was given."""
    bits = nearest.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(remainder).view(torch.float32)


def split(numbers: torch.Tensor, nearest: torch.Tensor) -> torch.Tensor:
    """Write the bfloat16 numbers into ``nearest``; returns the remainders, int16."""
    nearest.copy_(numbers)  # to even where two are equally near; what is not a number remains so
    bits = nearest.view(torch.int16)
    remainder = numbers.view(torch.int32) - bits.to(torch.int32).bitwise_left_shift_(16)
    remainder.masked_fill_(nearest.isnan(), 0)  # else the bits of some would be those of a number
    bits.add_(remainder == _TIE)  # their remainder, -2 ** 15 then, has the same low 16 bits
    return remainder.to(torch.int16)


class WeightHolder(Protocol):
    """Holds the weights of some parameters on the host, and loads the weights when their layer computes."""

    device: torch.device  # where the layers compute
    parameters: AbstractSet[torch.Tensor]

    def check_steps(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise if these parameters cannot be stepped in backward; nothing has been changed by then."""

    def begin_steps(self, steps: Any, parameters: Iterable[torch.Tensor]) -> None:
        """From now on, give the gradients of these parameters to ``steps``, the ``BackwardSteps`` of an optimizer."""

    def end_steps(self) -> None:
        """Give nothing to an optimizer any more."""


holders: weakref.WeakSet[WeightHolder] = weakref.WeakSet()  # all that hold the weights of their parameters now


def holder_of(parameter: torch.Tensor) -> WeightHolder | None:
    """What holds the weights of ``parameter`` on the host, if anything does."""
    return next((one for one in holders if parameter in one.parameters), None)


def holders_of(parameters: Iterable[torch.Tensor]) -> list[WeightHolder]:
    """What holds the weights of some of these parameters."""
    some = set(parameters)
    return [one for one in holders if not some.isdisjoint(one.parameters)]


WEIGHTS, TOTAL = "(weights)", "(gradient)"
"""Names of what is loaded beside the state of a parameter whose weights are on the host."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    part = getattr(tensor, "to_local", None)
    return tensor.detach() if part is None else part().detach()


def spread(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Of a sharded parameter: the sharded tensor whose part on this rank is ``part``, on whatever device."""
    if not hasattr(parameter, "to_local") or part.shape != local(parameter).shape or not part.ndim:
        return part
    with torch.no_grad():
        whole = torch.empty_like(parameter, dtype=part.dtype, device=part.device, requires_grad=False)
        local_part: torch.Tensor = whole.to_local()  # type: ignore[attr-defined]  # a DTensor
        local_part.data = part
    return whole


def move_state(optimizer: torch.optim.Optimizer) -> None:
    """Optimizer state to the devices of its parameters; counters remain where the optimizer has them."""
    for parameter, entry in list(optimizer.state.items()):
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and (value.numel() > 1 or value.shape == parameter.shape != ()):
                entry[key] = value.to(parameter.device)


def _settled(name: str) -> Callable[..., Any]:
    """A look into a dictionary of state, once the copies to the host are over."""

    def look(states: HostStates, *args: Any) -> Any:
        states.settle()
        return getattr(defaultdict, name)(states, *args)

    return look


class HostStates(defaultdict[Any, Any]):
    """``optimizer.state``: a look into it calls ``settle``, which waits until copies to the host are over."""

    def __new__(cls, *given: Any) -> Any:
        """What ``copy`` and ``|`` make is an ordinary one: they call the class as if it were a ``defaultdict``."""
        return super().__new__(cls) if len(given) == 1 else defaultdict(*given)

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__(dict)
        self.settle = settle

    __getitem__, get, values, items = map(_settled, ("__getitem__", "get", "values", "items"))
    pop, popitem, setdefault = map(_settled, ("pop", "popitem", "setdefault"))
    __iter__ = _settled("__iter__")  # without it, Python copies the values behind our back: dict(states), {**states}

    def entry(self, parameter: torch.Tensor, *, keep: bool = False) -> dict[str, Any]:
        """The state of a parameter, without waiting; ``keep`` puts an empty one there if there is none."""
        found: dict[str, Any] = dict.setdefault(self, parameter, {}) if keep else dict.get(self, parameter, {})
        return found

    def __reduce__(self) -> Any:
        """A copy, or what is pickled, is an ordinary one."""
        return defaultdict, (dict, dict(self.items()))


class ParameterState:
    """The state of one parameter. ``homes`` are on the host, or on the device if the parameter is ``resident``."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.resident = False
        self.homes: dict[str, torch.Tensor] = {}
        self.on_host = holder_of(parameter) is not None  # whether the weights are loaded and written as the state is
        self.gradient: torch.Tensor | None = None  # what is stepped with, if taken out of parameter.grad
        self.weights: torch.Tensor | None = None  # on the device, where a layer that was in backward has left them
        self.total: torch.Tensor | None = None  # the gradient on the host, if there is one, to which that is added
        self.set_aside: torch.Tensor | None = None  # host memory for the gradient, where it must not wait on the device
        self.written: Event | None = None  # after it, the copies that were queued to the homes are over
        self.stepped: Event | None = None  # after it, the last step is over

    def sources(self) -> dict[str, torch.Tensor]:
        """What a step needs on the device beside state and :attr:`gradient`."""
        found = {}
        if self.on_host and self.weights is None:
            found[WEIGHTS] = self.parameter.data
        if self.total is not None:
            found[TOTAL] = self.total
        return found

    def forget_step(self) -> None:
        """The step is made, or will not be."""
        self.gradient = self.weights = self.total = None


_Likes = dict[str, torch.Tensor]
"""Homes that are to be allocated for a parameter: tensors without memory that look like them, by their names."""


class StateStore:
    """All homes. ``shown`` is what the program finds in ``optimizer.state``, and has the homes that are in use."""

    def __init__(
        self,
        backend: Backend,
        proof: Proof,
        state_dtype: torch.dtype | None,
        master_weights: bool,
        max_host_bytes: int | None,
        resident_bytes: int,
        settle: Callable[[], None],
    ) -> None:
        self.proof = proof
        self.state_dtype = state_dtype
        self.master_weights = master_weights
        self.counters: Counter[str] = Counter()
        self.shown = HostStates(settle)
        self._backend = backend
        self._max_host_bytes = max_host_bytes
        self._resident_left = resident_bytes
        self._states: dict[torch.Tensor, ParameterState] = {}

    def of(self, parameter: torch.Tensor) -> ParameterState:
        """The state of a parameter; made at the first call."""
        if parameter not in self._states:
            self._states[parameter] = ParameterState(parameter)
        return self._states[parameter]

    def bytes_per_element(self, parameter: torch.Tensor) -> int:
        """What a chunk has of each element: what is loaded, or, if nothing is, what is stepped."""
        state, numel = self.of(parameter), max(1, local(parameter).numel())
        homes = sum(home.nbytes for home in state.homes.values()) // numel
        layout = sum(dtype.itemsize for dtype in self.layout(parameter).values())
        beside = sum(one.element_size() for one in state.sources().values())
        return max((homes or layout) + beside, dtype_of_step(parameter, self.state_dtype).itemsize)

    def is_home(self, value: object, parameter: torch.Tensor) -> bool:
        """Whether a value in a parameter's state is held here; the optimizer's other values remain as they are."""
        if type(value) is not torch.Tensor or not parameter.ndim or not parameter.numel():
            return False
        return of_shape(value, parameter) if self.proof.elementwise else is_large(value)

    def layout(self, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        """The state tensors of the parameter's shape, as far as they are known before its first step."""
        if not self.proof.elementwise and parameter.numel() <= 1:
            return {}  # a state tensor of one number is no home
        found = dict(self.proof.layouts.get(parameter, {}))
        if self.has_remainder(parameter) and parameter.ndim and parameter.numel():
            found[REMAINDER] = torch.int16
        return found

    def has_remainder(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter is the nearest bfloat16 number of a float32 one that the state completes."""
        return self.master_weights and parameter.dtype is torch.bfloat16

    def reserve(self, parameters: Iterable[torch.Tensor], states: Mapping[Any, Any]) -> None:
        """Provide what the first step of these parameters will need, as far as it is known."""
        # State in ``states`` that is in its place is kept there: it is neither pinned twice nor twice on the device.
        wanted: dict[ParameterState, _Likes] = {}
        for parameter in parameters:
            part = local(parameter)
            alike = partial(torch.empty_strided, part.shape, part.stride(), device="meta")
            wanted[self.of(parameter)] = {key: alike(dtype=dtype) for key, dtype in self.layout(parameter).items()}
        sized = [pair for pair in wanted.items() if pair[1]]
        for number in evenly(len(sized)):
            self._place(*sized[number])
        for state, likes in sized:
            entry = states.get(state.parameter)
            for key, value in entry.items() if isinstance(entry, dict) else ():
                home = local(value) if isinstance(value, torch.Tensor) else value
                if key in likes and type(home) is torch.Tensor and self._is_in_place(home, likes[key], state):
                    state.homes[key] = home
                    self.counters["resident_bytes" if state.resident else "host_bytes"] += likes.pop(key).nbytes
        self._allocate(wanted)

    def reserve_aside(self, parameters: Sequence[torch.Tensor], slot_bytes: int) -> None:
        """Provide host memory for the gradient of a model's head, with which backward begins, beside all activations.

        That is the last parameter whose state not even all slots hold, as :func:`number_of_head` tells.
        """
        if not self.proof.elementwise:
            return
        states = [one for one in map(self.of, parameters) if one.homes and not one.on_host]
        sizes = [sum(home.nbytes for home in one.homes.values()) for one in states]
        if (number := number_of_head(sizes, slot_bytes)) is None:
            return
        state = states[number]
        if not (state.resident or hasattr(state.parameter, "to_local")):
            like = torch.empty_like(state.parameter, dtype=gradient_dtype(state.parameter), device="meta")
            (state.set_aside,) = self._pinned([like])

    def _place(self, state: ParameterState, likes: _Likes) -> None:
        """Let all of a parameter's state be resident if so many bytes are left for that."""
        nbytes = sum(like.nbytes for like in likes.values())
        if nbytes and not state.homes and not state.resident and nbytes <= self._resident_left:
            state.resident = True
            self._resident_left -= nbytes

    def _is_in_place(self, value: torch.Tensor, like: torch.Tensor, state: ParameterState) -> bool:
        """Whether a state tensor is as it is wanted, in the pool or on the device."""
        if (value.dtype, value.shape, value.stride()) != (like.dtype, like.shape, like.stride()):
            return False
        pooled = value.untyped_storage() in _pooled
        here = value.device == self._backend.device and not value.is_inference()
        return (here and not pooled) if state.resident else pooled

    def add(self, state: ParameterState, values: dict[str, torch.Tensor]) -> None:
        """Allocate homes for these state tensors, or pieces of state tensors, where there are none."""
        part, likes = local(state.parameter), _Likes()
        for key, value in values.items():
            if key not in state.homes:
                like = part if self.proof.elementwise or value.shape == part.shape else value
                dtype = self.state_dtype if self.state_dtype and value.is_floating_point() else value.dtype
                likes[key] = torch.empty_like(like, dtype=dtype, device="meta")
        self._allocate({state: likes})

    def adopt(self, states: dict[Any, Any]) -> None:
        """Take over state that there is, on whatever device; of sharded tensors, this rank's part."""
        rounded = None
        for parameter, entry in states.items():
            if not isinstance(parameter, torch.Tensor) or not isinstance(entry, dict):
                self.shown[parameter] = entry
                continue
            parts = {key: local(value) if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
            if not self.has_remainder(parameter):
                parts.pop(REMAINDER, None)
            held = {key: value for key, value in parts.items() if self.is_home(value, local(parameter))}
            state = self.of(parameter)
            self.add(state, held)
            for key, value in parts.items():
                if key in held:
                    if value.is_floating_point() and value.dtype.itemsize < state.homes[key].dtype.itemsize:
                        rounded = value.dtype
                    if value.data_ptr() != state.homes[key].data_ptr():
                        state.homes[key].copy_(value)  # blocks until it is there
                elif is_large(value):
                    raise ValueError(
                        f"{key} in the optimizer's state must have its parameter's shape, "
                        f"{tuple(local(parameter).shape)}, got {tuple(value.shape)}; load a state_dict of this model."
                    )
                elif isinstance(value, torch.Tensor) and value.ndim:
                    parts[key] = value.to(self._backend.device)
            self.shown[parameter] = parts | {key: state.homes[key] for key in held}
        if rounded is not None:  # a checkpoint's float32, unless the steps before were made in 16 bits
            warn_caller(
                f"the optimizer's state continues in {self.state_dtype}, but it was rounded to {rounded} before, as "
                "load_state_dict of a PyTorch optimizer does it; to resume from a checkpoint, call load_state_dict "
                "after this call."
            )

    def foreign(self, states: dict[Any, Any]) -> dict[Any, Any]:
        """The entries of ``states`` that have a tensor which is no home, and belongs into one."""

        def strange(parameter: Any, entry: Any) -> bool:
            if not isinstance(parameter, torch.Tensor) or not isinstance(entry, dict):
                return False
            homes, part = self.of(parameter).homes, local(parameter)
            held = ((key, value) for key, value in entry.items() if is_large(value) or self.is_home(value, part))
            return any(value is not homes.get(key) for key, value in held)

        entries = dict.items(states)  # without waiting
        if states is not self.shown:
            return dict(entries)
        return {one: entry for one, entry in entries if strange(one, entry)}

    def moved_back(self) -> defaultdict[Any, Any]:
        """The state as the optimizer itself would hold it."""
        states: defaultdict[Any, Any] = defaultdict(dict)
        for parameter, entry in self.shown.items():
            states[parameter] = entry
            if parameter in self._states:
                states[parameter] = {
                    key: spread(self._beside(value, parameter), parameter)
                    if isinstance(value, torch.Tensor) and (value.ndim or self._states[parameter].on_host)
                    else value
                    for key, value in entry.items()
                    if key != REMAINDER
                }
        return states

    def _beside(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Where the parameter is: on the device, unless its weights are on the host, and so the next steps."""
        device = parameter.device if self._states[parameter].on_host else self._backend.device
        narrowed = self.state_dtype and value.ndim and value.is_floating_point()
        dtype = parameter.dtype if narrowed else value.dtype
        if value.dtype is dtype and value.device == device and value.untyped_storage() not in _pooled:
            return value
        if device.type == "cpu":  # without room, the system kills the process that touches its pages
            check_room(value.numel() * dtype.itemsize)
            return torch.empty_like(value, dtype=dtype, device=device).copy_(value)
        there = torch.empty_like(value, device=device).copy_(value)
        return there.to(dtype)  # there, as the host would do it slowly, in memory of its own

    def _allocate(self, wanted: Mapping[ParameterState, _Likes]) -> None:
        """On the device as long as there is room for all of a parameter's homes, else on the host."""
        host: list[tuple[ParameterState, str, torch.Tensor]] = []
        for state, likes in wanted.items():
            self._place(state, likes)  # unless it was known before the first step
            for key, like in likes.items():
                if state.resident:
                    self.counters["resident_bytes"] += like.nbytes
                    state.homes[key] = torch.empty_like(like, device=self._backend.device)
                else:
                    host.append((state, key, like))
        for (state, key, _), home in zip(host, self._pinned([like for *_, like in host]), strict=True):
            state.homes[key] = home

    def _pinned(self, likes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Host memory of the pool that looks like these."""
        pool, found = get_host_pool(self._backend), []
        buffers = pool.take_whole([like.nbytes for like in likes], self._max_host_bytes) if likes else []
        for like, buffer in zip(likes, buffers, strict=True):
            memory = own_storage(buffer.pieces[0]).untyped_storage()
            weakref.finalize(memory, _give_back, pool, buffer, self._backend).atexit = False
            _pooled.add(memory)
            found.append(torch.empty(0, dtype=like.dtype, device="cpu").set_(memory, 0, like.shape, like.stride()))
            self.counters["host_bytes"] += like.nbytes
        return found


_pooled = weakref.WeakSet[torch.UntypedStorage]()  # the memory of homes that are in a pool


def pooled_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What an optimizer's state has of a pool, also where nobody streams it any more."""
    values = (
        value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)
    )
    storages = {part.untyped_storage() for part in map(local, values)}
    return sum(storage.nbytes() for storage in storages if storage in _pooled)


def _give_back(pool: HostPool, buffer: HostBuffer, backend: Backend) -> None:
    """Nobody holds the home any more; copies may still run."""
    pool.give(buffer, *(stream.record_event() for stream in backend.state_streams))
