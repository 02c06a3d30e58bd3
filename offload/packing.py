"""Small storages travel together: what a copy costs the host, and loses at the link, they pay once.

Each copy takes the host some microseconds, with its events, its host buffer and the memory to come back to; and a copy
below 4 MiB is so short that the link idles between it and the next. So small storages are first put together into
one piece of device memory, which then moves as any other storage does. Their own memory is free from then on.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.backend import ALIGNMENT, flat_view
from offload.saved import Handle, SavedStorage, nothing, version_counter
from offload.waste import origin_of

if TYPE_CHECKING:
    from offload.activation_set import ActivationSet

SMALL_BYTES = 1 << 22
"""Storages below this size travel together."""
PACK_BYTES = 1 << 23
"""A pack of this size is full."""
_JOINED = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
)
"""Tensors of other types are joined byte by byte."""


class SmallTensor(Handle):
    """A small saved tensor, and its storage: alone until its pack is closed, then a part of the whole.

    It is the handle of the first tensor that was saved over the storage, and to those of others what
    :class:`~offload.saved.SavedStorage` is.
    """

    __slots__ = (
        "__weakref__",
        "bytes",
        "changes",
        "nbytes",
        "offset",
        "origin",
        "original",
        "set",
        "size",
        "start",
        "stride",
        "whole",
    )

    def __init__(self, tensor: torch.Tensor, memory: torch.UntypedStorage, owner: ActivationSet, changes: int) -> None:
        self.alive = owner.alive
        self.layer = owner.layer
        self.set = owner
        self.version = tensor._version
        self.changes = changes
        self.bytes = self.versions = tensor.detach()
        """A contiguous tensor over the whole storage; of no size once the bytes are in a pack."""
        self.nbytes = memory.nbytes()
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.start = tensor.storage_offset()
        if tensor.nbytes != self.nbytes or not tensor.is_contiguous() or tensor.dtype not in _JOINED:
            self.bytes, self.versions = flat_view(tensor), version_counter(tensor)
        self.origin = origin_of(tensor, owner.first_node)
        # While the weak reference lives, no other storage can have the same address.
        self.original = StorageWeakRef(memory)
        self.whole: WholePack | None = None
        self.offset = 0
        """Where its bytes begin in the memory that :meth:`read` gives."""

    def unpack(self) -> torch.Tensor:
        versions = self.versions
        if versions._version != self.version:
            self.check_version(versions.dtype, self.size)
        whole = self.whole
        memory = self.read() if whole is None else whole.read()
        view = versions.new_empty(0)
        view.set_(memory, self.start + self.offset // versions.itemsize, self.size, self.stride)
        return view

    def read(self) -> torch.UntypedStorage:
        """The memory that holds the bytes from ``offset`` on, ready for the current stream's next operation."""
        return self.bytes.untyped_storage() if self.whole is None else self.whole.read()

    def keep(self) -> None:
        """A layer that is not offloaded saved the same storage, and keeps it on the device: that is no surprise."""
        maker, _ = self.origin
        self.origin = maker, True


class Pack:
    """Small storages of one activation set, collected until they are worth a copy."""

    def __init__(self) -> None:
        self._groups: defaultdict[torch.dtype, list[SmallTensor]] = defaultdict(list)
        self._nbytes = 0

    def add(self, tensor: SmallTensor) -> bool:
        """One storage more; whether the pack is now large enough to move at the link's speed."""
        self._groups[tensor.bytes.dtype].append(tensor)
        self._nbytes += tensor.nbytes
        return self._nbytes >= PACK_BYTES

    def close(self, owner: ActivationSet) -> WholePack | None:
        """Begin a new pack. What was collected is one storage of ``owner`` now; ``None`` if it was nothing."""
        if not self._groups:
            return None
        groups = list(self._groups.values())
        self._groups.clear()
        self._nbytes = 0
        backend = owner.transfers.backend
        joined, offsets = _join(groups, backend.filling)
        whole = WholePack(joined, owner, groups)
        freed = [member.bytes.data for group in groups for member in group] if backend.poison else []
        for group in groups:
            empty = nothing(group[0].bytes.dtype, backend.device)
            for member in group:
                member.whole, member.offset = whole, next(offsets)
                member.bytes.data = empty
        while freed:
            backend.discard(freed.pop())
        return whole


class WholePack(SavedStorage):
    """The storage that small ones were put together in."""

    __slots__ = ("_members",)

    def __init__(self, tensor: torch.Tensor, owner: ActivationSet, groups: list[list[SmallTensor]]) -> None:
        super().__init__(tensor, owner)
        members = [member for group in groups for member in group]
        self._members = [weakref.ref(member) for member in members]
        self.storages = len(members)
        self.payload = sum([member.nbytes for member in members])

    def _look_for_waste(self) -> None:
        for reference in self._members if not self.wasted else ():
            member = reference()
            if member is not None and not member.original.expired():
                _, given = member.origin
                self._count_waste(member.origin, member.nbytes, surprising=not given)
        self.wasted = True


def _join(groups: list[list[SmallTensor]], filling: torch.Tensor) -> tuple[torch.Tensor, Iterator[int]]:
    """One flat tensor of all bytes, and where in it each storage begins: at a multiple of :data:`ALIGNMENT`."""
    offsets: list[int] = []
    end = 0
    flats = []
    for group in groups:
        pieces = []
        for member in group:
            offsets.append(end)
            pieces.append(member.bytes)
            end += member.nbytes
            if gap := -end % ALIGNMENT:
                pieces.append(filling[:gap].view(member.bytes.dtype))
                end += gap
        flats.append(torch._C._nn.flatten_dense_tensors(pieces).view(torch.uint8))
    return torch.cat(flats) if len(flats) > 1 else flats[0], iter(offsets)
