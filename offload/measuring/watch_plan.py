"""Layers that follow a given plan on the CPU: the peak of one microbatch is measured, and a broken budget is said."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from offload.activations.context import OffloadContext
from offload.activations.module_hooks import HookedLayers
from offload.base.checks import format_bytes, warn_caller
from offload.base.layer_events import Attachment
from offload.measuring.follow_plan import TOLERANCE
from offload.measuring.memory_peak import CpuMemoryPeak
from offload.measuring.microbatches import MicrobatchBegins, MicrobatchEnds, allocated_for
from offload.planning.plan import Plan


class WatchedPlan(HookedLayers):
    """Layers that follow a given plan, whose first microbatch that learns nothing is measured.

    An accelerator's allocator tells the peak to whoever asks; the CPU's peak is counted by nobody else.

    Args:
        layers: The layers, in call order.
        context: A context that follows the plan.
        plan: The plan, whose budget is compared.
    """

    def __init__(self, layers: list[nn.Module], context: OffloadContext, plan: Plan) -> None:
        super().__init__(layers, context)
        self._plan = plan
        self._peak = CpuMemoryPeak()
        self._learned = 0
        """How many forwards were learned when the microbatch began."""
        self._peak_bytes: int | None = None
        """The most memory in a microbatch that learned nothing; ``None`` before its backward has ended."""
        self._ends = Attachment([layers[0], layers[-1]], [MicrobatchBegins(self), MicrobatchEnds(self)])

    def remove(self) -> None:
        super().remove()
        self._ends.remove()
        self._peak.stop()

    def begin_microbatch(self, inputs: Sequence[torch.Tensor]) -> None:
        """A microbatch is about to enter the first layer."""
        self._peak.stop()
        if self._peak_bytes is not None:
            self._ends.remove()
            self._say(self._peak_bytes)
            return
        self._learned = self._count_learned()
        if self._learned or not any(self.context.policies):
            self._peak.start()
            self._peak.count(allocated_for(inputs, self.context.backend.device))

    def end_backward(self) -> None:
        """A microbatch's backward has ended."""
        if (self._learned or not any(self.context.policies)) and self._learned == self._count_learned():
            self._peak_bytes = self._peak.most_bytes()
        self._peak.stop()

    def _count_learned(self) -> int:
        return sum(one.learned for one in self.context.policies if one is not None)

    def _say(self, peak_bytes: int) -> None:
        budget = self._plan.memory_budget
        if peak_bytes > (1 + TOLERANCE) * max(budget, self._plan.peak_bytes):  # a plan made by hand may predict more
            warn_caller(
                f"memory_budget = {format_bytes(budget)} was not met by the plan, which predicted "
                f"{format_bytes(self._plan.peak_bytes)}: a microbatch needed {format_bytes(peak_bytes)}; plan with a "
                "smaller memory_budget, or give memory_budget to offload_layers, which corrects its plans."
            )
