"""Ways to keep regions of each kind of layer, and in which order layers keep more.

Layers are of one kind if their regions have the same names and bytes. A kind has ways, each with more bytes and fewer
seconds than the one before. A level has one way of each kind. From one level to the next, that kind keeps more which
saves the most seconds per byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from offload.planning.layer_passes import LayerPolicy
from offload.planning.profile import Profile
from offload.planning.region_costs import RegionCosts, region_costs, saved_of, ways_of
from offload.recompute.costs import RegionProfile


@dataclass(frozen=True)
class Kinds:
    """What the planner chooses from.

    Args:
        of_layers: Of each layer, the number of its kind.
        ways: Of each kind, its policies, fewest bytes first. The last one is ``None``: everything saved has one policy,
            and regions need not be told apart. For a layer without regions it is the only one.
        levels: Of each level, the way of each kind by its number; the first of all first, the last of all last.
    """

    of_layers: tuple[int, ...]
    ways: tuple[tuple[LayerPolicy | None, ...], ...]
    levels: tuple[tuple[int, ...], ...]


def layers_of_kinds(profile: Profile) -> list[list[int]]:
    """The layers of each kind, by their numbers."""
    found: defaultdict[object, list[int]] = defaultdict(list)
    for number, layer in enumerate(profile.layers):
        found[tuple(replace(one, seconds=0.0) for one in layer.regions)].append(number)
    return list(found.values())


def kinds_of(profile: Profile) -> Kinds:
    """The kinds of a profile's layers, with their ways and levels."""
    members = layers_of_kinds(profile)
    kinds = {number: kind for kind, numbers in enumerate(members) for number in numbers}
    ways: list[tuple[LayerPolicy | None, ...]] = []
    steps: list[tuple[float, int, int]] = []
    for kind, numbers in enumerate(members):
        regions = _average([profile.layers[number].regions for number in numbers])
        found = _ways(regions) if regions else []
        ways.append((*(LayerPolicy(way.kept, way.kept) for way in found[:-1]), None))
        steps += ((gain, kind, way) for way, gain in _gains(found))
    level = [0] * len(members)
    levels = [tuple(level)]
    # Gains fall from way to way of a kind, so the ways of a kind come in their order.
    for _, kind, way in sorted(steps, key=lambda step: -step[0]):
        level[kind] = way
        levels.append(tuple(level))
    return Kinds(tuple(kinds[number] for number in range(len(profile.layers))), tuple(ways), tuple(levels))


def _average(layers: Sequence[tuple[RegionProfile, ...]]) -> tuple[RegionProfile, ...]:
    """The regions of layers of one kind, with the mean of their seconds."""
    return tuple(replace(alike[0], seconds=fmean(one.seconds for one in alike)) for alike in zip(*layers, strict=True))


def _ways(regions: tuple[RegionProfile, ...]) -> list[RegionCosts]:
    """The ways of a kind; the last one keeps all that autograd saves, even what takes no time to recompute."""
    found, saved = ways_of(regions), saved_of(regions)
    return found if found[-1].kept == saved else [*found, region_costs(regions, saved)]


def _gains(ways: Sequence[RegionCosts]) -> Iterable[tuple[int, float]]:
    """The ways on the convex hull above the first, each with the seconds per byte saved since the one before."""
    way, last = 0, len(ways) - 1
    while way < last:
        gain, way = max(
            (
                (ways[way].recompute_s - ways[number].recompute_s)
                / max(1, ways[number].kept_bytes - ways[way].kept_bytes),
                number,
            )
            for number in range(way + 1, last + 1)
        )
        yield way, gain
