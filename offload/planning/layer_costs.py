"""The cost of a layer under a policy: forward and backward in pieces, and what the pieces add up to.

A piece is the operation of a region, or the share of one saved tensor where the profile has no regions. The simulator
runs the pieces one by one; the closed form and the search use their sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from offload.observe.spans import Kind
from offload.planning.profile import LayerProfile, Link, Profile
from offload.planning.region_costs import RegionCosts, operation_of, region_costs, saved_of
from offload.recompute.costs import LayerPolicy, RegionProfile


class Piece(NamedTuple):
    """A stretch of compute of one layer."""

    kind: Kind
    seconds: float
    taken_bytes: int = 0
    """Device memory that is allocated when the piece starts."""
    freed_bytes: int = 0
    """Device memory that is freed when the piece ends."""
    offloads: bool = False
    """In forward: whether ``taken_bytes`` are copied to the host once the piece has ended."""
    awaits: int | None = None
    """In backward: the number of the layer's offloaded tensor that is waited for; later ones are reloaded before it."""


class LayerPieces(NamedTuple):
    """Forward and backward of one layer."""

    forward: list[Piece]
    backward: list[Piece]
    """Recomputation first, if anything was dropped; then the last operation of forward first."""
    offloaded: list[int]
    """The bytes of each offloaded tensor, in the order of saving."""


class LayerCosts(NamedTuple):
    """What a layer under one policy adds to a step.

    The pieces of a layer wait for the layer's start or for the link, and then for each other. So the last piece ends at
    the later of two times: when the link is free plus all their seconds, or the start plus the longest way from there.
    """

    forward_s: float
    backward_s: float
    """With recomputation."""
    recompute_s: float
    offload_s: float
    """Seconds of the copies to the host, one after the other."""
    offloaded_after_s: float
    """The last copy to the host ends no sooner than so long after forward's start."""
    reload_s: float
    """Seconds of the reload's copies."""
    backward_after_s: float
    """Backward ends no sooner than so long after the reload's start."""
    held_bytes: int
    """On the device after forward, before anything is released."""
    offloaded_bytes: int
    forward_peak_bytes: int
    """The most that forward has on the device."""
    backward_peak_bytes: int
    """The most that backward has on the device, with what forward has left or was reloaded."""


def layer_pieces(layer: LayerProfile, policy: LayerPolicy | None = None, *, offloads: bool) -> LayerPieces:
    """Forward and backward of a layer in pieces, whose seconds are shared as the operations share those of forward.

    Args:
        layer: The layer's costs.
        policy: Of the layer's regions; if left out, everything that the layer saves is kept, or offloaded.
        offloads: Whether the layer is offloaded. If not, all that is kept is on the device.
    """
    regions = layer.known_regions()
    if policy is None or not layer.regions:
        policy = LayerPolicy(saved_of(regions), saved_of(regions))
    costs = region_costs(regions, policy.kept)
    total_s = math.fsum(region.seconds for region in regions)
    shares = [region.seconds / total_s if total_s else 1 / len(regions) for region in regions]
    moving = [number for number in sorted(policy.offloaded & costs.kept) if offloads and regions[number].nbytes]
    places = {number: place for place, number in enumerate(moving)}
    held = costs.kept | costs.dropped
    freed = _freed_after(regions, costs.dropped)
    forward, backward = [], []
    for number, (region, share) in enumerate(zip(regions, shares, strict=True)):
        nbytes = region.nbytes if number in held else 0
        forward.append(Piece("forward", share * layer.forward_s, nbytes, freed[number], number in places))
        saved_bytes, awaits = (nbytes, places.get(number)) if region.saved else (0, None)
        backward.append(Piece("backward", share * layer.backward_s, freed_bytes=saved_bytes, awaits=awaits))
    if costs.dropped:
        backward.append(_recompute(regions, costs, places))
    return LayerPieces(forward, backward[::-1], [regions[number].nbytes for number in moving])


def _freed_after(regions: Sequence[RegionProfile], numbers: Iterable[int]) -> Counter[int]:
    """The bytes of regions of these numbers, by the last operation that reads them."""
    last_reader = {read: number for number, region in enumerate(regions) for read in region.reads}
    freed: Counter[int] = Counter()
    for number in numbers:
        freed[last_reader.get(number, number)] += regions[number].nbytes
    return freed


def _recompute(regions: Sequence[RegionProfile], costs: RegionCosts, places: dict[int, int]) -> Piece:
    """The second run of forward: up to the last dropped region, once everything before that is reloaded.

    Results of skipped operations take memory, too, unless they are handed over. A result that is not dropped is freed
    after the last operation that reads it, and the layer's inputs at the end, unless autograd saves them.
    """
    last = costs.rerun[-1]
    operations = {operation_of(regions, number) for number in costs.rerun}
    made = {one for one in range(last + 1) if one not in costs.kept or operation_of(regions, one) in operations}
    freed = _freed_after(regions[: last + 1], made - costs.dropped)
    run = [Piece("recompute", 0.0, regions[n].nbytes if n in made else 0, freed[n]) for n in range(last + 1)]
    most, inputs = _peak_bytes(run), sum(regions[n].nbytes for n in costs.kept if not regions[n].saved)
    awaited = [place for number, place in places.items() if number < last]
    return Piece(
        "recompute", costs.recompute_s, most, most - _held_bytes(run) + inputs, awaits=min(awaited, default=None)
    )


def _held_bytes(pieces: Sequence[Piece]) -> int:
    """By how much the pieces change the memory on the device."""
    return sum(piece.taken_bytes - piece.freed_bytes for piece in pieces)


def _peak_bytes(pieces: Sequence[Piece], held_bytes: int = 0) -> int:
    """The most on the device while the pieces run, with ``held_bytes`` at their start."""
    changes = (change for piece in pieces for change in (piece.taken_bytes, -piece.freed_bytes))
    return max(accumulate(changes, initial=held_bytes))


def layer_costs(layer: LayerProfile, policy: LayerPolicy | None, link: Link, *, offloads: bool) -> LayerCosts:
    """What the pieces of a layer add up to, whenever they start."""
    forward, backward, offloaded = layer_pieces(layer, policy, offloads=offloads)
    held = _held_bytes(forward)
    ready_s = accumulate(piece.seconds for piece in forward)
    sent = [(ready, piece.taken_bytes) for ready, piece in zip(ready_s, forward, strict=True) if piece.offloads]
    offload_s = reload_s = rest_s = 0.0
    offloaded_after_s = backward_after_s = -math.inf
    for ready, nbytes in reversed(sent):
        offload_s += nbytes / link.d2h_bytes_per_s
        offloaded_after_s = max(offloaded_after_s, ready + offload_s)
    reloaded_after_s = []
    for nbytes in reversed(offloaded):
        reload_s += nbytes / link.h2d_bytes_per_s
        reloaded_after_s.append(reload_s)
    for piece in reversed(backward):
        rest_s += piece.seconds
        if piece.awaits is not None:
            backward_after_s = max(backward_after_s, reloaded_after_s[-1 - piece.awaits] + rest_s)
    return LayerCosts(
        math.fsum(piece.seconds for piece in forward),
        math.fsum(piece.seconds for piece in backward),
        math.fsum(piece.seconds for piece in backward if piece.kind == "recompute"),
        offload_s,
        offloaded_after_s,
        reload_s,
        backward_after_s,
        held,
        sum(offloaded),
        (layer.forward_workspace_bytes or 0) + _peak_bytes(forward),
        layer.workspace_bytes + _peak_bytes(backward, held),
    )


def costs_of(
    profile: Profile, link: Link, offloaded: Collection[int], policies: Sequence[LayerPolicy | None] = ()
) -> list[LayerCosts]:
    """The costs of each layer of a profile if these layers are offloaded."""
    layers = zip(profile.layers, policies or (None,) * len(profile.layers), strict=True)
    return [layer_costs(*layer, link, offloads=number in offloaded) for number, layer in enumerate(layers)]
