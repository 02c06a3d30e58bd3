"""Small storages travel together: what a copy costs the host, and loses at the link, they pay once.

Each copy takes the host some microseconds, with its events, its host buffer and the memory to come back to; and a copy
below 4 MiB is so short that the link idles between it and the next. So small storages are first put together into
one piece of device memory, which then moves as any other storage does. Their own memory is free from then on.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.backend import ALIGNMENT, flat_view
from offload.saved import SavedStorage, nothing, version_counter
from offload.waste import Origin, origin_of

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


class PackedStorage:
    """One small storage that autograd saved, on its own until its pack is closed, then a part of the whole.

    To the handles it is what :class:`~offload.saved.SavedStorage` is.
    """

    __slots__ = (
        "__weakref__",
        "_counter",
        "bytes",
        "nbytes",
        "offset",
        "origin",
        "original",
        "set",
        "tensors",
        "version",
        "whole",
    )

    def __init__(
        self, tensor: torch.Tensor, memory: torch.UntypedStorage, owner: ActivationSet, version: tuple[int, int]
    ) -> None:
        self.set = owner
        self.nbytes = memory.nbytes()
        self.version = version
        self.origin = origin_of(tensor, owner.first_node)
        # While the weak reference lives, no other storage can have the same address.
        self.original = StorageWeakRef(memory)
        self.whole: WholePack | None = None
        self.offset = 0
        self.tensors = 0
        alias = tensor.detach()
        self._counter: torch.Tensor | None = alias
        if tensor.nbytes != self.nbytes or not tensor.is_contiguous() or tensor.dtype not in _JOINED or tensor.is_neg():
            alias, self._counter = flat_view(tensor), None
        self.bytes = alias
        """A contiguous tensor over the whole storage; of no size once the bytes are in a pack."""

    def read(self) -> torch.UntypedStorage:
        """The memory that holds the bytes from ``offset`` on, ready for the current stream's next operation."""
        return self.bytes.untyped_storage() if self.whole is None else self.whole.read()

    def version_counter(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`SavedStorage.version_counter`. The first handle is made from the tensor that this is made from."""
        counter, self._counter = self._counter, None
        return version_counter(tensor) if counter is None else counter

    def keep(self) -> None:
        """A layer that is not offloaded saved the same storage, and keeps it on the device."""
        if self.whole is not None:
            self.whole.keep_part(self.offset)


class Pack:
    """Small storages of one activation set, collected until they are worth a copy."""

    def __init__(self) -> None:
        self._members: list[PackedStorage] = []
        self._nbytes = 0

    def add(self, storage: PackedStorage) -> bool:
        """One storage more; whether the pack is now large enough to move at the link's speed."""
        self._members.append(storage)
        self._nbytes += storage.nbytes
        return self._nbytes >= PACK_BYTES

    def close(self, owner: ActivationSet) -> WholePack | None:
        """Begin a new pack. What was collected is one storage of ``owner`` now; ``None`` if it was nothing."""
        members, self._members, self._nbytes = self._members, [], 0
        if not members:
            return None
        backend = owner.transfers.backend
        joined, offsets = _join(members, backend.filling)
        whole = WholePack(joined, owner)
        freed = [member.bytes.data for member in members] if backend.poison else []
        for member, offset in offsets:
            member.whole, member.offset = whole, offset
            member.bytes.data = nothing(member.bytes.dtype, backend.device)
        whole.hold(members)
        while freed:
            backend.discard(freed.pop())
        return whole


class WholePack(SavedStorage):
    """The storage that small ones were put together in."""

    __slots__ = ("_parts",)

    def __init__(self, tensor: torch.Tensor, owner: ActivationSet) -> None:
        super().__init__(tensor, owner, (0, 0))
        self._parts: dict[int, tuple[StorageWeakRef, Origin, int]] = {}

    def hold(self, parts: list[PackedStorage]) -> None:
        """These are in it."""
        self._parts = {part.offset: (part.original, part.origin, part.nbytes) for part in parts}
        self.storages = len(parts)
        self.payload = sum(part.nbytes for part in parts)

    def keep_part(self, offset: int) -> None:
        """A layer that is not offloaded saved the same storage as the part at ``offset``, and keeps it."""
        if part := self._parts.pop(offset, None):
            _, origin, nbytes = part
            self._count_waste(origin, nbytes, surprising=False)

    def _look_for_waste(self) -> None:
        parts, self._parts = self._parts, {}
        for original, origin, nbytes in parts.values():
            if not original.expired():
                self._count_waste(origin, nbytes, surprising=not origin.given)


def _join(members: list[PackedStorage], filling: torch.Tensor) -> tuple[torch.Tensor, list[tuple[PackedStorage, int]]]:
    """One flat tensor of all bytes, in which each member begins at a multiple of :data:`ALIGNMENT`, and where."""
    if len(members) == 1:
        return flat_view(members[0].bytes), [(members[0], 0)]
    groups: defaultdict[torch.dtype, list[PackedStorage]] = defaultdict(list)
    for member in members:
        groups[member.bytes.dtype].append(member)
    offsets = []
    end = 0
    flats = []
    for dtype, group in groups.items():
        pieces = []
        for member in group:
            offsets.append((member, end))
            pieces.append(member.bytes)
            end += member.nbytes
            if gap := -end % ALIGNMENT:
                pieces.append(filling[:gap].view(dtype))
                end += gap
        flats.append(torch._C._nn.flatten_dense_tensors(pieces).view(torch.uint8))
    return torch.cat(flats) if len(flats) > 1 else flats[0], offsets
