"""Activation sets: all that one layer of one microbatch saved, offloaded and reloaded as one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum
from operator import attrgetter
from typing import Any

import torch

from offload.activations.copies import Reload, Transfers
from offload.activations.handles import KeptHandle, MovedHandle, SavedHandle, SubclassHandle, Token, unpack
from offload.activations.saved_storage import SavedStorage, watched
from offload.activations.what_moves import SMALL, Parts, Rules, decide
from offload.base import trace
from offload.base.torch_private import address_of, next_node, pop_hooks, push_hooks
from offload.device.backend import Event, Stream, Wait

EVENT_BYTES = 1 << 24  # reloads share an event until there are so many bytes, which take the link 0.3 ms


class OffloadState(Enum):
    """State of one activation set: who owns its memory."""

    RESIDENT = "resident"
    """The device holds it, nothing was copied."""
    OFFLOADING = "offloading"
    """The device holds it, and copies to the host are queued."""
    OFFLOADED = "offloaded"
    """The host holds it, the device memory was let go."""
    RELOADING = "reloading"
    """Copies into new device buffers are queued, and backward reads each as it arrives."""


class OffloadStateError(RuntimeError):
    """A call that the layer's state does not allow; the message says what to call instead."""


RESIDENT, OFFLOADING, OFFLOADED, RELOADING = OffloadState

_REMEDY = {
    RESIDENT: "call start_offload_layer first",
    OFFLOADING: "call release_activation_forward_gpu_memory next",
    OFFLOADED: "call start_reload_layer next, or let backward reload it on demand",
    RELOADING: "nothing is left to call: backward waits for the reload by itself",
}


class Saved(dict[int, "weakref.ref[SavedStorage]"]):
    """The storages that one microbatch has saved, by the addresses of the program's own, and those of an operation.

    All weakly: a storage that the graph has let go of is not copied any more. The address of one that the program has
    let go of may be another's by now.

    Autograd may save a tensor before the kernel has run that writes it: ``rrelu`` saves its noise first and draws it
    then, without a change of its version. So nothing is copied, and no ready event recorded, until the operation is
    over: when a later one saves, when the layer's forward ends, or when the program asks. Only the first tensor that a
    layer saves is copied at once if another operation computed it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operation: list[weakref.ref[SavedStorage]] = []  # what the operation at work has saved, for one set
        self.stream: Stream | None = None  # where its kernels are queued, which the operation after it need not use
        self.node = -1  # the number of autograd's next node, which grows with each operation that saves anything
        watched[id(self)] = self


class ActivationSet:
    """Everything that one layer of one microbatch saved for backward; a set that ``stays`` is never offloaded.

    It holds its storages weakly: the graph's handles own them. A storage that a later layer saves as well moves with
    that layer's set, which backward needs first; the storage's ``layer`` says with which. ``known`` is the
    microbatch's.
    """

    packing: Callable[[torch.Tensor], Any] | None = None  # a pack hook other than `pack`; it must not outlive forward

    # Attributes that most layers leave as they are cost a forward no time.
    state: OffloadState = RESIDENT
    _early: tuple[SavedStorage, ...] = ()  # storages that were copied early, which no handle holds yet
    _small = 0  # saved tensors below `min_bytes`, which are many: they are counted when the layer ends
    in_graph = False  # whether a graph has come to hold `alive`
    backward_begun = False
    has_hooks = False  # whether handles hold what the layer has saved

    def __init__(self, layer: int, transfers: Transfers, rules: Rules, known: Saved, *, stays: bool) -> None:
        self.layer = layer
        self.transfers = transfers
        self._rules = rules
        self._known = known
        self._stays = stays
        self._compute_stream = transfers.backend.compute_stream()
        self._storages: list[weakref.ref[SavedStorage]] = []
        self.alive: Token | None = Token(layer, self._reload_late)  # until the forward has ended
        # Weakly, so that it tells whether a handle is left.
        self._graph = weakref.ref(self.alive)

    @property
    def gone(self) -> bool:
        """Whether the graph let go of everything that the layer saved."""
        return self.in_graph and self._graph() is None

    def enter(self, inputs: object = None) -> None:
        """The layer's forward begins with ``inputs``, if they are known: autograd hands over what it saves."""
        self.has_hooks = True
        push_hooks(self.packing or self.pack, unpack)

    def leave(self, *, failed: bool) -> None:
        """The forward has ended, or ``failed``; also called where it was cut off before :meth:`enter`."""
        if self.has_hooks:
            pop_hooks(self.packing or self.pack)

    def close(self) -> None:
        """End of the layer's forward: from now on only the graph's handles keep the set alive."""
        self.alive = None
        self._early = ()
        if self._small and self.state is not RESIDENT:
            self.transfers.skipped[SMALL] += self._small
        self._end_operation()
        if self.state is OFFLOADING:
            self.transfers.end_batch()

    def start_early(self, tensor: torch.Tensor, changes: int = 0) -> None:
        """Queue the copy of a tensor that the layer will save, as soon as the tensor is computed."""
        if self.state is not OFFLOADING:
            return
        decision = decide(tensor, self._rules)
        if isinstance(decision, Parts):
            for part in decision.inner:
                self.start_early(part, changes + tensor._version)
        elif isinstance(decision, type):
            storage = self._storage_of(tensor, decision, changes)
            if storage.ready is None:
                storage.ready = self.transfers.backend.compute_stream().record_event()
            storage.start_offload()
            self._early += (storage,)

    def pack(self, tensor: torch.Tensor, changes: int = 0) -> SavedHandle:
        """The pack hook: a handle for a tensor that autograd saves; ``changes`` as :class:`SavedStorage` has it."""
        self.in_graph = True
        token = self.alive or self._token
        decision = decide(tensor, self._rules)
        if decision is SMALL:
            self._small += 1
            return KeptHandle(tensor, token)
        if isinstance(decision, Parts):
            return self._pack_parts(tensor, decision, token, changes)
        known = self._known
        if known.operation and next_node() != known.node:
            self._end_operation()
        if isinstance(decision, str):
            if self.state is not RESIDENT:
                self.transfers.skipped[decision] += 1
            return KeptHandle(tensor, token)
        storage = self._storage_of(tensor, decision, changes)
        storage.tensors += 1
        if self.state is not RESIDENT:
            self.transfers.offloaded_tensors += 1
        if storage.host is None:
            # The storage may still be written; or an earlier set has not offloaded it, and this set may.
            operation = known.operation
            if not operation:
                known.node, known.stream = next_node(), self.transfers.backend.compute_stream()
            operation.append(weakref.ref(storage))
            if len(operation) == len(self._storages) == 1 and tensor.grad_fn is not None:
                # An input of the operation: written before it. Around a checkpoint that is all that the layer saves,
                # and its copy would only begin when the layer ends.
                self._end_operation()
        return MovedHandle(tensor, token, storage)

    def _pack_parts(self, tensor: torch.Tensor, parts: Parts, token: Token, changes: int) -> SubclassHandle:
        # Not in pack itself: variables that a comprehension shares with its function are slow in all of it.
        inner = [self.pack(part, changes + tensor._version) for part in parts.inner]
        return SubclassHandle(tensor, token, inner, parts.rebuild)

    @property
    def _token(self) -> Token:
        return self.alive or Token(self.layer, self._reload_late)

    def _storage_of(self, tensor: torch.Tensor, maker: type, changes: int) -> SavedStorage:
        """The storage of a tensor that is offloaded, which moves with this set from now on."""
        memory = tensor.untyped_storage()
        address = address_of(memory)
        reference = self._known.get(address)
        storage = None if reference is None else reference()
        if storage is None or storage.original() is not memory or not storage.same_bytes(tensor, changes):
            storage = SavedStorage(tensor, maker, self.transfers, self.layer, stays=self._stays, changes=changes)
            self._known[address] = reference = weakref.ref(storage)
            self._storages.append(reference)
        elif storage.layer != self.layer:
            # It stays in the earlier set's list as well, where its layer's number lets it be passed over. An interrupt
            # may come at any line, and what is in no list would never be reloaded. First in this list, as it was saved
            # before the rest: reloads go from the last to the first.
            self._storages.insert(0, weakref.ref(storage))
            storage.move_with(self.layer, tensor, stays=self._stays)
        return storage

    def _end_operation(self) -> None:
        """What the operation has saved is complete, with one event for all: what is to be copied now is copied."""
        known = self._known
        saved, known.operation = known.operation, []
        ready: Event | None = None
        for reference in saved:
            storage = reference()
            if storage is None or known.stream is None:
                continue
            if ready is None and not self._stays:
                ready = known.stream.record_event()
            if storage.ready is None:  # in layers that are kept there is no event, until a later layer saves it too
                storage.ready = ready
            if self.state is OFFLOADING:
                storage.start_offload()
            elif self.state is OFFLOADED:  # the release came in the midst of the operation
                storage.start_offload()
                self._let_go([storage])

    # The three verbs, with the names of the manual synchronizer's calls in errors.

    def _reach(self, state: OffloadState, call: str, needed: OffloadState) -> None:
        if self.state is not needed:
            raise OffloadStateError(
                f"{call}({self.layer}): layer {self.layer} must be {needed.name}, but it is {self.state.name}; "
                f"{_REMEDY[self.state]}."
            )
        self.state = state

    def start_offload(self) -> None:
        """Queue the copies of what was saved so far; what is saved from now on follows at once."""
        self._reach(OFFLOADING, "start_offload_layer", needed=RESIDENT)
        for storage in self._live():
            storage.start_offload()  # what is being written follows when its operation is over
            self.transfers.offloaded_tensors += storage.tensors
        self.transfers.end_batch()

    def release(self) -> None:
        """Let the device memory go: the compute stream waits for the copies, then reuses the memory."""
        self._reach(OFFLOADED, "release_activation_forward_gpu_memory", needed=OFFLOADING)
        self._let_go(self._live())

    def _let_go(self, storages: list[SavedStorage]) -> None:
        moved = [one for one in storages if one.memory is not None and one.host is not None]
        batches = [storage.batch for storage in moved if storage.batch is not None]
        if not batches:
            return
        # Copies run in order on one stream, so the batch that was queued last stands for all.
        done = self.transfers.done(max(batches, key=attrgetter("number")))
        trace.point("wait", self.layer)
        # Before the memory is free for compute's next operations, which the copies may still read.
        self.transfers.wait_for_copies(self._compute_stream, done, Wait.RELEASE)
        for storage in moved:
            storage.release()

    def start_reload(self) -> None:
        """Queue the copies back to the device, last saved first, as backward will ask for them."""
        self._reach(RELOADING, "start_reload_layer", needed=OFFLOADED)
        self._reload()

    def _reload_late(self, storage: SavedStorage) -> None:
        """Backward needs ``storage`` now, and nobody has started its reload: correct, but a stall."""
        with self.transfers.lock:
            if storage.memory is not None:
                return  # another thread has reloaded it meanwhile
            if storage.layer != self.layer:
                # The later layer that the storage moves with has no backward here: reload it with this one.
                self._storages.append(weakref.ref(storage))
                storage.layer = self.layer
            self.transfers.late_reloads += 1
            if self.state is OFFLOADED:
                self.state = RELOADING
            self._reload()

    def _reload(self) -> None:
        backend = self.transfers.backend
        with self.transfers.lock:  # backward may read what was saved in several threads
            away = [storage for storage in reversed(self._live()) if storage.memory is None]
            # Allocating can queue work on the compute stream: under deterministic algorithms PyTorch fills new memory.
            landings = [backend.empty(storage.nbytes).untyped_storage() for storage in away]
            compute = backend.compute_stream()
            # Once for the set: what compute has done with the memory until now is over, and so are copies to the host
            # that compute has waited for before it let the device memory go.
            backend.wait(self.transfers.h2d_stream, compute.record_event(), Wait.LANDING)
            group: list[tuple[SavedStorage, torch.UntypedStorage]] = []
            nbytes = 0
            for storage, landing in zip(away, landings, strict=True):
                group.append((storage, landing))
                nbytes += storage.nbytes
                if nbytes >= EVENT_BYTES or storage is away[-1]:
                    self._reload_group(group, compute)
                    group, nbytes = [], 0

    def _reload_group(self, group: list[tuple[SavedStorage, torch.UntypedStorage]], compute: Stream) -> None:
        backend, h2d_stream = self.transfers.backend, self.transfers.h2d_stream
        try:
            for storage, landing in group:
                storage.start_reload(landing)
            reload = Reload(backend.record_timed(h2d_stream), compute, backend.compute_stream_id())
            for storage, landing in group:
                storage.end_reload(landing, reload)
        except BaseException:
            # Storages that were not reloaded remain on the host. Compute waits for copies that run into their landings.
            backend.wait(compute, h2d_stream.record_event(), Wait.UNREAD)
            raise

    def _live(self) -> list[SavedStorage]:
        """The storages that a graph still holds and that move with this set, in the order of the copies to the host."""
        layer = self.layer
        living = [reference() for reference in self._storages]
        return [storage for storage in living if storage is not None and storage.layer == layer]
