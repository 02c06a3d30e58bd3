"""A storage that autograd saved, and where its bytes are: each transition is one method.

A storage is copied once, however many saved tensors look into it, as long as none was changed in place in between.
``memory``, on the device, and ``host``, a buffer, say where the bytes are: with both of them, on the host only once the
copies of ``batch`` are done; with a ``reload``, on the device only once it is done.

Note:
    An interrupt (Ctrl-C) can come between any two lines. Memory that is taken over is assigned last, when all else is
    known about it. Memory that is given away is forgotten first: it can be lost on the way, but never be given twice.

PyTorch counts the in-place changes of a tensor and of all its views in one counter, its version. Autograd compares the
counter in backward, but not for tensors that hooks have taken: the library does. What holds the counter must not hold
the memory.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from offload.activations.copies import NO_HOST_MEMORY, CopyBatch, Reload, Transfers
from offload.base import tensors, trace
from offload.base.torch_private import (
    TorchDispatchMode,
    address_of,
    keep_versions,
    without_modes,
    without_torch_function,
)
from offload.device.backend import Event, Wait
from offload.host.pool import HostBuffer

RESIZED = "resized"  # why a storage that the program has resized is kept on the device, in `stats().skipped`


class SavedStorage:
    """One storage that autograd saved, at one version; ``tensor`` looks into it."""

    # Defaults of the class: they cost a layer no time, and __del__ finds them even if __init__ has failed.
    memory: torch.UntypedStorage | None = None
    host: HostBuffer | None = None
    batch: CopyBatch | None = None  # the copies to the host that the copy into `host` belongs to
    reload: Reload | None = None  # what `memory` came with; `None` while `memory` is the program's own
    ready: Event | None = None  # `memory` is complete after it; `None` while it may be written, and if kept
    resized = False  # whether the program has resized the memory: then the storage is never copied
    counted = False  # whether `memory` is among the resident bytes of offloaded layers
    tensors = 0  # saved tensors that look into the storage

    # No dataclass, whose generated __init__ costs more, and is in no file: the compiler would compile it.
    def __init__(
        self, tensor: torch.Tensor, maker: type, transfers: Transfers, layer: int, *, stays: bool, changes: int
    ) -> None:
        self.transfers = transfers
        self.maker = maker  # the type of the autograd node that made it, or of `None`
        self.layer = layer  # the layer that the storage is offloaded with: the last one that has saved it
        self.stays = stays  # whether that layer is kept
        self.changes = changes  # how often wrappers around the tensor were changed, which its version does not tell
        memory = tensor.untyped_storage()
        self.nbytes = memory.nbytes()
        self.original = weakref.ref(memory)  # the program's
        self.version = tensor._version
        # At version 0 nothing was changed yet, through whichever tensor: there is nothing to tell apart.
        self.versions = version_counter(tensor) if self.version else None
        # What has been read of `memory`, by whose number and geometry: held, or autograd would make it a gradient and
        # add the next in place.
        self.views: dict[int, tuple[tensors.Geometry, torch.Tensor]] = {}
        self.memory = memory

    def __del__(self) -> None:
        reload = self.reload
        if reload is not None and reload.awaited_by != reload.home:
            # Nobody has read the reloaded bytes: their memory is free behind the copy into it, which may still run.
            self.transfers.backend.wait(reload.stream, reload.done, Wait.UNREAD)
        if self.memory is not None and self.host is not None and self.batch is not None:  # it was not released
            self.transfers.backend.end_useless_copy(self.transfers.done(self.batch))
        self._give_host_back()
        self.release()

    def same_bytes(self, tensor: torch.Tensor, changes: int) -> bool:
        """Whether ``tensor``, over the same storage, was not changed in place since it was saved here."""
        version = tensor._version
        if self.version != version or self.changes != changes:
            return False
        if self.versions is None:
            return True
        # A change of one must count as a change of the other, as it does for views. But torch.unsafe_chunk, which cells
        # of RNNs use, and .data give tensors over one storage that count for themselves.
        with probing, keep_versions(self.versions):
            torch.autograd.graph.increment_version(self.versions)
            return tensor._version != version

    def start_offload(self) -> None:
        """Queue the copy to the host. Where it does not fit, the storage is kept on the device."""
        ready = self.ready if self.reload is None else self.reload.done
        if self.host is not None or self.memory is None or self.resized or ready is None:
            return
        self._count()
        transfers = self.transfers
        # The copy reads what compute has written by then. It need not wait for what the layer computes later.
        queued = transfers.to_host(self.memory, self.nbytes, ready, self.layer)
        if queued is None:
            transfers.skipped[NO_HOST_MEMORY] += 1
            return
        self.batch, self.host = queued
        transfers.offloaded_storages += 1
        transfers.offloaded_bytes += self.nbytes

    def start_reload(self, landing: torch.UntypedStorage) -> None:
        """Queue the copy back into ``landing``, memory that the h2d stream has waited for."""
        if self.memory is None and self.host is not None:
            self.transfers.to_device(landing, self.host, self.layer)
            self.transfers.reloaded_bytes += self.nbytes

    def end_reload(self, landing: torch.UntypedStorage, reload: Reload) -> None:
        """The copy back, queued before, is over when ``reload`` is done, and so is the use of the host buffer."""
        host = self.host
        if self.memory is not None or host is None:
            return
        if self.original() is not None:
            self.transfers.waste(self.nbytes, self.maker)
        self.reload = reload
        self.memory = landing  # from here on another thread may read it
        self.host = None
        self.transfers.pool.give(host, reload.done)
        self._count()

    def move_with(self, layer: int, tensor: torch.Tensor, *, stays: bool) -> None:
        """A later layer saves the storage once more, as ``tensor``: it is offloaded with that layer from now on."""
        self.layer, self.stays = layer, stays
        if self.memory is None:  # something has kept the device memory alive
            self.memory = tensor.untyped_storage()
            self._count()
        if stays:
            if self.host is not None:
                self._give_host_back()
                self.transfers.waste(self.nbytes, self.maker)
            self._uncount()

    def give_up(self, memory: torch.UntypedStorage) -> None:
        """The program is about to resize ``memory``, this storage's: backward reads what ``memory`` holds then."""
        transfers = self.transfers
        with transfers.lock:
            if self.resized or self.reload is not None:
                return  # backward has begun, with memory of its own
            if self.memory is None:
                self.memory = memory
            elif self.batch is not None and self.host is not None:
                # The memory is free for compute's next operation; the copy may still read it.
                transfers.wait_for_copies(transfers.backend.compute_stream(), transfers.done(self.batch), Wait.RELEASE)
            self.resized = True
            if self.host is not None:
                self._give_host_back()
                self._uncount()
            if not self.stays:
                transfers.skipped[RESIZED] += self.tensors

    def wait_for(self, reload: Reload) -> None:
        """Let the current stream wait for the copy back, and so for all that came with it."""
        backend = self.transfers.backend
        trace.point("wait", self.layer)
        # Backward reads the bytes next, on this stream.
        self.transfers.wait_for_copies(backend.compute_stream(), reload.done, Wait.RELOADED)
        reload.awaited_by = backend.compute_stream_id()  # only now: another thread of this stream may rely on it

    def _count(self) -> None:
        if not self.counted:
            self.transfers.hold(self.nbytes)
            self.counted = True

    def _uncount(self) -> None:
        if self.counted:
            self.counted = False
            self.transfers.resident_bytes -= self.nbytes

    def release(self) -> None:
        """Let the device memory go. The compute stream must have waited for the copies from and to it."""
        memory, self.memory = self.memory, None
        self.views.clear()
        backend = self.transfers.backend
        # Who else saved this memory, at another version, holds the same object, which counts as one owner. Two hold it
        # otherwise: the variable here, and the function that counts.
        if backend.poison and memory is not None and sys.getrefcount(memory) <= 2:
            with without_modes():  # garbage may be collected while a layer runs again
                backend.discard(tensors.whole(memory))
        self._uncount()

    def _give_host_back(self) -> None:
        host, self.host = self.host, None
        if host is not None and self.batch is not None:
            self.transfers.pool.give(host, self.transfers.done(self.batch))  # free behind the copy into it


probing = threading.Lock()  # held while a version is changed for a moment, which no thread is to take for a change


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor without memory that shares the version counter of ``tensor`` and all its views."""
    if type(tensor) is torch.Tensor:
        return tensors.plain_version_counter(tensor)
    # Of a subclass, autograd gives the counter to what ``detach`` returns below it.
    with without_torch_function(), _Nothing():
        return torch.Tensor.detach(tensor)


class _Nothing(TorchDispatchMode):
    """Lets every operation return a new tensor without memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        return torch.empty(0, device="cpu")


watched: weakref.WeakValueDictionary[int, Mapping[int, weakref.ref[SavedStorage]]]
watched = weakref.WeakValueDictionary()
"""The storages of each microbatch, by address, to find those that are resized. Weakly, as the graphs own the
microbatches; by identity, as a dictionary cannot be hashed."""


def give_up_resized(storage: torch.UntypedStorage) -> None:
    """The program is about to resize a storage: autograd reads what the program puts there."""
    for known in tuple(watched.values()):
        reference = known.get(address_of(storage))
        saved = None if reference is None else reference()
        if saved is not None and saved.original() is storage:
            saved.give_up(storage)
