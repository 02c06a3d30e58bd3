"""What a chunk of a pipeline's stage costs, and how its activation set is cut into parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from offload.base.checks import check_number
from offload.planning.profile import LayerProfile


@dataclass(frozen=True)
class StageProfile:
    """What one chunk of a stage costs.

    The defaults stand for stages of which only the order is known: a backward takes two forwards, and the copies of a
    set one forward in each direction.

    Args:
        forward_s: Compute seconds of its forward.
        backward_s: Compute seconds of its backward, or of the half for the inputs.
        weight_s: Compute seconds of the half for the weights, where the schedule splits the backward.
        saved_bytes: Size of its activation set, as far as it can travel.
        tensors: The bytes of each tensor of the set in the order of saving; any size if left out.
        weight_bytes: What the half for the inputs leaves on the device for that for the weights, beside the set.
        kept_bytes: What it keeps on the device until backward, beside the set.
        again_bytes: What its backward computes again, one part after the other.
        layers: The stage's layers, with their regions, where these are known.
        workspace: For each tensor, the most bytes that backward needs beside it and those before it, while it is the
            earliest that backward has asked for: gradients, and what kernels allocate. Nothing if left out.
        last_saved: For each tensor, how many of the set were saved before it was saved for the last time, as several
            operations may save one. All are saved once if left out.

    Raises:
        ValueError: A value is negative or not finite, the tensors do not add up to ``saved_bytes``, there is not one
            ``workspace`` or ``last_saved`` for each of them, or one is saved for the last time before the first.
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    weight_s: float = 0.0
    saved_bytes: int = 1
    tensors: tuple[int, ...] = ()
    weight_bytes: int = 0
    kept_bytes: int = 0
    again_bytes: int = 0
    layers: tuple[LayerProfile, ...] = ()
    workspace: tuple[int, ...] = ()
    last_saved: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tensors", "layers", "workspace", "last_saved"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, value in vars(self).items():
            for one in () if name == "layers" else value if isinstance(value, tuple) else (value,):
                check_number(name, one)
        if self.tensors and sum(self.tensors) != self.saved_bytes:
            raise ValueError(f"tensors must add up to saved_bytes = {self.saved_bytes}, got {sum(self.tensors)}")
        count = len(self.tensors)
        for name in ("workspace", "last_saved"):
            if len(getattr(self, name)) not in (0, count):
                raise ValueError(
                    f"{name} must have an entry for each of the {count} tensors, got {getattr(self, name)}"
                )
        for number, last in enumerate(self.last_saved):
            if not number <= last <= count:
                raise ValueError(f"last_saved must be from {number} to {count} for tensor {number}, got {last}")

    @classmethod
    def of_layers(cls, layers: Iterable[LayerProfile], *, weight_s: float = 0.0, weight_bytes: int = 0) -> StageProfile:
        """What a chunk costs of a stage that consists of these layers."""
        found = tuple(layers)
        tensors = tuple(nbytes for layer in found for nbytes in layer.pieces())
        return cls(
            sum(layer.forward_s for layer in found),
            sum(layer.backward_s for layer in found),
            weight_s,
            sum(tensors),
            tensors,
            weight_bytes,
            layers=found,
        )

    def cut(self, parts: int) -> list[tuple[int, ...]]:
        """The tensors of each part if the set is cut into that many: a part ends with the tensor that fills it.

        What is saved again in a later part belongs to that, as backward needs it there first. Without a list of
        tensors, each part is one, of equal size.
        """
        if not self.tensors:
            edges = [round(self.saved_bytes * part / parts) for part in range(parts + 1)]
            return [(end - start,) for start, end in pairwise(edges)]
        found: list[list[int]] = [[] for _ in range(parts)]
        at_work = self._at_work(parts)
        for nbytes, last in zip(self.tensors, self.last_saved or range(len(self.tensors)), strict=True):
            found[at_work[last]].append(nbytes)
        return [tuple(part) for part in found]

    def workspace_of(self, parts: int) -> list[int]:
        """The most bytes that the backward of each part needs beside the part and those before it, as it was cut."""
        found, left = [0] * parts, [0] * parts
        if not self.workspace:
            return found
        sizes = [sum(part) for part in self.cut(parts)]
        at_work = self._at_work(parts)[:-1]
        for part, nbytes, needed in zip(at_work, self.due_bytes(), self.workspace, strict=True):
            left[part] += nbytes  # of the part; backward has freed what it asked for before
            found[part] = max(found[part], left[part] + needed - sizes[part])
        for part in range(at_work[-1] + 1, parts):  # backward begins in the last part, also if nothing is in it
            found[part] = max(0, self.workspace[-1] - sum(sizes[at_work[-1] + 1 : part + 1]))
        return found

    def due_bytes(self) -> list[int]:
        """For each tensor, the bytes of all that are saved for the last time in its place, and so first asked for."""
        found = [0] * (len(self.tensors) + 1)
        for nbytes, last in zip(self.tensors, self.last_saved or range(len(self.tensors)), strict=True):
            found[last] += nbytes
        return found[:-1]

    def _at_work(self, parts: int) -> list[int]:
        """In which part the forward is before each tensor is saved, and after the last."""
        found = [0]
        for so_far in accumulate(self.tensors):
            part = found[-1]
            while part < parts - 1 and so_far >= (part + 1) * self.saved_bytes / parts:
                part += 1
            found.append(part)
        return found
