"""What a chunk of a pipeline's stage costs, and how its activation set is cut into parts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from offload.base.checks import check_number


@dataclass(frozen=True)
class StageProfile:
    """What one chunk of a stage costs.

    The defaults stand for stages of which only the order is known: a backward takes two forwards, and the copies of a
    set one forward in each direction.

    Args:
        forward_s: Compute seconds of its forward.
        backward_s: Compute seconds of its backward, or of the half for the inputs.
        weight_s: Compute seconds of the half for the weights, where the schedule splits the backward.
        saved_bytes: Bytes of its activation set that may be offloaded.
        tensors: The bytes of each tensor of the set in the order of saving; any size if left out.
        weight_bytes: Bytes that the half for the inputs leaves on the device for the half for the weights, beside the
            set.
        kept_bytes: Bytes that it keeps on the device until backward, beside the set.

    Raises:
        ValueError: A value is negative or not finite, or the tensors do not add up to ``saved_bytes``.
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    weight_s: float = 0.0
    saved_bytes: int = 1
    tensors: tuple[int, ...] = ()
    weight_bytes: int = 0
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        for name, value in vars(self).items():
            for one in value if isinstance(value, tuple) else (value,):
                check_number(name, one)
        if self.tensors and sum(self.tensors) != self.saved_bytes:
            raise ValueError(f"tensors must add up to saved_bytes = {self.saved_bytes}, got {sum(self.tensors)}")

    def cut(self, parts: int) -> list[tuple[int, ...]]:
        """The bytes of each part's tensors if the set is cut into that many: a part ends with the tensor that fills it.

        Without a list of tensors, each part is one tensor, of equal size.
        """
        if not self.tensors:
            edges = [round(self.saved_bytes * part / parts) for part in range(parts + 1)]
            return [(end - start,) for start, end in pairwise(edges)]
        found: list[list[int]] = [[] for _ in range(parts)]
        part = 0
        for nbytes, so_far in zip(self.tensors, accumulate(self.tensors), strict=True):
            found[part].append(nbytes)
            while part < parts - 1 and so_far >= (part + 1) * self.saved_bytes / parts:
                part += 1
        return [tuple(part) for part in found]
