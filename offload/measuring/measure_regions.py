"""What the regions of a model's layers cost, measured in steps of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from offload.activations.context import DEFAULT_MIN_BYTES, OffloadContext
from offload.activations.module_hooks import HookedLayers
from offload.measuring.layer_times import LayerTimes, rest_s
from offload.planning.estimate import with_workspace
from offload.planning.passes import LayerPolicy
from offload.planning.profile import LayerProfile, Profile
from offload.recompute.costs import RegionProfile, Treated, ways
from offload.recompute.policies import LayerPolicies, Policy, join
from offload.schedule.schedule import Schedule


class Recomputed(NamedTuple):
    """What is found of a layer in steps in which everything is recorded and computed again."""

    regions: tuple[RegionProfile, ...]
    """In the order of forward, each with the seconds that its operation takes alone."""
    forward_s: float
    backward_s: float


def measure_regions(
    layers: Sequence[nn.Module],
    step: Callable[[], object],
    *,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
    device: torch.device | str | int | None = None,
    steps: int = 1,
) -> list[Recomputed]:
    """Run a step in which each operation is run once more, compared and timed, and steps that are timed as they are.

    Args:
        layers: In call order.
        step: Runs forward and backward; it should have run before, since a first step takes longer.
        min_bytes: Storages below this size are no regions of their own.
        device: Where the layers run.
        steps: How many steps are timed: a host that is slow to record is not as slow in each.

    Returns:
        Of each layer its regions, and the medians of the seconds of its forwards and of its backwards.
    """
    policies = learning(layers)
    context = OffloadContext(Schedule(len(layers)), len(layers), min_bytes=min_bytes, device=device, policies=policies)
    with HookedLayers(list(layers), context):
        step()
        times = LayerTimes(layers, context.backend)
        for _ in range(steps):
            step()
        times.remove()
    return [Recomputed(one.costs, *seconds) for one, seconds in zip(policies, times.seconds(), strict=True)]


def with_regions(layers: Sequence[LayerProfile], found: Sequence[Recomputed]) -> tuple[LayerProfile, ...]:
    """The profiles of layers as they are, with their regions.

    The regions' seconds are those that they take in backward: by how much longer that is if all is computed again, as
    each of them would share it. An operation that is timed alone, behind a pause, finds a faster device.
    """
    alone_s = math.fsum(Treated(one.regions, frozenset()).recompute_s for one in found)
    longer_s = math.fsum(one.backward_s - layer.backward_s for one, layer in zip(found, layers, strict=True))
    ratio = longer_s / alone_s if alone_s > 0 and longer_s > 0 else 1.0  # steps vary by more than little work takes
    return tuple(
        LayerProfile.from_regions(
            (replace(region, seconds=ratio * region.seconds) for region in one.regions),
            layer.forward_s,
            layer.backward_s,
            workspace_bytes=layer.workspace_bytes,
            recorded_s=one.forward_s,
        )
        for layer, one in zip(layers, found, strict=True)
    )


def measure_frugally(
    layers: Sequence[nn.Module],
    step: Callable[[], object],
    *,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
    device: torch.device | str | int | None = None,
    steps: int = 1,
) -> Profile:
    """Profile a model that does not fit: everything is computed again in backward, and the layers' inputs travel.

    Args:
        layers: In call order.
        step: Runs forward and backward of at least one microbatch.
        min_bytes: Storages below this size are no regions of their own.
        device: Where the layers run.
        steps: How many steps are timed, after one that learns what the regions cost.
    """
    count = len(layers)
    schedule = frugal_schedule(count)
    policies = learning(layers)
    context = OffloadContext(schedule, count, min_bytes=min_bytes, device=device, policies=policies)
    with HookedLayers(list(layers), context):
        step()
        times = LayerTimes(layers, context.backend)
        times.start(reads_memory=context.backend.device.type != "cpu")
        marks = [context.backend.mark()]
        for _ in range(steps):
            step()
            marks.append(context.backend.mark())
        times.remove()
    profile = frugal_profile(policies, times)
    known_s = sum(map(sum, times.seconds())) + profile.loss_s
    return replace(profile, other_s=rest_s(context.backend, marks, times.rounds, known_s))


def learning(layers: Iterable[nn.Module]) -> list[LayerPolicies]:
    """Policies with which layers compute everything again, and learn what their regions cost."""
    found = [LayerPolicies({"*": Policy.RECOMPUTE}, layer, measures=True) for layer in layers]
    join(found, len(found))
    return found


def frugal_schedule(count: int) -> Schedule:
    """As many layers travel as can without waiting for each copy."""
    return Schedule.default(max(0, count - 2), count)


def frugal_policies(profile: Profile) -> list[LayerPolicy]:
    """All is computed again; what that reads is kept, and travels."""
    held = [ways(layer.regions)[0].held for layer in profile.layers]
    return [LayerPolicy(one, one) for one in held]


def frugal_profile(policies: Sequence[LayerPolicies], times: LayerTimes) -> Profile:
    """What the layers cost if nothing is computed again, from steps in which everything is."""
    layers = []
    for learned, (forward_s, backward_s) in zip(policies, times.seconds(), strict=True):
        again_s = ways(learned.costs)[0].recompute_s
        layers.append(LayerProfile.from_regions(learned.costs, forward_s, max(forward_s, backward_s - again_s)))
    profile = Profile(tuple(layers), times.loss_s())
    num_layers = len(frugal_schedule(len(layers)).offloaded_layers)
    return with_workspace(profile, times.peaks(), num_layers, frugal_policies(profile))
