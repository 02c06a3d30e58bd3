"""What the default schedule needs, without a timeline: hundreds of times as fast as a simulation, and as exact.

The default schedule, k of N, never copies in both directions at once: what goes to the host is there before the last
forward begins. So each stream is one sum. And memory is taken and given back in the order of compute, whenever that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from offload.planning.link import Link
from offload.planning.passes import LayerTreatment, Passes, passes_of
from offload.planning.profile import Profile


class Peaks(NamedTuple):
    """The most bytes on the device in each part of a step."""

    forward: list[int]
    """While each layer runs forward."""
    between: int
    """Between the last forward and its backward."""
    backward: list[int]
    """While each layer runs backward, by the layers' numbers."""


def peak_bytes(layers: Sequence[Passes], num_layers: int, between_bytes: int = 0) -> int:
    """The most bytes on the device.

    Args:
        layers: The passes of each layer.
        num_layers: How many of them travel, the first ones.
        between_bytes: What else is there between the last forward and its backward.
    """
    peaks = peaks_of(layers, num_layers)
    return max(*peaks.forward, peaks.between + between_bytes, *peaks.backward)


def peaks_of(layers: Sequence[Passes], num_layers: int) -> Peaks:
    """What the layers have on the device if the first ``num_layers`` of them travel."""
    resident = len(layers) - num_layers
    held = 0
    forward, backward = [], []
    for number, layer in enumerate(layers):
        if number >= resident:
            held -= layers[number - resident].travelling_bytes
        forward.append(held + layer.forward_peak_bytes)
        held += layer.held_bytes
    between = held
    for number in range(len(layers) - 1, -1, -1):
        layer = layers[number]
        if 0 <= number - resident + 1 < num_layers:
            held += layers[number - resident + 1].travelling_bytes
        held -= layer.held_bytes
        backward.append(held + layer.backward_peak_bytes)
        held += layer.left_bytes
    return Peaks(forward, between, backward[::-1])


def step_s(layers: Sequence[Passes], num_layers: int, link: Link, between_s: float = 0.0) -> float:
    """Seconds from the first forward to the end of the last backward.

    Args:
        layers: The passes of each layer.
        num_layers: How many of them travel, the first ones.
        link: How fast copies are.
        between_s: Compute seconds between the last forward and its backward.
    """
    resident = len(layers) - num_layers
    now_s = copied_s = 0.0
    sent_s: list[float] = []
    """When the copies of each layer to the host are done."""
    rate = link.d2h_bytes_per_s
    for number, layer in enumerate(layers):
        if number >= resident:
            now_s = max(now_s, sent_s[number - resident])
        for ready_s, nbytes in layer.sends:
            copied_s = max(copied_s, now_s + ready_s) + nbytes / rate
        sent_s.append(copied_s if layer.sends else 0.0)
        now_s += layer.forward_s
    now_s += between_s
    back_s: dict[int, list[float]] = {}
    """When each travelling piece of a layer is back."""
    rate = link.h2d_bytes_per_s
    for number in reversed(range(len(layers))):
        reloaded = number - resident + 1
        if 0 <= reloaded < num_layers:
            copied_s = max(copied_s, now_s)
            arrivals: list[float] = []
            for nbytes in reversed(layers[reloaded].travelling):
                copied_s += nbytes / rate
                arrivals.append(copied_s)
            back_s[reloaded] = arrivals[::-1]
        if number >= num_layers:
            now_s += layers[number].backward_s
            continue
        for awaits, seconds in layers[number].stretches:
            if awaits is not None and back_s[number][awaits] > now_s:
                now_s = back_s[number][awaits]
            now_s += seconds
    return now_s


def with_workspace(
    profile: Profile, measured: Peaks, num_layers: int = 0, treatments: Sequence[LayerTreatment] | None = None
) -> Profile:
    """A profile with the memory that layers and loss need beside what they keep.

    Args:
        profile: Without it.
        measured: In a step under the default schedule.
        num_layers: How many layers travelled in that step.
        treatments: What happened to the regions of each layer, if not the same to all.
    """
    layers = zip(profile.layers, treatments or (None,) * len(profile.layers), strict=True)
    passes = [passes_of(*layer, travels=number < num_layers) for number, layer in enumerate(layers)]
    expected = peaks_of(passes, num_layers)
    forward = (most - held for most, held in zip(measured.forward, expected.forward, strict=True))
    backward = (most - held for most, held in zip(measured.backward, expected.backward, strict=True))
    return replace(
        profile,
        layers=tuple(
            replace(layer, workspace_bytes=max(0, *excess))
            for layer, excess in zip(profile.layers, zip(forward, backward, strict=True), strict=True)
        ),
        loss_bytes=max(0, measured.between - expected.between),
    )
