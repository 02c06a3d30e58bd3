"""What one region of a layer costs, learned in a layer's first forward; and a planner's policy of a layer's regions."""

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


@dataclass(frozen=True)
class LayerPolicy:
    """The policy of one layer's regions. What is not kept is recomputed, if backward needs it.

    Args:
        kept: The numbers of the regions that are kept until backward, on the device or on the host: regions that
            autograd saves, and inputs of the layer.
        offloaded: Of the kept regions, those that are offloaded if the layer is.

    Raises:
        ValueError: An offloaded region is not kept.
    """

    kept: frozenset[int]
    offloaded: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.offloaded <= self.kept:
            missing = sorted(self.offloaded - self.kept)
            raise ValueError(f"offloaded must be some of the kept regions, got {missing} beside them; keep them too")
