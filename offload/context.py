"""The offload context: it turns a program's events into points of the schedule.

Entering it means that a layer's forward begins. The sync function marks the layer's output, so
that the context learns when the layer's backward begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from weakref import WeakValueDictionary

import torch

from offload import trace
from offload.activation_set import ActivationSet
from offload.backend import get_backend
from offload.caller import warn_caller
from offload.compiler import interpreted
from offload.host_memory import NO_HOST_MEMORY, HostMemory
from offload.host_pool import get_host_pool
from offload.round import Round
from offload.saved import unpack
from offload.schedule import Schedule
from offload.states import OffloadStateError
from offload.stats import Counters, OffloadStats
from offload.transfers import Transfers

Output = TypeVar("Output")

DEFAULT_MIN_BYTES = 1 << 22

_open_sets: list[ActivationSet] = []
"""The activation sets of the layers whose forward runs now, innermost last."""


class _Entry(NamedTuple):
    opened: ActivationSet
    hooks: AbstractContextManager[Any] | None


class _Closed(NamedTuple):
    microbatch: Round
    opened: ActivationSet
    alive: object | None
    """What the graph shall hold of a layer whose saved tensors have no handles."""

    def begin_backward(self, _: object) -> None:
        self.microbatch.begin_backward(self.opened.layer)


class OffloadContext(ContextDecorator):
    """Wraps each layer's forward; what autograd saves inside follows the schedule.

    Made by :func:`get_cpu_offload_context`. Under ``torch.no_grad()``, in inference mode, and when a layer is
    recomputed during backward, entering it does nothing.

    Args:
        schedule: What moves when; ``None`` leaves that to the manual synchronizer.
        model_layers: Number of layers in a round.
        min_bytes: Storages below this size stay on the device, in bytes.
        device: The device whose activations move.
        copy_stream: A stream for the copies of both directions, in place of the two shared ones.
        host: How much host memory the context may take; see :class:`HostMemory`.
    """

    def __init__(
        self,
        schedule: Schedule | None,
        model_layers: int,
        *,
        min_bytes: int = DEFAULT_MIN_BYTES,
        device: torch.device | str | int | None = None,
        copy_stream: Any = None,
        host: HostMemory | None = None,
    ) -> None:
        backend = get_backend(device)
        d2h_stream, h2d_stream = (copy_stream, copy_stream) if copy_stream is not None else backend.copy_streams
        self.schedule = schedule
        self.model_layers = model_layers
        self._min_bytes = min_bytes
        self._transfers = Transfers(
            backend, get_host_pool(backend), d2h_stream, h2d_stream, Counters(), host or HostMemory()
        )
        self._round = self._new_round()
        self._entered: list[_Entry | None] = []
        self._open: ActivationSet | None = None
        self._closed: _Closed | None = None
        self._sets: WeakValueDictionary[tuple[int, int], ActivationSet] = WeakValueDictionary()
        self._ever_entered = False
        self._warned = False
        self.microbatch = -1
        """Number of the round that began last, counted from 0."""
        self.skipped = False
        """Whether the context did nothing when it was entered last."""

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.exit(failed=kind is not None)

    @interpreted
    def enter(self, layer: int | None = None) -> None:
        """A layer's forward begins.

        Args:
            layer: Its number, where the caller knows it; else the one after the last, or 0 in a new round.

        Raises:
            OffloadStateError: The context is already inside a layer's forward.
        """
        self._ever_entered = True
        self._closed = None
        self.skipped = not torch.is_grad_enabled() or _in_backward()
        if self.skipped:
            self._entered.append(None)
            return
        if self._open is not None:
            raise OffloadStateError(
                f"the offload context was entered inside the forward of layer {self._open.layer}; leave it first, "
                "or use one context per level of nesting."
            )
        self._open = self._begin_layer(layer)
        hooks = None
        if not (self._round.passes_by(self._open.layer) or _in_checkpoint()):
            hooks = torch.autograd.graph.saved_tensors_hooks(self._open.pack, unpack)
            hooks.__enter__()
        self._entered.append(_Entry(self._open, hooks))
        _open_sets.append(self._open)

    @interpreted
    def exit(self, *, failed: bool = False) -> None:
        """A layer's forward ends; if it ``failed``, the round is given up and the next layer is layer 0."""
        entry = self._entered.pop() if self._entered else None
        if entry is None:
            return
        if entry.hooks is not None:
            entry.hooks.__exit__(None, None, None)
        trace.point("other")
        self._open = None
        _open_sets.remove(entry.opened)
        alive = entry.opened.alive if self._round.passes_by(entry.opened.layer) else None
        try:
            entry.opened.close()
        except BaseException:
            self._give_up_round()
            raise
        if failed:
            self._give_up_round()
            return
        self._closed = _Closed(self._round, entry.opened, alive)
        if entry.opened.layer == self.model_layers - 1:
            self._transfers.join()
            self._warn_if_nothing_moved()

    def abort(self) -> None:
        """Leave a forward that was cut off without leaving the context, if there is one."""
        while self._open is not None:
            self.exit(failed=True)

    @interpreted
    def sync(self, output: Output) -> Output:
        """Mark a layer's output, so that the schedule learns when the layer's backward begins.

        Args:
            output: Whatever the layer returned: a tensor, or a tuple, list, mapping or dataclass that holds some.
                Tensors that need no gradient are passed over.

        Returns:
            ``output``, the same object.

        Raises:
            OffloadStateError: Called before the context was entered, or while it is.
        """
        if self._open is not None:
            raise OffloadStateError(
                f"the sync function was called inside the forward of layer {self._open.layer}; call it after the "
                "with block, on the layer's output."
            )
        if not self._ever_entered:
            raise OffloadStateError(
                "the sync function was called before the offload context was entered; run the layer inside "
                "`with context:` first."
            )
        if self._closed is not None:
            opened = self._closed.opened
            nodes = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
            for node in nodes:
                node.register_prehook(self._closed.begin_backward)
                opened.in_graph |= self._closed.alive is not None
            if not nodes or opened.gone:
                # The forward goes on without what the layer has saved: that it goes does not mean that the round does.
                opened.in_graph = False
        return output

    def stats(self) -> OffloadStats:
        """A frozen snapshot of what has moved so far."""
        return self._transfers.counters.snapshot(self._transfers.pool.pinned_bytes)

    def set_of(self, microbatch: int, layer: int) -> ActivationSet | None:
        """The activation set of one layer of one round, unless it has gone with its graph."""
        return self._sets.get((microbatch, layer))

    def sets_of(self, layer: int) -> list[ActivationSet]:
        """The activation sets of one layer that a graph still holds, oldest round first."""
        return [found for (_, number), found in sorted(self._sets.items()) if number == layer and not found.gone]

    def reset(self) -> None:
        """Give up the current round: the next layer is layer 0. Graphs that exist stay valid."""
        self._round = self._new_round()
        self._closed = None

    @property
    def inside(self) -> bool:
        """Whether a layer's forward runs now."""
        return self._open is not None

    def __repr__(self) -> str:
        what = "manual" if self.schedule is None else f"{len(self.schedule.moves)} of {self.model_layers} layers"
        return f"OffloadContext({what}, device={str(self._transfers.backend.device)!r})"

    def _begin_layer(self, layer: int | None) -> ActivationSet:
        last = self._round.last_layer
        number = last + 1 if layer is None else layer
        if number >= self.model_layers or number <= last or self._round.abandoned:
            self._round = self._new_round()
            number = 0 if layer is None else layer
        if not self._round.sets:
            self.microbatch += 1
        opened = self._round.begin_forward(number)
        self._sets[self.microbatch, number] = opened
        return opened

    def _give_up_round(self) -> None:
        self._transfers.join()
        self.reset()

    def _new_round(self) -> Round:
        return Round(self.schedule, self._transfers, self._min_bytes)

    def _warn_if_nothing_moved(self) -> None:
        counters = self._transfers.counters
        said = self._warned or NO_HOST_MEMORY in counters.skipped
        if said or counters.offloaded_storages or not self.schedule or not self.schedule.moves:
            return
        if len(self._round.sets) < self.model_layers:
            return  # layers were skipped, perhaps those that offload
        self._warned = True
        reasons = ", ".join(f"{count} {reason}" for reason, count in counters.skipped.items()) or "nothing was saved"
        warn_caller(
            f"a whole round of {self.model_layers} layers was run and nothing was offloaded: saved tensors of the "
            f"offloaded layers stayed on the device for these reasons: {reasons}. min_bytes is {self._min_bytes} and "
            f"the context's device {self._transfers.backend.device}; see context.stats().skipped."
        )


def start_offload(*tensors: torch.Tensor | None, offload_base_tensor: bool = False) -> None:
    """Begin the copies of tensors that the running layer will save, as soon as they are computed.

    Inside a layer that is offloaded, the copies are queued now, behind what has been computed so far, and not when
    autograd saves the tensors. Elsewhere this does nothing.

    Args:
        tensors: Tensors on the context's device; ``None`` is passed over.
        offload_base_tensor: Accepted for compatibility; a view always travels with its whole storage, once.

    Raises:
        TypeError: An argument is neither a tensor nor ``None``.
    """
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"start_offload takes tensors, got {type(tensor).__name__}")
        if tensor is not None and _open_sets:
            _open_sets[-1].start_early(tensor)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _in_checkpoint() -> bool:
    """Whether activation checkpointing decides here what is saved; hooks inside of its own would undo it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__
