"""Layers that are measured in their first microbatches, and follow a plan from then on.

In the first microbatch everything is recomputed, the layers' inputs are offloaded, and each region is timed. The second
runs in the same way, and layers are timed as a whole. That makes a profile, and the profile a plan, which is followed.
Inputs for which something needs more than for any before get a new plan before they run, from what was measured.
Smaller ones follow it in as few layers as are enough, and others keep all. Much larger ones are timed as the second.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from offload.activations.context import OffloadContext
from offload.activations.module_hooks import HookedLayers
from offload.base.checks import format_bytes, format_s, parse_bytes
from offload.base.layer_events import Attachment, ForwardBegins, LayerCall
from offload.base.tensors import tensors_in
from offload.device.backend import Event
from offload.device.cuda import CaptureError
from offload.measuring.compare_plans import ComparePlans
from offload.measuring.layer_times import LayerTimes, count_inputs, warn_if_checkpointed
from offload.measuring.measure_link import measure_link
from offload.measuring.memory_left import TOLERANCE, DeviceLeft, GivenMemory, MemoryLeft, allocated_bytes, new_gradients
from offload.measuring.profile_layers import (
    counted_once,
    end_second_runs,
    hold_some,
    learned_profile,
    learning_policies,
    learning_schedule,
    recompute_all,
    recomputed_plan,
    time_second_runs,
)
from offload.measuring.sizes import CostsBySize, Inputs, Size, given_to, is_within, rounded_up, with_skipped
from offload.observe.memory import memory_peak
from offload.optimizer.early import first_step_is_next
from offload.planning.plan import Plan, TooLittleMemoryError, make_plan, relaxed
from offload.planning.profile import Link, Profile
from offload.planning.search import Among
from offload.recompute.layer_policies import LayerPolicies
from offload.schedule.schedule import Schedule

_logger = logging.getLogger(__name__)

RESERVE = 0.02  # of the budget: a plan leaves it free unless it recomputes as measured steps do, which do not show all
SLACK = 0.005  # of it, by which checkpoints that need least may be above: else copies would keep the peak of PyTorch's
CORRECTIONS = 3  # how often a plan is made again because its peak broke the budget


class FollowPlan(HookedLayers):
    """Layers that follow a plan as soon as there is one; undone by ``remove()``.

    A plan for a budget leaves room for what no profile knows, and is made again with less if a microbatch breaks the
    budget. On the CPU, where measuring a peak takes time, that ends with the first microbatch that keeps to the budget.
    ``memory_budget`` may also be what tells how much is left of a budget for more than activations.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        memory_budget: int | str | MemoryLeft,
        *,
        min_bytes: int | str,
        device: torch.device | str | int | None,
        max_host_bytes: int | str | None,
        link: Link | None = None,
    ) -> None:
        count, most = len(layers), None if max_host_bytes is None else parse_bytes(max_host_bytes, "max_host_bytes")
        context = OffloadContext(Schedule(count), count, min_bytes=min_bytes, device=device, max_host_bytes=most)
        self._backend, self._compare = context.backend, ComparePlans(context.backend)
        self.link = link or measure_link(self._backend.device)  # before there are hooks, as it may raise
        if memory_budget == "auto":
            memory_budget = DeviceLeft(self._backend.device, layers, most)
        elif isinstance(memory_budget, int | str):
            memory_budget = GivenMemory(parse_bytes(memory_budget, "memory_budget"), self._backend.device, layers, most)
        self._left: MemoryLeft = memory_budget
        self._budget = self._held_bytes = 0  # left when layers were timed, and held beside gradients by an accelerator
        self._times = LayerTimes(layers, self._backend, ended=self.end_backward, lost=self._note_peak)
        self._times.paused = True
        begins = [ForwardBegins(partial(self._begin_forward, number)) for number in range(len(layers))]
        super().__init__(layers, context, begins, self._times.layers)
        self._begins = Attachment(layers, begins)
        self._peak = memory_peak(self._backend.device)
        self.plan: Plan | None = None  # that the last microbatch follows; ``None`` while the layers are measured
        self.profile: Profile | None = None  # what the layers cost, once that was measured
        self.measured_bytes = 0  # the most in the timed microbatch, above what there was when its step began
        self.missing_bytes = 0  # what a step of the planned size needs on the device beside the layers' activations
        self._costs = CostsBySize()
        self.time_again = self._costs.forget_times  # in the next microbatch, as what backward needs has changed
        self._stage: Literal["learning", "timing", "following"] = "learning"
        self._inputs = self._timed_inputs = Inputs(1, ())  # of the microbatch that began last, and of one being timed
        self._learned = self._learned_then = [0] * len(layers)  # how often each layer had been learned when those began
        self._new_gradients: list[int] = []  # bytes of each layer's gradients that the timed microbatch allocates
        self._planned: Size = {}  # of inputs that the plan is for
        self._plans: dict[Hashable, Plan] = {}  # by the sizes of inputs: for the planned size, and for smaller ones
        self._peak_bytes = self._gradient_bytes = 0  # the last microbatch's most; its gradients before, if they count
        self._begin_bytes = 0  # these, or all that others held beside which it began, as they awaited their backward
        self._learning = 0, 0  # the most in the layers of a microbatch that learned, and the elements of its inputs
        self._planned_gradients = 0  # those that a microbatch is planned to begin with: the most so far
        self._timed_gradients = self._counted_gradients = 0  # those with which one was timed, and that the plan counts
        self._watches = True  # whether the peaks of microbatches are measured
        self._most_in_flight = self._rewatch = 0  # as one began; for how many steps peaks are measured for that
        self._timed_all = self._ran_all = False  # whether the timed, and the last, microbatch has skipped no layer
        self._counted = False  # whether what the last microbatch saved before its first layer was counted
        self._proves = False  # whether this is a plan's first microbatch, which may hold layers twice to prove it
        self._proofs = 0  # how often layers had been proven when the last microbatch began
        self._corrections_left, self._said = 0, False  # whether the budget is known to be too small
        self._policies = self._learning_policies(layers)
        for one in self._policies:
            one.ask(self._is_short)
        self._recompute_all()

    @property
    def measures(self) -> bool:
        return self._stage != "following"

    @property
    def largest_plan(self) -> Plan | None:
        """The plan for inputs of the planned size."""
        return self._plans.get(frozenset(self._planned.items()))

    @property
    def recomputed_fits(self) -> bool:
        """Whether the timed microbatch, with everything recomputed, was within the budget, as planned ones are then."""
        within = self._timed_all and is_within(self._planned, self._costs.size_of(self._costs.last_timed))
        return within and self.measured_bytes <= self._budget

    @property
    def corrected_plan(self) -> Plan | None:
        """The plan that is followed, with the seconds that it was measured to take."""
        return self._compare.as_measured(self.plan)

    def remove(self) -> None:
        super().remove()
        self._begins.remove()
        self._times.remove()
        self._peak.stop()
        # No circles: who deletes the model now would wait for Python's collector to have its memory.
        self._left, left = GivenMemory(self._budget, self._backend.device, (), None), self._left
        self._times.let_go()
        left.end()

    def _learning_policies(self, layers: list[nn.Module]) -> list[LayerPolicies]:
        return learning_policies(layers)

    def _is_short(self, nbytes: int) -> bool:
        """Whether the microbatch breaks the budget if it needs so much more now."""
        return self._peak.now_bytes() + self._begin_bytes + nbytes > (self._budget or self._left.device_bytes())

    def _recompute_all(self) -> None:
        policies = [one if one.runs_again else None for one in self._policies]  # compiled layers have no others
        self.context.follow(learning_schedule(len(policies)), policies)

    def _time(self) -> None:
        """Time the layers in the microbatch that begins, with everything recomputed."""
        if not self.measures:
            _logger.info("inputs of %s are measured, too: what is known does not tell of them", self._inputs.sides)
            self.plan, self._plans, self._proves = None, {}, True
            for one in self._policies:
                one.measure_again()
            self._recompute_all()
        self._stage, self._timed_inputs, self._learned_then = "timing", self._inputs, self._learned
        modules = [one.module() for one in self._times.layers]  # of which the program may have removed some
        self._new_gradients = [0 if module is None else new_gradients(module) for module in modules]
        self._watches, self._peak_bytes, self._moved_then = True, 0, self.context.stats()
        hold_some(self._policies)
        time_second_runs(self._policies, self._backend)
        self._times.start(self._peak)

    def _begin_forward(self, number: int, call: LayerCall, inputs: object) -> None:
        if self._stage == "learning" and not self._said and not any(one.learned for one in self._policies):
            self._said = warn_if_checkpointed(call, self.names)  # else layers run again in backward by their policies
        if self.context.begins_round(number) and not self.context.has_nothing_to_do():
            self.begin_microbatch(list(tensors_in(inputs)), goes_on=self._times.begin_microbatch())

    def begin_round(self, first: int, call: LayerCall) -> None:
        counts = self.measures or (self._watches and self._peak.costs_time)  # which layers run
        rests = self._timed_all and not (counts or call.from_compiled)
        behind = max(first, self._times.ends_with)  # these tell of a microbatch's begin and end
        self._times.forwards += self.rest(behind if rests else len(self._policies))

    def begin_microbatch(self, inputs: list[torch.Tensor], *, goes_on: bool = False) -> None:
        """A microbatch enters the first layer that it runs. It ``goes_on`` if layers run again before backward."""
        if self._backend.capturing:  # nothing can be measured then, nor may a CUDA graph see two plans
            if self.measures:
                raise CaptureError(
                    "a step that is still measured for a plan was to be captured; warm up with three steps before the "
                    "capture, of which the third follows the plan."
                )
            return
        self._counted = self._peak.counts
        proofs, self._proofs = self._proofs, sum(one.proofs for one in self._policies)
        ran_twice = self._learn_costs() or proofs < self._proofs
        proved, self._proves = ran_twice or self._proves, False
        if self._stage == "timing" and not goes_on:
            self._end_timing(self._backend.mark())
        learned = self._stage == "learning" and all(one.proven for one in self._policies)
        last, self._inputs = self._inputs, given_to(inputs)
        size, gradient_bytes = self._costs.size_of(self._inputs), self._left.gradient_bytes()
        counts_others = self._times.in_flight and self._watches
        begin_bytes = self._begin_bytes + self._peak.now_bytes() if counts_others else gradient_bytes
        goes_on &= self.measures or is_within(size, self._planned)
        if goes_on:
            self._proves = proved  # one peak counts for all that runs before backward
            if self._stage == "timing":
                self._timed_inputs = max(self._timed_inputs, self._inputs)
        elif not self.measures or (learned and not first_step_is_next(self._begins.modules)):
            larger, counts = not is_within(size, self._planned), self._planned_gradients
            if self._costs.lack(self._inputs) or (larger and self._costs.seem_too_much(size, self._budget, counts)):
                self._time()
            elif larger or gradient_bytes > self._planned_gradients:
                followed, self._planned_gradients = self.plan, max(gradient_bytes, self._planned_gradients)
                if followed is not None and followed is self.largest_plan and not ran_twice:
                    self._need_more(followed)
                self._plan_for(self._costs.largest_with(self._inputs))
                self._costs.cover(self._inputs)
                if followed is not None:  # lengths may grow from step to step
                    self._left.broken.tell()
            elif self._watches and not proved and (largest := self.largest_plan) is not None:
                self._keep_to_budget(largest, last)
        if isinstance(self._left, DeviceLeft) and not self.measures:
            grown_bytes = allocated_bytes(self._backend.device) - gradient_bytes - self._held_bytes
            if grown_bytes > RESERVE * self._budget:  # optimizer state, that the first step has made, perhaps
                self.plan_again()
        largest = self.largest_plan
        if self._compare.measures and largest is not None:
            # On the CPU, copies and compute share the cores: the times of some microbatches say little there.
            ready = self._backend.device.type != "cpu" and self._plan_at(size, largest) is largest
            ready = ready and all(one is None or one.proven for one in self.context.policies)
            if (other := self._compare.begin_microbatch(self._inputs.elements, ready=ready)) is not None:
                self._change_to(other)
        if (largest := self.largest_plan) is not None:
            self._follow(self._plan_at(size, largest))
        if largest is not None and (others := self._times.in_flight) > max(self._most_in_flight, largest.together - 1):
            self._most_in_flight, self._rewatch = others, 0 if self._watches or self._said else 2
            if self._rewatch:  # those have not been counted, and are to be in the next step
                _logger.info("more microbatches are in flight than before: peaks are measured from the next step on")
                asked = self._left.asked_bytes
                self._left.broken.expect(others, asked(largest.peak_beside(others)), asked(self._budget))
        if goes_on:
            return
        self._gradient_bytes, self._peak_bytes = gradient_bytes, self._peak_bytes if largest is None else 0
        self._watches = self._watches or self._stage == "learning" or self._rewatch > 0
        if self._watches:
            self._proves |= not self._counted  # what nobody has counted would not be seen to be freed
            self._peak.start()
        else:
            self._peak.stop()
        self._begin_bytes, self._ran_all = begin_bytes, False
        count_inputs(self._peak, inputs, self._backend.device)
        behind = next((one for one in inputs if one.grad_fn is not None), None)
        if self._stage == "learning" and behind is not None:
            behind.register_hook(self._end_layers)

    def _end_layers(self, _: object = None) -> None:
        """The layers' backward is over. What backward frees from here on was not counted in the first microbatch."""
        if self._stage == "learning" and self._watches:
            self._watches, most_bytes = False, self._peak.most_bytes() + self._begin_bytes
            self._learning = max(self._learning, (most_bytes, self._inputs.elements))

    def end_backward(self) -> None:
        """The backward is over that has come to the first layer whose output needs one."""
        if self._backend.capturing:
            return
        self._ran_all = self._times.forwards >= len(self._policies)
        self._compare.end_backward(ran_all=self._ran_all and self._times.alone)
        if self._watches and self._stage == "timing" and self._counted:
            self._times.measure_before(self._inputs.elements)
        before_bytes = self._note_peak()
        if self._times.alone and self._peak.counts:
            self._left.found_left(self._peak.now_bytes() + (before_bytes if self._counted else 0))

    def _note_peak(self) -> int:
        """Read the peak before the program has it forgotten; returns what was saved before the first layer."""
        self._end_layers()
        before_bytes = self._times.before_bytes(self._inputs.elements)
        if self._watches:
            most_bytes = self._times.most_bytes() if self._stage == "timing" else self._peak.most_bytes()
            self._peak_bytes = max(self._peak_bytes, most_bytes + before_bytes + self._begin_bytes)
        most_bytes, (layers_bytes, elements) = self._peak_bytes, self._learning
        if self._stage == "timing":  # which tells what the learning microbatches were counted without
            most_bytes = max(most_bytes, layers_bytes + self._times.before_bytes(elements))
        left = self._budget or self._left.device_bytes()
        self._left.broken.note(most_bytes - left, self._left.asked_bytes(left))
        return before_bytes

    def _change_to(self, plan: Plan) -> None:
        """From the next microbatch on, this is the plan for inputs of the planned size."""
        self._plans, self._proves = {frozenset(self._planned.items()): plan}, True
        self._watches = not (self._said and self._peak.costs_time)

    def _follow(self, plan: Plan) -> None:
        if plan is not self.plan:
            self.plan = plan
            triples = zip(self._policies, plan.policies, plan.profile.layers, strict=True)
            self.context.follow(plan.schedule, [one.follows(policy, layer.regions) for one, policy, layer in triples])

    def _plan_at(self, size: Size, largest: Plan) -> Plan:
        """The plan for inputs of this size; of the planned one where layers run again with another kind of inputs."""
        alike = not largest.profile.calls or len(self._inputs.sides) == len(self._costs.last_timed.sides)
        size = rounded_up(size, self._planned) if alike else self._planned
        if (key := frozenset(size.items())) not in self._plans:
            known = self._costs.beside(*self._costs.at(size), self._counted_gradients)
            self._plans[key] = relaxed(largest, known, (1 - RESERVE) * self._budget)
        return self._plans[key]

    def _keep_to_budget(self, largest: Plan, inputs: Inputs) -> None:
        """Plan again with less if the last microbatch, which had these inputs, has broken the budget by its plan."""
        over, smaller = self._peak_bytes - self._budget, self.plan is not largest
        if smaller and over > 0:
            _logger.info("a plan for smaller inputs needed %s: it is given up", format_bytes(self._peak_bytes))
            self._plans = {key: largest if one is self.plan else one for key, one in self._plans.items()}
        elif over > SLACK * self._budget * (largest.peak_bytes > self._budget) and self._corrections_left:
            self._corrections_left -= 1
            self._need_more(largest)
            self._make_plan(over)
        elif over > TOLERANCE * self._budget and not self._said:
            if self._left.more_after_step():
                return
            least = [*largest.policies] == recompute_all(largest.profile)
            tried = "although everything is recomputed" if least else f"by {CORRECTIONS + 1} plans"
            budget, needed = map(self._as_asked, (self._budget, self._peak_bytes))
            self._left.broken.warn(budget, f"was not met {tried}: a microbatch needed {needed}.")
            self._said, self._rewatch, self._watches = True, 0, not (self._peak.costs_time and self._ran_all)
        else:
            self._left.broken.tell()
            grown = max(0.0, self._planned[()] / inputs.elements - 1) * (self._peak_bytes - self._begin_bytes)
            largest_fits = over + grown <= TOLERANCE * self._budget and not (smaller or self._times.in_flight)
            if largest_fits and self._ran_all and self._gradient_bytes >= self._planned_gradients:
                self._watches = not self._peak.costs_time or self._rewatch > 0
                self._rewatch -= self._rewatch > 0

    def _need_more(self, plan: Plan) -> None:
        """Count what the last microbatch, under this plan, has needed beyond the budget, and what the plan leaves."""
        if (over := self._peak_bytes - self._budget) > 0:
            amounts = map(self._as_asked, (self._budget, self._peak_bytes))
            _logger.info("memory_budget = %s: the last microbatch needed %s, so it is planned again", *amounts)
            self._costs.need_more(over + max(0, round((1 - RESERVE) * self._budget) - plan.peak_bytes))

    def _learn_costs(self) -> bool:
        """Add what layers have learned in the last microbatch, if any has, to what is known of their costs."""
        before, self._learned = self._learned, [one.learned for one in self._policies]
        # What only some have learned is of no one size.
        if before != self._learned and (self._stage == "learning" or all(map(operator.ne, before, self._learned))):
            self._costs.learn(self._inputs, counted_once(self._policies))
        return before != self._learned

    def _end_timing(self, now: Event) -> None:
        """Add what was timed until ``now`` to what is known of the layers' costs, unless layers were learned meanwhile.

        A layer that was skipped costs what another one with the same regions does. While there is none, timing goes on.
        """
        ran = self._times.ran
        kinds = [tuple((region.name, region.nbytes) for region in one.costs) for one in self._policies]
        ended = self._times.together > 0  # else it was cut off, for want of memory perhaps
        if ended and not {kinds[number] for number in ran} >= {*kinds}:
            return
        self._stage, self._planned = "following", {}
        if not ended or self._learned != self._learned_then:
            self._times.start(self._peak, paused=True)
            end_second_runs(self._policies)
            return
        regions, moved = self._costs.regions_at(self._timed_inputs), self.context.stats() - self._moved_then
        profile, expected = learned_profile(self._policies, regions, self._times, moved)
        self.measured_bytes = self._peak_bytes
        profile = with_skipped(replace(profile, other_s=self._times.between_s(now)), ran, kinds, self._new_gradients)
        self._times.start(self._peak, paused=True)  # what was counted before this microbatch is freed in it
        end_second_runs(self._policies)
        self._ask_what_is_left()
        self._timed_all, self._timed_gradients = len(ran) == len(kinds), self._gradient_bytes
        self._planned_gradients = max(self._timed_gradients, self._planned_gradients)
        missing_bytes = max(0, self._peak_bytes - self._timed_gradients - expected)
        self._costs.add(self._timed_inputs, profile, missing_bytes, self._new_gradients, self._timed_gradients)

    def _as_asked(self, nbytes: int) -> str:
        return format_bytes(self._left.asked_bytes(nbytes))  # the memory_budget with which a step may need so much

    def _ask_what_is_left(self) -> None:
        self._budget, self._corrections_left = self._left.device_bytes(), CORRECTIONS
        self._held_bytes = allocated_bytes(self._backend.device) - self._left.gradient_bytes()

    def plan_again(self) -> None:
        """Plan for what is left now, if there is a plan already."""
        if self.largest_plan is not None:
            self._peak_bytes -= self._budget  # by so much the last microbatch broke what was left for it
            self._ask_what_is_left()
            self._peak_bytes += self._budget
            self._plan_for(self._planned)

    def _plan_for(self, size: Size) -> None:
        before = vars(self).copy()
        self._planned, self._said, self._counted_gradients = size, False, self._planned_gradients
        try:
            self._make_plan()
        except BaseException:  # a warning may be an error for the program, which does not run these inputs then
            vars(self).update(before, _peak_bytes=0, _ran_all=False)  # which have counted
            self._costs.uncover(self._planned)
            raise

    def _make_plan(self, over_bytes: int | None = None) -> None:
        """Follow a plan for the planned size, after one that needed ``over_bytes`` too many; or recompute all."""
        self.profile, missing_bytes = self._costs.at(self._planned)
        profile = self._costs.beside(self.profile, missing_bytes, self._counted_gradients)
        self.missing_bytes = missing_bytes + self._counted_gradients
        budget, missing = self._as_asked(self._budget), format_bytes(self.missing_bytes)
        link, host_bytes = self._left.link(self.link), self._left.host_bytes()
        plans, least_bytes = {}, math.inf
        slack = SLACK if (over_bytes or 0) <= SLACK * self._budget else 0.0  # else the same plan would follow
        shares = dict.fromkeys(Among, 1 - RESERVE) | {Among.CHECKPOINTS: 1.0}  # of the budget
        for among, share in [*shares.items(), (Among.CHECKPOINTS, 1 + slack)]:
            try:
                if among not in plans:
                    made = make_plan(profile, round(share * self._budget), link, max_host_bytes=host_bytes, among=among)
                    plans[among] = replace(made, memory_budget=self._budget)
            except TooLittleMemoryError as error:  # fewer policies need not fit, nor more: they leave a reserve
                least_bytes = min(least_bytes, error.least_bytes / (1 - RESERVE))
        if not (plans or self.recomputed_fits) and self._counted_gradients > self._timed_gradients:
            self._counted_gradients = self._timed_gradients  # the profile may have the others, which its backward made
            self._make_plan(over_bytes)
            return
        if not plans:
            self._corrections_left = 0
            if over_bytes is not None and over_bytes <= TOLERANCE * self._budget:
                return  # the last plan is good enough
            frugal = plans[Among.CHECKPOINTS] = recomputed_plan(profile, link, self._budget, host_bytes)
            if self.recomputed_fits:
                _logger.info("%s is met by no plan: all is recomputed, as while it was measured", budget)
            elif not self._left.more_after_step() and over_bytes is None:
                least = max(math.ceil(least_bytes), self.measured_bytes)
                inside = replace(frugal, profile=replace(self.profile, loss_bytes=0))
                self._left.say_too_little(least, max(0, least - inside.peak_bytes), self._budget, host_bytes)
                self._said = True
        made = self._compare.best(plans, self._planned[()])
        _logger.info(
            "memory_budget = %s: %d of %d layers are offloaded, %s a step are recomputed; step %s, peak "
            "%s, of which %s outside of them",
            *(budget, made.num_layers, len(profile.layers), format_s(made.recompute_s), format_s(made.step_s)),
            *(format_bytes(made.peak_bytes), missing),
        )
        self._change_to(made)
