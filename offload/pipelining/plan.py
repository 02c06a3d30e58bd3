"""Which activations of a pipeline rank are offloaded, and when: a schedule derived from the rank's own order.

Each chunk, one microbatch on one stage, saves one activation set, cut into parts of equal size so that memory is freed
and allocated gradually. The longest-lived parts are offloaded first, each released once its copy can be done, and
reloaded just early enough. A part is skipped if that leaves no time on the host.

Where a budget asks for more than the link can copy meanwhile, the derivation is repeated with slower compute, and the
schedule with the shortest simulated stalls is taken. Memory that the peak leaves elsewhere is used as slack.

Note:
    A prediction leaves out the other ranks and so the bubbles of the pipeline, a link that several GPUs share, and
    backward's workspace. Both directions of the link count as always busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from offload.base.checks import check_type, format_bytes, format_s, is_int, parse_bytes, warn_caller
from offload.observe.timeline import Timeline
from offload.pipelining.order import Action, Chunk, number_chunks, read_actions
from offload.pipelining.rank_step import Absent, RankStep, StageProfile
from offload.planning.profile import Link, check_link
from offload.planning.simulate import simulate_steps
from offload.schedule.points import Move
from offload.schedule.schedule import Schedule

WAITS = tuple(0.05 * 1.4**n for n in range(18))  # how long compute may wait for copies, in steps

LONGER_WAITS = 4  # as many that are long enough are tried: with longer ones, fewer bytes may be offloaded

INSTANT_LINK = Link(1e30, 1e30, 2e30)  # the last resort: released and reloaded at once, at whatever cost


@dataclass(frozen=True, repr=False)
class PipelinePlan:
    """What a pipeline rank offloads and when, with its predicted cost.

    Args:
        actions: What the rank runs, in order.
        parts: Into how many parts each chunk's set is cut.
        profile: What a chunk of each stage costs.
        link: The link that the plan was made for.
        schedule: What is released and reloaded when, over ``chunks * parts`` layers.
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
        """Bytes that are copied to the host and back in one step."""
        return sum(self._step.nbytes[layer] for layer in self.schedule.offloaded_layers)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all activation sets of one step."""
        return sum(self._step.nbytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of activation sets on the device at once. Backward's workspace comes on top."""
        return self._step.peak_bytes(self._absent)

    @property
    def peak_bytes_without(self) -> int:
        """The most bytes of activation sets on the device at once with nothing offloaded."""
        return self._step.peak_bytes({})

    @property
    def host_bytes(self) -> int:
        """The most bytes on the host at once."""
        return self._step.host_bytes(self._absent)

    @property
    def step_s_without(self) -> float:
        """Compute seconds of the step, bubbles left out."""
        return self._step.start_s[-1]

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step, bubbles left out. Where a backward is split, memory counts as free after its half I."""
        return simulate_steps(self.schedule, self._step.layers, self.link, self._step.steps, title=repr(self))

    @property
    def stall_s(self) -> float:
        """Seconds that compute waits for copies in the simulated step."""
        return self.timeline.stall_s

    @property
    def slowdown(self) -> float:
        """Stalls as a fraction of compute; 0 where the link is fast enough for all copies."""
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
    def _step(self) -> RankStep:
        return RankStep(self.actions, self.profile, self.parts)

    @cached_property
    def _absent(self) -> Absent:
        index = {point: number for number, point in enumerate(self.schedule.order)}
        return {move.layer: (index[move.release], index[move.reload]) for move in self.schedule.moves}


def plan_pipeline(
    actions: Iterable[Any],
    profile: Mapping[int, StageProfile],
    link: Link,
    *,
    memory_budget: int | str | None = None,
    parts: int = 1,
) -> PipelinePlan:
    """Choose what a pipeline rank offloads, and when.

    Without a budget, everything is offloaded that the link can copy while compute goes on. With one, the longest-lived
    parts are offloaded until it is met, and compute waits where it cannot be met otherwise.

    Args:
        actions: What the rank runs in one step, in order: texts such as ``"2F0"`` and ``"(0F4;3B1)OVERLAP_F_B"``, or
            the actions in a PyTorch schedule's ``pipeline_order[rank]``.
        profile: Stage → what a chunk of it costs.
        link: How fast copies are.
        memory_budget: Bytes of activation sets that may be on the device at once, or a text such as ``"20GiB"``. If no
            schedule meets it, the one that needs least is returned, with a warning.
        parts: Into how many parts each chunk's set is cut.
    """
    order = read_actions(actions)
    check_options(memory_budget, parts, profile, link)
    missing = sorted({action.stage for action in order} - set(profile))
    if missing:
        raise ValueError(f"profile must have an entry for each stage, got none for stage {missing[0]}")
    budget_bytes = None if memory_budget is None else parse_bytes(memory_budget)
    step = RankStep(order, profile, parts)
    limit_bytes = -1 if budget_bytes is None else budget_bytes  # without a budget, nothing is ever enough

    def is_enough(absent: Absent) -> bool:
        return step.peak_bytes(absent) <= limit_bytes

    found = [step.choose(link, is_enough)]
    if budget_bytes is not None and not is_enough(found[0]):
        at_once = step.choose(INSTANT_LINK, is_enough)
        waits = WAITS if is_enough(at_once) else ()
        slower = (RankStep(order, _slower(order, profile, wait * step.start_s[-1]), parts) for wait in waits)
        waiting = (slow.choose(link, is_enough) for slow in slower)
        found = [*islice(filter(is_enough, waiting), LONGER_WAITS), at_once]
    plans = []
    for absent in found:
        relaxed = step.relax(absent, max(limit_bytes, step.peak_bytes(absent)))
        moves = tuple(Move(layer, step.order[at], step.order[until]) for layer, (at, until) in relaxed.items())
        schedule = Schedule(len(step.nbytes), moves, tuple(step.order))
        plans.append(PipelinePlan(order, parts, profile, link, schedule))
    best = plans[0] if len(plans) == 1 else min(plans, key=lambda plan: round(plan.slowdown, 9))
    if budget_bytes is not None and best.peak_bytes > budget_bytes:
        warn_caller(
            f"memory_budget must be at least {best.peak_bytes} bytes ({format_bytes(best.peak_bytes)}), the least peak "
            f"that offloading reaches here, got {format_bytes(budget_bytes)}; the plan breaks the budget. Raise it, "
            "use smaller microbatches, or a schedule with fewer of them in flight."
        )
    return best


def _slower(actions: tuple[Action, ...], profile: Mapping[int, StageProfile], wait_s: float) -> dict[int, StageProfile]:
    """The profile with which forwards and backwards wait half of ``wait_s`` each, in proportion to their seconds."""
    forward_s = sum(profile[action.stage].forward_s for action in actions if action.kind == "F")
    backward_s = sum(profile[action.stage].backward_s for action in actions if action.kind in "BI")
    forwards = 1 + 0.5 * wait_s / forward_s if forward_s else 1.0
    backwards = 1 + 0.5 * wait_s / backward_s if backward_s else 1.0
    return {
        stage: replace(costs, forward_s=forwards * costs.forward_s, backward_s=backwards * costs.backward_s)
        for stage, costs in profile.items()
    }


def check_options(memory_budget: Any, parts: Any, profile: Any, link: object) -> None:
    """Refuse what :func:`plan_pipeline` would refuse, whatever the actions."""
    if memory_budget is not None:
        parse_bytes(memory_budget, "memory_budget")
    if parts is not None and not is_int(parts, 1):
        raise ValueError(f"parts must be an int of at least 1, got {parts!r}")
    if profile is not None:
        wanted = "a dictionary of stages, such as {0: StageProfile(forward_s=0.1, backward_s=0.2, saved_bytes=1 << 30)}"
        check_type("profile", profile, Mapping, wanted)
        for costs in profile.values():
            check_type("each entry of profile", costs, StageProfile, "a StageProfile")
    if link is not None:
        check_link(link)
