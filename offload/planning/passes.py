"""A layer's forward and backward piece by piece: what computes, what is on the device meanwhile, and what travels.

A piece is a region of the layer, or one of its tensors where the profile has no regions. The simulator plays pieces one
by one, and the planner adds them up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from offload.planning.profile import LayerProfile
from offload.planning.region_pieces import BackwardPiece, ForwardPiece, RegionPieces, region_pieces
from offload.recompute.costs import seconds_of


@dataclass(frozen=True)
class LayerPolicy:
    """What happens to the regions of one layer. Those that are neither kept nor needless are computed again.

    Args:
        kept: The numbers of the regions that are there until backward, on the device or on the host.
        travelling: Of them, those that go to the host and come back.
        group: Which layer it is of how many that hold one input, that of the first. The layers before compute those of
            the others again.

    Raises:
        ValueError: A region is to travel and not to be kept.
    """

    kept: frozenset[int]
    travelling: frozenset[int] = frozenset()
    group: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if not self.travelling <= self.kept:
            missing = sorted(self.travelling - self.kept)
            raise ValueError(f"travelling must be some of the kept regions, got {missing} beside them; keep them too")


@dataclass(frozen=True)
class Passes:
    """Both passes of one layer.

    Args:
        forward: The pieces of its forward.
        backward: Those of its backward, the last of forward first.
        travelling: The bytes of each piece that travels, in the order of saving.
        workspace_bytes: What else is on the device while either runs.
    """

    forward: tuple[ForwardPiece, ...]
    backward: tuple[BackwardPiece, ...]
    travelling: tuple[int, ...]
    workspace_bytes: int

    @cached_property
    def forward_s(self) -> float:
        """Compute seconds of forward."""
        return math.fsum(piece.seconds for piece in self.forward)

    @cached_property
    def recompute_s(self) -> float:
        """Seconds of backward in which forward's operations run again."""
        return math.fsum(piece.recompute_s for piece in self.backward)

    @cached_property
    def backward_s(self) -> float:
        """Compute seconds of backward, with what is computed again."""
        return math.fsum(piece.seconds for piece in self.backward) + self.recompute_s

    @cached_property
    def sends(self) -> tuple[tuple[float, int], ...]:
        """Of each piece that travels: how long after forward's start it is ready, and its bytes."""
        ready_s = accumulate(piece.seconds for piece in self.forward)
        return tuple(
            (ready, piece.taken_bytes) for ready, piece in zip(ready_s, self.forward, strict=True) if piece.travels
        )

    @cached_property
    def stretches(self) -> tuple[tuple[int | None, float], ...]:
        """Backward cut where it waits: which travelling piece it waits for, and how long it computes from there."""
        found: list[tuple[int | None, float]] = []
        for piece in self.backward:
            awaits, seconds = piece.awaits, piece.recompute_s + piece.seconds
            if found and (awaits is None or found[-1][0] == awaits):
                awaits, seconds = found[-1][0], found.pop()[1] + seconds
            found.append((awaits, seconds))
        return tuple(found)

    @cached_property
    def travelling_bytes(self) -> int:
        """What goes to the host."""
        return sum(self.travelling)

    @cached_property
    def held_bytes(self) -> int:
        """What is on the device after forward, before anything of it is released."""
        return sum(piece.taken_bytes - piece.freed_bytes for piece in self.forward)

    @cached_property
    def left_bytes(self) -> int:
        """What is on the device after backward, for the layers before it; less than nothing if they have left it."""
        changes = (piece.taken_bytes - piece.passing_bytes - piece.freed_bytes for piece in self.backward)
        return self.held_bytes + sum(changes)

    @cached_property
    def forward_peak_bytes(self) -> int:
        """The most that forward has on the device."""
        changes = (change for piece in self.forward for change in (piece.taken_bytes, -piece.freed_bytes))
        return self.workspace_bytes + max(accumulate(changes), default=0)

    @cached_property
    def backward_peak_bytes(self) -> int:
        """The most that backward has on the device, with what forward has left or was reloaded."""
        changes = (
            change
            for piece in self.backward
            for change in (piece.taken_bytes, -piece.passing_bytes, -piece.freed_bytes)
        )
        return self.workspace_bytes + max(accumulate(changes, initial=self.held_bytes))


def passes_of(layer: LayerProfile, policy: LayerPolicy | None = None, *, travels: bool) -> Passes:
    """Both passes of a layer.

    Args:
        layer: What it costs.
        policy: Of its regions; everything that it saves is treated alike, and nothing recorded, if left out.
        travels: Whether the layer's set moves. If not, all that is kept stays.
    """
    if not layer.regions:
        return _of_tensors(layer, travels=travels)
    forward_s = layer.recorded_s
    if policy is None:
        saved = frozenset(number for number, region in enumerate(layer.regions) if region.saved)
        policy, forward_s = LayerPolicy(saved, saved), layer.forward_s
    travelling = policy.travelling if travels else frozenset()
    if policy.group[1] > 1:
        return _in_group(layer, policy, travelling)
    return _of_regions(layer, region_pieces(layer.kind, policy.kept, travelling), forward_s)


def _of_tensors(layer: LayerProfile, *, travels: bool) -> Passes:
    """The n-th of m tensors is ready after the fraction n/m of forward, and used in the mirrored part of backward."""
    tensors = layer.pieces()
    travels = travels and bool(tensors)
    parts = tensors or (0,)
    forward_s, backward_s = layer.forward_s / len(parts), layer.backward_s / len(parts)
    forward = tuple(ForwardPiece(forward_s, nbytes, travels=travels) for nbytes in parts)
    backward = tuple(
        BackwardPiece(backward_s, nbytes, number if travels else None)
        for number, nbytes in reversed([*enumerate(parts)])
    )
    return Passes(forward, backward, tensors if travels else (), layer.workspace_bytes)


def _of_regions(layer: LayerProfile, pieces: RegionPieces, forward_s: float) -> Passes:
    """Regions share the seconds of forward and backward as their operations share those of forward."""
    regions = layer.regions
    total_s = math.fsum(region.seconds for region in regions)
    shares = [region.seconds / total_s if total_s else 1 / len(regions) for region in regions]
    forward = tuple(
        ForwardPiece(share * forward_s, *piece[1:]) for piece, share in zip(pieces.forward, shares, strict=True)
    )
    backward = tuple(
        BackwardPiece(share * layer.backward_s, *piece[1:3], seconds_of(regions, again), *piece[4:])
        for piece, again, share in zip(pieces.backward, pieces.again, reversed(shares), strict=True)
    )
    return Passes(forward, backward, pieces.travelling, layer.workspace_bytes)


def _in_group(layer: LayerProfile, policy: LayerPolicy, travelling: frozenset[int]) -> Passes:
    """The passes of a layer of a group. What each runs for the next one's input counts to its own backward.

    What that has on the device counts to the last one's backward, with which it begins, as if the layers were alike.
    """
    place, size = policy.group
    joined = frozenset(number for number, region in enumerate(layer.regions) if region.from_before and place)
    kind = tuple(replace(region, nbytes=0) if number in joined else region for number, region in enumerate(layer.kind))
    pieces = region_pieces(kind, policy.kept, travelling - joined)
    alone = _of_regions(layer, pieces, layer.recorded_s)
    input_bytes = sum(layer.regions[number].nbytes for number in joined)
    begin: list[BackwardPiece] = []
    if place == size - 1:
        on_the_way = pieces.replay_bytes + input_bytes
        begin.append(BackwardPiece(0.0, 0, taken_bytes=place * input_bytes + on_the_way, passing_bytes=on_the_way))
    else:
        others_s = layer.forward_s - math.fsum(region.seconds for region in layer.regions)
        begin.append(
            BackwardPiece(0.0, 0, recompute_s=seconds_of(layer.regions, pieces.recomputed) + max(0.0, others_s))
        )
    return replace(
        alone,
        forward=(ForwardPiece(0.0, input_bytes), *alone.forward, ForwardPiece(0.0, 0, input_bytes)),
        backward=(*begin, *alone.backward, BackwardPiece(0.0, input_bytes)),
    )
