"""What the default schedule needs, without a timeline: a thousand times as fast as a simulation, and as exact.

The default schedule, k of N, never copies in both directions at once: what goes to the host is there before the last
forward begins. So each stream is one sum. And memory is taken and given back in the order of compute, whenever that is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from offload.planning.link import Link
from offload.planning.passes import LayerPolicy, Passes, passes_of
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


class Trips(NamedTuple):
    """What a layer's passes and copies come to on one link.

    Its pieces wait for the layer's start or for the link, and then for each other. So the last one ends at the later of
    two times: when the link was free and all their seconds, or at the start and the longest way from there.
    """

    forward_s: float
    backward_s: float
    send_s: float
    """Seconds of its copies to the host, one after the other."""
    sent_after_s: float
    """Its last copy to the host ends no sooner than so long after forward's start."""
    reload_s: float
    """Seconds of its copies back."""
    done_after_s: float
    """Its backward ends no sooner than so long after the start of the copies back."""


def trips_of(layer: Passes, link: Link) -> Trips:
    """What a layer's pieces come to, whenever they start."""
    send_s = reload_s = rest_s = 0.0
    sent_after_s = done_after_s = -math.inf
    for ready_s, nbytes in reversed(layer.sends):
        send_s += nbytes / link.d2h_bytes_per_s
        sent_after_s = max(sent_after_s, ready_s + send_s)
    back_after_s: list[float] = []
    for nbytes in reversed(layer.travelling):
        reload_s += nbytes / link.h2d_bytes_per_s
        back_after_s.append(reload_s)
    for awaits, seconds in reversed(layer.stretches):
        rest_s += seconds
        if awaits is not None:
            done_after_s = max(done_after_s, back_after_s[-1 - awaits] + rest_s)
    return Trips(layer.forward_s, layer.backward_s, send_s, sent_after_s, reload_s, done_after_s)


def step_s(layers: Sequence[Trips], num_layers: int, between_s: float = 0.0) -> float:
    """Seconds from the first forward to the end of the last backward.

    Args:
        layers: The trips of each layer.
        num_layers: How many of them travel, the first ones.
        between_s: Compute seconds between the last forward and its backward.
    """
    resident = len(layers) - num_layers
    now_s = copied_s = 0.0
    sent_s: list[float] = []
    """When the copies to the host are done of each layer and those before it."""
    for number, layer in enumerate(layers):
        if number >= resident:
            now_s = max(now_s, sent_s[number - resident])
        copied_s = max(copied_s + layer.send_s, now_s + layer.sent_after_s)
        sent_s.append(copied_s)
        now_s += layer.forward_s
    now_s += between_s
    reloads_s = [0.0] * len(layers)
    """When the copies back of each layer start."""
    for number in reversed(range(len(layers))):
        layer = layers[number]
        reloaded = number - resident + 1
        if 0 <= reloaded < num_layers:
            reloads_s[reloaded] = max(copied_s, now_s)
            copied_s = reloads_s[reloaded] + layers[reloaded].reload_s
        now_s += layer.backward_s
        if number < num_layers:
            now_s = max(now_s, reloads_s[number] + layer.done_after_s)
    return now_s


def with_workspace(
    profile: Profile, measured: Peaks, num_layers: int = 0, policies: Sequence[LayerPolicy] | None = None
) -> Profile:
    """A profile with the memory that layers and loss need beside what they keep.

    Args:
        profile: Without it.
        measured: In a step under the default schedule.
        num_layers: How many layers travelled in that step.
        policies: What happened to the regions of each layer, if not the same to all.
    """
    layers = zip(profile.layers, policies or (None,) * len(profile.layers), strict=True)
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
