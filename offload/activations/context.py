"""The offload context: it turns a program's events into points of the schedule.

Entering it means that a layer's forward begins; the sync function marks the output, where the backward will begin.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ContextDecorator
from typing import NamedTuple, Self, TypeVar
from weakref import WeakValueDictionary

import torch

from offload.activations import selective
from offload.activations.activation_set import ActivationSet, OffloadStateError
from offload.activations.copies import NO_HOST_MEMORY, Transfers
from offload.activations.round import Round
from offload.activations.stats import OffloadStats
from offload.activations.what_moves import given_tensors
from offload.base import torch_private, trace
from offload.base.checks import parse_bytes, warn_caller
from offload.base.tensors import tensors_in
from offload.base.torch_private import interpreted
from offload.device.backend import Backend
from offload.device.select import get_backend
from offload.host.pool import get_host_pool
from offload.recompute.layer_policies import LayerPolicies, check_patterns
from offload.schedule.schedule import Schedule

LayerOutput = TypeVar("LayerOutput")

DEFAULT_MIN_BYTES = 1 << 21
"""From this size on, storages that are copied one by one reach 80% of the link's bandwidth in both directions:
measured by ``benchmarks.suite --only small_copies`` on an H200 behind PCIe Gen5."""

UNSYNCED = 2  # so many outputs in a row that sync was not given are worth a warning: one may be a loop's last


class _Closed(NamedTuple):
    """The layer whose forward has ended last, until its output is known."""

    microbatch: Round
    opened: ActivationSet
    alive: object | None  # what the graph shall hold of a layer whose saved tensors have no handles

    def begin_backward(self, _: object) -> None:
        self.microbatch.begin_backward(self.opened.layer)


class OffloadContext(ContextDecorator):
    """Wraps each layer's forward; what autograd saves inside follows the schedule.

    Made by :func:`get_cpu_offload_context`, whose arguments it has. Without a ``schedule``, the manual synchronizer
    says what moves; ``policies`` are those of the regions of each layer. Under ``torch.no_grad()``, in inference mode,
    and when a layer is recomputed during backward, entering it does nothing.
    """

    def __init__(
        self,
        schedule: Schedule | None,
        model_layers: int,
        *,
        min_bytes: int | str = DEFAULT_MIN_BYTES,
        device: torch.device | str | int | None = None,
        max_host_bytes: int | str | None = None,
        policies: Sequence[LayerPolicies | None] = (),
        enabled: bool = True,
    ) -> None:
        selective.patch_pytorch()
        torch_private.leave_to_interpreter()
        backend = get_backend(device)
        self.model_layers = model_layers
        self.microbatch = -1  # number of the round that began last, counted from 0
        self.enabled = enabled
        self.skipped = not enabled  # whether the context did nothing when it was entered last
        self._min_bytes = parse_bytes(min_bytes, "min_bytes")
        most = None if max_host_bytes is None else parse_bytes(max_host_bytes, "max_host_bytes")
        self._transfers = Transfers(backend, get_host_pool(backend), most)
        self._first_node = 0  # the first that autograd made in the round: earlier ones belong to no layer of it
        self._entered: list[ActivationSet | None] = []  # `None` where the context was entered and does nothing
        # The one that has entered the context last, and the layers whose forward runs there, of all contexts.
        self._thread, self._thread_number = threading.current_thread(), threading.get_ident()
        self._told: list[ActivationSet] = []
        # Weakly, for the manual synchronizer: a round lives as long as its graph, and no longer.
        self._rounds: WeakValueDictionary[int, Round] = WeakValueDictionary()
        self._unsynced = 0  # outputs in a row that sync was not given, if a schedule needs to know of them
        self._warned: set[str] = set()
        self._closed: _Closed | None = None
        self._given = schedule  # later ones come from who has measured what layers save
        self.follow(schedule, policies)

    @interpreted
    def __enter__(self) -> Self:
        depth = len(self._entered)
        try:
            if self.has_nothing_to_do():
                self._closed = None
                self._entered.append(None)
                self.skipped = True
                return self
            self.check_thread()
            if self._open is not None:
                raise OffloadStateError(
                    f"the offload context was entered inside the forward of layer {self._open.layer}; leave it first, "
                    "or use one context per level of nesting. After an interrupt that kept the block from leaving it, "
                    "call reset()."
                )
            self.begin_layer()
            return self
        except BaseException:
            self.abort(depth)  # nobody else will: an interrupt can come between here and the first line of the block
            raise

    @interpreted
    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.end_layer(failed=kind is not None)
        except BaseException:
            self.abort()
            raise

    def begin_layer(self, layer: int | None = None, inputs: object = None) -> None:
        """A layer's forward begins with these ``inputs``: ``layer``, or the one after the last, or 0 in a new round."""
        self._closed = None  # it may be all that holds the last layer's graph, which tells whether its round is over
        if not self.in_this_thread:
            self._thread, self._thread_number = threading.current_thread(), threading.get_ident()
        if self._unsynced >= UNSYNCED:
            self._warn_once(
                "sync",
                "the output of each layer must be passed to the sync function, but that of layer "
                f"{self._round.last_layer} was not, so that no reload starts before backward waits for it; write "
                "`output = sync(output)` after the block of each layer.",
            )
        number = self._round.last_layer + 1 if layer is None else layer
        if self.begins_round(number):
            self._begin_round()
            number = 0 if layer is None else layer
        takes_all = not (self._round.keeps(number) or torch_private.in_checkpoint())
        if takes_all and (reason := torch_private.why_no_hooks()) is not None:
            raise RuntimeError(
                f"layer {number} must run where hooks on saved tensors are allowed if it is offloaded, but PyTorch "
                f"says: {reason} Take the derivative by torch.autograd, or run the layer without offloading: outside "
                "of the context, or after handle.remove()."
            )
        entered = len(self._entered)
        try:
            if not self._round.sets:
                self.microbatch += 1
                self._first_node = torch_private.next_node()
                self._rounds[self.microbatch] = self._round
            opened = self._round.begin_forward(number)
            # The entry comes first: whatever interrupts the rest, leaving undoes as much as was done.
            self._entered.append(opened)
        except BaseException:
            # Also if an interrupt came between the two: the round must not count a layer that nobody is in.
            del self._entered[entered:]
            self._give_up_round()
            raise
        self.skipped = False
        self._told = selective.opened()
        self._told.append(opened)
        if takes_all:
            opened.enter(inputs)

    def kept_layers(self) -> list[int]:
        """The layers that need not enter the context behind the round's first one."""
        nothing_moves = not (self._needs_sync or trace.is_on())
        return [number for number in range(self.model_layers) if nothing_moves and self._round.keeps(number)]

    def end_layer(self, *, failed: bool) -> None:
        """A layer's forward ends; if it ``failed``, the round is given up and the next layer is layer 0."""
        opened = self._entered[-1] if self._entered else None
        if opened is None:
            del self._entered[-1:]
            return
        try:
            if opened in self._told:
                self._told.remove(opened)  # first: to leave may run the layer again
            opened.leave(failed=failed)
            self._entered.pop()
            trace.point("other")
            alive = None if opened.has_hooks else opened.alive
            opened.close()
            if not failed:
                self._unsynced += self._needs_sync
                self._closed = _Closed(self._round, opened, alive)
                if opened.layer == self.model_layers - 1:
                    self._transfers.join()
                    if len(self._round.sets) == self.model_layers:  # else layers were skipped
                        self._check_round()
        except BaseException:
            self._give_up_round()
            raise
        if failed:
            self._give_up_round()

    def check_thread(self, layer: int | None = None) -> None:
        """Raise if ``layer`` begins in this thread while another one is between its first layer and its last."""
        if self.in_this_thread or not self._thread.is_alive():
            return
        number = self._round.last_layer + 1 if layer is None else layer
        if self._open is not None or not self.begins_round(number):
            raise RuntimeError(
                f"layer {number} must run in the thread {self._thread.name!r}, which is in the forward of the same "
                f"layers, but runs in {threading.current_thread().name!r}; use one copy of the model per thread, each "
                "with offloading of its own."
            )

    @property
    def in_this_thread(self) -> bool:
        """Whether this thread has entered the context last."""
        return self._thread_number == threading.get_ident()

    def abort(self, depth: int = 0) -> None:
        """Leave forwards that were cut off without leaving the context, until it is entered ``depth`` times."""
        while len(self._entered) > depth:
            self.end_layer(failed=True)

    def has_nothing_to_do(self) -> bool:
        """Whether entering the context does nothing: there is no backward to save for, or no memory to move."""
        return (
            not (self.enabled and torch.is_grad_enabled())
            or torch_private.in_backward()
            or torch_private.is_traced()
            or torch_private.is_transformed()
        )

    @interpreted
    def sync(self, output: LayerOutput) -> LayerOutput:
        """Mark a layer's output, so that the schedule learns when the layer's backward begins, and return it.

        Args:
            output: Whatever the layer returned: a tensor, or a tuple, list, mapping or dataclass that holds some.

        Raises:
            OffloadStateError: Called before the context was entered, or while it is.
        """
        if self._open is not None:
            raise OffloadStateError(
                f"the sync function was called inside the forward of layer {self._open.layer}; call it after the "
                "with block, on the layer's output."
            )
        if self.microbatch < 0 and not self.skipped:
            raise OffloadStateError(
                "the sync function was called before the offload context was entered; run the layer inside "
                "`with context:` first."
            )
        self.mark(output)
        return output

    def mark(self, output: object) -> None:
        """As :meth:`sync`, after the layer's forward has ended."""
        closed = self._closed
        if closed is not None:
            self._unsynced = 0
            opened = closed.opened
            if self._needs_sync or self.schedule is None or trace.is_on():
                nodes = torch_private.before_backward(tensors_in(output), self._first_node, closed.begin_backward)
                # Without nodes, nothing leads from the output to what the layer has saved.
                opened.in_graph = bool(nodes) and (opened.in_graph or closed.alive is not None)
            if opened.gone:
                # Nothing holds what the layer has saved any more: a frozen layer, say. Its set may go at any time, and
                # must not count as the end of the round when it does.
                opened.in_graph = False

    def stats(self) -> OffloadStats:
        """The counters so far, a frozen :class:`~offload.OffloadStats`."""
        return self._transfers.stats() if self.enabled else OffloadStats()

    def limit_host(self, max_host_bytes: int | None) -> None:
        self._transfers.max_host_bytes = max_host_bytes

    def sets_of(self, layer: int) -> dict[int, ActivationSet]:
        """The activation sets of one layer, unless they have gone with their graph, by round, the oldest first."""
        return {number: one.sets[layer] for number, one in sorted(self._rounds.items()) if layer in one.sets}

    def reset(self) -> None:
        """Give up the current round, also inside of a layer's forward: the next layer is layer 0. Graphs remain."""
        self.abort()
        self._give_up_round()

    def follow(self, schedule: Schedule | None, policies: Sequence[LayerPolicies | None]) -> None:
        """Do this from the next round on, which begins now. Existing graphs remain valid."""
        self.schedule, self.policies = schedule, list(policies)
        self._needs_sync = schedule is not None and bool(schedule.moves)
        self._begin_round()

    @property
    def backend(self) -> Backend:
        return self._transfers.backend

    def __repr__(self) -> str:
        what = "manual" if self.schedule is None else f"{len(self.schedule.moves)} of {self.model_layers} layers"
        return f"OffloadContext({what}, device={str(self._transfers.backend.device)!r})"

    @property
    def _open(self) -> ActivationSet | None:
        return next(filter(None, self._entered), None)

    def begins_round(self, layer: int) -> bool:
        """Whether a forward of this layer, which may not be the first one, begins a new round."""
        now = self._round
        return not now.sets or layer <= now.last_layer or layer >= self.model_layers or now.abandoned

    def _give_up_round(self) -> None:
        self._transfers.join()
        self._begin_round()

    def _begin_round(self) -> None:
        policies_of = self.policies.__getitem__ if self.policies else None
        self._round = Round(self.schedule, self._transfers, self._min_bytes, policies_of=policies_of)
        self._closed = None

    def _check_round(self) -> None:
        """All layers have run: say what cannot be meant."""
        if "patterns" not in self._warned and any(one is not None and one.last is not None for one in self.policies):
            check_patterns(self.policies)  # a refusal comes in each forward
            self._warned.add("patterns")
        transfers = self._transfers
        if self.schedule is not self._given or not self._given or not self._given.moves:
            return
        if transfers.offloaded_storages or NO_HOST_MEMORY in transfers.skipped:
            return
        reasons = ", ".join(f"{count} {reason}" for reason, count in transfers.skipped.items()) or "nothing was saved"
        self._warn_once(
            "nothing moved",
            f"a whole round of {self.model_layers} layers was run and nothing was offloaded: saved tensors of the "
            f"offloaded layers were kept on the device for these reasons: {reasons}. min_bytes is {self._min_bytes} "
            f"and the context's device {transfers.backend.device}; see context.stats().skipped.",
        )

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warn_caller(message)


def start_offload(*tensors: torch.Tensor | None, offload_base_tensor: bool = False) -> None:
    """Start to copy tensors to the host that the running layer will save, when they are computed.

    Outside of a layer that is offloaded, this does nothing.

    Args:
        tensors: Tensors on the context's device; ``None`` is passed over.
        offload_base_tensor: Accepted for compatibility; a view is always offloaded with its whole storage, once.
    """
    for tensor in given_tensors("start_offload", tensors):
        if found := selective.opened():
            found[-1].start_early(tensor)
