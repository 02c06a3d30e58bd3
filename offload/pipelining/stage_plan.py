"""When the activations of a pipeline rank move: a schedule derived from the order in which the rank runs.

Each chunk, one microbatch on one stage, saves one activation set, cut into parts of equal size so that memory
goes and comes back gradually. The parts are the layers of an ordinary :class:`~offload.Schedule`: part p of
the n-th chunk to run forward is layer ``n * parts + p``.

The derivation walks along the rank's step as if compute never waited. It takes the longest-lived parts first, lets each
go once its copy can be done, and starts its reload just so early that the copy can be done in time. A part is
skipped if that leaves no time on the host: its life is shorter than both copies, or the link is busy. Where a
budget asks for more than the link can carry meanwhile, the walk is repeated with slower compute, and of what meets
the budget that is taken for which the simulated step waits least. In the end, what room the peak leaves elsewhere is
given back as slack: parts go later and come back earlier.

Note:
    Bubbles of the pipeline count as no time, and both directions of the link as always busy. So the link is
    rather faster, and the rank rather slower, than what the derivation takes them for. Other ranks are left out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from numbers import Real
from typing import Any

from offload.base.checks import check_type, format_bytes, format_s, is_int, parse_bytes, warn_caller
from offload.observe.timeline import Timeline
from offload.pipelining.order import Action, Chunk, number_chunks, read_actions
from offload.pipelining.stage_profile import StageProfile
from offload.pipelining.walk import Stay, Walk
from offload.planning.link import Link, check_link
from offload.planning.simulate import Simulation
from offload.schedule.points import Move
from offload.schedule.schedule import Schedule

WAITS = tuple(0.05 * 1.4**rung for rung in range(18))
"""How long compute may be taken to wait for copies, as multiples of the step."""

LONGER_WAITS = 3
"""How many longer ones are tried beside the shortest that is enough: with more time, fewer bytes have to move."""

INSTANT_LINK = Link(1e30, 1e30, 2e30)
"""The last resort: each part goes and comes back at the nearest point, whatever that costs."""

ROUNDING = 1e-9
"""How far sums of the same sizes may be apart."""


@dataclass(frozen=True, repr=False)
class PipelinePlan:
    """What a pipeline rank offloads and when, with what that should cost.

    Args:
        actions: What the rank runs, in order.
        parts: Into how many parts each chunk's set is cut.
        profile: What a chunk of each stage costs.
        link: The link that it was made for.
        schedule: What moves when, over ``chunks * parts`` layers.
    """

    actions: tuple[Action, ...]
    parts: int
    profile: Mapping[int, StageProfile]
    link: Link
    schedule: Schedule

    @cached_property
    def chunks(self) -> dict[Chunk, int]:
        """Each chunk's number in the order of forwards."""
        return number_chunks(self.actions)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that travel to the host and back in one step."""
        return round(sum(self._walk.nbytes[layer] for layer in self.schedule.offloaded_layers))

    @property
    def saved_bytes(self) -> int:
        """Bytes of all activation sets of one step."""
        return round(sum(self._walk.nbytes))

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device at once: activation sets."""
        return round(self._walk.peak_bytes(self._placed))

    @property
    def peak_bytes_without(self) -> int:
        """The same with nothing offloaded."""
        return round(self._walk.peak_bytes({}))

    @property
    def host_bytes(self) -> int:
        """The most bytes on the host at once."""
        return round(self._walk.host_bytes(self._placed))

    @property
    def step_s_without(self) -> float:
        """Compute seconds of the step, bubbles left out."""
        return self._walk.duration_s

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step, bubbles left out. Where a backward is split, it takes the memory to be free after I."""
        return self._played.timeline(repr(self))

    @cached_property
    def stall_s(self) -> float:
        """Seconds that compute waits for copies in the simulated step."""
        return self._played.stall_s

    @property
    def slowdown(self) -> float:
        """How much longer the step takes with the stalls, as a fraction; 0 where the link allows all that moves."""
        return self.stall_s / self.step_s_without if self.step_s_without else 0.0

    def __repr__(self) -> str:
        share = self.offloaded_bytes / self.saved_bytes if self.saved_bytes else 0.0
        return f"<PipelinePlan: {len(self.chunks)} chunks in {self.parts} parts, {share:.0%} of their bytes offloaded>"

    def __str__(self) -> str:
        """A line per chunk in the order of forwards, then the predictions."""
        offloaded = set(self.schedule.offloaded_layers)
        lines = ["chunk    size  offloaded"]
        for chunk, number in self.chunks.items():
            share = sum(number * self.parts + part in offloaded for part in range(self.parts)) / self.parts
            size = format_bytes(self.profile[chunk.stage].saved_bytes)
            lines.append(f"{chunk.stage}F{chunk.microbatch:<4}{size:>9}{share:>8.0%}")
        lines.append(f"peak {format_bytes(self.peak_bytes)}, without {format_bytes(self.peak_bytes_without)}")
        lines.append(f"compute {format_s(self.step_s_without)}, stalls {format_s(self.stall_s)}")
        return "\n".join(lines)

    @cached_property
    def _walk(self) -> Walk:
        return Walk(self.actions, self.profile, self.parts)

    @property
    def _played(self) -> Simulation:
        step = Simulation(self.schedule, self._walk.layers, self.link)
        step.play(self._walk.steps)
        return step

    @cached_property
    def _placed(self) -> dict[int, Stay]:
        index = {point: number for number, point in enumerate(self.schedule.order)}
        return {move.layer: Stay(index[move.release], index[move.reload]) for move in self.schedule.moves}


def plan_pipeline(
    actions: Iterable[Any],
    profile: Mapping[int, StageProfile] | None = None,
    link: Link | None = None,
    *,
    memory_budget: int | str | None = None,
    fraction: float | None = None,
    lookahead: int | None = None,
    parts: int = 1,
) -> PipelinePlan:
    """Choose what a pipeline rank offloads, and when.

    Without a budget or fraction, everything moves that the link can carry while compute goes on. With one, the
    longest-lived parts move until it is met, and compute waits where it cannot be met otherwise.

    Args:
        actions: What the rank runs in one step, in order: texts such as ``"2F0"`` and ``"(0F4;3B1)OVERLAP_F_B"``, or
            the actions in a PyTorch schedule's ``pipeline_order[rank]``.
        profile: Stage → what a chunk of it costs; all alike if left out.
        link: How fast copies are; needed with a profile.
        memory_budget: Bytes of activation sets that may be on the device at once, or a text such as ``"20GiB"``; needs
            a profile. If no schedule meets it, the one that needs least is returned, with a warning.
        fraction: Fraction of the saved bytes to offload, 0 to 1. What has no time to travel stays all the same.
        lookahead: Start each reload so many actions before its backward, or right after its release if that is later;
            as many as the copy needs, if left out.
        parts: Into how many parts each chunk's set is cut.

    Raises:
        ValueError: Arguments out of range or that exclude each other, or actions that are no training step.
        TypeError: ``actions``, ``profile`` or ``link`` is something else.
    """
    order = read_actions(actions)
    check_options(memory_budget, fraction, lookahead, parts)
    check_costs(profile, link)
    if profile is None:
        if memory_budget is not None:
            raise ValueError("memory_budget needs a profile, which says how large the activation sets are; give both")
        profile = {action.stage: StageProfile() for action in order}
        link = link or Link(1.0, 1.0, 2.0)
    if link is None:
        raise ValueError("a profile needs a link to compare with; give link=measure_link()")
    missing = sorted({action.stage for action in order} - set(profile))
    if missing:
        raise ValueError(f"profile must have an entry for each stage, got none for stage {missing[0]}")
    most_bytes = None if memory_budget is None else parse_bytes(memory_budget)
    best = derive(order, profile, link, memory_budget=most_bytes, fraction=fraction, lookahead=lookahead, parts=parts)
    if most_bytes is not None:
        warn_of_budget(best, most_bytes)
    return best


def derive(
    order: tuple[Action, ...],
    profile: Mapping[int, StageProfile],
    link: Link,
    *,
    memory_budget: int | None = None,
    fraction: float | None = None,
    lookahead: int | None = None,
    parts: int = 1,
) -> PipelinePlan:
    """What :func:`plan_pipeline` chooses, of arguments that are checked, and without a warning."""
    walk = Walk(order, profile, parts)
    most_bytes = math.inf if memory_budget is None else memory_budget
    moved_bytes = math.inf if fraction is None else fraction * sum(walk.nbytes) * (1 - ROUNDING)

    def missing_bytes(placed: dict[int, Stay]) -> float:
        """How far ``placed`` is from what was asked for; without a budget or fraction, nothing is ever enough."""
        if memory_budget is not None:
            return walk.peak_bytes(placed) - most_bytes
        return moved_bytes - sum(walk.nbytes[layer] for layer in placed)

    may_miss_bytes = 0.0

    def is_enough(placed: dict[int, Stay]) -> bool:
        return missing_bytes(placed) <= may_miss_bytes

    def plan(placed: dict[int, Stay]) -> PipelinePlan:
        limit = walk.peak_bytes(placed)
        if memory_budget is not None:
            limit = max(limit, most_bytes + may_miss_bytes)
        relaxed = walk.relax(placed, limit, reloads=lookahead is None)
        moves = tuple(Move(layer, walk.order[stay.release], walk.order[stay.reload]) for layer, stay in relaxed.items())
        return PipelinePlan(order, parts, profile, link, Schedule(len(walk.nbytes), moves, tuple(walk.order)))

    placed = walk.choose(link, lookahead, is_enough)
    if is_enough(placed) or (memory_budget is None and fraction is None):
        return plan(placed)
    at_once = walk.choose(INSTANT_LINK, lookahead, is_enough)
    if not is_enough(at_once):  # No link is fast enough. From here on, what an instant one reaches counts as enough.
        may_miss_bytes = missing_bytes(at_once) + ROUNDING * sum(walk.nbytes)

    @cache
    def while_waiting(wait: float) -> dict[int, Stay]:
        slowed = Walk(order, _slower(order, profile, wait * walk.duration_s), parts)
        return slowed.choose(link, lookahead, is_enough)

    shortest = bisect_left(WAITS, True, key=lambda wait: is_enough(while_waiting(wait)))
    placements = [while_waiting(wait) for wait in WAITS[shortest : shortest + 1 + LONGER_WAITS]]
    placements.append(walk.choose(INSTANT_LINK, lookahead, is_enough))
    # Of those that wait equally long, but for rounding, the first.
    return min((plan(placed) for placed in placements if is_enough(placed)), key=lambda plan: round(plan.slowdown, 9))


def warn_of_budget(best: PipelinePlan, most_bytes: int) -> None:
    """Warn the caller if the plan breaks the budget, though it is the one that needs least."""
    if best.peak_bytes > most_bytes + ROUNDING * best.saved_bytes:
        warn_caller(
            f"memory_budget must be at least {best.peak_bytes} bytes ({format_bytes(best.peak_bytes)}), the least peak "
            f"that offloading reaches here, got {format_bytes(most_bytes)}; the plan breaks the budget. Raise it, use "
            "smaller microbatches, or a schedule with fewer of them in flight."
        )


def _slower(actions: tuple[Action, ...], profile: Mapping[int, StageProfile], wait_s: float) -> dict[int, StageProfile]:
    """The profile with which forwards and backwards wait half of ``wait_s`` each, in proportion to what they take."""
    forward_s = sum(profile[action.stage].forward_s for action in actions if action.kind == "F")
    backward_s = sum(profile[action.stage].backward_s for action in actions if action.kind in "BI")
    forwards = 1 + 0.5 * wait_s / forward_s if forward_s else 1.0
    backwards = 1 + 0.5 * wait_s / backward_s if backward_s else 1.0
    return {
        stage: replace(costs, forward_s=forwards * costs.forward_s, backward_s=backwards * costs.backward_s)
        for stage, costs in profile.items()
    }


def check_options(memory_budget: int | str | None, fraction: float | None, lookahead: int | None, parts: int) -> None:
    """Refuse options that :func:`plan_pipeline` would refuse, whatever the actions.

    Raises:
        ValueError: An option is out of range, or two of them exclude each other.
    """
    if memory_budget is not None:
        parse_bytes(memory_budget, "memory_budget")
    if memory_budget is not None and fraction is not None:
        raise ValueError("memory_budget and fraction exclude each other; give one.")
    if fraction is not None and not (isinstance(fraction, Real) and 0 <= fraction <= 1):
        raise ValueError(f"fraction must be from 0 to 1, got {fraction!r}")
    for name, value, minimum in (("lookahead", lookahead, 0), ("parts", parts, 1)):
        if value is not None and not is_int(value, minimum):
            raise ValueError(f"{name} must be an int of at least {minimum}, got {value!r}")


def check_costs(profile: Any, link: object) -> None:
    """Raise a ``TypeError`` for what is no profile of stages, or no link."""
    if profile is not None:
        wanted = "a dictionary of stages, such as {0: StageProfile(forward_s=0.1, backward_s=0.2, saved_bytes=1 << 30)}"
        check_type("profile", profile, Mapping, wanted)
        for costs in profile.values():
            check_type("each entry of profile", costs, StageProfile, "a StageProfile")
    if link is not None:
        check_link(link)
