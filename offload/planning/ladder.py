"""Ways to treat each kind of layer, from all computed again to all kept, and in which order to keep more.

Layers are of one kind if their regions have the same names and bytes. A kind has rungs: ways to treat its regions, each
with more bytes and fewer seconds than the one before. A level says on which rung each kind stands. From one level to
the next, that kind goes up which saves the most seconds per byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from offload.planning.passes import LayerPolicy
from offload.planning.profile import LayerProfile, Profile
from offload.recompute.costs import RegionProfile, Treated, ways


@dataclass(frozen=True)
class Ladder:
    """What the planner chooses from.

    Args:
        kinds: Of each layer, the number of its kind.
        rungs: Of each kind, its ways, fewest bytes first. The last one is ``None``: all that is saved is treated alike,
            and regions need not be told apart. For a layer without regions it is the only one.
        levels: Of each level, the rung of each kind; all on the lowest first, all on the highest last.
    """

    kinds: tuple[int, ...]
    rungs: tuple[tuple[LayerPolicy | None, ...], ...]
    levels: tuple[tuple[int, ...], ...]


def kinds_of(profile: Profile) -> list[list[int]]:
    """The layers of each kind, by their numbers."""
    found: defaultdict[object, list[int]] = defaultdict(list)
    for number, layer in enumerate(profile.layers):
        found[_kind(layer)].append(number)
    return list(found.values())


def ladder_of(profile: Profile) -> Ladder:
    """The kinds of a profile's layers, with their rungs and levels."""
    members = kinds_of(profile)
    kinds = {number: kind for kind, numbers in enumerate(members) for number in numbers}
    rungs: list[tuple[LayerPolicy | None, ...]] = []
    steps: list[tuple[float, int, int]] = []
    for kind, numbers in enumerate(members):
        layers = [profile.layers[number] for number in numbers]
        regions = _average([layer.regions for layer in layers])
        treated = _rungs(regions) if regions else []
        rungs.append((*(LayerPolicy(way.held, way.held) for way in treated[:-1]), None))
        recording_s = fmean(layer.recorded_s - layer.forward_s for layer in layers)
        steps += ((gain, kind, rung) for rung, gain in _gains(treated, recording_s))
    standing = [0] * len(members)
    levels = [tuple(standing)]
    # Gains fall from rung to rung of a kind, so they are in order.
    for _, kind, rung in sorted(steps, key=lambda step: -step[0]):
        standing[kind] = rung
        levels.append(tuple(standing))
    return Ladder(tuple(kinds[number] for number in range(len(profile.layers))), tuple(rungs), tuple(levels))


def _kind(layer: LayerProfile) -> object:
    if not layer.regions:
        return None
    return tuple(replace(one, seconds=0.0, from_before=False) for one in layer.regions)


def _average(layers: Sequence[tuple[RegionProfile, ...]]) -> tuple[RegionProfile, ...]:
    """The regions of layers of one kind, with the mean of their seconds."""
    return tuple(replace(alike[0], seconds=fmean(one.seconds for one in alike)) for alike in zip(*layers, strict=True))


def _rungs(regions: tuple[RegionProfile, ...]) -> list[Treated]:
    """Ways to treat them; the last one keeps all that autograd saves, even what takes no time to compute again."""
    found = ways(regions)
    saved = frozenset(number for number, region in enumerate(regions) if region.saved)
    return found if found[-1].held == saved else [*found, Treated(regions, saved)]


def _gains(treated: Sequence[Treated], recording_s: float) -> Iterable[tuple[int, float]]:
    """The rungs of the convex hull above the lowest, each with the seconds per byte saved since the one before."""
    last = len(treated) - 1
    costs = [(way.saved_bytes, way.recompute_s + (recording_s if way is not treated[last] else 0)) for way in treated]
    rung = 0
    while rung < last:
        nbytes, seconds = costs[rung]
        gain, rung = max(
            ((seconds - costs[number][1]) / max(1, costs[number][0] - nbytes), number)
            for number in range(rung + 1, last + 1)
        )
        yield rung, gain
