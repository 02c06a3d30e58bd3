"""What a user may say in place of numbers: a memory budget, or that offloading is to cost nothing.

Where an accelerator tells its peak, a plan for a budget leaves room for what no profile knows, and is made again with
less if a round breaks the budget.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from offload.base.checks import format_bytes, format_s, parse_bytes, warn_caller
from offload.device.select import get_backend
from offload.measuring.follow_plan import PlannedLayers
from offload.measuring.measure_regions import frugal_policies, frugal_schedule
from offload.planning.plan import Plan, free_plan, plan
from offload.planning.profile import Profile

_logger = logging.getLogger(__name__)

AUTO_SHARE = 0.92
"""Of what the device has left: allocators need some room to cut blocks from."""

RESERVE = 0.02
"""Part of the budget that a first plan leaves, as what was measured with everything recomputed says not quite all."""

CORRECTIONS = 3
"""How often a plan is made again because its peak broke the budget."""


class BudgetedLayers(PlannedLayers):
    """Layers that are kept, offloaded and recomputed as a memory budget asks for.

    Args:
        layers: The layers, in call order.
        budget: Bytes, a text, or ``"auto"``.
        options: As ``PlannedLayers`` takes them.
    """

    def __init__(self, layers: list[torch.nn.Module], budget: int | str, **options: Any) -> None:
        self._budget = None if budget == "auto" else parse_bytes(budget, "memory_budget")
        self._missing_bytes = 0
        """What of the budget is needed outside of the layers."""
        self._corrections = 0
        if self._budget is None and get_backend(options["device"]).device.type == "cpu":
            raise ValueError('memory_budget="auto" asks an accelerator what it has left; on the CPU, give bytes.')
        super().__init__(layers, **options)

    def _memory(self) -> int:
        """The budget."""
        if self._budget is None:
            device = self._backend.device
            self._budget = int(AUTO_SHARE * _left_bytes(device))
        return self._budget

    def _first_plan(self, profile: Profile) -> Plan | None:
        frugal = frugal_schedule(len(profile.layers))
        run = Plan(frugal, profile, self._link, self._memory(), tuple(frugal_policies(profile)))
        self._missing_bytes = max(0, self._peak_bytes - run.peak_bytes) + round(RESERVE * self._memory())
        self._corrections = 0
        return self._planned(profile, "everything is recomputed and inputs travel")

    def _next_plan(self, followed: Plan) -> Plan | None:
        over = self._peak_bytes - self._memory()
        if over <= 0 or self._corrections == CORRECTIONS:
            return None
        self._corrections += 1
        self._missing_bytes += over
        return self._planned(followed.profile, "the plan is followed that has broken it")

    def _planned(self, profile: Profile, otherwise: str) -> Plan | None:
        """A plan that fits; if there is none, say so, and what is done then."""
        begin = time.perf_counter()
        budget = max(0, self._memory() - self._missing_bytes)
        try:
            made = plan(profile, budget, self._link, max_host_bytes=self._max_host_bytes)
        except ValueError as error:
            warn_caller(
                f"memory_budget = {format_bytes(self._memory())} cannot be met, so {otherwise}: {error} Of the budget, "
                f"{format_bytes(self._missing_bytes)} are needed outside of the layers."
            )
            self._corrections = CORRECTIONS
            return None
        _logger.info(
            "memory_budget = %s: %d of %d layers travel, %s a step are recomputed; step of the layers %s, peak %s, and "
            "%s outside of them; planned in %s",
            format_bytes(self._memory()),
            made.num_layers,
            len(profile.layers),
            format_s(made.recompute_s),
            format_s(made.step_s),
            format_bytes(made.peak_bytes),
            format_bytes(self._missing_bytes),
            format_s(time.perf_counter() - begin),
        )
        return made


def _left_bytes(device: torch.device) -> int:
    """What can still be allocated: what nobody has, and what PyTorch's allocator has cached; within its limit."""
    free, total = torch.accelerator.get_memory_info(device)
    reserved = torch.accelerator.memory_reserved(device)
    if device.type == "cuda":
        free = min(free, int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved)
    return max(0, free + reserved - torch.accelerator.memory_allocated(device))


class FreeLayers(PlannedLayers):
    """Layers of which as many travel as make the step no longer."""

    def _first_plan(self, profile: Profile) -> Plan:
        made = free_plan(profile, self._link, max_host_bytes=self._max_host_bytes)
        _logger.info(
            'num_layers="auto": %d of %d layers travel, which makes a peak of %s of %s',
            made.num_layers,
            len(profile.layers),
            format_bytes(made.peak_bytes),
            format_bytes(made.without.peak_bytes),
        )
        return made
