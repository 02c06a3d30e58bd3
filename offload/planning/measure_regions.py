"""What the regions of a model's layers cost, measured in one step of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from offload.activations.context import DEFAULT_MIN_BYTES, OffloadContext
from offload.activations.layers import OffloadedLayers
from offload.recompute.costs import RegionProfile
from offload.recompute.treatments import LayerTreatments, Treatment
from offload.schedule.schedule import Schedule


def measure_regions(
    layers: Sequence[nn.Module],
    step: Callable[[], object],
    *,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
    device: torch.device | str | int | None = None,
    frugally: bool = False,
) -> list[tuple[RegionProfile, ...]]:
    """Run one step, in which the operations of each layer are run once more, compared, and timed.

    Args:
        layers: In call order.
        step: Runs forward and backward; it should have run before, since a first step takes longer.
        min_bytes: Storages below this size are no regions of their own.
        device: Where the layers run.
        frugally: Compute everything again in backward, and let inputs travel, so that a model runs that does not fit.

    Returns:
        Of each layer, its regions in the order of forward.
    """
    patterns = {"*": Treatment.RECOMPUTE if frugally else Treatment.KEEP}
    treatments = [LayerTreatments(patterns, layer, measures=True) for layer in layers]
    schedule = Schedule.default(max(0, len(layers) - 2) if frugally else 0, len(layers))
    context = OffloadContext(schedule, len(layers), min_bytes=min_bytes, device=device, treatments=treatments)
    with OffloadedLayers(list(layers), context):
        step()
    return [one.costs for one in treatments]
