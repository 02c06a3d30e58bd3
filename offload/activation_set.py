"""Activation sets: what one layer of one microbatch saved, moved as one."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from offload import trace
from offload.backend import Wait
from offload.exclusions import reason_to_stay
from offload.saved import Handle, KeptHandle, MovedHandle, SavedStorage, SubclassHandle
from offload.states import OffloadState, next_state

if TYPE_CHECKING:
    from offload.round import Round


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
        self._compute_stream = self.transfers.backend.compute_stream()
        self.min_bytes = microbatch.min_bytes
        self._known = microbatch.storages
        self._storages: list[weakref.ref[SavedStorage]] = []
        self._early: list[SavedStorage] = []
        self.alive: object | None = _Alive()
        self._graph = weakref.ref(self.alive)
        self._saved_any = False
        self.backward_begun = False

    @property
    def gone(self) -> bool:
        """Whether the graph let go of everything that the layer saved."""
        return self._saved_any and self._graph() is None

    @property
    def abandoned(self) -> bool:
        """Whether the graph that held this set has gone without a backward."""
        return self.gone and not self.backward_begun

    def close(self) -> None:
        """End of the layer's forward: from now on only the graph's handles keep the set alive."""
        self.alive = None
        self._early.clear()

    def start_early(self, tensor: torch.Tensor) -> None:
        """Queue the copy of a tensor that the layer will save, as soon as it is computed."""
        if self.state is OffloadState.OFFLOADING and not self.reason_to_stay(tensor):
            self._early.append(self._storage_of(tensor))

    def reason_to_stay(self, tensor: torch.Tensor) -> str | None:
        """Why ``tensor`` does not travel with this set, if it does not."""
        return reason_to_stay(tensor, self.transfers.backend.device, self.min_bytes)

    def pack(self, tensor: torch.Tensor) -> Handle | SubclassHandle:
        """The pack hook: a handle for a tensor that autograd saves."""
        self._saved_any = True
        reason = self.reason_to_stay(tensor)
        if reason == "subclass" and hasattr(tensor, "__tensor_flatten__"):
            return SubclassHandle(tensor, self)
        if reason is not None:
            if self.state is not OffloadState.RESIDENT:
                self.transfers.counters.skipped[reason] += 1
            return KeptHandle(tensor, self)
        storage = self._storage_of(tensor)
        storage.tensors += 1
        if self.state is not OffloadState.RESIDENT:
            self.transfers.counters.offloaded_tensors += 1
        return MovedHandle(tensor, storage, self)

    def _storage_of(self, tensor: torch.Tensor) -> SavedStorage:
        key = tensor.untyped_storage()._cdata
        reference = self._known.get(key)
        storage = reference() if reference is not None else None
        if storage is None or storage.version != tensor._version:
            storage = SavedStorage(tensor, self)
            self._known[key] = weakref.ref(storage)
            self._storages.append(weakref.ref(storage))
        elif storage.set is not self:
            self._take_over(storage, tensor)
        if self.state is OffloadState.OFFLOADING:
            storage.count()
            storage.start_offload()
        return storage

    def _take_over(self, storage: SavedStorage, tensor: torch.Tensor) -> None:
        """An earlier layer saved the same storage: from now on it moves with this set, which backward needs first."""
        storage.set._storages.remove(weakref.ref(storage))
        storage.set = self
        self._storages.insert(0, weakref.ref(storage))
        storage.adopt(tensor)
        if self.stays:
            storage.keep()

    def start_offload(self, call: str | None = None) -> None:
        """Queue the copies of what was saved so far; what is saved from now on follows at once.

        Raises:
            OffloadStateError: The set is not RESIDENT.
        """
        self.state = next_state("start_offload", self.layer, self.state, call=call)
        for storage in self._live():
            storage.count()
            storage.start_offload()
            self.transfers.counters.offloaded_tensors += storage.tensors

    def release(self, call: str | None = None) -> None:
        """Let the device memory go: the compute stream waits for the copies, then reuses the memory.

        Raises:
            OffloadStateError: The set is not OFFLOADING.
        """
        self.state = next_state("release", self.layer, self.state, call=call)
        moved = [storage for storage in self._live() if storage.host is not None]
        if not moved:
            return
        # Copies run in order on one stream, so the event of the one queued last stands for all.
        last = max(moved, key=lambda storage: storage.copy_number)
        trace.point("wait", self.layer)
        self.transfers.wait(self._compute_stream, last.offload_done, Wait.RELEASE)
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
        self.transfers.counters.late_reloads += 1
        if self.state is OffloadState.OFFLOADED:
            self.state = next_state("start_reload", self.layer, self.state)
        self._reload()

    def _reload(self) -> None:
        away = [storage for storage in reversed(self._live()) if storage.away]
        # Allocating can queue work on the compute stream: under deterministic algorithms PyTorch fills new memory.
        landings = [self.transfers.backend.empty(storage.nbytes) for storage in away]
        compute = self.transfers.backend.compute_stream()
        self.transfers.wait(self.transfers.h2d_stream, compute.record_event(), Wait.LANDING)
        for storage, landing in zip(away, landings, strict=True):
            storage.start_reload(landing, compute)

    def mark_read(self) -> None:
        """Backward has begun to read what was reloaded."""
        if self.state is OffloadState.RELOADING:
            self.state = next_state("unpack", self.layer, self.state)

    def _live(self) -> list[SavedStorage]:
        return [storage for reference in self._storages if (storage := reference()) is not None]


class _Alive:
    """Held by every handle of a set, so that a weak reference tells whether the graph is gone."""

    __slots__ = ("__weakref__",)
