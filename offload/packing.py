"""Small storages travel together: what a copy costs the host, and loses at the link, they pay once.

Each copy takes the host some microseconds, with its events, its host buffer and the memory to come back to; and a copy
below 4 MiB is so short that the link idles between it and the next. So small storages are first put together into
one piece of device memory, which then moves as any other storage does. Their own memory is free from then on. When
backward reads the first of them, each gets memory of its own again: code may address a whole storage, by an offset from
its begin.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

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

_copies: Any = torch.split_with_sizes_copy
"""PyTorch's types say that it returns nothing."""


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
        """A contiguous tensor over the whole storage; of no size while the bytes are in a pack."""
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

    def unpack(self) -> torch.Tensor:
        versions = self.versions
        if versions._version != self.version:
            self.check_version(versions.dtype, self.size)
        view = versions.new_empty(0)
        view.set_(self.read(), self.start, self.size, self.stride)
        return view

    def read(self) -> torch.UntypedStorage:
        """The memory on the device, ready for the current stream's next operation."""
        if self.whole is not None:
            self.whole.split()
        return self.bytes.untyped_storage()

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
        with torch._C._DisableAutocast():  # on the CPU it has a say in what is joined
            joined, sizes = _join(groups, backend.filling)
        whole = WholePack(joined, owner, groups, sizes)
        freed = [member.bytes.data for group in groups for member in group] if backend.poison else []
        for group in groups:
            empty = nothing(group[0].bytes.dtype, backend.device)
            for member in group:
                member.whole = whole
                member.bytes.data = empty
        while freed:
            backend.discard(freed.pop())
        return whole


class WholePack(SavedStorage):
    """The storage that small ones were put together in.

    Args:
        tensor: All bytes, uint8 of one dimension.
        owner: The activation set that it moves with.
        groups: Whose bytes they are.
        sizes: Bytes of each of these, and of the gap behind it.
    """

    __slots__ = ("_members", "_sizes", "is_split")

    def __init__(
        self, tensor: torch.Tensor, owner: ActivationSet, groups: list[list[SmallTensor]], sizes: list[tuple[int, int]]
    ) -> None:
        super().__init__(tensor, owner)
        self._members = [weakref.ref(member) for group in groups for member in group]
        self._sizes = sizes
        self.storages = len(sizes)
        self.payload = sum([nbytes for nbytes, _ in sizes])
        self.is_split = False

    def split(self) -> None:
        """Give each storage memory of its own again, ready for the current stream's next operation."""
        if not self.is_split:
            self.read()
            self._split()
        elif self.awaited_by != self.set.transfers.backend.compute_stream_id():
            self._await_reload()

    def _split(self) -> None:
        pieces = [nbytes for sizes in self._sizes for nbytes in sizes if nbytes]
        copies = iter(_copies(self.device, pieces))
        for reference, (_, gap) in zip(self._members, self._sizes, strict=True):
            copy = next(copies)
            if gap:
                next(copies)
            member = reference()
            if member is not None:
                member.bytes = copy
        self.is_split = True
        backend = self.set.transfers.backend
        self.reload_done = backend.record_timed(backend.compute_stream())
        self.awaited_by = backend.compute_stream_id()
        if self.host is None:
            self._let_go()  # the bytes are elsewhere on the device now, and still count

    def _look_for_waste(self) -> None:
        for reference in self._members if not self.wasted else ():
            member = reference()
            if member is not None and not member.original.expired():
                _, given = member.origin
                self._count_waste(member.origin, member.nbytes, surprising=not given)
        self.wasted = True


def _join(groups: list[list[SmallTensor]], filling: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """One flat tensor of all bytes, in which each storage begins at a multiple of :data:`ALIGNMENT`, and the sizes."""
    sizes: list[tuple[int, int]] = []
    flats = []
    for group in groups:
        pieces = []
        for member in group:
            pieces.append(member.bytes)
            gap = -member.nbytes % ALIGNMENT
            if gap:
                pieces.append(filling[:gap].view(member.bytes.dtype))
            sizes.append((member.nbytes, gap))
        flats.append(torch._C._nn.flatten_dense_tensors(pieces).view(torch.uint8))
    return torch.cat(flats) if len(flats) > 1 else flats[0], sizes
