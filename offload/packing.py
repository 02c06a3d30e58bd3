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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from offload.backend import ALIGNMENT, flat_view
from offload.saved import Handle, SavedStorage, nothing

if TYPE_CHECKING:
    from offload.activation_set import ActivationSet
    from offload.waste import Origin

SMALL_BYTES = 1 << 22
"""Storages below this size travel together."""
PACK_BYTES = 1 << 23
"""A pack of this size is full."""
_JOINED = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
)
"""Tensors of other types are joined byte by byte."""
RESIZED = "resized"
"""Why a small storage stays on the device whose size has changed since it was saved, in ``stats().skipped``."""


class SmallTensor(Handle):
    """A small saved tensor, and its storage: alone until its pack is closed, then a part of the whole.

    It is the handle of the first tensor that was saved over the storage, and to those of others what
    :class:`~offload.saved.SavedStorage` is. What a pack can do for all of them at once is done there: in the midst of a
    program's operations each call takes several times as long.
    """

    __slots__ = (
        "__weakref__",
        "changes",
        "conj",
        "nbytes",
        "neg",
        "origin",
        "set",
        "size",
        "start",
        "stride",
        "tensor",
        "whole",
    )

    def __init__(self, tensor: torch.Tensor, nbytes: int, owner: ActivationSet, changes: int, origin: Origin) -> None:
        self.alive = owner.alive
        self.layer = owner.layer
        self.set = owner
        self.version = tensor._version
        self.changes = changes
        self.tensor = self.versions = tensor.detach()
        """An alias of the saved tensor; a copy of it after the pack has been split."""
        self.nbytes = nbytes
        self.origin = origin
        self.whole: WholePack | None = None

    def unpack(self) -> torch.Tensor:
        if self.versions._version != self.version:
            self.check_version(self.tensor.dtype, self.tensor.size() if self.whole is None else self.size)
        whole = self.whole
        if whole is None:
            return self.tensor.data
        if whole.split_on != whole.compute_stream_now():
            whole.split()
        return self.tensor

    def read(self) -> torch.UntypedStorage:
        """The memory on the device, ready for the current stream's next operation."""
        if self.whole is not None and self.whole.split_on != self.whole.compute_stream_now():
            self.whole.split()
        return self.tensor.untyped_storage()

    @property
    def is_back(self) -> bool:
        """Whether the bytes were in a pack and have memory of their own again, to stay."""
        return self.whole is not None

    def leave(self) -> torch.Tensor:
        """Take down how the tensor looks at its storage, of which the result is all, contiguous, to be joined."""
        tensor = self.tensor
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.start, self.conj, self.neg = 0, False, False
        is_whole = tensor.nbytes == self.nbytes and tensor.is_contiguous()
        if is_whole and tensor.dtype in _JOINED and not tensor.is_neg():
            return tensor
        self.start, self.conj, self.neg = int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
        return flat_view(tensor)

    def come_back(self, flat: torch.Tensor) -> None:
        """``flat`` has the bytes of the storage."""
        tensor = self.versions.data
        tensor.set_(flat.untyped_storage(), self.start, self.size, self.stride)
        if self.conj:
            tensor = tensor.conj()
        self.tensor = torch._neg_view(tensor) if self.neg else tensor

    def keep(self) -> None:
        """A layer that is not offloaded saved the same storage, and keeps it on the device: that is no surprise."""
        maker, _ = self.origin
        self.origin = maker, True


class Pack:
    """Small storages of one activation set, collected until they are worth a copy."""

    def __init__(self) -> None:
        self._members: list[SmallTensor] = []
        self._nbytes = 0

    def add(self, tensor: SmallTensor) -> bool:
        """One storage more; whether the pack is now large enough to move at the link's speed."""
        self._members.append(tensor)
        self._nbytes += tensor.nbytes
        return self._nbytes >= PACK_BYTES

    def close(self, owner: ActivationSet) -> WholePack | None:
        """Begin a new pack. What was collected is one storage of ``owner`` now; ``None`` if nothing is to move."""
        saved, self._members, self._nbytes = self._members, [], 0
        backend = owner.transfers.backend
        # The bytes of a storage that was resized since may be gone, to be back before backward.
        collected = [member for member in saved if member.tensor.untyped_storage().nbytes() == member.nbytes]
        if len(collected) < len(saved):
            owner.transfers.counters.skipped[RESIZED] += len(saved) - len(collected)
        if not collected:
            return None
        groups: defaultdict[torch.dtype, _Group] = defaultdict(_Group)
        for member in collected:
            piece = member.leave()
            group = groups[piece.dtype]
            group.members.append(member)
            group.pieces.append(piece)
            if gap := -member.nbytes % ALIGNMENT:
                group.pieces.append(backend.filling[:gap].view(piece.dtype))
        with torch._C._DisableAutocast():  # on the CPU it has a say in what is joined
            flats = [torch._C._nn.flatten_dense_tensors(group.pieces).view(torch.uint8) for group in groups.values()]
            joined = torch.cat(flats) if len(flats) > 1 else flats[0]
        whole = WholePack(joined, owner, [member for group in groups.values() for member in group.members])
        groups.clear()
        freed = [member.tensor.data for member in collected] if backend.poison else []
        for member in collected:
            member.whole = whole
            member.tensor.data = nothing(member.tensor.dtype, backend.device)
        while freed:
            backend.discard(freed.pop())
        return whole


class _Group:
    """Storages that are joined as tensors of one type."""

    __slots__ = ("members", "pieces")

    def __init__(self) -> None:
        self.members: list[SmallTensor] = []
        self.pieces: list[torch.Tensor] = []


class WeakStorages:
    """Weak references to storages, made at once. While they live, no other storage can have the same address."""

    __slots__ = ("_references",)

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        self._references: list[Any] = [storage._weak_ref() for storage in storages]

    def expired(self) -> Iterator[bool]:
        """Of each storage, whether nobody holds it any more."""
        has_expired: Any = torch.UntypedStorage._expired
        return map(has_expired, self._references)

    def __del__(self) -> None:
        free = torch.UntypedStorage._free_weak_ref
        for reference in self._references:
            free(reference)


class WholePack(SavedStorage):
    """The storage that small ones were put together in.

    Args:
        tensor: All bytes, uint8 of one dimension.
        owner: The activation set that it moves with.
        members: Whose bytes they are, in order, each with the gap behind it.
    """

    __slots__ = ("_members", "_originals", "_sizes", "_unit", "compute_stream_now", "split_on")

    def __init__(self, tensor: torch.Tensor, owner: ActivationSet, members: list[SmallTensor]) -> None:
        super().__init__(tensor, owner)
        self._members = [weakref.ref(member) for member in members]
        self._originals = WeakStorages([member.tensor.untyped_storage() for member in members])
        self._unit = torch.uint8 if any(member.nbytes % 8 for member in members) else torch.int64
        self._sizes = [(member.nbytes + -member.nbytes % ALIGNMENT) // self._unit.itemsize for member in members]
        self.storages = len(members)
        self.payload = sum([member.nbytes for member in members])
        self.split_on: object = None
        """The stream on which the storages that it was split into are ready; ``None`` before."""
        self.compute_stream_now = owner.transfers.backend.compute_stream_id

    def split(self) -> None:
        """Give each storage memory of its own again, ready for the current stream's next operation."""
        with self.set.transfers.lock:
            if self.split_on is None:
                self._split(self.read())
            else:
                self._await_reload()
            self.split_on = self.compute_stream_now()

    def _split(self, memory: torch.UntypedStorage) -> None:
        flat = torch.empty(0, dtype=self._unit, device=memory.device).set_(memory)
        parts = torch.unsafe_split_with_sizes(flat, self._sizes)
        members, sources = [], []
        for reference, part in zip(self._members, parts, strict=True):
            member = reference()
            if member is not None:
                members.append(member)
                sources.append(part[: member.nbytes // self._unit.itemsize] if member.nbytes % ALIGNMENT else part)
        # Integers times one: of all ways to copy many tensors into new memory, the one that takes the host least.
        for member, copy in zip(members, torch._foreach_mul(sources, 1), strict=True):
            member.come_back(copy)
        backend = self.set.transfers.backend
        self.reload_done = backend.record_timed(backend.compute_stream())
        self.awaited_by = backend.compute_stream_id()
        if self.host is None:
            self._let_go()  # the bytes are elsewhere on the device now, and still count

    def _look_for_waste(self) -> None:
        if self.wasted:
            return
        self.wasted = True
        for reference, expired in zip(self._members, self._originals.expired(), strict=True):
            member = None if expired else reference()
            if member is not None:
                _, given = member.origin
                self._count_waste(member.origin, member.nbytes, surprising=not given)
