"""Seconds and peak of a step under the default schedule, added up: without a timeline, and as exact as the simulation.

The default schedule, k of N, never copies in both directions at once: what is offloaded is on the host before the last
forward begins. So each stream is one sum. And memory is taken and freed in the order of compute, whenever that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from offload.planning.layer_passes import LayerPasses, LayerPolicy, Piece, layer_passes
from offload.planning.link import Link
from offload.planning.profile import Profile


class LayerCosts(NamedTuple):
    """What a layer under one policy adds to a step.

    The pieces of a layer wait for the layer's start or for the link, and then for each other. So the last piece ends at
    the later of two times: when the link is free plus all their seconds, or the start plus the longest way from there.
    """

    forward_s: float
    backward_s: float
    """With what is recomputed."""
    recompute_s: float
    offload_s: float
    """Seconds of the copies to the host, one after the other."""
    offloaded_after_s: float
    """The last copy to the host ends no sooner than so long after forward's start."""
    reload_s: float
    """Seconds of the copies back."""
    backward_after_s: float
    """Backward ends no sooner than so long after the start of the copies back."""
    held_bytes: int
    """What is on the device after forward, before anything is released."""
    offloaded_bytes: int
    forward_peak_bytes: int
    """The most that forward has on the device."""
    backward_peak_bytes: int
    """The most that backward has on the device, with what forward has left or was reloaded."""


class Peaks(NamedTuple):
    """The most bytes on the device in each part of a step."""

    forward: list[int]
    """While each layer runs forward."""
    between: int
    """Between the last forward and its backward."""
    backward: list[int]
    """While each layer runs backward, by the layers' numbers."""


def layer_costs(layer: LayerPasses, link: Link) -> LayerCosts:
    """What the pieces of a layer add up to, whenever they start."""
    pieces = [*([layer.recompute] if layer.recompute else []), *layer.backward]
    held = sum(piece.taken_bytes - piece.freed_bytes for piece in layer.forward)
    peaks = [
        layer.workspace_bytes + max(accumulate(_changes(of), initial=start))
        for of, start in ((layer.forward, 0), (pieces, held))
    ]
    ready_s = accumulate(piece.seconds for piece in layer.forward)
    sent = [(ready, piece.taken_bytes) for ready, piece in zip(ready_s, layer.forward, strict=True) if piece.offloads]
    offload_s = reload_s = rest_s = 0.0
    offloaded_after_s = backward_after_s = -math.inf
    for ready, nbytes in reversed(sent):
        offload_s += nbytes / link.d2h_bytes_per_s
        offloaded_after_s = max(offloaded_after_s, ready + offload_s)
    reloaded_after_s = []
    for nbytes in reversed(layer.offloaded):
        reload_s += nbytes / link.h2d_bytes_per_s
        reloaded_after_s.append(reload_s)
    for piece in reversed(pieces):
        rest_s += piece.seconds
        if piece.awaits is not None:
            backward_after_s = max(backward_after_s, reloaded_after_s[-1 - piece.awaits] + rest_s)
    return LayerCosts(
        math.fsum(piece.seconds for piece in layer.forward),
        math.fsum(piece.seconds for piece in pieces),
        layer.recompute.seconds if layer.recompute else 0.0,
        offload_s,
        offloaded_after_s,
        reload_s,
        backward_after_s,
        held,
        sum(layer.offloaded),
        *peaks,
    )


def _changes(pieces: Sequence[Piece]) -> Iterator[int]:
    """By how much the memory on the device grows at each piece's start and end."""
    return (change for piece in pieces for change in (piece.taken_bytes, -piece.freed_bytes))


def peak_bytes(layers: Sequence[LayerCosts], num_layers: int, loss_bytes: int = 0) -> int:
    """The most bytes on the device.

    Args:
        layers: The costs of each layer.
        num_layers: How many layers are offloaded, the first ones.
        loss_bytes: What else is there between the last forward and its backward.
    """
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
    """Seconds from the first forward to the end of the last backward.

    Args:
        layers: The costs of each layer.
        num_layers: How many layers are offloaded, the first ones.
        loss_s: Compute seconds between the last forward and its backward.
    """
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


def costs_of(
    profile: Profile, link: Link, num_layers: int, policies: Sequence[LayerPolicy | None] = ()
) -> list[LayerCosts]:
    """The costs of each layer of a profile if the first ``num_layers`` are offloaded."""
    layers = zip(profile.layers, policies or (None,) * len(profile.layers), strict=True)
    return [
        layer_costs(layer_passes(*layer, offloads=number < num_layers), link) for number, layer in enumerate(layers)
    ]


def with_workspace(
    profile: Profile, measured: Peaks, num_layers: int = 0, policies: Sequence[LayerPolicy | None] = ()
) -> Profile:
    """A profile with the memory that layers and loss need beside what the layers keep.

    Args:
        profile: Without it.
        measured: In a step under the default schedule.
        num_layers: How many layers were offloaded in that step.
        policies: Of the regions of each layer, if not all were kept or offloaded.
    """
    expected = peaks_of(
        costs_of(profile, Link(1.0, 1.0, 1.0), num_layers, policies), num_layers
    )  # seconds do not count
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
