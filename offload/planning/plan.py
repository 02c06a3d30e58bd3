"""What to keep, offload and recompute, so that the step fits into a memory budget and takes the least time.

Where the layers' regions are not known, whole layers are offloaded. The chosen plan is simulated,
stalls included, so the prediction comes with a timeline to look at.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from offload.base.checks import format_bytes, format_s, parse_bytes
from offload.observe.timeline import Timeline
from offload.planning.layer_costs import LayerCosts, costs_of, peak_bytes, peaks_of, region_costs
from offload.planning.profile import HostSeconds, Link, Profile, check_link, check_profile
from offload.planning.search import Among, Search, layers_of_kinds
from offload.planning.simulate import simulate
from offload.recompute.costs import LayerPolicy
from offload.schedule.schedule import Schedule

_logger = logging.getLogger(__name__)

FREE = 1e-3  # by what part of it a step may be longer that counts as equally long
MORE = 1.25  # how much more of something :meth:`Plan.helps` asks for


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule and policies that meet a memory budget, and what to expect of them."""

    schedule: Schedule  #: Which layers are offloaded, and when they move.
    profile: Profile  #: What the layers cost.
    link: Link  #: The link that was planned for.
    memory_budget: int  #: Bytes.
    policies: tuple[LayerPolicy | None, ...] = ()  #: Of each layer's regions; ``None``: all is kept, or offloaded.
    max_host_bytes: int | None = None  #: Most bytes on the host, if that is limited.

    def __post_init__(self) -> None:
        # __dict__ is the way to fill a frozen dataclass.
        vars(self)["policies"] = tuple(self.policies) or (None,) * len(self.profile.layers)

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted step."""
        return simulate(self.schedule, self.profile, self.link, policies=self.policies)

    @cached_property
    def without(self) -> Timeline:
        """The predicted step with everything on the device."""
        return simulate(Schedule(self.schedule.model_layers), self.profile, self.link)

    @property
    def num_layers(self) -> int:
        """How many layers are offloaded."""
        return len(self.schedule.offloaded_layers)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.duration_s

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the activation sets, and of the layers' workspace where the profile knows it."""
        return self.timeline.peak_bytes

    @property
    def together(self) -> int:
        """How many microbatches are in flight at once, or how often layers run before backward, in the plan's step."""
        return len(self.profile.order) // len(self.profile.layers)

    def peak_beside(self, others: int) -> int:
        """Predicted peak, at most, of a microbatch that begins while so many others await their backward."""
        costs = costs_of(self.profile, self.link, set(self.schedule.offloaded_layers), self.policies)
        between = peaks_of(costs, self.num_layers, self.profile.calls).between
        more_bytes = between // self.together + self.profile.loss_bytes  # which may keep all that the loss has needed
        return self.peak_bytes + max(0, others + 1 - self.together) * more_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the offloaded sets need, all of them on the host at once."""
        return sum(layer.offloaded_bytes for layer in self._costs)

    @property
    def recompute_s(self) -> float:
        """Seconds of a step that recompute what was not kept."""
        return math.fsum(layer.recompute_s for layer in self._costs)

    @property
    def host_s(self) -> float:
        """Seconds in which the host queues a step's kernels and copies; 0 where it is known to be far ahead."""
        return math.fsum(layer.host_s for layer in self._costs)

    @cached_property
    def _costs(self) -> list[LayerCosts]:
        """Of each call."""
        costs = costs_of(self.profile, self.link, set(self.schedule.offloaded_layers), self.policies)
        return [costs[number] for number in self.profile.order]

    def helps(self) -> dict[str, float]:
        """Predicted seconds of a step with a quarter more of each resource, by its name. Plans again for each.

        ``"device"`` stands for its memory, ``"link"`` for its speed, ``"host"`` for its memory if that is limited, and
        ``"kernels"`` for how many of them the host queues in a second, if the device waits for that: compiled layers
        have fewer.
        """
        profile, budget, link, host = self.profile, self.memory_budget, self.link, self.max_host_bytes
        asked: dict[str, tuple[Profile, int, Link, int | None]]
        asked = {
            "device": (profile, round(MORE * budget), link, host),
            "link": (profile, budget, link.faster(MORE), host),
        }
        if host is not None:
            asked["host"] = (profile, budget, link, round(MORE * host))
        if self.timeline.late_s:
            sooner = [replace(one, host=HostSeconds(*(each / MORE for each in one.host))) for one in profile.layers]
            asked["kernels"] = (replace(profile, layers=tuple(sooner)), budget, link, host)
        return {
            what: make_plan(profile, budget, link, max_host_bytes=host).step_s
            for what, (profile, budget, link, host) in asked.items()
        }

    def binds(self) -> str:
        """The key of :meth:`helps` that would help most; ``"compute"`` if none of them would."""
        helps = self.helps()
        least = min(helps, key=helps.__getitem__)
        return least if helps[least] < 0.999 * self.step_s else "compute"

    def __repr__(self) -> str:
        peak = f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.memory_budget)}"
        layers = f"{self.num_layers} of {self.schedule.model_layers} layers"
        again = f", recompute {format_s(self.recompute_s)}" if self.recompute_s else ""
        return f"<Plan: offload {layers}{again}, step {format_s(self.step_s)}, {peak}>"

    def __str__(self) -> str:
        """A row per region, or kind of layer, and the prediction beside that of keeping everything."""
        step, step_without = format_s(self.step_s), format_s(self.without.duration_s)
        peak, peak_without = format_bytes(self.peak_bytes), format_bytes(self.without.peak_bytes)
        budget, host = format_bytes(self.memory_budget), format_bytes(self.host_bytes)
        again, waiting = format_s(self.recompute_s), format_s(self.timeline.stall_s)
        most = "" if self.max_host_bytes is None else f" of {format_bytes(self.max_host_bytes)}"
        late_s = self.timeline.late_s
        late = f" and {format_s(late_s)} for the host" if late_s >= FREE * self.step_s else ""
        seconds = f"step {step}, of which {again} recomputing and {waiting} waiting for copies{late}; {step_without}"
        memory = f"peak {peak} of {budget}, {peak_without} if all is kept; host memory {host}{most}"
        return "\n".join([*self._region_table(), f"{seconds} if all is kept", memory])

    def _region_table(self) -> Iterator[str]:
        """For each kind of layer, the policy of each region in offloaded layers and in the others."""
        for numbers in layers_of_kinds(self.profile):
            layer = self.profile.layers[numbers[0]]
            rows = [(one.name, one.nbytes, one.seconds) for one in layer.regions]
            rows = rows or [("whole layer", layer.saved_bytes, layer.forward_s)]
            columns = []
            for state in ("offloaded", "resident"):
                group = [one for one in numbers if (one in self.schedule.offloaded_layers) == (state == "offloaded")]
                column = [f"{state} {ranges(group)}", *(self._policies_of(group, row) for row in range(len(rows)))]
                columns += [[cell.ljust(max(map(len, column))) for cell in column]] * bool(group)
            names = ["region", *(name for name, _, _ in rows)]
            sizes = ["size", *(format_bytes(nbytes) if nbytes or not layer.regions else "" for _, nbytes, _ in rows)]
            compute = ["compute", *(format_s(seconds) if seconds else "-" for _, _, seconds in rows)]
            for name, size, seconds, *cells in zip(names, sizes, compute, *columns, strict=True):
                # Else it is neither saved nor needed for recomputation, or it is shared by all layers.
                if size and {cell.rstrip() for cell in cells} != {"-"}:
                    yield f"{name:<{max(map(len, names))}}{size:>12}{seconds:>10}  {'  '.join(cells)}".rstrip()

    def _policies_of(self, layers: Iterable[int], row: int) -> str:
        """The policy of one region in these layers; of how many each, if not the same in all."""
        counts = Counter(self._policy_of(number, row) for number in layers).most_common()
        return counts[0][0] if len(counts) == 1 else ", ".join(f"{what} {count}" for what, count in counts)

    def _policy_of(self, number: int, row: int) -> str:
        regions, policy = self.profile.layers[number].regions, self.policies[number]
        offloads = number in self.schedule.offloaded_layers
        if policy is None:
            return ("offload" if offloads else "keep") if not regions or regions[row].saved else "-"
        costs = region_costs(regions, policy.kept)
        if row in costs.kept:
            return "offload" if offloads and row in policy.offloaded else "keep"
        return "recompute" if row in costs.rerun else "-"


def ranges(numbers: Iterable[int]) -> str:
    """``ranges([0, 1, 2, 5])`` is ``"0-2, 5"``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def make_plan(
    profile: Profile,
    memory_budget: int | str,
    link: Link,
    *,
    max_host_bytes: int | str | None = None,
    among: Among = Among.REGIONS,
) -> Plan:
    """Choose what to keep, offload and recompute: the shortest step whose peak is within the budget."""
    # See ``plan``, which measures the link if it is given none.
    begin_s = time.perf_counter()
    budget = parse_bytes(memory_budget, "memory_budget")
    host = None if max_host_bytes is None else parse_bytes(max_host_bytes, "max_host_bytes")
    check_profile(profile)
    check_link(link)
    search = Search(profile, link, budget, math.inf if host is None else host, among)
    found = search.best()
    if found is None:
        raise _too_little(search, budget, host)
    score, choice = found
    made = Plan(_default(choice.num_layers, search.count), profile, link, budget, search.policies(choice), host)
    amounts = format_bytes(budget), choice.num_layers, search.count, format_bytes(score.host_bytes)
    took = format_s(time.perf_counter() - begin_s)
    _logger.info("planned for %s: %d of %d layers are offloaded, with %s; in %s", *amounts, took)
    return made


def relaxed(plan: Plan, profile: Profile, most_bytes: float) -> Plan:
    """The same plan for inputs of another size, by its profile: the last layers keep everything, as many as fit."""
    count = len(profile.layers)
    following = costs_of(profile, plan.link, plan.schedule.offloaded_layers, plan.policies)
    keeping = costs_of(profile, plan.link, ())

    def fits(follow: int) -> bool:
        costs = following[:follow] + keeping[follow:]
        return peak_bytes(costs, min(plan.num_layers, follow), profile.loss_bytes, profile.calls) <= most_bytes

    follow = bisect_left(range(count), True, key=fits)
    schedule = _default(min(plan.num_layers, follow), count)
    policies = (*plan.policies[:follow], *[None] * (count - follow))
    return replace(plan, schedule=schedule, profile=profile, policies=policies)


class TooLittleMemoryError(ValueError):
    """No plan fits: the least peak is ``least_bytes``."""

    def __init__(self, said: str, least_bytes: int = 0) -> None:
        super().__init__(said)
        self.least_bytes = least_bytes


def _too_little(search: Search, budget: int, host: int | None) -> TooLittleMemoryError:
    least, choice = search.least_peak
    within = "" if host is None else f" within max_host_bytes = {host} ({format_bytes(host)})"
    said = (
        f"memory_budget must be at least {least} bytes ({format_bytes(least)}), the least peak that a plan reaches"
        f"{within}, with {choice.num_layers} of {search.count} layers offloaded, got {budget} bytes "
        f"({format_bytes(budget)}); raise it or use smaller microbatches."
    )
    return TooLittleMemoryError(said, least)


def _default(num_layers: int, model_layers: int) -> Schedule:
    with warnings.catch_warnings():
        # That k = N-1 cannot overlap is part of the prediction.
        warnings.simplefilter("ignore", UserWarning)
        return Schedule.default(num_layers, model_layers)
