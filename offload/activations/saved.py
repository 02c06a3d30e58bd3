"""What moves: the storages that autograd saves, and the handles that the graph holds instead of tensors.

Ownership runs one way. The autograd graph holds handles; a handle holds its
:class:`SavedStorage`; that holds the device memory and the host buffer. When the graph
goes, for whatever reason, everything goes with it by reference counting: device memory to
the allocator, the host buffer to the pool with the event that says when it is free.

A storage travels once, however many saved tensors look into it, as long as none was changed in
between. Each handle keeps its tensor's geometry, and gives it back over whatever device memory holds the bytes by then.
"""

from __future__ import annotations

import functools
import operator
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef

from offload.activations.resized import RESIZED
from offload.activations.waste import kind_of, maker_of
from offload.base import trace
from offload.device.backend import Stream, Wait
from offload.host.limits import NO_HOST_MEMORY

if TYPE_CHECKING:
    from offload.activations.activation_set import ActivationSet
    from offload.activations.transfers import CopyBatch
    from offload.host.buffers import HostBuffer


class SavedStorage:
    """One storage that autograd saved, wherever its bytes are now.

    ``device`` and ``host`` say where: a tensor over the device memory, a host buffer, or both while a copy is in
    flight. The activation set it belongs to decides when it moves.
    """

    __slots__ = (
        "__weakref__",
        "awaited_by",
        "batch",
        "changes",
        "counted",
        "device",
        "host",
        "kind",
        "nbytes",
        "original",
        "ready",
        "reload_done",
        "resized",
        "set",
        "stream",
        "tensors",
        "version",
        "versions",
        "wasted",
    )

    def __init__(self, tensor: torch.Tensor, owner: ActivationSet, changes: int = 0) -> None:
        storage = tensor.untyped_storage()
        self.set = owner
        self.device: torch.Tensor | None = tensor.detach()
        self.nbytes = storage.nbytes()
        self.version = tensor._version
        self.versions = version_counter(tensor) if self.version else None
        self.changes = changes
        self.kind = kind_of(maker_of(tensor))
        self.host: HostBuffer | None = None
        self.batch: CopyBatch | None = None
        # While the weak reference lives, no other storage can have the same address.
        self.original = StorageWeakRef(storage)
        self.reload_done: Any = None
        self.awaited_by: object = None
        self.stream: Any = None
        self.tensors = 0
        self.counted = False
        self.wasted = False
        self.ready: Any = None
        """The event after which the device memory holds the bytes; ``None`` as long as the operation may write them."""
        self.resized = False

    def start_offload(self) -> None:
        """Queue the copy to the host, behind :attr:`ready`."""
        if self.host is not None or self.device is None or self.resized:
            return
        self.count()
        transfers = self.set.transfers
        host = transfers.take_host(self.nbytes)
        if host is None:
            transfers.counters.skipped[NO_HOST_MEMORY] += 1
            return
        transfers.wait_until_ready(self.ready)
        for event in host.events:
            transfers.wait(transfers.d2h_stream, event, Wait.HOST_BUFFER)
        batch = transfers.to_host(host, self.device, self.set.layer)
        # At once, and only now: what fails or is interrupted half-way stays on the device.
        self.host, self.batch = host, batch
        transfers.counters.offloaded_storages += 1
        transfers.counters.offloaded_bytes += self.nbytes
        self.wasted = False

    def release(self) -> None:
        """Let the device memory go. The compute stream must have waited for the copy."""
        if self.host is None or self.device is None:
            return
        self._discard()

    @property
    def away(self) -> bool:
        """Whether the bytes are on the host only."""
        return self.host is not None and self.device is None

    @property
    def is_back(self) -> bool:
        """Whether the bytes were away and are on the device again, to stay."""
        return self.reload_done is not None

    def start_reload(self, landing: torch.Tensor) -> None:
        """Queue the copy back into ``landing``, memory that the h2d stream has waited for."""
        if self.host is None:
            return
        self._look_for_waste()
        self.set.transfers.to_device(landing, self.host, self.set.layer)
        self.set.transfers.counters.reloaded_bytes += self.nbytes

    def end_reload(self, landing: torch.Tensor, compute_stream: Stream, done: Any) -> None:
        """The copy back, queued before, is over with the event ``done``; so is the use of the host buffer.

        ``landing`` is memory of ``compute_stream``. It is there for other threads when all else is said about it.
        """
        host = self.host
        if host is None:
            return
        self.stream = compute_stream
        self.reload_done = self.ready = done
        self.awaited_by = None
        # At once, so that the bytes are somewhere at any moment, and before the buffer can be another's.
        self.device, self.host = landing, None
        self.set.transfers.pool.give(host, done)
        self.count()

    def keep(self) -> None:
        """Stay on the device after all: a layer that is not offloaded saved the same storage."""
        if self.host is not None:
            self._give_host_back()
            self._waste()
        self._uncount()

    def give_up(self, storage: torch.UntypedStorage) -> None:
        """The program is about to resize ``storage``, this one: backward shall read what it holds then."""
        transfers = self.set.transfers
        with transfers.lock:
            if self.resized or self.reload_done is not None:
                return  # backward has begun, with memory of its own
            self.resized = True
            if not self.set.stays:
                transfers.counters.skipped[RESIZED] += self.tensors
            if self.host is None:
                return
            if self.device is None:
                self.device = torch.empty(0, dtype=torch.uint8, device=transfers.backend.device).set_(storage)
            else:
                # The memory is free for compute's next operation; the copy may still read it.
                done = transfers.done(self.batch)  # type: ignore[arg-type]  # set with the host buffer
                transfers.wait_for_copies(transfers.backend.compute_stream(), done, Wait.RELEASE)
            self._give_host_back()
            self._uncount()

    def adopt(self, tensor: torch.Tensor) -> None:
        """Use the device memory that ``tensor``, saved once more, turned out to have kept alive."""
        if self.device is None:
            self.device = tensor.detach()
            self.count()

    def read(self) -> torch.UntypedStorage:
        """The memory on the device, ready for the current stream's next operation."""
        if self.device is None:
            self.set.reload_late()
        if self.reload_done is not None and self.awaited_by != self.set.transfers.backend.compute_stream_id():
            self._await_reload()
        return self.device.untyped_storage()  # type: ignore[union-attr]  # reload_late has set it

    def _await_reload(self) -> None:
        transfers = self.set.transfers
        trace.point("wait", self.set.layer)
        transfers.wait_for_copies(transfers.backend.compute_stream(), self.reload_done, Wait.RELOADED)
        self.awaited_by = transfers.backend.compute_stream_id()
        self.set.mark_read()

    def _let_go(self) -> None:
        device, self.device = self.device, None
        if device is not None and self.set.transfers.backend.poison:
            self.set.transfers.backend.discard(device)

    def count(self) -> None:
        """Add the device memory to the resident bytes of offloaded layers."""
        if not self.counted and self.device is not None:
            self.set.transfers.counters.hold(self.nbytes)
            self.counted = True

    def _look_for_waste(self) -> None:
        if not self.original.expired():
            self._waste()

    def _waste(self) -> None:
        if not self.wasted:
            self.wasted = True
            self.set.transfers.counters.waste(self.nbytes, self.kind)

    def _uncount(self) -> None:
        if self.counted:
            self.counted = False
            self.set.transfers.counters.drop(self.nbytes)

    def _discard(self) -> None:
        self._let_go()
        self._uncount()

    def _give_host_back(self) -> None:
        host, self.host = self.host, None  # forgotten first: an interrupt loses it, and it is never given twice
        if host is not None and self.batch is not None:
            transfers = self.set.transfers
            transfers.pool.give(host, transfers.done(self.batch))

    def __del__(self) -> None:
        if self.reload_done is not None and self.awaited_by is None:
            self.set.transfers.wait(self.stream, self.reload_done, Wait.UNREAD)
        if self.host is not None:
            self._give_host_back()
        self._discard()


class Handle:
    """What the autograd graph holds instead of a tensor."""

    __slots__ = ("alive", "layer", "version", "versions")

    alive: object | None
    layer: int
    version: int
    """The tensor's when it was saved."""
    versions: torch.Tensor
    """What tells the tensor's version now."""

    def unpack(self) -> torch.Tensor:
        """The tensor, on the device and ready for the current stream."""
        raise NotImplementedError

    def check_version(self, dtype: torch.dtype, size: torch.Size) -> None:
        """Raise as autograd does without hooks.

        Raises:
            RuntimeError: The tensor was changed in place after it had been saved.
        """
        now = self.versions._version
        if now != self.version:
            with _probing:
                now = self.versions._version
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{dtype} {list(size)}], saved in layer {self.layer}, is at version {now}; expected version "
                f"{self.version} instead. Clone the tensor before you change it, or change it out of place."
            )


class KeptHandle(Handle):
    """A saved tensor that stays where it is."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor, owner: ActivationSet) -> None:
        self.alive = owner.alive
        self.layer = owner.layer
        self.version = tensor._version
        # A result of the operation that saves it would own itself through the graph: hold an alias.
        self.tensor = self.versions = tensor if tensor.is_leaf else tensor.detach()

    def unpack(self) -> torch.Tensor:
        if self.versions._version != self.version:
            self.check_version(self.tensor.dtype, self.tensor.size())
        return self.tensor


class MovedHandle(Handle):
    """A saved tensor whose storage travels, and how the tensor looks into it."""

    __slots__ = ("conj", "dtype", "neg", "size", "start", "storage", "stride", "view")

    def __init__(self, tensor: torch.Tensor, storage: SavedStorage, owner: ActivationSet) -> None:
        self.alive = owner.alive
        self.layer = owner.layer
        self.version = tensor._version
        self.versions = version_counter(tensor)
        self.storage = storage
        self.dtype = tensor.dtype
        self.start = tensor.storage_offset()
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.view: torch.Tensor | None = None
        """The tensor that has come back. Nobody else may take its memory over, as autograd does with gradients."""

    def unpack(self) -> torch.Tensor:
        self.check_version(self.dtype, self.size)
        memory = self.storage.read()
        if self.view is not None:
            return self.view
        view = self.versions.data
        view.set_(memory, self.start, self.size, self.stride)
        if self.conj:
            view = view.conj()
        if self.neg:
            view = torch._neg_view(view)
        if self.storage.is_back:
            self.view = view
        return view


unpack = operator.methodcaller("unpack")
"""The unpack hook."""


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares the version counter of ``tensor`` and all its views."""
    counter = tensor.detach()
    counter.data = nothing(tensor.dtype, tensor.device)
    return counter


def shares_versions(versions: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a change of one counts as a change of the other.

    It does for views. But ``torch.unsafe_chunk``, which the cells of RNNs use, and ``.data`` give tensors over one
    storage that count for themselves.
    """
    with _probing, _unsafe_preserve_version_counter(versions):
        before = tensor._version
        torch.autograd.graph.increment_version(versions)
        return tensor._version != before


_probing = threading.Lock()
"""While a version is changed to see what else changes with it."""


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without memory, always the same."""
    return torch.empty(0, dtype=dtype, device=device)
