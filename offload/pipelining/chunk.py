"""One chunk of a pipeline on its way: its saved tensors, cut into parts, and the schedule's points it comes past.

The parts are the layers of a :class:`~offload.activations.round.Round`, so that everything below is the same as
for the layers of a model. A part's forward begins when the one before has saved its share; its backward begins when
autograd asks for the first tensor of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch

from offload.activations.handles import Handle
from offload.activations.round import Round
from offload.activations.what_moves import storages_of
from offload.base.torch_private import pop_hooks, push_hooks
from offload.pipelining.probe import BackwardMemory, DeviceMemory, Saved


class PackedTensor(NamedTuple):
    """What the autograd graph of a chunk holds instead of a tensor."""

    chunk: ChunkParts
    part: int
    handle: Handle


class ChunkParts:
    """A chunk's parts, which backward comes past from the last to the first.

    Args:
        microbatch: The round that holds all chunks of this step.
        number: The chunk's number in the order of forwards.
        parts: How many layers of the round the chunk has.
        held: Tensors that somebody else keeps on the device until backward; they do not travel.
    """

    def __init__(self, microbatch: Round, number: int, parts: int, held: Iterable[torch.Tensor]) -> None:
        self.parts = parts
        self._round = microbatch
        self._held = storages_of(held)
        self._first_layer = number * parts
        self._reached = parts

    @property
    def saved(self) -> Saved:
        """What the chunk has saved so far."""
        return Saved()

    def __enter__(self) -> Self:
        """The forward begins."""
        return self

    def __exit__(self, *_: object) -> None:
        """It has returned or raised."""

    @property
    def rises(self) -> Sequence[float]:
        """For each of these tensors, how far memory rose in backward, where that is measured."""
        return ()

    def begin_backward(self) -> None:
        """Backward begins, or the half of it for the weights."""
        self._come_to(self.parts - 1)

    def reach(self, part: int) -> None:
        """Backward asks for something of ``part``."""
        self._come_to(part)

    def end_backward(self) -> None:
        """It has ended, also where it asked for nothing of some parts."""
        self._come_to(0)

    def _come_to(self, part: int) -> None:
        """Backward has come to ``part``, and so past all later ones."""
        while self._reached > part:
            self._reached -= 1
            self._round.begin_backward(self._first_layer + self._reached)


class ChunkPass(ChunkParts):
    """A chunk's forward and backward, its parts of equal size.

    Args:
        microbatch: As for any chunk, and so are ``number``, ``parts`` and ``held``.
        part_bytes: The size of a part.
    """

    def __init__(
        self, microbatch: Round, number: int, parts: int, part_bytes: float, held: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__(microbatch, number, parts, held)
        self._tensors: list[int] = []
        self._last_saved: list[int] = []
        self._saved_bytes = 0
        self._part_bytes = part_bytes
        self._numbers: dict[int, int] = {}
        """Which of the tensors each storage is."""
        self._part = 0
        self._set = self._round.begin_forward(self._first_layer, self._held)

    def pack(self, tensor: torch.Tensor) -> PackedTensor:
        """The pack hook."""
        packed = PackedTensor(self, self._part, self._set.pack(tensor))
        for storage in packed.handle.storages():
            count = len(self._tensors)
            number = self._numbers.setdefault(id(storage), count)
            if number == count:
                self._tensors.append(storage.nbytes)
                self._last_saved.append(count)
                self._saved_bytes += storage.nbytes
            self._last_saved[number] = count
        while self._part < self.parts - 1 and self._saved_bytes >= (self._part + 1) * self._part_bytes:
            self._next_part(in_operation=True)
        return packed

    @property
    def saved(self) -> Saved:
        return Saved(self._tensors, self._last_saved)

    def __enter__(self) -> Self:
        push_hooks(self.pack, unpack)
        return self

    def __exit__(self, *_: object) -> None:
        pop_hooks(self.pack)
        while self._part < self.parts - 1:
            self._next_part(in_operation=False)
        self._set.close()
        self._numbers.clear()

    def _next_part(self, *, in_operation: bool) -> None:
        self._set.close(in_operation=in_operation)
        self._part += 1
        self._set = self._round.begin_forward(self._first_layer + self._part, self._held)


class MeasuredChunk(ChunkPass):
    """A chunk of the step that measures: it is one part, and its backward tells how far memory rises.

    Args:
        microbatch: As for any chunk, and so are ``number`` and ``held``.
        memory: That of the device.
    """

    def __init__(self, microbatch: Round, number: int, held: Iterable[torch.Tensor], memory: DeviceMemory) -> None:
        super().__init__(microbatch, number, 1, 0.0, held)
        self._memory = memory
        self._backward: BackwardMemory | None = None

    def pack(self, tensor: torch.Tensor) -> PackedTensor:
        """The pack hook, which notes the number of the set's next tensor in place of the part that it would be in."""
        number = len(self._tensors)
        return super().pack(tensor)._replace(part=number)

    @property
    def rises(self) -> Sequence[float]:
        return () if self._backward is None else self._backward.rises

    def begin_backward(self) -> None:
        super().begin_backward()
        self._backward = BackwardMemory(self._memory, len(self._tensors))

    def reach(self, part: int) -> None:
        if self._backward is not None:
            self._backward.ask(part)
        super().reach(0)

    def end_backward(self) -> None:
        super().end_backward()
        if self._backward is not None:
            self._backward.note()


def unpack(packed: PackedTensor) -> torch.Tensor:
    """The unpack hook."""
    packed.chunk.reach(packed.part)
    return packed.handle.unpack()
