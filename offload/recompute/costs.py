"""What one region of a layer costs, learned in a layer's first forward; and a planner's policy of a layer's regions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RegionProfile:
    """What one region costs. The layer's inputs are regions that no operation computes, and never recomputable."""

    name: str  #: The module that computes the region, and the operation, such as ``"mlp.up_proj: mm"``.
    nbytes: int  #: Size of the region's memory.
    seconds: float  #: Compute seconds of its operation; zero for ``another_of``.
    reads: tuple[int, ...] = ()  #: The regions that the operation reads, by their numbers, all lower than its own.
    saved: bool = True  #: Whether autograd saves the region. Only a saved region can be kept or offloaded.
    recomputable: bool = True  #: Whether the operation gives the same bits when it runs again.
    another_of: int | None = None  #: The first result of the same operation; ``None`` for the first itself.
    only_with: int | None = None  #: The region without which this one is never kept; ``None`` if there is none.
    spared_bytes: int = 0  #: If it is kept, backward needs so much less than all regions together; more if negative.


@dataclass(frozen=True)
class LayerPolicy:
    """The policy of one layer's regions, by their numbers. What is not kept is recomputed, if backward needs it.

    Regions that autograd saves, and inputs of the layer, can be kept. A ``ValueError`` refuses an offloaded region that
    is not kept.
    """

    kept: frozenset[int]  #: Regions that are kept until backward, on the device or on the host.
    offloaded: frozenset[int] = frozenset()  #: Of the kept regions, those that are offloaded if the layer is.

    def __post_init__(self) -> None:
        if not self.offloaded <= self.kept:
            missing = sorted(self.offloaded - self.kept)
            raise ValueError(f"offloaded must be some of the kept regions, got {missing} beside them; keep them too")
