"""What moves: the storages that autograd saves, and the handles that the graph holds instead of tensors.

Ownership runs one way. The autograd graph holds handles; a handle holds its
:class:`SavedStorage`; that holds the device memory and the host buffer. When the graph
goes, for whatever reason, everything goes with it by reference counting: device memory to
the allocator, the host buffer to the pool with the event that says when it is free.

A storage travels once, however many saved tensors look into it. Each handle keeps its
tensor's geometry, and gives it back over whatever device memory holds the bytes by then.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload import trace
from offload.backend import Stream, Wait
from offload.host_memory import NO_HOST_MEMORY

if TYPE_CHECKING:
    from offload.activation_set import ActivationSet
    from offload.host_pool import HostBuffer


class SavedStorage:
    """One storage that autograd saved, wherever its bytes are now.

    ``device`` and ``host`` say where: uint8 device memory, a host buffer, or both while a copy is
    in flight. The activation set it belongs to decides when it moves.
    """

    __slots__ = (
        "__weakref__",
        "copy_number",
        "counted",
        "device",
        "host",
        "nbytes",
        "offload_done",
        "original",
        "ready",
        "reload_done",
        "set",
        "stream",
        "tensors",
        "unread",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, owner: ActivationSet) -> None:
        self.set = owner
        self.device: torch.Tensor | None = None
        self.host: HostBuffer | None = None
        self.offload_done: Any = None
        self.copy_number = 0
        self.reload_done: Any = None
        self.stream: Any = None
        self.unread = False
        self.tensors = 0
        self.counted = False
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.original = StorageWeakRef(storage)
        self.version = tensor._version
        self.device = _flat(tensor)
        self.ready = owner.transfers.backend.compute_stream().record_event()

    def start_offload(self) -> None:
        """Queue the copy to the host; it waits for the event recorded when the tensor was saved."""
        if self.host is not None or self.device is None:
            return
        transfers = self.set.transfers
        self.host = transfers.take_host(self.nbytes)
        if self.host is None:
            transfers.counters.skipped[NO_HOST_MEMORY] += 1
            return
        transfers.wait(transfers.d2h_stream, self.ready, Wait.READY)
        for event in self.host.events:
            transfers.wait(transfers.d2h_stream, event, Wait.HOST_BUFFER)
        transfers.to_host(self.host, self.device, self.set.layer)
        self.offload_done = transfers.d2h_stream.record_event()
        self.copy_number = transfers.counters.offloaded_storages

    def release(self) -> None:
        """Let the device memory go. The compute stream must have waited for ``offload_done``."""
        if self.host is None or self.device is None:
            return
        self._discard()
        if not self.original.expired():
            self.set.transfers.counters.wasted_bytes += self.nbytes

    @property
    def away(self) -> bool:
        """Whether the bytes are on the host only."""
        return self.host is not None and self.device is None

    def start_reload(self, landing: torch.Tensor, compute_stream: Stream) -> None:
        """Queue the copy back into ``landing``, memory of ``compute_stream`` that the h2d stream has waited for."""
        if self.host is None:
            return
        transfers = self.set.transfers
        self.device = landing
        self.count()
        transfers.to_device(self.device, self.host, self.set.layer)
        self.reload_done = transfers.h2d_stream.record_event()
        self.stream = compute_stream
        self.unread = True
        transfers.pool.give(self.host, self.reload_done)
        self.host = None

    def keep(self) -> None:
        """Stay on the device after all: a layer that is not offloaded saved the same storage."""
        if self.host is not None:
            self.set.transfers.pool.give(self.host, self.offload_done)
            self.host = None
            self.set.transfers.counters.wasted_bytes += self.nbytes
        self._uncount()

    def adopt(self, tensor: torch.Tensor) -> None:
        """Use the device memory that ``tensor``, saved once more, turned out to have kept alive."""
        if self.device is None:
            self.device = _flat(tensor)
            self.count()

    def read(self) -> torch.Tensor:
        """The bytes on the device, uint8, ready for the current stream's next operation."""
        if self.device is None:
            self.set.reload_late()
        if self.reload_done is not None:
            transfers = self.set.transfers
            trace.point("wait", self.set.layer)
            transfers.wait(transfers.backend.compute_stream(), self.reload_done, Wait.RELOADED)
            self.unread = False
            self.set.mark_read()
        return cast("torch.Tensor", self.device)

    def count(self) -> None:
        """Add the device memory to the resident bytes of offloaded layers."""
        if not self.counted and self.device is not None:
            self.set.transfers.counters.hold(self.nbytes)
            self.counted = True

    def _uncount(self) -> None:
        if self.counted:
            self.set.transfers.counters.drop(self.nbytes)
            self.counted = False

    def _discard(self) -> None:
        device, self.device = self.device, None
        self._uncount()
        if device is not None:
            self.set.transfers.backend.discard(device)

    def __del__(self) -> None:
        transfers = self.set.transfers
        if self.unread:
            transfers.wait(self.stream, self.reload_done, Wait.UNREAD)
        if self.host is not None:
            transfers.pool.give(self.host, self.offload_done)
        self._discard()


class Geometry(NamedTuple):
    """How a tensor looks into its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        return cls(
            tensor.dtype,
            int(tensor.storage_offset()),
            tensor.size(),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def over(self, flat: torch.Tensor) -> torch.Tensor:
        """The same view over the storage of ``flat``."""
        view = torch.empty(0, dtype=self.dtype, device=flat.device)
        view.set_(flat.untyped_storage(), self.offset, self.size, self.stride)
        if self.conj:
            view = view.conj()
        return torch._neg_view(view) if self.neg else view


class Handle:
    """What the autograd graph holds instead of a tensor."""

    __slots__ = ("alive", "layer", "version", "versions")

    def __init__(self, tensor: torch.Tensor, owner: ActivationSet) -> None:
        self.alive = owner.alive
        self.layer = owner.layer
        self.version = tensor._version
        self.versions = _version_counter(tensor)

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
    """A saved tensor whose storage travels."""

    __slots__ = ("geometry", "storage")

    def __init__(self, tensor: torch.Tensor, storage: SavedStorage, owner: ActivationSet) -> None:
        super().__init__(tensor, owner)
        self.storage = storage
        self.geometry = Geometry.of(tensor)

    def unpack(self) -> torch.Tensor:
        self.check_version(self.geometry.dtype, self.geometry.size)
        return self.geometry.over(self.storage.read())


class SubclassHandle:
    """A tensor subclass, as handles of its inner tensors and what rebuilds it from them.

    The protocol is PyTorch's: ``__tensor_flatten__`` and ``__tensor_unflatten__`` of traceable wrapper subclasses.
    """

    __slots__ = ("context", "inner", "kind", "size", "stride")

    def __init__(self, tensor: torch.Tensor, owner: ActivationSet) -> None:
        names, self.context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # checked by the caller
        self.kind = type(tensor)
        self.size, self.stride = tensor.size(), tensor.stride()
        self.inner = {name: owner.pack(getattr(tensor, name)) for name in names}

    def unpack(self) -> torch.Tensor:
        inner = {name: handle.unpack() for name, handle in self.inner.items()}
        rebuild: Any = self.kind
        result: torch.Tensor = rebuild.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return result


def unpack(handle: Handle | SubclassHandle) -> torch.Tensor:
    """The unpack hook."""
    return handle.unpack()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage, uint8 of one dimension, sharing its memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares the version counter of ``tensor`` and all its views."""
    counter = tensor.detach()
    counter.data = _nothing(tensor.dtype, tensor.device)
    return counter


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)
