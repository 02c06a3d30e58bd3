"""A storage that autograd saved: its state says where the bytes are, and each transition is one method.

It travels once, however many saved tensors look into it, as long as none was changed in between. It knows the transfers
that move it, and the number of the layer that it moves with, but neither that layer's set nor who holds it.

Note:
    An interrupt (Ctrl-C) can come after any call and before any line. So a transition that takes memory over ends in
    one assignment, of the state and the memory together: until then, all is as it was. Memory that is given away is
    forgotten first, so that it can be lost on the way, but never be given twice.
"""

from __future__ import annotations

import weakref
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.activations.versions import shares_versions, version_counter
from offload.activations.waste import kind_of, maker_of
from offload.base import trace
from offload.device.backend import Wait
from offload.host.limits import NO_HOST_MEMORY

if TYPE_CHECKING:
    from offload.activations.transfers import CopyBatch, Transfers
    from offload.device.backend import Event, Stream
    from offload.host.buffers import HostBuffer

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


WRITTEN, COMPLETE, LEAVING, AWAY, BACK, GIVEN_UP = StorageState


class KnownStorages(dict[int, "weakref.ref[SavedStorage]"]):
    """What one microbatch has saved, by the storage's address; weakly, as the graph's handles own it.

    A class of its own, because a plain dict cannot be referenced weakly.
    """

    def find(self, key: int) -> SavedStorage | None:
        """What was saved of the storage at this address, if a graph still holds it."""
        reference = self.get(key)
        return None if reference is None else reference()


class SavedStorage:
    """One storage that autograd saved, wherever its bytes are now.

    Args:
        tensor: A tensor that looks into it.
        transfers: What it moves with.
        layer: The number of the layer that it moves with.
        stays: Whether that layer is none that is offloaded.
        changes: How often wrappers around the tensor were changed in place.
    """

    # No dataclass, whose generated __init__ costs more, and is in no file: the compiler would compile it.
    __slots__ = (
        "__weakref__",
        "awaited_by",
        "batch",
        "changes",
        "counted",
        "device",
        "host",
        "kind",
        "layer",
        "nbytes",
        "original",
        "ready",
        "reload_done",
        "state",
        "stays",
        "stream",
        "tensors",
        "transfers",
        "version",
        "versions",
    )

    def __init__(self, tensor: torch.Tensor, transfers: Transfers, layer: int, *, stays: bool, changes: int) -> None:
        # First what __del__ asks for, in case that the rest fails.
        self.state = WRITTEN
        self.transfers = transfers
        self.counted = False
        """Whether the device memory is among the resident bytes of offloaded layers."""
        self.host: HostBuffer | None = None
        self.batch: CopyBatch | None = None
        """The copies to the host that the one into ``host`` was among."""
        self.stream: Stream | None = None
        """The compute stream whose memory the last reload came to."""
        self.reload_done: Event | None = None
        """After it the memory of the last reload holds the bytes; ``None`` while it is the program's own memory."""
        self.awaited_by: object = None
        """The stream that has waited for the last reload."""
        self.device: torch.Tensor | None = None
        """A tensor over the device memory."""
        self.ready: Event | None = None
        """After it the device memory holds the bytes; ``None`` while the operation may write them."""
        self.layer = layer
        self.stays = stays
        self.changes = changes
        self.tensors = 0
        """Saved tensors that look into it."""
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        # Not to keep the memory, but its address: while the weak reference lives, no other storage can have it.
        self.original = StorageWeakRef(storage)
        self.version = tensor._version
        # At version 0 what looks into the memory was not changed either.
        self.versions = version_counter(tensor) if self.version else None
        self.kind = kind_of(maker_of(tensor))
        self.device = tensor.detach()

    def __del__(self) -> None:
        if self.stream is not None and self.reload_done is not None and self.awaited_by is None:
            # Nobody has read what came back: its memory is free behind the copy into it, which may still run.
            self.transfers.wait(self.stream, self.reload_done, Wait.UNREAD)
        self._give_host_back(self.state)
        self._let_device_go(self.state)

    def same_bytes(self, tensor: torch.Tensor, changes: int) -> bool:
        """Whether ``tensor``, over the same storage, was not changed in place since it was saved here."""
        if self.version != tensor._version or self.changes != changes:
            return False
        return self.versions is None or shares_versions(self.versions, tensor)

    def complete(self, ready: Event) -> None:
        """WRITTEN to COMPLETE: the operation that saved it is over, and has written the bytes when ``ready`` is."""
        if self.state is WRITTEN:
            self.state, self.ready = COMPLETE, ready

    def start_offload(self) -> None:
        """COMPLETE or BACK to LEAVING: queue the copy to the host. Without room there, all stays as it is."""
        if self.state not in (COMPLETE, BACK) or self.device is None or self.ready is None:
            return
        self._count()
        transfers = self.transfers
        host = transfers.take_host(self.nbytes)
        if host is None:
            transfers.counters.skipped[NO_HOST_MEMORY] += 1
            return
        # The copy reads what compute has written by then. It need not wait for what the layer computes later.
        transfers.wait_until_ready(self.ready)
        for event in host.events:
            # The buffer's last user may still read it, or write it.
            transfers.wait(transfers.d2h_stream, event, Wait.HOST_BUFFER)
        batch = transfers.to_host(host, self.device, self.layer)
        # At once, and only now: what fails or is interrupted half-way stays on the device.
        self.state, self.host, self.batch = LEAVING, host, batch
        transfers.counters.offloaded_storages += 1
        transfers.counters.offloaded_bytes += self.nbytes

    def release(self) -> None:
        """LEAVING to AWAY: let the device memory go. The compute stream must have waited for the copy."""
        if self.state is LEAVING:
            self._let_device_go(AWAY)

    def start_reload(self, landing: torch.Tensor) -> None:
        """Queue the copy back into ``landing``, memory that the h2d stream has waited for."""
        if self.state is AWAY and self.host is not None:
            self.transfers.to_device(landing, self.host, self.layer)
            self.transfers.counters.reloaded_bytes += self.nbytes

    def end_reload(self, landing: torch.Tensor, compute_stream: Stream, done: Event) -> None:
        """AWAY to BACK: the copy back, queued before, is over with the event ``done``; so is the host buffer's use.

        ``landing`` is memory of ``compute_stream``.
        """
        host = self.host
        if self.state is not AWAY or host is None:
            return
        if not self.original.expired():
            self.transfers.counters.waste(self.nbytes, self.kind)
        self.stream = compute_stream
        self.reload_done = self.ready = done
        self.awaited_by = None
        # Last, as another thread may read it from here on, and before the buffer can be another's.
        self.state, self.device, self.host = BACK, landing, None
        self.transfers.pool.give(host, done)
        self._count()

    def move_with(self, layer: int, tensor: torch.Tensor, *, stays: bool) -> None:
        """Belong to a later layer from now on, which saves the storage once more, as ``tensor``."""
        self.layer, self.stays = layer, stays
        if self.state is AWAY:
            # AWAY to LEAVING: something has kept the device memory alive, so it holds the bytes as well.
            self.state, self.device = LEAVING, tensor.detach()
            self._count()
        if stays:
            # LEAVING to COMPLETE: the copy was in vain.
            if self.state is LEAVING:
                self._give_host_back(COMPLETE)
                self.transfers.counters.waste(self.nbytes, self.kind)
            self._uncount()

    def give_up(self, storage: torch.UntypedStorage) -> None:
        """To GIVEN_UP: the program is about to resize ``storage``, this one, and backward reads what it holds then."""
        transfers = self.transfers
        with transfers.lock:
            if self.state is GIVEN_UP or self.reload_done is not None:
                return  # backward has begun, with memory of its own
            if self.state is AWAY:
                self.device = torch.empty(0, dtype=torch.uint8, device=transfers.backend.device).set_(storage)
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

    def wait_for_reload(self) -> bool:
        """Let the current stream wait for the copy back, each stream once; whether it had to."""
        current = self.transfers.backend.compute_stream_id()
        if self.reload_done is None or self.awaited_by == current:
            return False
        trace.point("wait", self.layer)
        self.transfers.wait_for_copies(self.transfers.backend.compute_stream(), self.reload_done, Wait.RELOADED)
        self.awaited_by = current
        return True

    def _count(self) -> None:
        if not self.counted:
            self.transfers.counters.hold(self.nbytes)
            self.counted = True

    def _uncount(self) -> None:
        if self.counted:
            self.counted = False
            self.transfers.counters.drop(self.nbytes)

    def _let_device_go(self, state: StorageState) -> None:
        device, self.device, self.state = self.device, None, state
        if device is not None and self.transfers.backend.poison:
            self.transfers.backend.discard(device)
        self._uncount()

    def _give_host_back(self, state: StorageState) -> None:
        host, self.host, self.state = self.host, None, state
        if host is not None and self.batch is not None:
            self.transfers.pool.give(host, self.transfers.done(self.batch))  # free behind the copy into it
