"""Watch whether a given plan keeps to its budget on the CPU, whose peak nobody counts who is not asked to."""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import NamedTuple

from torch import nn

from offload.activations.context import OffloadContext
from offload.activations.module_hooks import HookedLayers
from offload.base.checks import format_bytes, warn_caller
from offload.base.layer_events import Attachment, ForwardBegins, LayerCall
from offload.base.tensors import tensors_in
from offload.measuring.layer_times import LayerTimes, count_inputs
from offload.measuring.memory_left import TOLERANCE, BrokenBudget, GivenMemory
from offload.measuring.sizes import given_to
from offload.observe.memory import memory_peak
from offload.planning.plan import Plan
from offload.recompute.policies import SOURCE


class Load(NamedTuple):
    """What decides how much memory a microbatch needs, by one plan."""

    elements: int  # of its inputs
    gradient_bytes: int  # that it began with
    others: int  # that were in flight then


NONE = Load(0, 0, 0)


class WatchedPlan(HookedLayers):
    """Layers that follow a given plan; what breaks the plan's budget is said.

    A microbatch that learns nothing and runs all layers tells of all that have no larger inputs and begin with no more
    gradients, beside no more others: these are not watched, as measuring a peak takes time.
    """

    def __init__(self, layers: list[nn.Module], context: OffloadContext, plan: Plan) -> None:
        self._times = LayerTimes(layers, context.backend, ended=self._end_backward, lost=self._note_lost)
        super().__init__(layers, context)
        begins = [ForwardBegins(partial(self._begin_forward, number)) for number in range(len(layers))]
        self._begins = Attachment(layers, begins)
        self._memory = memory_peak(context.backend.device)
        self._plan = plan
        self._expected = max(plan.memory_budget, plan.peak_bytes)  # a plan made by hand may predict more
        self._left = GivenMemory(self._expected, context.backend.device, layers, None)
        self._broken = BrokenBudget()
        self._learned = 0  # how many forwards were learned when the microbatch began
        self._now = NONE  # the microbatch that began last
        self._begin_bytes = 0  # of gradients and of all that others held in flight, when it began
        self._known: list[Load] = []  # of microbatches that tell of others
        self._asked = NONE  # the largest one that cannot tell, as what was there at its first layer was not counted
        inputs = [one.nbytes for one in plan.profile.layers[0].regions if one.name == SOURCE]
        self._planned_bytes = sum(inputs)  # of the inputs that the plan is for, if its profile has regions
        self._input_bytes = 1  # of the microbatch's inputs
        self._counted = self._has_counted = False  # whether what is saved before the first layer was counted: now, ever
        self._learning = 0, 0  # the most memory in a microbatch that learned, without that, and its elements
        self._peak_bytes: int | None = None  # the most memory in a microbatch that learned nothing, once it has ended

    def remove(self) -> None:
        super().remove()
        self._stop_watching()
        self._broken.tell()

    def _stop_watching(self) -> None:
        self._begins.remove()
        self._times.remove()

    def _begin_forward(self, number: int, call: LayerCall, inputs: object) -> None:
        if not self.context.begins_round(number) or self.context.has_nothing_to_do():
            return
        if self._peak_bytes is not None and self._say(self._peak_bytes):
            self._stop_watching()
            return
        tensors, self._peak_bytes = list(tensors_in(inputs)), None
        self._times.begin_microbatch()
        gradient_bytes, others = self._left.gradient_bytes(), self._times.in_flight
        knows_others = self._times.memory is not None
        self._begin_bytes = self._begin_bytes + self._memory.now_bytes() if others and knows_others else gradient_bytes
        if others > max((one.others for one in self._known), default=self._plan.together - 1):
            self._broken.expect(others, self._plan.peak_beside(others), self._expected)
        self._now = Load(given_to(tensors).elements, gradient_bytes, others)
        self._input_bytes = max(1, sum(one.nbytes for one in tensors if one.is_floating_point()))
        if not any(self._asked) and any(all(map(operator.le, self._now, one)) for one in self._known):
            self._times.start(paused=True)
            return
        self._learned, self._counted = self._count_learned(), self._memory.counts and (knows_others or not others)
        self._times.start(self._memory)
        count_inputs(self._memory, tensors, self.context.backend.device)

    def _end_backward(self) -> None:
        if self._times.memory is None:
            return  # another microbatch has begun since, which is not watched
        elements = self._now.elements
        if self._counted:
            self._has_counted = True
            if not self._times.joined:
                self._times.measure_before(elements)
        most_bytes = self._times.most_bytes() if self._counted else self._times.layers_bytes
        before_bytes = self._times.before_bytes(elements)
        if self._times.alone:
            self._left.found_left(self._memory.now_bytes() + (before_bytes if self._counted else 0))
        if self._learned != self._count_learned() or not self._has_counted:
            self._learning = max(self._learning, (most_bytes + self._begin_bytes, elements))
            self._broken.note(self._learning[0] + before_bytes - self._expected, self._expected)
            return
        self._peak_bytes = most_bytes + before_bytes + self._begin_bytes
        self._broken.note(self._peak_bytes - self._expected, self._expected)
        if not self._counted:
            self._asked = max(self._asked, self._now)
            return
        # The plan's own inputs may be larger: of how much more these need, all but the gradients may grow with them.
        grown = max(0.0, self._planned_bytes / self._input_bytes - 1) * (most_bytes + before_bytes)
        ran_all = self._times.forwards >= len(self._times.layers)
        if ran_all and self._peak_bytes + grown <= (1 + TOLERANCE) * self._expected:
            self._known.append(self._now)
            self._asked = NONE

    def _note_lost(self) -> None:
        """The microbatch's graph is gone, and it had no backward: it tells of no other."""
        if self._times.memory is not None:
            most_bytes = self._times.most_bytes() + self._times.before_bytes(self._now.elements) + self._begin_bytes
            self._broken.note(most_bytes - self._expected, self._expected)

    def _count_learned(self) -> int:
        return sum(one.learned for one in self.context.policies if one is not None)

    def _say(self, peak_bytes: int) -> bool:
        """Say what the microbatches so far, of which the last one needed this, are to be told of; whether for good."""
        if peak_bytes <= (1 + TOLERANCE) * self._expected:
            learning_bytes, elements = self._learning
            before_bytes = self._times.before_bytes(elements)
            self._broken.note(learning_bytes + before_bytes - self._expected, self._expected)
            self._broken.tell()
            return False
        self._broken.told_bytes = math.inf
        warn_caller(
            f"memory_budget = {format_bytes(self._plan.memory_budget)} was not met by the plan, which predicted "
            f"{format_bytes(self._plan.peak_bytes)}: a microbatch needed {format_bytes(peak_bytes)}; plan with a "
            "smaller memory_budget, or give memory_budget to offload_layers, which corrects its plans."
        )
        return True
