"""A memory budget in place of numbers: the first steps run frugally and are measured, the next ones follow a plan.

A round of a microbatch through the layers is what is counted. In the first everything is recomputed, inputs travel, and
each region is timed. The second, run in the same way, is timed as a whole. Then a plan is made. Where an
accelerator tells its peak, the plan leaves room for what no profile knows (the loss, temporary tensors), and is made
again with less if a round breaks the budget. It is also made again where the inputs' size changes much.
"""

from __future__ import annotations

import logging
import time
from enum import Enum, auto
from typing import Any

import torch

import offload.activations.layers as spine
from offload.activations.context import OffloadContext
from offload.activations.layers import OffloadedLayers
from offload.base.autograd import before_backward, tensors_in
from offload.base.checks import format_bytes, format_s, parse_bytes, warn_caller
from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn
from offload.host.limits import HostMemory
from offload.planning.measure import measure_link
from offload.planning.measure_regions import frugal_profile, frugal_schedule, frugal_treatments
from offload.planning.measured_layer import LayerTimes
from offload.planning.plan import Plan, plan
from offload.planning.profile import Profile
from offload.recompute.treatments import LayerTreatments, Treatment
from offload.schedule.schedule import Schedule

_logger = logging.getLogger(__name__)

AUTO_SHARE = 0.92
"""Of what the device has left: allocators need some room to cut blocks from."""

RESERVE = 0.02
"""Part of the budget that a first plan leaves, as what was measured with everything recomputed says not quite all."""

CORRECTIONS = 3
"""How often a plan is made again because its peak broke the budget."""

MUCH = 1.25
"""From this factor on, inputs of another size are worth another plan."""


class _Stage(Enum):
    LEARNING = auto()
    TIMING = auto()
    FOLLOWING = auto()


class BudgetedLayers(OffloadedLayers):
    """Layers that are kept, offloaded and recomputed as a memory budget asks for; undone by ``remove()``.

    Args:
        layers: The layers, in call order.
        budget: Bytes, a text, or ``"auto"``.
        min_bytes: Storages below this size are no regions of their own.
        device: Where the layers compute.
        host: How much host memory there is; a capacity of the plan.
    """

    def __init__(
        self,
        layers: list[torch.nn.Module],
        budget: int | str,
        *,
        min_bytes: int | str,
        device: torch.device | str | int | None,
        host: HostMemory,
    ) -> None:
        self._budget = None if budget == "auto" else parse_bytes(budget, "memory_budget")
        context = OffloadContext(Schedule(len(layers)), len(layers), min_bytes=min_bytes, device=device, host=host)
        self._backend = context.backend
        self._has_peak = self._backend.device.type != "cpu"
        if self._budget is None and not self._has_peak:
            raise ValueError('memory_budget="auto" asks an accelerator what it has left; on the CPU, give bytes.')
        self._max_host_bytes = host.max_bytes
        super().__init__(layers, context)
        self._layers = layers
        self.plan: Plan | None = None
        """What is followed; ``None`` in the first rounds."""
        self._link = measure_link(self._backend.device)
        self._times = LayerTimes(layers, self._backend)
        self._peak_bytes = 0
        """The most device memory in the last round, above what there was when it began."""
        ends = [_Rounds(self), _Backwards(self)]
        self._rounds = Attachment([layers[0], layers[-1]], ends)
        self._restart(0)

    def remove(self) -> None:
        super().remove()
        self._rounds.remove()
        self._times.remove()

    def _restart(self, elements: int) -> None:
        """Be frugal, and learn what the regions cost with inputs of so many elements."""
        self._stage = _Stage.LEARNING
        self._elements = elements
        self._missing_bytes = 0
        self._corrections = 0
        self._start_bytes = 0
        self._times.remove()
        # Attached now, since what is attached while a layer begins misses that.
        self._times = LayerTimes(self._layers, self._backend)
        self._treatments = [LayerTreatments({"*": Treatment.RECOMPUTE}, layer, measures=True) for layer in self._layers]
        self._context.follow(frugal_schedule(len(self._layers)), self._treatments)

    def begin_round(self, elements: int) -> None:
        """A microbatch is about to enter the first layer, with so many elements in its inputs."""
        if self._elements and not self._elements / MUCH <= elements <= self._elements * MUCH:
            self._restart(elements)
        elif self._stage is _Stage.LEARNING:
            self._elements = elements
            if all(one.costs for one in self._treatments):
                self._stage = _Stage.TIMING
                self._times.start(reads_memory=self._has_peak)
        elif self._stage is _Stage.TIMING and self._times.complete:
            self._times.remove()
            profile = frugal_profile(self._treatments, self._times)
            self._missing_bytes = max(0, self._peak_bytes - self._frugal(profile).peak_bytes)
            self._missing_bytes += round(RESERVE * self._memory())
            self._stage = _Stage.FOLLOWING
            self._follow_plan(profile)
        elif self._stage is _Stage.FOLLOWING and self.plan is not None:
            over = self._peak_bytes - self._memory()
            if over > 0 and self._corrections < CORRECTIONS:
                self._corrections += 1
                self._missing_bytes += over
                self._follow_plan(self.plan.profile)
        if self._has_peak and self._stage is _Stage.FOLLOWING:
            torch.accelerator.reset_peak_memory_stats(self._backend.device)
            self._start_bytes = torch.accelerator.memory_allocated(self._backend.device)

    def end_backward(self) -> None:
        """A round's backward has ended: what its peak was; later the program may have the peak forgotten."""
        if self._stage is _Stage.TIMING:
            self._peak_bytes = self._times.most_bytes()
        elif self._has_peak:
            self._peak_bytes = torch.accelerator.max_memory_allocated(self._backend.device) - self._start_bytes

    def _memory(self) -> int:
        """The budget."""
        if self._budget is None:
            free, _ = torch.accelerator.get_memory_info(self._backend.device)
            cached = torch.accelerator.memory_reserved(self._backend.device) - torch.accelerator.memory_allocated(
                self._backend.device
            )
            self._budget = int(AUTO_SHARE * (free + cached))
        return self._budget

    def _frugal(self, profile: Profile) -> Plan:
        """What the first rounds do, as a plan."""
        schedule = frugal_schedule(len(self._layers))
        return Plan(schedule, profile, self._link, self._memory(), tuple(frugal_treatments(profile)))

    def _follow_plan(self, profile: Profile) -> None:
        """Make a plan, and follow it; what cannot be met stays frugal, and says so."""
        begin = time.perf_counter()
        budget = max(0, self._memory() - self._missing_bytes)
        try:
            made = plan(profile, budget, self._link, max_host_bytes=self._max_host_bytes)
        except ValueError as error:
            warn_caller(
                f"memory_budget = {format_bytes(self._memory())} cannot be met, so everything is recomputed and inputs "
                f"travel: {error} Of the budget, {format_bytes(self._missing_bytes)} are needed outside of the layers."
            )
            self.plan = None
            return
        self.plan = made
        for learned, numbered in zip(self._treatments, made.treatments, strict=True):
            if numbered is not None:
                learned.follow(numbered)
        treated = zip(self._treatments, made.treatments, strict=True)
        followed = [None if numbered is None else learned for learned, numbered in treated]
        self._context.follow(made.schedule, followed)
        _logger.info(
            "memory_budget = %s: %d of %d layers travel, %s a step are recomputed; step of the layers %s, peak %s, and "
            "%s outside of them; planned in %s",
            format_bytes(self._memory()),
            made.num_layers,
            len(self._layers),
            format_s(made.recompute_s),
            format_s(made.step_s),
            format_bytes(made.peak_bytes),
            format_bytes(self._missing_bytes),
            format_s(time.perf_counter() - begin),
        )


class _Rounds(LayerListener):
    """Tells when a microbatch enters the first layer, before anything else happens there."""

    turn = Turn.WEIGHTS

    def __init__(self, budgeted: BudgetedLayers) -> None:
        self._budgeted = budgeted

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        if not self._budgeted._context.has_nothing_to_do():
            self._budgeted.begin_round(sum(tensor.numel() for tensor in tensors_in(inputs)))


class _Backwards(LayerListener):
    """Tells when the backward that has come to the last layer is over."""

    turn = Turn.MEASURING

    def __init__(self, budgeted: BudgetedLayers) -> None:
        self._budgeted = budgeted

    def forward_returned(self, call: LayerCall, output: object) -> None:
        if not call.recomputes and torch.is_grad_enabled():
            before_backward(output, call.first_node, self._begin)

    def _begin(self, _: object) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._budgeted.end_backward)


spine.budgeted = BudgetedLayers
