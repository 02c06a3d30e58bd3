"""Steps an optimizer chunk by chunk: state to the device, step, state to the host, each on its own stream.

A chunk is made of pieces of parameters. The state of the pieces is loaded into a device slot; the step of the user's
own class runs on the pieces, by way of a stand-in; the new state is copied back to the host. Slots let the load of one
chunk, the step of another and the copy of a third run at the same time. Nothing blocks the host, and from the second
step on nothing is allocated but what the optimizer's own step allocates.

Of parameters whose weights are on the host, the weights and the gradients there are loaded with the state, as far as
they are not on the device already, and the weights are written with the state.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.base import trace
from offload.base.checks import warn_caller
from offload.base.tensors import aligned
from offload.device.backend import Backend, Event
from offload.optimizer.proof import (
    OWN,
    Group,
    changes,
    dtype_of_step,
    gradient_dtype,
    is_large,
    marks_of,
    stand_in_for,
    unhooked_step,
    with_groups,
)
from offload.optimizer.state import REMAINDER, TOTAL, WEIGHTS, ParameterState, StateStore, join, local, split

NUM_SLOTS = 6  # three keep the link and compute busy; the others hold what either has ready before the other needs it
PIECE_ELEMENTS = 1024  # pieces begin at multiples of this: vectors of kernels, and the alignment of copies


class StepWait(Enum):
    """The only places where streamed optimizer state waits, and what would go wrong without."""

    LOADED = "compute steps with state, or weights, that have not arrived on the device"
    SLOT = "a load overwrites state that is still being copied to the host, or memory that compute still uses"
    WRITTEN = "a load reads state, or a gradient, on the host that is still being written"
    STEPPED = "a copy to the host reads state before compute has written it"
    RELEASE = "compute reuses the memory of state, or of a gradient, that is still being copied to the host"
    GRADIENT = "a step beside backward, or a copy, reads a gradient before backward has written it"
    JOINED = "backward returns, or reuses the memory of a gradient, while a step beside it still runs"
    NEXT_FORWARD = "the program reads a parameter, or changes a gradient, while a step beside it still runs"
    READ = "the program reads state, or weights, on the host that are still being written"


class ParameterPiece(NamedTuple):
    """Elements of a parameter, in the order of its memory; the parameter itself where it must not be split."""

    state: ParameterState
    group: int
    start: int
    stop: int
    last: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor that looks like the parameter."""
        if (self.last and not self.start) or not tensor.ndim:
            return tensor
        return tensor.as_strided((self.stop - self.start,), (1,), tensor.storage_offset() + self.start)


StateChunk = list[ParameterPiece]
"""Pieces whose state is loaded and stepped together."""


@cache
def _warn_of_sums() -> None:
    """Warn the first time: PyTorch keeps state as parts of a sum where it can."""
    warn_caller(
        "gradients are sums over ranks that nobody has taken (placement Partial). The streamed optimizer takes them "
        "before a step, and PyTorch's own later, so the last bits may differ; for the same bits, call "
        "redistribute(placements=parameter.placements) on the gradients before step()."
    )


@dataclass
class StateSlot:
    """Device memory for the state of one chunk at a time."""

    memory: torch.Tensor
    free: Event  # after it, nothing uses the slot
    held: list[torch.Tensor] = field(default_factory=list)  # what the optimizer has allocated, until it is on the host


class Loaded(NamedTuple):
    """A chunk whose state is on the way to the device; of each piece, the tensors there."""

    chunk: StateChunk
    slot: StateSlot
    tensors: list[dict[str, torch.Tensor]]
    event: Event | None


class ChunkStepper:
    """Steps the parameters of ``optimizer``, whose state is in ``store``."""

    last_copy: Event | None = None  # of all that were queued to the host; ``None`` if it is known to be over

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend, chunk_bytes: int, **options: Any) -> None:
        self.reference = weakref.ref(optimizer)
        self.backend = backend
        # Weak references: without a circle, a dropped optimizer is gone at once, with its state and its hooks.
        this = weakref.ref(self)
        self.store = StateStore(backend, settle=lambda: None if (one := this()) is None else one.settle(), **options)
        self.counters: Counter[str] = self.store.counters
        self.torn = ""  # what was cut off in the middle of a step: parameters and state belong to different steps since
        self.chunk_bytes = chunk_bytes
        self.d2h_stream, self._h2d_stream = backend.state_streams
        self._slots: list[StateSlot] = []
        self._next_slot = 0
        self._slot_bytes = 0  # the most that a chunk has to have loaded, from its second step on
        self._changes: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """Slots go, out of which copies run that write state and weights which the program may still hold."""
        if not ends() and not self.backend.capturing:
            with contextlib.suppress(RuntimeError):  # a copy that has failed is over, too
                self.settle()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's; it holds this stepper by its hooks."""
        found = self.reference()
        if found is None:
            raise RuntimeError("the optimizer must be there while it is streamed, but it is gone; keep it.")
        return found

    @property
    def torn_message(self) -> str:
        return (
            f"parameters and optimizer state must belong to one step, but {self.torn}; load both from a checkpoint, by "
            "load_state_dict."
        )

    def settle(self) -> None:
        """Block until no copy to the host runs."""
        copied = self.last_copy
        if copied is not None:
            try:
                self.backend.wait_on_host(copied, StepWait.READ)
            except Exception:
                self.last_copy, self.torn = None, "a copy of state has failed"  # the program is told once
                raise
            self.last_copy = None  # after the wait: an interrupt leaves it to the next

    def take_over(self) -> None:
        """Let state be streamed that the program has put into ``optimizer.state``, or in the place of all of it.

        Raises if a step was cut off in the middle: some parameters have made it, and others have not.
        """
        if self.torn:
            raise RuntimeError(self.torn_message)
        given, shown = self.optimizer.state, self.store.shown
        foreign = self.store.foreign(given)
        if foreign or given is not shown:
            self.settle()
            if given is not shown:
                shown.clear()
                self.optimizer.state = shown
            self.store.adopt(foreign)

    def step(
        self,
        parameters: Iterable[tuple[int, torch.Tensor]],
        between: Callable[[list[StateChunk]], list[StateChunk]] = list,
    ) -> int:
        """Step these parameters, each given with the number of its group; returns how many chunks they have.

        ``between`` may add chunks of others to theirs.
        """
        parameters = list(parameters)
        for _, parameter in parameters:
            state = self.store.of(parameter)
            if state.on_host and state.gradient is None:
                state.total = parameter.grad
            if state.total is not None:
                state.total = _dense(state.total, local(parameter))
            gradient: Any = parameter.grad if state.gradient is None else state.gradient
            if getattr(gradient, "placements", None) != (placements := getattr(parameter, "placements", None)):
                # Some layers leave sums to whoever reads them: the gradient is sharded as its parameter is.
                if any(one.is_partial() for one in gradient.placements):
                    _warn_of_sums()
                state.gradient = gradient.redistribute(placements=placements)
        own_chunks = self.split(parameters)
        chunks, loaded = between(own_chunks), list[Loaded]()
        try:
            for number in range(len(chunks)):
                loaded += map(self.load, chunks[len(loaded) : number + NUM_SLOTS])
                self.step_chunk(loaded[number])
        except BaseException:
            # Loads of later chunks still write slots, whose memory compute gets if the program drops the optimizer.
            with contextlib.suppress(RuntimeError):  # a copy that has failed is over, too
                self.backend.wait(self.backend.compute_stream(), self._h2d_stream.record_event(), StepWait.SLOT)
            raise
        for _, parameter in parameters:
            state = self.store.of(parameter)
            state.forget_step()
            if state.on_host:  # written where autograd does not see it
                torch.autograd.graph.increment_version(parameter)
        return len(own_chunks)

    def split(self, parameters: Iterable[tuple[int, torch.Tensor]]) -> list[StateChunk]:
        """Parameters, each with the number of its group, in chunks; a parameter longer than a chunk in pieces."""
        chunks: list[StateChunk] = []
        room = 0
        for group, parameter in parameters:
            state, numel = self.store.of(parameter), local(parameter).numel()
            per_element = self.store.bytes_per_element(parameter)
            size = max(1, self.chunk_bytes // per_element // PIECE_ELEMENTS) * PIECE_ELEMENTS
            if not self.store.proof.elementwise:
                size = max(1, numel)
            for start in range(0, max(1, numel), size):
                stop = min(start + size, numel)
                if not chunks or (stop - start) * per_element > room:
                    chunks.append([])
                    room = self.chunk_bytes
                chunks[-1].append(ParameterPiece(state, group, start, stop, last=stop == numel))
                room -= (stop - start) * per_element
        return chunks

    def load(self, chunk: StateChunk) -> Loaded:
        """Queue the copies of a chunk's state into the next slot."""
        backend, h2d = self.backend, self._h2d_stream
        tensors: list[dict[str, torch.Tensor]] = []
        sources: list[tuple[dict[str, torch.Tensor], str, torch.Tensor]] = []
        later_bytes = 0
        for piece in chunk:
            entry = self.store.shown.entry(piece.state.parameter)
            homes = {key: piece.of(home) for key, home in piece.state.homes.items()}
            beside = {key: piece.of(source) for key, source in piece.state.sources().items()}
            # Others wait for the parameter's first step, which makes the state.
            parts = {key: home for key, home in homes.items() if key in entry}
            tensors.append(parts)
            loaded = beside if piece.state.resident else homes | beside
            sources += [(parts, key, part) for key, part in loaded.items() if key in parts or key in beside]
            later_bytes += sum(aligned(part.nbytes) for part in loaded.values())
        self._slot_bytes = max(self._slot_bytes, later_bytes)
        slot = self._take_slot(sum(aligned(part.nbytes) for *_, part in sources))
        if not sources:
            return Loaded(chunk, slot, tensors, None)
        # The slot's last chunk must be on the host; compute must be done with the memory of a new slot.
        backend.wait(h2d, slot.free, StepWait.SLOT)
        for event in dict.fromkeys(piece.state.written for piece in chunk):
            if event is not None:  # the copies of this state's last step
                backend.wait(h2d, event, StepWait.WRITTEN)
        start = 0
        with trace.mark("h2d"):
            for parts, key, part in sources:
                target = torch.empty(0, dtype=part.dtype, device=backend.device)
                offset = start // part.dtype.itemsize
                parts[key] = target.set_(slot.memory.untyped_storage(), offset, part.shape, part.stride())
                backend.copy(h2d, target, part)
                start += aligned(part.nbytes)
                self.counters["loaded_bytes"] += part.nbytes
        return Loaded(chunk, slot, tensors, h2d.record_event())

    def _take_slot(self, nbytes: int) -> StateSlot:
        """The next slot, with at least so much memory."""
        if len(self._slots) < NUM_SLOTS:
            self._slots.append(StateSlot(self.backend.empty(0), self.backend.compute_stream().record_event()))
        slot = self._slots[self._next_slot % NUM_SLOTS]
        self._next_slot += 1
        self._grow(slot, nbytes)
        return slot

    def _grow(self, slot: StateSlot, nbytes: int) -> None:
        """Let a slot have at least so much memory, and hold nothing else if it had less."""
        if len(slot.memory) < nbytes:
            self.counters["slot_bytes"] += nbytes - len(slot.memory)
            self._release(slot)
            self.backend.use_here(slot.memory)
            slot.memory = self.backend.empty(nbytes)
            slot.free = self.backend.compute_stream().record_event()

    def _release(self, slot: StateSlot) -> None:
        """Let compute use the memory that the slot's last step has made, once the copies out of it are over."""
        self.backend.wait(self.backend.compute_stream(), slot.free, StepWait.RELEASE)
        while slot.held:
            self.backend.use_here(slot.held[-1])  # a step beside backward frees what optimizer.step() has made
            self.backend.discard(slot.held.pop())

    def step_chunk(self, loaded: Loaded) -> None:
        """Step a chunk on the compute stream, and queue the copies of its new state to the host."""
        backend, compute, slot = self.backend, self.backend.compute_stream(), loaded.slot
        if loaded.event is not None:
            backend.wait(compute, loaded.event, StepWait.LOADED)
        if slot.held:
            self._release(slot)
        copies: list[tuple[ParameterState, torch.Tensor, torch.Tensor]] = []
        for piece, (target, entry) in zip(loaded.chunk, self._run(loaded), strict=True):
            copies += self._keep(piece, entry)
            if piece.state.on_host:
                # .data: a version of its own, as the thread that copies must not count the parameter's.
                copies.append((piece.state, piece.of(piece.state.parameter.data), target))
        slot.free = stepped = compute.record_event()
        if copies:
            backend.wait(self.d2h_stream, stepped, StepWait.STEPPED)
            backend.give_way(self.d2h_stream)
            with trace.mark("d2h"):
                for _, home, value in copies:
                    backend.copy(self.d2h_stream, home, value)
                    self.counters["written_bytes"] += home.nbytes
            slot.free = self.last_copy = self.d2h_stream.record_event()
            slot.held = [value for *_, value in copies]
        for state, *_ in copies:
            state.written = slot.free
        for piece in loaded.chunk:
            piece.state.stepped = stepped
        self.counters["chunks"] += 1

    def finish(self) -> None:
        """All chunks of a step are queued: what they have set in groups and attributes holds from now on.

        After the first step, slots have the memory that the next ones need: these may be measured.
        """
        for slot in self._slots:
            self._grow(slot, self._slot_bytes)
        for target, found in self._changes:
            target.update(found)
        self._changes.clear()
        self.counters["steps"] += 1

    def forget(self) -> None:
        """A checkpoint was loaded: nothing is left of a step that was cut off."""
        for _, parameter in with_groups(self.optimizer):
            self.store.of(parameter).forget_step()
        self._changes.clear()
        for slot in self._slots if self.torn else ():  # nothing runs any more, and copies may have failed
            slot.held.clear()
            slot.free = self.backend.compute_stream().record_event()
        self.torn = ""

    def _run(self, loaded: Loaded) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """Run the step of the optimizer's class on a chunk; returns the weights and the state of each piece."""
        groups: dict[int, Group] = {}
        states: dict[Any, Any] = defaultdict(dict)
        stepped = []
        for piece, tensors in zip(loaded.chunk, loaded.tensors, strict=True):
            target, parameter = self._parameter(piece, tensors)
            stepped.append((target, parameter))
            group = groups.setdefault(piece.group, {**self.optimizer.param_groups[piece.group], "params": []})
            group["params"].append(parameter)
            for key, value in self.store.shown.entry(piece.state.parameter).items():
                if key == REMAINDER:
                    continue  # the optimizer knows nothing of it
                # Each piece advances counters of its own; those of the last piece are kept.
                counts = isinstance(value, torch.Tensor) and not piece.last and key not in tensors
                states[parameter][key] = value.clone() if counts else tensors.get(key, value)
                is_counter = isinstance(value, torch.Tensor) and not value.ndim
                if piece.state.on_host and is_counter and (group.get("fused") or group.get("capturable")):
                    # PyTorch loads counters to where it finds the parameter; from the second step on they are here.
                    states[parameter][key] = states[parameter][key].to(self.backend.device)
        stand_in = stand_in_for(self.optimizer, list(groups.values()), states)
        unhooked_step(self.optimizer)(stand_in)
        for target, parameter in stepped:
            if parameter.dtype is not target.dtype:
                if self.store.has_remainder(target) and target.ndim:
                    states[parameter][REMAINDER] = split(parameter.detach(), target)
                else:
                    target.copy_(parameter)
            elif parameter.data_ptr() != target.data_ptr():
                target.copy_(parameter)  # the step has assigned parameter.data
        for number, group in groups.items():
            original = self.optimizer.param_groups[number]
            self._changes.append((original, changes(original, group, {"params"})))
        attributes = vars(self.optimizer)
        self._changes.append((attributes, changes(attributes, vars(stand_in), OWN)))
        return [(target, states[parameter]) for target, parameter in stepped]

    def _parameter(self, piece: ParameterPiece, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, nn.Parameter]:
        """The piece of the weights, and what the step is given: that, or a copy in the state's dtype."""
        state, remainder = piece.state, tensors.get(REMAINDER)
        if not state.on_host:
            target = piece.of(local(state.parameter))
        else:
            target = tensors[WEIGHTS] if state.weights is None else piece.of(state.weights)
        gradient = self._gradient(piece, tensors.get(TOTAL))
        dtype = dtype_of_step(target, self.store.state_dtype)
        value = target.to(dtype) if remainder is None else join(target, remainder)
        parameter = nn.Parameter(value, requires_grad=state.parameter.requires_grad)
        vars(parameter).update(marks_of(state.parameter))
        if dtype is not target.dtype:
            gradient = gradient.to(dtype)
        if gradient.dtype is not dtype:
            parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient
        return target, parameter

    def _gradient(self, piece: ParameterPiece, total: torch.Tensor | None) -> torch.Tensor:
        """The piece of the gradient, on the device, with what earlier microbatches have left on the host."""
        state, given = piece.state, piece.state.parameter
        if total is not None and state.gradient is None:
            return total
        gradient = given.grad if state.gradient is None else state.gradient
        assert gradient is not None  # noqa: S101  # only parameters with one are stepped
        gradient = piece.of(_dense(local(gradient), local(given)))
        if total is not None:
            return total.add_(gradient)
        # As autograd would add it to parameter.grad.
        return gradient.to(gradient_dtype(given)) if state.on_host else gradient

    def _keep(
        self, piece: ParameterPiece, made: dict[str, Any]
    ) -> list[tuple[ParameterState, torch.Tensor, torch.Tensor]]:
        """Keep a piece's new state; returns the copies to the host that this needs."""
        state, store = piece.state, self.store
        like = piece.of(local(state.parameter))
        held = {key: value for key, value in made.items() if store.is_home(value, like)}
        if not held.keys() <= state.homes.keys():
            store.add(state, held)
        copies = []
        for key, value in made.items():
            if key in held:
                home = piece.of(state.homes[key])
                if not state.resident:
                    copies.append((state, home, value))
                elif value.data_ptr() != home.data_ptr():
                    home.copy_(value)
            elif is_large(value):
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} must hold plain state tensors of its parameters' shapes, but "
                    f"{key} is a {type(value).__name__} of shape {tuple(value.shape)}; set options before streaming."
                )
            if piece.last:
                store.shown.entry(state.parameter, keep=True)[key] = state.homes[key] if key in held else value
        return copies


def _dense(gradient: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The gradient with its numbers in the order of the weights in memory."""
    if gradient.stride() == weights.stride():
        return gradient
    return torch.empty_like(weights, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
