"""One chunk of a pipeline: its saved tensors, cut into parts, and the points of the schedule that it reaches.

The parts are the layers of a :class:`~offload.activations.round.Round`, so that everything below is the same as
for the layers of a model. A part's forward begins when the part before has saved its share; its backward begins when
autograd asks for the first tensor of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

import torch

from offload.activations.handles import SavedHandle
from offload.activations.round import Round
from offload.activations.what_moves import storages_of
from offload.base.torch_private import pop_hooks, push_hooks
from offload.pipelining.probe import ChunkBytes


class PackedTensor(NamedTuple):
    """What the autograd graph of a chunk holds instead of a tensor."""

    chunk: ChunkParts
    part: int
    handle: SavedHandle


class ChunkParts:
    """A chunk's parts. Backward reaches them from the last to the first.

    As a context manager it surrounds the chunk's forward.

    Args:
        microbatch: The round that holds all chunks of this step.
        number: The chunk's number in the order of forwards.
        parts: How many layers of the round the chunk has.
        held: Tensors that the stage keeps on the device until backward; they are not offloaded.
    """

    def __init__(self, microbatch: Round, number: int, parts: int, held: Iterable[torch.Tensor]) -> None:
        self.parts = parts
        self._round = microbatch
        self._held = storages_of(held)
        self._first_layer = number * parts
        self._reached = parts

    @property
    def saved(self) -> ChunkBytes:
        """What the chunk has saved so far."""
        return ChunkBytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin_backward(self) -> None:
        """Backward begins, or the half of it for the weights."""
        self.reach(self.parts - 1)

    def reach(self, part: int) -> None:
        """Backward asks for a tensor of ``part``, and so is past all later parts."""
        while self._reached > part:
            self._reached -= 1
            self._round.begin_backward(self._first_layer + self._reached)

    def end_backward(self) -> None:
        """Backward has ended, also where it asked for nothing of some parts."""
        self.reach(0)


class EvenChunk(ChunkParts):
    """A chunk whose parts are of equal size.

    Args:
        microbatch: As for any chunk, and so are ``number``, ``parts`` and ``held``.
        part_bytes: The size of a part.
    """

    def __init__(
        self, microbatch: Round, number: int, parts: int, part_bytes: float, held: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__(microbatch, number, parts, held)
        self._saved: dict[int, int] = {}
        """The ``id`` of each storage that was saved → its bytes."""
        self._saved_bytes = 0
        self._part_bytes = part_bytes
        self._part = 0
        self._set = self._round.begin_forward(self._first_layer, self._held)

    def pack(self, tensor: torch.Tensor) -> PackedTensor:
        """The pack hook."""
        packed = PackedTensor(self, self._part, self._set.pack(tensor))
        for storage in packed.handle.storages():
            if id(storage) not in self._saved:
                self._saved[id(storage)] = storage.nbytes
                self._saved_bytes += storage.nbytes
        while self._part < self.parts - 1 and self._saved_bytes >= (self._part + 1) * self._part_bytes:
            self._next_part(in_operation=True)
        return packed

    @property
    def saved(self) -> ChunkBytes:
        return ChunkBytes(tuple(self._saved.values()))

    def __enter__(self) -> Self:
        push_hooks(self.pack, unpack_part)
        return self

    def __exit__(self, *_: object) -> None:
        pop_hooks(self.pack)
        while self._part < self.parts - 1:
            self._next_part(in_operation=False)
        self._set.close()

    def _next_part(self, *, in_operation: bool) -> None:
        self._set.close(in_operation=in_operation)
        self._part += 1
        self._set = self._round.begin_forward(self._first_layer + self._part, self._held)


def unpack_part(packed: PackedTensor) -> torch.Tensor:
    """The unpack hook."""
    packed.chunk.reach(packed.part)
    return packed.handle.unpack()
