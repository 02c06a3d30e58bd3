"""All ranks of a pipeline in one simulation, bubbles included.

Each rank has its three streams, and what one does waits for another: a forward for that of the stage before, a backward
for that of the stage behind. So a wait for a copy is hidden where the rank would have waited for its neighbours anyway,
and a rank that waits lets them wait, too. The ranks share what their host gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from offload.base.checks import format_s
from offload.observe.timeline import Timeline
from offload.pipelining.order import Action
from offload.pipelining.shared_link import SharedLink
from offload.pipelining.stage_plan import PipelinePlan
from offload.pipelining.walk import Walk
from offload.planning.simulate import Arrival, Expected, Interlude, Simulation, Stream, play
from offload.schedule.points import Point


@dataclass(frozen=True, repr=False)
class PipelineStep:
    """One simulated step of all ranks.

    Args:
        timelines: What each rank does.
        step_s_without: Seconds of the step if nothing is offloaded.
    """

    timelines: tuple[Timeline, ...]
    step_s_without: float

    @property
    def step_s(self) -> float:
        """Seconds until the last rank is done."""
        return max(timeline.duration_s for timeline in self.timelines)

    @property
    def slowdown(self) -> float:
        """How much longer the step takes than without offloading, as a fraction."""
        return self.step_s / self.step_s_without - 1 if self.step_s_without else 0.0

    @property
    def bubbles_s(self) -> tuple[float, ...]:
        """Seconds of each rank in which it neither computes nor waits for a copy."""
        return tuple(
            self.step_s - sum(span.duration_s for span in timeline.lane("compute")) for timeline in self.timelines
        )

    def __repr__(self) -> str:
        return (
            f"<PipelineStep: {len(self.timelines)} ranks, {format_s(self.step_s)}, "
            f"without offloading {format_s(self.step_s_without)}>"
        )


def simulate_pipeline(
    plans: Sequence[PipelinePlan], link: SharedLink | None = None, *, step_s_without: float | None = None
) -> PipelineStep:
    """What all ranks would do in one step, and when.

    Sending an activation to the next stage counts as no time.

    Args:
        plans: What each rank runs and offloads.
        link: How fast each rank copies, alone and while the others copy; each rank's own, that its plan was made for,
            if left out.
        step_s_without: Measured seconds of a step without offloading, to which the plans' seconds of compute are
            stretched: they are those of a fast chunk, and the clocks of a busy device vary.

    Raises:
        ValueError: No plans, not one link for each rank, or orders that wait for each other for ever.
    """
    link = link or SharedLink.private([plan.link for plan in plans])
    if len(link.alone) != len(plans):
        raise ValueError(f"link must have one link for each of the {len(plans)} ranks, got {len(link.alone)}")
    staying = [replace(plan, schedule=replace(plan.schedule, moves=())) for plan in plans]
    without_s = max(rank.duration_s for rank in _play(staying, link, 1.0))
    stretch = step_s_without / without_s if step_s_without and without_s else 1.0
    timelines = (rank.timeline(f"rank {number}") for number, rank in enumerate(_play(plans, link, stretch)))
    return PipelineStep(tuple(timelines), without_s * stretch)


def _play(plans: Sequence[PipelinePlan], link: SharedLink, stretch: float) -> list[Simulation]:
    """The ranks side by side, their compute ``stretch`` times as long."""
    stages = {action.stage for plan in plans for action in plan.actions}
    ranks: list[Simulation] = []
    for plan in plans:
        profile = {stage: costs.stretched(stretch) for stage, costs in plan.profile.items()}
        walk = Walk(plan.actions, profile, plan.parts)
        rank = Simulation(plan.schedule, walk.layers, plan.link, beside=next(iter(ranks), None))
        rank.queue(_steps(plan.actions, walk, stages))
        ranks.append(rank)

    @cache
    def rates(busy: frozenset[Stream]) -> dict[Stream, float]:
        return link.rates(frozenset(stream for stream in busy if stream[1] != "compute"))

    play(ranks, rates)
    return ranks


def _steps(actions: Sequence[Action], walk: Walk, stages: set[int]) -> Iterator[Point | Interlude | Arrival | Expected]:
    """What the rank runs, with what it waits for from other stages, and what they wait for."""
    for action, steps in zip(actions, walk.action_steps, strict=True):
        before = action.stage - 1 if action.kind == "F" else action.stage + 1
        if action.kind != "W" and before in stages:
            yield Expected(_hand_over(before, action))
        yield from steps
        if action.kind != "W":
            yield Arrival(_hand_over(action.stage, action))


def _hand_over(stage: int, action: Action) -> str:
    """The forward of this stage for the action's microbatch, or its backward: the half for the inputs is enough."""
    return f"{stage}{'F' if action.kind == 'F' else 'B'}{action.microbatch}"
