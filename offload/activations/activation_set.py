"""Activation sets: what one layer of one microbatch saved, moved as one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from offload.activations.saved import Handle, KeptHandle, MovedHandle, SavedStorage, shares_versions
from offload.activations.states import OffloadState, next_state
from offload.activations.subclasses import SubclassHandle, parts_of
from offload.activations.waste import maker_of
from offload.activations.what_moves import held_by_autograd, is_plain, reason_of_memory, reason_of_other, reason_to_stay
from offload.base import trace
from offload.device.backend import Wait

if TYPE_CHECKING:
    from offload.activations.microbatch import Round


_RESIDENT = OffloadState.RESIDENT
EVENT_BYTES = 1 << 24
"""Tensors that are reloaded one after the other share an event: so many bytes take the link 0.3 ms."""


class ActivationSet:
    """Everything that one layer of one microbatch saved for backward.

    It holds its storages weakly: the graph's handles own them.

    Args:
        layer: The layer's number.
        microbatch: The round of layers that it belongs to.
    """

    def __init__(self, layer: int, microbatch: Round) -> None:
        self.layer = layer
        self.state = OffloadState.RESIDENT
        self.transfers = microbatch.transfers
        self.stays = not microbatch.may_offload(layer)
        self._device = self.transfers.backend.device
        self._compute_stream = self.transfers.backend.compute_stream()
        self._min_bytes = max(1, microbatch.min_bytes)
        self._known = microbatch.storages
        self._operation = microbatch.operation
        self._nothing_moves = microbatch.nothing_moves_from(layer)
        self._storages: list[weakref.ref[SavedStorage]] = []
        self._early: list[SavedStorage] = []
        self._small = 0
        """Saved tensors below ``min_bytes``."""
        self.alive: object | None = _Alive()
        self._graph = weakref.ref(self.alive)
        self.in_graph = False
        """Whether a graph has come to hold ``alive``."""
        self.backward_begun = False

    @property
    def gone(self) -> bool:
        """Whether the graph let go of everything that the layer saved."""
        return self.in_graph and self._graph() is None

    @property
    def abandoned(self) -> bool:
        """Whether the graph that held this set has gone without a backward."""
        return self.gone and not self.backward_begun

    @property
    def closed(self) -> bool:
        """Whether the layer saves no more."""
        return self.alive is None

    def close(self, *, in_operation: bool = False) -> None:
        """End of the layer's forward: from now on only the graph's handles keep the set alive.

        Args:
            in_operation: The operation that saved last may still be at work, and goes on with another set.
        """
        self.alive = None
        self._early.clear()
        if self._small and self.state is not _RESIDENT:
            self.transfers.counters.skipped["small"] += self._small
        if not in_operation:
            self._operation.end()
        if self.state is OffloadState.OFFLOADING:
            self.transfers.end_batch()

    def start_early(self, tensor: torch.Tensor, changes: int = 0) -> None:
        """Queue the copy of a tensor that the layer will save, as soon as it is computed."""
        if self.state is not OffloadState.OFFLOADING:
            return
        reason = reason_to_stay(tensor, self._device, self._min_bytes)
        if reason == "subclass" and (parts := parts_of(tensor)):
            for inner in parts.inner:
                self.start_early(inner, changes + tensor._version)
        elif reason is None:
            key = tensor.untyped_storage()._cdata
            storage = self._known_storage(tensor, key, changes) or self._new_storage(tensor, key, changes)
            if storage.ready is None:
                storage.ready = self.transfers.backend.compute_stream().record_event()
            storage.start_offload()
            self._early.append(storage)

    def pack(self, tensor: torch.Tensor, changes: int = 0) -> Handle:
        """The pack hook: a handle for a tensor that autograd saves.

        Args:
            tensor: The tensor.
            changes: How often wrappers around it were changed in place, which its own version does not tell.
        """
        self.in_graph = True
        if not is_plain(tensor):
            return self._pack_other(tensor, changes)
        memory = tensor.untyped_storage()
        nbytes = memory.nbytes()
        if nbytes < self._min_bytes:
            self._small += 1
            return KeptHandle(tensor, self)
        self._operation.end_if_over()
        key = memory._cdata
        if self._nothing_moves and key not in self._known:
            return KeptHandle(tensor, self)
        reason = reason_of_memory(tensor, key, self._device)
        if reason is not None:
            return self._keep(tensor, reason)
        reason = held_by_autograd(tensor, maker_of(tensor))
        if reason is not None:
            return self._keep(tensor, reason)
        storage = self._known_storage(tensor, key, changes) if key in self._known else None
        if self.state is not _RESIDENT:
            self.transfers.counters.offloaded_tensors += 1
        storage = storage or self._new_storage(tensor, key, changes)
        storage.tensors += 1
        if storage.host is None:
            self._operation.add(storage)
        return MovedHandle(tensor, storage, self)

    def _pack_other(self, tensor: torch.Tensor, changes: int) -> Handle:
        """A handle for a tensor without a storage of its own: its inner tensors travel, if it has any."""
        reason = reason_of_other(tensor)
        if reason == "subclass" and (parts := parts_of(tensor)):
            return SubclassHandle(tensor, parts, self, changes)
        return self._keep(tensor, reason)

    def _keep(self, tensor: torch.Tensor, reason: str) -> KeptHandle:
        if self.state is not _RESIDENT:
            self.transfers.counters.skipped[reason] += 1
        return KeptHandle(tensor, self)

    def _known_storage(self, tensor: torch.Tensor, key: int, changes: int) -> SavedStorage | None:
        """What was saved over the same storage before, unchanged, if it can move with this set."""
        reference = self._known.get(key)
        known = reference() if reference is not None else None
        if known is None or known.version != tensor._version or known.changes != changes:
            return None
        if known.version and known.versions is not None and not shares_versions(known.versions, tensor):
            return None
        if known.set is not self:
            self._take_over(known, tensor)
        return known

    def _new_storage(self, tensor: torch.Tensor, key: int, changes: int) -> SavedStorage:
        storage = SavedStorage(tensor, self, changes)
        self._storages.append(weakref.ref(storage))
        self._known[key] = weakref.ref(storage)
        return storage

    def follow(self, storage: SavedStorage) -> None:
        """What is saved while the set is on its way goes with it, as soon as the operation that saved it is over."""
        if self.state is OffloadState.OFFLOADING:
            storage.start_offload()
        elif self.state is OffloadState.OFFLOADED:  # the release came in the midst of the operation
            storage.start_offload()
            self._let_go([storage])

    def _take_over(self, storage: SavedStorage, tensor: torch.Tensor) -> None:
        """What an earlier layer saved as well moves with this set from now on, which backward needs first."""
        # In both sets for a moment, but never in none, from where nothing would bring it back.
        self._storages.insert(0, weakref.ref(storage))
        earlier, storage.set = storage.set, self
        earlier._storages.remove(weakref.ref(storage))
        storage.adopt(tensor)
        if self.stays:
            storage.keep()

    def start_offload(self, call: str | None = None) -> None:
        """Queue the copies of what was saved so far; what is saved from now on follows at once.

        Raises:
            OffloadStateError: The set is not RESIDENT.
        """
        self.state = next_state("start_offload", self.layer, self.state, call=call)
        saved = self._live()
        for storage in saved:
            if storage.ready is not None:  # else it follows when its operation is over
                storage.start_offload()
            self.transfers.counters.offloaded_tensors += storage.tensors
        if saved:
            self.transfers.end_batch()

    def release(self, call: str | None = None) -> None:
        """Let the device memory go: the compute stream waits for the copies, then reuses the memory.

        Raises:
            OffloadStateError: The set is not OFFLOADING.
        """
        self.state = next_state("release", self.layer, self.state, call=call)
        self._let_go(self._live())

    def _let_go(self, storages: list[SavedStorage]) -> None:
        moved = [storage for storage in storages if storage.host is not None and storage.device is not None]
        batches = [storage.batch for storage in moved if storage.batch is not None]
        if not batches:
            return
        # Copies run in order on one stream, so the batch that was queued last stands for all.
        done = self.transfers.done(max(batches, key=lambda batch: batch.number))
        trace.point("wait", self.layer)
        self.transfers.wait_for_copies(self._compute_stream, done, Wait.RELEASE)
        for storage in moved:
            storage.release()

    def start_reload(self, call: str | None = None) -> None:
        """Queue the copies back to the device, last saved first, as backward will ask for them.

        Raises:
            OffloadStateError: The set is not OFFLOADED.
        """
        self.state = next_state("start_reload", self.layer, self.state, call=call)
        self._reload()

    def reload_late(self) -> None:
        """Backward needs the set now, and nobody has started its reload: correct, but a stall."""
        with self.transfers.lock:
            if not any(storage.away for storage in self._live()):
                return  # another thread has done it meanwhile
            self.transfers.counters.late_reloads += 1
            if self.state is OffloadState.OFFLOADED:
                self.state = next_state("start_reload", self.layer, self.state)
            self._reload()

    def _reload(self) -> None:
        with self.transfers.lock:
            away = [storage for storage in reversed(self._live()) if storage.away]
            # Allocating can queue work on the compute stream: under deterministic algorithms PyTorch fills new memory.
            landings = [self.transfers.backend.empty(storage.nbytes) for storage in away]
            compute = self.transfers.backend.compute_stream()
            self.transfers.wait(self.transfers.h2d_stream, compute.record_event(), Wait.LANDING)
            for group in _groups(zip(away, landings, strict=True)):
                self._reload_group(group, compute)

    def _reload_group(self, group: list[tuple[SavedStorage, torch.Tensor]], compute: Any) -> None:
        h2d_stream = self.transfers.h2d_stream
        try:
            for storage, landing in group:
                storage.start_reload(landing)
            done = self.transfers.backend.record_timed(h2d_stream)
            for storage, landing in group:
                storage.end_reload(landing, compute, done)
        except BaseException:
            # What has not come back stays on the host. Compute gets the landings again, into which copies may run.
            self.transfers.wait(compute, h2d_stream.record_event(), Wait.UNREAD)
            raise

    def mark_read(self) -> None:
        """Backward has begun to read what was reloaded."""
        if self.state is OffloadState.RELOADING:
            self.state = next_state("unpack", self.layer, self.state)

    def _live(self) -> list[SavedStorage]:
        return [storage for reference in self._storages if (storage := reference()) is not None]


def _groups(
    landings: Iterable[tuple[SavedStorage, torch.Tensor]],
) -> Iterator[list[tuple[SavedStorage, torch.Tensor]]]:
    """Storages with their landings, in order, as many together as share an event."""
    group: list[tuple[SavedStorage, torch.Tensor]] = []
    nbytes = 0
    for storage, landing in landings:
        group.append((storage, landing))
        nbytes += storage.nbytes
        if nbytes >= EVENT_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


class _Alive:
    """Held by every handle of a set, so that a weak reference tells whether the graph is gone."""

    __slots__ = ("__weakref__",)
