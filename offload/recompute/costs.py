"""What one region of a layer costs. Pure data, learned in a layer's first forward, for planners."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RegionProfile:
    """What one region costs.

    Args:
        name: The module that computes the region, and the operation, such as ``"mlp.up_proj: mm"``.
        nbytes: Size of the region's memory.
        seconds: Compute seconds of its operation; zero for ``another_of``.
        reads: The regions that the operation reads, by their numbers in the layer, all lower than its own.
        saved: Whether autograd saves the region. Only a saved region can be kept or offloaded.
        recomputable: Whether the operation gives the same bits when it runs again. The layer's inputs are no
            operations, and never recomputable.
        another_of: Where an operation has several results, the number of the first; ``None`` for the first itself.
        only_with: The region without which this one is never kept; ``None`` if there is none.
    """

    name: str
    nbytes: int
    seconds: float
    reads: tuple[int, ...] = ()
    saved: bool = True
    recomputable: bool = True
    another_of: int | None = None
    only_with: int | None = None
