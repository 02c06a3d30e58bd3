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
_JOINED_AS_THEY_ARE = frozenset(
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
        "alias",
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
        self.alias = _flat_alias(tensor, self.nbytes)
        self._counter: torch.Tensor | None = self.alias
        self.version = version
        self.origin = origin_of(tensor, owner.first_node)
        # While the weak reference lives, no other storage can have the same address.
        self.original = StorageWeakRef(memory)
        self.whole: WholePack | None = None
        self.offset = 0
        self.tensors = 0

    def read(self) -> torch.UntypedStorage:
        """The memory that holds the bytes from ``offset`` on, ready for the current stream's next operation."""
        return self.alias.untyped_storage() if self.whole is None else self.whole.read()

    def version_counter(self, tensor: torch.Tensor) -> torch.Tensor:
        """What shares the version counter of ``tensor``, which looks into this storage."""
        counter, self._counter = self._counter, None
        return version_counter(tensor) if counter is None else counter

    def keep(self) -> None:
        """A layer that is not offloaded saved the same storage, and keeps it on the device."""
        if self.whole is not None:
            self.whole.keep_part(self.offset)

    def move_into(self, whole: WholePack, offset: int) -> None:
        """The bytes are in ``whole``, from ``offset`` on: let the own memory go."""
        self.whole, self.offset = whole, offset
        self.alias.data = nothing(torch.uint8, self.alias.device)


class Pack:
    """Small storages of one activation set, collected until they are worth a copy."""

    def __init__(self) -> None:
        self._members: list[PackedStorage] = []
        self._nbytes = 0

    def add(self, storage: PackedStorage) -> None:
        """One storage more."""
        self._members.append(storage)
        self._nbytes += storage.nbytes

    @property
    def full(self) -> bool:
        """Whether it is large enough to move at the link's speed."""
        return self._nbytes >= PACK_BYTES

    def close(self, owner: ActivationSet) -> WholePack | None:
        """Begin a new pack. What was collected is one storage of ``owner`` now; ``None`` if it was nothing."""
        members, self._members, self._nbytes = self._members, [], 0
        if not members:
            return None
        backend = owner.transfers.backend
        joined, offsets = _join(members, backend.filling)
        whole = WholePack(joined, owner)
        freed = [member.alias.data for member in members] if backend.poison else []
        for member, offset in offsets:
            whole.add(member, offset)
            member.move_into(whole, offset)
        while freed:
            backend.discard(freed.pop())
        return whole


class WholePack(SavedStorage):
    """The storage that small ones were put together in."""

    __slots__ = ("_parts",)

    def __init__(self, tensor: torch.Tensor, owner: ActivationSet) -> None:
        super().__init__(tensor, owner, (0, 0))
        self.storages = self.payload = 0
        self._parts: dict[int, tuple[StorageWeakRef, Origin, int]] = {}

    def add(self, storage: PackedStorage, offset: int) -> None:
        """This storage's bytes begin at ``offset``."""
        self._parts[offset] = (storage.original, storage.origin, storage.nbytes)
        self.storages += 1
        self.payload += storage.nbytes

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
        return members[0].alias.view(-1).view(torch.uint8), [(members[0], 0)]
    groups: defaultdict[torch.dtype, list[PackedStorage]] = defaultdict(list)
    for member in members:
        groups[member.alias.dtype].append(member)
    offsets = []
    end = 0
    flats = []
    for dtype, group in groups.items():
        pieces = []
        for member in group:
            offsets.append((member, end))
            pieces.append(member.alias)
            end += member.nbytes
            if gap := -end % ALIGNMENT:
                pieces.append(filling[:gap].view(dtype))
                end += gap
        flats.append(torch._C._nn.flatten_dense_tensors(pieces).view(torch.uint8))
    return torch.cat(flats) if len(flats) > 1 else flats[0], offsets


def _flat_alias(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """All bytes of the tensor's storage in a row, and the tensor's version counter."""
    alias = tensor.detach()
    whole = tensor.is_contiguous() and tensor.nbytes == nbytes and tensor.dtype in _JOINED_AS_THEY_ARE
    if not whole or tensor.is_neg():
        alias.data = flat_view(alias)
    return alias
