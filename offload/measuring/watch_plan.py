"""Watch whether a given plan keeps to its budget on the CPU, whose peak nobody counts who is not asked to."""

from __future__ import annotations

from functools import partial

from torch import nn

from offload.activations.context import OffloadContext
from offload.activations.module_hooks import HookedLayers
from offload.base.checks import format_bytes, warn_caller
from offload.base.layer_events import Attachment, LayerCall
from offload.base.tensors import tensors_in
from offload.measuring.layer_times import ForwardBegins, LayerTimes, count_inputs
from offload.measuring.memory_left import TOLERANCE, BrokenBudget
from offload.observe.memory import memory_peak
from offload.planning.plan import Plan


class WatchedPlan(HookedLayers):
    """Layers that follow a given plan; what breaks the plan's budget is said once.

    Of the microbatches that learn nothing, the first one tells, unless nothing was counted before it.
    """

    def __init__(self, layers: list[nn.Module], context: OffloadContext, plan: Plan) -> None:
        self._times = LayerTimes(layers, context.backend, ended=self._end_backward)
        super().__init__(layers, context)
        begins = [ForwardBegins(partial(self._begin_forward, number)) for number in range(len(layers))]
        self._begins = Attachment(layers, begins)
        self._memory = memory_peak(context.backend.device)
        self._plan = plan
        self._learned = 0  # how many forwards were learned when the microbatch began
        self._is_first = True
        """Whether nothing was counted before the microbatch, as what is saved before the first layer."""
        self._learning_bytes = 0
        """The most memory in a microbatch that learned something, without what is saved before the first layer."""
        self._peak_bytes: int | None = None
        """The most memory in a microbatch that learned nothing; ``None`` before its backward has ended."""

    def remove(self) -> None:
        super().remove()
        self._stop_watching()

    def _stop_watching(self) -> None:
        self._begins.remove()
        self._times.remove()

    def _begin_forward(self, number: int, call: LayerCall, inputs: object) -> None:
        if not self.context.begins_round(number) or self.context.has_nothing_to_do():
            return
        if self._peak_bytes is not None:
            self._stop_watching()
            self._say(self._peak_bytes)
            return
        self._learned, self._is_first = self._count_learned(), self._times.memory is None
        self._times.awaits_end, self._times.forwards = True, 0
        self._times.start(self._memory)
        count_inputs(self._memory, tensors_in(inputs), self.context.backend.device)

    def _end_backward(self) -> None:
        before_bytes, most_bytes = self._times.before_bytes(), self._times.most_bytes()
        if self._is_first:  # what backward frees before the first layer was not counted
            self._learning_bytes = self._times.layers_bytes
        elif self._learned != self._count_learned():
            self._learning_bytes = max(self._learning_bytes, most_bytes)
        else:
            self._peak_bytes = before_bytes + most_bytes
            self._learning_bytes += before_bytes

    def _count_learned(self) -> int:
        return sum(one.learned for one in self.context.policies if one is not None)

    def _say(self, peak_bytes: int) -> None:
        budget = self._plan.memory_budget
        expected = max(budget, self._plan.peak_bytes)  # a plan made by hand may predict more
        if peak_bytes <= (1 + TOLERANCE) * expected:
            BrokenBudget(over_bytes=self._learning_bytes - expected).tell(expected)
            return
        warn_caller(
            f"memory_budget = {format_bytes(budget)} was not met by the plan, which predicted "
            f"{format_bytes(self._plan.peak_bytes)}: a microbatch needed {format_bytes(peak_bytes)}; plan with a "
            "smaller memory_budget, or give memory_budget to offload_layers, which corrects its plans."
        )
