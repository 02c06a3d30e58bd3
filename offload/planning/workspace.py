"""What is on the device beside what is kept: measured peaks, less what a profile accounts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offload.planning.estimate import Peaks, peaks_of
from offload.planning.passes import LayerTreatment, passes_of
from offload.planning.profile import Profile


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
