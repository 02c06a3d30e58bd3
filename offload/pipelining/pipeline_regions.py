"""What a pipeline rank keeps, offloads and computes again, where the layers of its stages are known by region.

Ways to treat the layers are tried, from all kept to all computed again: see :mod:`offload.planning.ladder`. With
each, the rank's moves are derived as for whole sets, and taken is what is over first. Layers of one kind are treated
alike, in all microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from offload.base.checks import check_type, parse_bytes
from offload.pipelining.order import read_actions
from offload.pipelining.stage_plan import ROUNDING, PipelinePlan, derive, warn_of_budget
from offload.pipelining.stage_profile import StageProfile
from offload.pipelining.walk import Walk
from offload.planning.ladder import ladder_of
from offload.planning.link import Link
from offload.planning.passes import LayerPolicy, passes_of
from offload.planning.profile import LayerProfile, Profile

StagePolicies = Mapping[int, tuple[LayerPolicy, ...]]
"""Stage → what happens to the regions of each of its layers."""


@dataclass(frozen=True, repr=False)
class RegionPlan(PipelinePlan):
    """What a pipeline rank does with the regions of its layers, and what of that travels when.

    Args:
        policies: Stage → what happens to the regions of each of its layers. What is kept travels if the layer's part
            does. The profile is that of chunks whose layers are treated so.
    """

    policies: StagePolicies

    def __str__(self) -> str:
        """As any pipeline plan, then what is computed again in the layers of each stage."""
        lines = [super().__str__()]
        for stage, policies in self.policies.items():
            layers = [*zip(self.profile[stage].layers, policies, strict=True)]
            again = [
                ", ".join(region.name for number, region in enumerate(layer.regions) if number not in policy.kept)
                for layer, policy in layers
            ]
            for alike, numbers in groupby(range(len(again)), key=again.__getitem__):
                first, *others = numbers
                which = f"layers {first} to {others[-1]}" if others else f"layer {first}"
                lines.append(f"stage {stage}, {which} computed again: {alike or 'nothing'}")
        return "\n".join(lines)


def plan_regions(
    actions: Iterable[Any],
    profile: Mapping[int, StageProfile],
    link: Link,
    *,
    memory_budget: int | str,
    lookahead: int | None = None,
) -> RegionPlan:
    """Choose what a pipeline rank keeps, offloads and computes again, and when it moves.

    Args:
        actions: What the rank runs in one step, in order: texts such as ``"2F0"`` and ``"(0F4;3B1)OVERLAP_F_B"``, or
            the actions in a PyTorch schedule's ``pipeline_order[rank]``.
        profile: Stage → what a chunk of it costs, with the stage's layers and their regions.
        link: How fast copies are.
        memory_budget: Bytes of activation sets that may be on the device at once, with what is computed again, or a
            text such as ``"20GiB"``. If nothing meets it, what needs least is returned, with a warning.
        lookahead: As :func:`~offload.pipelining.plan_pipeline` takes it.

    Raises:
        ValueError: A stage has no profile with layers, or the actions are no training step.
        TypeError: ``profile`` is something else.
    """
    order = read_actions(actions)
    check_type("profile", profile, Mapping, "a dictionary of stages with their StageProfile")
    stages = {action.stage: profile.get(action.stage) for action in order}
    for stage, costs in stages.items():
        if costs is None or not costs.layers:
            raise ValueError(
                f"profile must have the layers of each stage, got none for stage {stage}; make it with "
                "StageProfile.of_layers, or let attach measure it"
            )
    most_bytes = parse_bytes(memory_budget, "memory_budget")
    known = {stage: costs for stage, costs in stages.items() if costs is not None}
    parts = max(len(costs.layers) for costs in known.values())
    fitting: list[RegionPlan] = []
    others: list[RegionPlan] = []
    for policies in _ways(known):
        costs_so = {stage: treated(costs, policies[stage]) for stage, costs in known.items()}
        if fitting and Walk(order, costs_so, 1).duration_s >= min(map(_step_s, fitting)):
            break  # what keeps less computes more
        moves = derive(order, costs_so, link, memory_budget=most_bytes, lookahead=lookahead, parts=parts)
        plan = RegionPlan(order, parts, costs_so, link, moves.schedule, policies)
        fits = plan.peak_bytes <= most_bytes + ROUNDING * plan.saved_bytes
        (fitting if fits else others).append(plan)
    if fitting:
        return min(fitting, key=_step_s)
    best = min(others, key=lambda plan: plan.peak_bytes)
    warn_of_budget(best, most_bytes)
    return best


def treated(costs: StageProfile, policies: Sequence[LayerPolicy]) -> StageProfile:
    """What a chunk costs whose layers are treated so: its set is what is kept, all of which may travel."""
    passes = [passes_of(layer, policy, travels=True) for layer, policy in zip(costs.layers, policies, strict=True)]
    tensors = tuple(nbytes for layer in passes for nbytes in layer.travelling if nbytes)
    recording_s = sum(one.forward_s - layer.forward_s for one, layer in zip(passes, costs.layers, strict=True))
    return replace(
        costs,
        forward_s=max(costs.forward_s, costs.forward_s + recording_s),
        backward_s=costs.backward_s + sum(layer.recompute_s for layer in passes),
        saved_bytes=sum(tensors),
        tensors=tensors,
        kept_bytes=0,
        again_bytes=sum(
            max(0, layer.backward_peak_bytes - layer.workspace_bytes - layer.held_bytes) for layer in passes
        ),
    )


def everything_again(costs: StageProfile) -> tuple[LayerPolicy, ...]:
    """The policies with which the fewest bytes are kept, and the most is computed again."""
    return tuple(_all_travelling(layer, LayerPolicy(frozenset())) for layer in costs.layers)


def _ways(profile: Mapping[int, StageProfile]) -> Iterator[dict[int, tuple[LayerPolicy, ...]]]:
    """Ways to treat the layers of all stages, the one that keeps all first."""
    ladder = ladder_of(Profile(tuple(layer for costs in profile.values() for layer in costs.layers)))
    for level in reversed(ladder.levels):
        rungs = iter([ladder.rungs[kind][level[kind]] for kind in ladder.kinds])
        yield {
            stage: tuple(_all_travelling(layer, next(rungs)) for layer in costs.layers)
            for stage, costs in profile.items()
        }


def _all_travelling(layer: LayerProfile, rung: LayerPolicy | None) -> LayerPolicy:
    """What the rung keeps travels, and what cannot be computed again; all that is saved, if there is no rung."""
    saved = frozenset(number for number, region in enumerate(layer.regions) if region.saved)
    kept = saved if rung is None else rung.kept | {one for one in saved if not layer.regions[one].recomputable}
    return LayerPolicy(kept, kept)


def _step_s(plan: PipelinePlan) -> float:
    """Rounded, so that of equally fast ones the one counts that keeps most."""
    return round(plan.step_s_without + plan.stall_s, 9)
