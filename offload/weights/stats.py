"""Counters of the weights and gradients that were copied, and their frozen snapshot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from offload.activations.stats import as_table, since


@dataclass(frozen=True)
class WeightStats:
    """What a :class:`~offload.StreamedWeights` has moved since it was made, and the memory it holds.

    ``after - before`` is what has moved between two moments, with the memory that is held ``after``.
    """

    loads: int = 0
    """Layers copied from the host to the device."""
    loaded_bytes: int = 0
    """Copied from the host to the device."""
    late_loads: int = 0
    """Loads that nobody had started when the layer began: one per forward, for its first layer; more are stalls."""
    gradient_bytes: int = 0
    """Gradients copied from the device to the host."""
    added_bytes: int = 0
    """Copied gradients that the worker added to ``p.grad``, or converted for it; the others landed in ``p.grad``."""
    staging_waits: int = 0
    """How often backward waited on the host until the worker had freed a staging buffer."""
    early_steps: int = 0
    """Optimizer steps of one layer, made beside backward."""
    weight_bytes: int = 0
    """Pinned host memory of the parameters."""
    gradient_host_bytes: int = 0
    """Host memory of gradients that is kept from step to step."""
    staging_bytes: int = 0
    """Pinned host memory where gradients wait to be added."""
    slot_bytes: int = 0
    """Device memory of all slots."""

    def __sub__(self, before: WeightStats) -> WeightStats:
        return since(before, self, held=("weight_bytes", "gradient_host_bytes", "staging_bytes", "slot_bytes"))

    def __str__(self) -> str:
        return as_table(self)


WeightCounters = Counter[str]
"""The running counts, by the names of :class:`WeightStats`, which is made from them: ``WeightStats(**counters)``."""
