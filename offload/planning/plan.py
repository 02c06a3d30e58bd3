"""How many layers to offload: the fewest with which the step fits into a memory budget.

Each candidate schedule is simulated, so what is chosen is what the executor is going to do, stalls
included, and the prediction comes with a timeline to look at.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

from offload.base.checks import format_bytes, format_s, parse_bytes
from offload.observe.timeline import Timeline
from offload.planning.link import Link
from offload.planning.profile import Profile
from offload.planning.simulate import simulate
from offload.schedule.schedule import Schedule


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule that meets a memory budget, and what to expect of it.

    Args:
        schedule: Which layers are offloaded, and when they move.
        profile: What the layers cost.
        link: The link that was planned for.
        memory_budget: Bytes.
    """

    schedule: Schedule
    profile: Profile
    link: Link
    memory_budget: int

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted step."""
        return simulate(self.schedule, self.profile, self.link)

    @cached_property
    def without(self) -> Timeline:
        """The predicted step with every layer on the device."""
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
    def host_bytes(self) -> int:
        """Bytes of host memory that the offloaded sets need, all of them on the host at once."""
        return sum(self.profile.layers[layer].saved_bytes for layer in self.schedule.offloaded_layers)

    def __repr__(self) -> str:
        peak = f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.memory_budget)}"
        layers = f"{self.num_layers} of {self.schedule.model_layers} layers"
        return f"<Plan: offload {layers}, step {format_s(self.step_s)}, {peak}>"

    def __str__(self) -> str:
        """A row per layer, and the prediction beside that of keeping everything."""
        offloaded = self.schedule.offloaded_layers
        stalls = [span for span in self.timeline.lane("compute") if span.kind == "stall"]
        lines = [f"{'layer':>5}{'saved':>12}  {'what':<8}{'waits for it':>14}"]
        for index, layer in enumerate(self.profile.layers):
            what = "offload" if index in offloaded else "keep"
            stall_s = sum(span.duration_s for span in stalls if span.layer == index)
            waits = format_s(stall_s) if index in offloaded else ""
            lines.append(f"{index:>5}{format_bytes(layer.saved_bytes):>12}  {what:<8}{waits:>14}".rstrip())
        step, step_without = format_s(self.step_s), format_s(self.without.duration_s)
        peak, peak_without = format_bytes(self.peak_bytes), format_bytes(self.without.peak_bytes)
        budget, host = format_bytes(self.memory_budget), format_bytes(self.host_bytes)
        lines.append(f"step {step}, without offloading {step_without}")
        lines.append(f"peak {peak}, without offloading {peak_without}")
        lines.append(f"budget {budget}, host memory {host}")
        return "\n".join(lines)


def plan(profile: Profile, memory_budget: int | str, link: Link | None = None) -> Plan:
    """The default schedule with the fewest offloaded layers whose peak stays within the budget.

    Args:
        profile: What the layers cost, from :func:`~offload.profile_layers` or written by hand.
        memory_budget: Device memory for what a step adds to parameters and optimizer state: bytes,
            or a text such as ``"40GiB"``.
        link: Measured now if left out.

    Raises:
        ValueError: Not even the most layers that can be offloaded meet the budget; the message
            names the least peak. Or the budget is a text of another form.
        TypeError: The budget is neither an int nor a str.
    """
    budget = parse_bytes(memory_budget, "memory_budget")
    if link is None:
        from offload.planning.measure import measure_link  # The only part of planning that needs torch.

        link = measure_link()
    model_layers = len(profile.layers)
    if not model_layers:
        raise ValueError("profile must have at least one layer, got none; profile the layers to offload.")
    peaks = []
    for num_layers in range(model_layers):
        with warnings.catch_warnings():
            # That k = N-1 cannot overlap is part of the prediction.
            warnings.simplefilter("ignore", UserWarning)
            schedule = Schedule.default(num_layers, model_layers)
        found = Plan(schedule, profile, link, budget)
        if found.peak_bytes <= budget:
            return found
        peaks.append(found.peak_bytes)
    least = min(peaks)
    raise ValueError(
        f"memory_budget must be at least {least} bytes ({format_bytes(least)}), the least peak that "
        f"offloading reaches, with {peaks.index(least)} of {model_layers} layers, got {budget} bytes "
        f"({format_bytes(budget)}); raise it, use smaller microbatches, or recompute in the layers "
        "(torch.utils.checkpoint)."
    )
