"""A storage that autograd saved: its state says where the bytes are, and each transition is one method.

It travels once, however many saved tensors look into it, as long as none was changed in between. It knows the transfers
that move it, and the number of the layer that it moves with, but neither that layer's set nor who holds it.

Note:
    An interrupt (Ctrl-C) can come after any call and before any line. So a transition that takes memory over ends in
    one assignment, of the state and the memory together: until then, all is as it was. Memory that is given away is
    forgotten first, so that it can be lost on the way, but never be given twice.

Versions say whether a saved tensor was changed in place since it was saved. PyTorch counts the changes of a tensor and
of all its views in one counter. Autograd compares it in backward, but not for tensors that hooks have taken, so the
library does. What holds the counter must not hold the memory.
"""

from __future__ import annotations

import sys
import threading
import weakref
from enum import Enum
from typing import Any

import torch

from offload.activations.copies import CopyBatch, Reload, Transfers
from offload.base import tensors, trace
from offload.base.torch_private import (
    TorchDispatchMode,
    address_of,
    free_weak_storage,
    is_expired,
    keep_versions,
    weak_storage,
    without_torch_function,
)
from offload.device.backend import Event, Wait
from offload.host.buffers import HostBuffer
from offload.host.limits import NO_HOST_MEMORY

RESIZED = "resized"
"""Why a storage stays on the device that the program has resized, in ``stats().skipped``."""


class StorageState(Enum):
    """Where the bytes are, and who owns which memory."""

    WRITTEN = "written"
    """The device memory holds them, but the operation that saved them may still be writing: nothing copies yet."""
    COMPLETE = "complete"
    """The device memory holds them, the same that the program has computed them in."""
    LEAVING = "leaving"
    """The device memory holds them, and so does the host buffer when the copy that is queued is done."""
    AWAY = "away"
    """The host buffer holds them, and the device memory was let go."""
    BACK = "back"
    """New device memory holds them when the copy that is queued is done, and the host buffer went back to the pool."""
    GIVEN_UP = "given up"
    """The program has resized its memory, which holds what the program puts there. They do not move any more."""


WRITTEN, COMPLETE, LEAVING = StorageState.WRITTEN, StorageState.COMPLETE, StorageState.LEAVING
AWAY, BACK, GIVEN_UP = StorageState.AWAY, StorageState.BACK, StorageState.GIVEN_UP


class SavedStorage:
    """One storage that autograd saved, wherever its bytes are now; ``tensor`` looks into it."""

    # Defaults of the class: they cost a layer no time, and __del__ finds them even if __init__ has failed.
    state = WRITTEN
    counted = False
    """Whether the device memory is among the resident bytes of offloaded layers."""
    reload: Reload | None = None
    """The copies back that this one's came with; ``None`` while the device memory is the program's own."""
    host: HostBuffer | None = None
    memory: torch.UntypedStorage | None = None
    """The device memory."""
    original: Any = None
    """A weak reference to the program's memory: while it lives, no other storage can have the same address."""
    batch: CopyBatch | None = None
    """The copies to the host that the one into ``host`` came with."""
    ready: Event | None = None
    """After it the device memory holds the bytes; ``None`` while the operation may write them, and for what stays."""
    tensors = 0
    """Saved tensors that look into it."""

    # No dataclass, whose generated __init__ costs more, and is in no file: the compiler would compile it.
    def __init__(
        self, tensor: torch.Tensor, maker: type, transfers: Transfers, layer: int, *, stays: bool, changes: int
    ) -> None:
        self.transfers = transfers
        self.maker = maker
        """The type of the autograd node that made it, or of ``None``."""
        self.layer = layer
        """That it moves with."""
        self.stays = stays
        """Whether that layer is not offloaded."""
        self.changes = changes
        """How often wrappers around the tensor were changed in place, which its own version does not tell."""
        memory = tensor.untyped_storage()
        self.nbytes = memory.nbytes()
        self.original = weak_storage(memory)
        self.version = tensor._version
        # At version 0 nothing was changed yet, through whichever tensor: there is nothing to tell apart.
        self.versions = version_counter(tensor) if self.version else None
        self.memory = memory

    def __del__(self) -> None:
        reload = self.reload
        if reload is not None and reload.awaited_by != reload.home:
            # Nobody has read what came back: its memory is free behind the copy into it, which may still run.
            self.transfers.backend.wait(reload.stream, reload.done, Wait.UNREAD)
        if self.host is not None:
            self._give_host_back(self.state)
        self._let_memory_go(self.state)
        if self.original is not None:
            free_weak_storage(self.original)

    def same_bytes(self, tensor: torch.Tensor, changes: int) -> bool:
        """Whether ``tensor``, over the same storage, was not changed in place since it was saved here."""
        if self.version != tensor._version or self.changes != changes:
            return False
        return self.versions is None or shares_versions(self.versions, tensor)

    def complete(self, ready: Event | None) -> None:
        """WRITTEN to COMPLETE: the operation that saved it is over, and has written the bytes when ``ready`` is.

        What stays has no event, until it moves with a later set that does not stay, which saves it once more.
        """
        if self.state is WRITTEN:
            self.state, self.ready = COMPLETE, ready
        elif self.ready is None:
            self.ready = ready

    def start_offload(self) -> None:
        """COMPLETE or BACK to LEAVING: queue the copy to the host. Without room there, all stays as it is."""
        if (self.state is not COMPLETE and self.state is not BACK) or self.memory is None:
            return
        ready = self.ready if self.reload is None else self.reload.done
        if ready is None:
            return
        self._count()
        counters = self.transfers.counters
        # The copy reads what compute has written by then. It need not wait for what the layer computes later.
        queued = self.transfers.to_host(self.memory, self.nbytes, ready, self.layer)
        if queued is None:
            counters.skipped[NO_HOST_MEMORY] += 1
            return
        # At once, and only now: what fails or is interrupted half-way stays on the device.
        self.state, self.host, self.batch = LEAVING, *queued
        counters.offloaded_storages += 1
        counters.offloaded_bytes += self.nbytes

    def release(self) -> None:
        """LEAVING to AWAY: let the device memory go. The compute stream must have waited for the copy."""
        if self.state is LEAVING:
            self._let_memory_go(AWAY)

    def start_reload(self, landing: torch.UntypedStorage) -> None:
        """Queue the copy back into ``landing``, memory that the h2d stream has waited for."""
        if self.state is AWAY and self.host is not None:
            self.transfers.to_device(landing, self.host, self.layer)
            self.transfers.counters.reloaded_bytes += self.nbytes

    def end_reload(self, landing: torch.UntypedStorage, reload: Reload) -> None:
        """AWAY to BACK: the copy back, queued before, is over when ``reload`` is done; so is the host buffer's use."""
        host = self.host
        if self.state is not AWAY or host is None:
            return
        if not is_expired(self.original):
            self.transfers.counters.waste(self.nbytes, self.maker)
        self.reload = reload
        # Last, as another thread may read it from here on, and before the buffer can be another's.
        self.state, self.memory, self.host = BACK, landing, None
        self.transfers.pool.give(host, reload.done)
        self._count()

    def move_with(self, layer: int, tensor: torch.Tensor, *, stays: bool) -> None:
        """Belong to a later layer from now on, which saves the storage once more, as ``tensor``."""
        self.layer, self.stays = layer, stays
        if self.state is AWAY:
            # AWAY to LEAVING: something has kept the device memory alive, so it holds the bytes as well.
            self.state, self.memory = LEAVING, tensor.untyped_storage()
            self._count()
        if stays:
            # LEAVING to COMPLETE: the copy was in vain.
            if self.state is LEAVING:
                self._give_host_back(COMPLETE)
                self.transfers.counters.waste(self.nbytes, self.maker)
            self._uncount()

    def give_up(self, memory: torch.UntypedStorage) -> None:
        """To GIVEN_UP: the program is about to resize ``memory``, this one, and backward reads what it holds then."""
        transfers = self.transfers
        with transfers.lock:
            if self.state is GIVEN_UP or self.reload is not None:
                return  # backward has begun, with memory of its own
            if self.state is AWAY:
                self.memory = memory
            elif self.state is LEAVING and self.batch is not None:
                # The memory is free for compute's next operation; the copy may still read it.
                done = transfers.done(self.batch)
                transfers.wait_for_copies(transfers.backend.compute_stream(), done, Wait.RELEASE)
            travelled = self.host is not None
            self._give_host_back(GIVEN_UP)
            if travelled:
                self._uncount()
            if not self.stays:
                transfers.counters.skipped[RESIZED] += self.tensors

    def wait_for(self, reload: Reload) -> None:
        """Let the current stream wait for the copy back, and so for all that came with it."""
        backend = self.transfers.backend
        trace.point("wait", self.layer)
        # Backward reads the bytes next, on this stream.
        self.transfers.wait_for_copies(backend.compute_stream(), reload.done, Wait.RELOADED)
        reload.awaited_by = backend.compute_stream_id()  # only now: another thread of this stream may rely on it

    def _count(self) -> None:
        if not self.counted:
            self.transfers.counters.hold(self.nbytes)
            self.counted = True

    def _uncount(self) -> None:
        if self.counted:
            self.counted = False
            self.transfers.counters.resident_bytes -= self.nbytes

    def _let_memory_go(self, state: StorageState) -> None:
        memory, self.memory, self.state = self.memory, None, state
        backend = self.transfers.backend
        # Who else saved this memory, at another version, holds the same object, which counts as one owner. Two hold it
        # otherwise: the variable here, and the function that counts.
        if backend.poison and memory is not None and sys.getrefcount(memory) <= 2:
            backend.discard(tensors.whole(memory))
        self._uncount()

    def _give_host_back(self, state: StorageState) -> None:
        host, self.host, self.state = self.host, None, state
        if host is not None and self.batch is not None:
            self.transfers.pool.give(host, self.transfers.done(self.batch))  # free behind the copy into it


probing = threading.Lock()
"""Held while a version is changed to see what else changes with it: no thread is to take that for a change."""


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor without memory that shares the version counter of ``tensor`` and all its views."""
    if type(tensor) is torch.Tensor:
        return tensors.plain_version_counter(tensor)
    # Of a subclass, autograd gives the counter to what ``detach`` returns below it.
    with without_torch_function(), _Nothing():
        return torch.Tensor.detach(tensor)


def shares_versions(versions: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a change of one counts as a change of the other.

    It does for views. But ``torch.unsafe_chunk``, which the cells of RNNs use, and ``.data`` give tensors over one
    storage that count for themselves.
    """
    with probing, keep_versions(versions):
        before = tensor._version
        torch.autograd.graph.increment_version(versions)
        return tensor._version != before


class _Nothing(TorchDispatchMode):
    """Lets every operation return a new tensor without memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        return torch.empty(0, device="cpu")


Known = dict[int, "weakref.ref[SavedStorage]"]
# Weakly, as the graphs own the microbatches; by identity, as a dict cannot be hashed.
_watched: weakref.WeakValueDictionary[int, Known] = weakref.WeakValueDictionary()


def watch(known: Known) -> None:
    """Learn when a storage that is in ``known`` by then, by its address, is resized."""
    _watched[id(known)] = known


def give_up_resized(storage: torch.UntypedStorage) -> None:
    """The program is about to resize a storage: autograd reads what the program puts there."""
    for known in tuple(_watched.values()):
        reference = known.get(address_of(storage))
        saved = None if reference is None else reference()
        if saved is not None:
            saved.give_up(storage)
