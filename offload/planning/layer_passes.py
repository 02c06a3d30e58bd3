"""Forward and backward of one layer under a policy, in pieces: seconds, device memory, copies.

A piece is the operation of a region, or the share of one saved tensor where the profile has no regions. The simulator
runs the pieces one by one, and the search adds them up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.planning.profile import LayerProfile
from offload.planning.region_costs import RegionCosts, operation_of, region_costs, saved_of
from offload.recompute.costs import RegionProfile


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


class Piece(NamedTuple):
    """A stretch of compute of one layer."""

    seconds: float
    taken_bytes: int = 0
    """Device memory that is allocated when the piece starts."""
    freed_bytes: int = 0
    """Device memory that is freed when the piece ends."""
    offloads: bool = False
    """In forward: whether ``taken_bytes`` are copied to the host once the piece has ended."""
    awaits: int | None = None
    """In backward: the number of the layer's offloaded tensor that is waited for; later ones are reloaded before it."""


class LayerPasses(NamedTuple):
    """Forward and backward of one layer."""

    forward: tuple[Piece, ...]
    recompute: Piece | None
    """What runs again at the beginning of backward."""
    backward: tuple[Piece, ...]
    """Last operation of forward first."""
    offloaded: tuple[int, ...]
    """The bytes of each offloaded tensor, in the order of saving."""
    workspace_bytes: int
    """What else is on the device while the layer runs forward or backward."""


def layer_passes(layer: LayerProfile, policy: LayerPolicy | None = None, *, offloads: bool) -> LayerPasses:
    """Forward and backward of a layer.

    Args:
        layer: The layer's costs.
        policy: Of the layer's regions; if left out, everything that the layer saves is kept, or offloaded.
        offloads: Whether the layer is offloaded. If not, all that is kept stays on the device.
    """
    if not layer.regions:
        return _of_tensors(layer, offloads=offloads)
    if policy is None:
        saved = saved_of(layer.regions)
        policy = LayerPolicy(saved, saved)
    return _of_regions(layer, region_costs(layer.regions, policy.kept), policy.offloaded if offloads else frozenset())


def _of_tensors(layer: LayerProfile, *, offloads: bool) -> LayerPasses:
    """The n-th of m tensors is saved after the fraction n/m of forward, and used in the mirrored part of backward."""
    tensors = layer.pieces()
    offloads = offloads and bool(tensors)
    parts = tensors or (0,)
    forward_s, backward_s = layer.forward_s / len(parts), layer.backward_s / len(parts)
    forward = tuple(Piece(forward_s, nbytes, offloads=offloads) for nbytes in parts)
    backward = tuple(
        Piece(backward_s, freed_bytes=nbytes, awaits=number if offloads else None)
        for number, nbytes in reversed([*enumerate(parts)])
    )
    return LayerPasses(forward, None, backward, tensors if offloads else (), layer.workspace_bytes)


def _of_regions(layer: LayerProfile, costs: RegionCosts, offloaded: frozenset[int]) -> LayerPasses:
    """Regions share the seconds of forward and backward as their operations share those of forward."""
    regions = layer.regions
    total_s = math.fsum(region.seconds for region in regions)
    shares = [region.seconds / total_s if total_s else 1 / len(regions) for region in regions]
    moving = [number for number in sorted(offloaded & costs.kept) if regions[number].nbytes]
    places = {number: place for place, number in enumerate(moving)}
    here = costs.kept | costs.dropped
    freed = _freed_in_forward(regions, costs.dropped)
    forward = tuple(
        Piece(share * layer.forward_s, region.nbytes if number in here else 0, freed[number], number in places)
        for number, (region, share) in enumerate(zip(regions, shares, strict=True))
    )
    backward = tuple(
        Piece(
            shares[number] * layer.backward_s,
            freed_bytes=regions[number].nbytes if number in here and regions[number].saved else 0,
            awaits=places.get(number) if regions[number].saved else None,
        )
        for number in reversed(range(len(regions)))
    )
    recompute = _recompute(regions, costs, places) if costs.dropped else None
    return LayerPasses(
        forward, recompute, backward, tuple(regions[one].nbytes for one in moving), layer.workspace_bytes
    )


def _freed_in_forward(regions: Sequence[RegionProfile], dropped: frozenset[int]) -> Counter[int]:
    """The bytes that are freed after each region of forward: dropped ones, once the last operation has read them."""
    last_reader = {read: number for number, region in enumerate(regions) for read in region.reads}
    freed: Counter[int] = Counter()
    for number in dropped:
        freed[last_reader.get(number, number)] += regions[number].nbytes
    return freed


def _recompute(regions: Sequence[RegionProfile], costs: RegionCosts, places: dict[int, int]) -> Piece:
    """The second run of forward: up to the last dropped region, once everything before that is reloaded.

    Results of skipped operations take memory, too, unless they are handed over. What is not dropped is freed after the
    last operation that reads it, and the layer's inputs at the end, unless autograd saves them.
    """
    last = costs.rerun[-1]
    last_reader = {read: number for number, region in enumerate(regions[: last + 1]) for read in region.reads}
    operations = {operation_of(regions, number) for number in costs.rerun}
    made = [one for one in range(last + 1) if one not in costs.kept or operation_of(regions, one) in operations]
    freed: Counter[int] = Counter()
    for number in made:
        freed[last_reader.get(number, number)] += 0 if number in costs.dropped else regions[number].nbytes
    held = most = 0
    for number in range(last + 1):
        held += regions[number].nbytes if number in made else 0
        most = max(most, held)
        held -= freed[number]
    inputs = sum(regions[number].nbytes for number in costs.kept if not regions[number].saved)
    awaited = [place for number, place in places.items() if number < last]
    return Piece(costs.recompute_s, most, most - held + inputs, awaits=min(awaited, default=None))
