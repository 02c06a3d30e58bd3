"""Seconds and peak of a step under the default schedule, added up: without a timeline, and as exact as the simulation.

The default schedule, k of N, never copies in both directions at once: what is offloaded is on the host before the last
forward begins. So each stream is one sum. And memory is taken and freed in the order of compute, whenever that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from offload.planning.layer_costs import LayerCosts, costs_of
from offload.planning.profile import Link, Profile
from offload.recompute.costs import LayerPolicy


class Peaks(NamedTuple):
    """The most bytes on the device in each part of a step."""

    forward: list[int]
    """While each layer runs forward."""
    between: int
    """Between the last forward and its backward."""
    backward: list[int]
    """While each layer runs backward, by the layers' numbers."""


def peak_bytes(layers: Sequence[LayerCosts], num_layers: int, loss_bytes: int = 0) -> int:
    """The most bytes on the device if the first ``num_layers`` are offloaded, and the loss needs ``loss_bytes``."""
    peaks = peaks_of(layers, num_layers)
    return max(*peaks.forward, peaks.between + loss_bytes, *peaks.backward)


def peaks_of(layers: Sequence[LayerCosts], num_layers: int) -> Peaks:
    """The most that the layers have on the device in each part of a step if the first ``num_layers`` are offloaded."""
    resident = len(layers) - num_layers
    held = 0
    forward, backward = [], []
    for number, layer in enumerate(layers):
        if number >= resident:
            held -= layers[number - resident].offloaded_bytes
        forward.append(held + layer.forward_peak_bytes)
        held += layer.held_bytes
    between = held
    for number in range(len(layers) - 1, -1, -1):
        if 0 <= number - resident + 1 < num_layers:
            held += layers[number - resident + 1].offloaded_bytes
        held -= layers[number].held_bytes
        backward.append(held + layers[number].backward_peak_bytes)
    return Peaks(forward, between, backward[::-1])


def step_s(layers: Sequence[LayerCosts], num_layers: int, loss_s: float = 0.0) -> float:
    """Seconds from the first forward to the end of the last backward, with ``loss_s`` of compute between the two."""
    resident = len(layers) - num_layers
    now_s = copied_s = 0.0
    offloaded_s: list[float] = []
    """When each layer and those before it are on the host."""
    for number, layer in enumerate(layers):
        if number >= resident:
            now_s = max(now_s, offloaded_s[number - resident])
        copied_s = max(copied_s + layer.offload_s, now_s + layer.offloaded_after_s)
        offloaded_s.append(copied_s)
        now_s += layer.forward_s
    now_s += loss_s
    reloads_s = [0.0] * len(layers)
    """When the reload of each layer starts."""
    for number in reversed(range(len(layers))):
        reloaded = number - resident + 1
        if 0 <= reloaded < num_layers:
            reloads_s[reloaded] = max(copied_s, now_s)
            copied_s = reloads_s[reloaded] + layers[reloaded].reload_s
        now_s += layers[number].backward_s
        if number < num_layers:
            now_s = max(now_s, reloads_s[number] + layers[number].backward_after_s)
    return now_s


def with_workspace(
    profile: Profile, measured: Peaks, num_layers: int = 0, policies: Sequence[LayerPolicy | None] = ()
) -> Profile:
    """A profile with the memory that layers and loss need beside the layers' activations.

    Args:
        profile: Without that memory.
        measured: In a step under the default schedule.
        num_layers: How many layers were offloaded in that step.
        policies: Of the regions of each layer, if not all were kept or offloaded.
    """
    instant = Link(1.0, 1.0, 1.0)  # peaks do not depend on it
    expected = peaks_of(costs_of(profile, instant, range(num_layers), policies), num_layers)
    layers = zip(profile.layers, measured.forward, measured.backward, expected.forward, expected.backward, strict=True)
    return replace(
        profile,
        layers=tuple(
            replace(
                layer,
                workspace_bytes=max(0, backward - held_backward),
                forward_workspace_bytes=max(0, forward - held_forward),
            )
            for layer, forward, backward, held_forward, held_backward in layers
        ),
        loss_bytes=max(0, measured.between - expected.between),
    )
