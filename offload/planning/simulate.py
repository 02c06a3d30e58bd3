"""What the executor would do, and when: a schedule played against what layers cost and a link.

What is played is any sequence of forwards and backwards, with other compute between them: a training step is one, a
pipeline rank's step another.

The rules are the executor's own. Copies to the host are queued when a tensor is saved and run one
at a time, in order, on the d2h stream. A release lets compute wait until the layer's copies are
done. A reload allocates its buffers at once, and its copies start no earlier than compute has
come to that point, the tensor saved last first. Backward waits for one tensor at a time and
frees each when it is done with it. While both directions are busy they share the duplex bandwidth.

Note:
    A profile without regions says how many tensors a layer saves, not when. The n-th of m is taken to be ready
    after the fraction n/m of the forward, and to be used in the mirrored part of the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from offload.observe.spans import KINDS, LANES, Kind, Lane, Span, covered_s, merged
from offload.observe.timeline import Timeline
from offload.planning.link import Link, check_link
from offload.planning.passes import LayerPolicy, Passes, passes_of
from offload.planning.profile import LayerProfile, Profile, check_profile
from offload.schedule.points import Point, backward
from offload.schedule.schedule import HasSchedule, Schedule, schedule_of


class Interlude(NamedTuple):
    """Compute that belongs to no layer."""

    label: str
    duration_s: float
    nbytes: int = 0
    """Device memory that it needs while it runs."""


def simulate(
    schedule: Schedule | HasSchedule,
    profile: Profile,
    link: Link,
    *,
    policies: Sequence[LayerPolicy | None] | None = None,
    title: str | None = None,
) -> Timeline:
    """One microbatch's step, as ``schedule`` would run it.

    Args:
        schedule: A :class:`Schedule`, or a plan.
        profile: What the layers cost.
        link: How fast copies are.
        policies: What happens to the regions of each layer; those of the plan if left out. Where there is none, all
            that a layer saves is treated alike.
        title: The timeline's title; how many layers are offloaded, if left out.

    Raises:
        ValueError: The profile has another number of layers than the schedule or the policies, or not the regions
            that are treated.
    """
    if not isinstance(schedule, Schedule):
        if policies is None:
            policies = getattr(schedule, "policies", None)
        schedule = schedule_of("schedule", schedule, "a Schedule, such as Schedule.default(4, 32), or a plan")
    check_profile(profile)
    check_link(link)
    if len(profile.layers) != schedule.model_layers:
        raise ValueError(
            f"profile must have as many layers as the schedule, {schedule.model_layers}, got "
            f"{len(profile.layers)}; profile the layers that the schedule speaks of."
        )
    policies = policies or (None,) * schedule.model_layers
    _check_policies(policies, profile)
    if title is None:
        title = f"{len(schedule.offloaded_layers)} of {schedule.model_layers} layers offloaded"
    steps: list[Point | Interlude] = [*schedule.order, Interlude("rest of the step", profile.other_s)]
    loss = Interlude("loss", profile.loss_s, profile.loss_bytes)
    steps.insert(steps.index(backward(schedule.model_layers - 1)), loss)
    step = Simulation(schedule, profile.layers, link, policies)
    step.play(steps)
    return step.timeline(title)


def _check_policies(policies: Sequence[LayerPolicy | None], profile: Profile) -> None:
    if len(policies) != len(profile.layers):
        raise ValueError(
            f"policies must be one for each of the {len(profile.layers)} layers, got {len(policies)}; give None "
            "for a layer whose regions are treated alike."
        )
    for number, (policy, layer) in enumerate(zip(policies, profile.layers, strict=True)):
        if policy is not None and not policy.kept <= set(range(len(layer.regions))):
            raise ValueError(
                f"the policy of layer {number} must name some of its {len(layer.regions)} regions, got "
                f"{sorted(policy.kept)}; plan with the same profile."
            )


@dataclass(eq=False, slots=True)
class _Task:
    """What a stream does in one go: seconds of compute, or bytes of a copy."""

    lane: Lane
    kind: Kind
    amount: float
    label: str = ""
    layer: int | None = None
    after: _Task | None = None
    """A task of another stream, over before this one starts."""
    taken_bytes: int = 0
    """Device memory that is taken when it starts, or given back if negative."""
    freed_bytes: int = 0
    """Device memory that is given back when it ends."""
    start_s: float = math.inf
    end_s: float = math.inf


class Simulation:
    """What the three streams do: compute its steps, the others what a schedule moves before each of its points."""

    def __init__(
        self,
        schedule: Schedule,
        layers: Sequence[LayerProfile],
        link: Link,
        policies: Sequence[LayerPolicy | None] | None = None,
    ) -> None:
        self._schedule = schedule
        self._link = link
        moving = set(schedule.offloaded_layers)
        self._passes: list[Passes] = []
        made: dict[tuple[int, int, bool], Passes] = {}
        """Those of each layer, so treated: a pipeline's chunks have theirs in common."""
        for number, (layer, policy) in enumerate(zip(layers, policies or (None,) * len(layers), strict=True)):
            key = id(layer), id(policy), number in moving
            if key not in made:
                made[key] = passes_of(layer, policy, travels=number in moving)
            self._passes.append(made[key])
        self._tasks: dict[Lane, list[_Task]] = {lane: [] for lane in LANES}
        self._copies: dict[int, list[_Task]] = {layer: [] for layer in schedule.offloaded_layers}
        """Per offloaded layer the copies of its tensors in the order of saving: to the host, later back."""

    def play(self, steps: Iterable[Point | Interlude]) -> None:
        """Play the points of the schedule in their order, and what compute does between them."""
        for step in steps:
            if isinstance(step, Interlude):
                other = self._add(_Task("compute", "other", step.duration_s, step.label))
                other.taken_bytes = other.freed_bytes = step.nbytes
                continue
            for layer in self._schedule.releases(step):
                self._hold(-self._passes[layer].travelling_bytes, after=next(reversed(self._copies[layer]), None))
            for layer in self._schedule.reloads(step):
                self._reload(layer)
            workspace_bytes = self._passes[step.layer].workspace_bytes
            self._hold(workspace_bytes)
            if step.phase == "F":
                self._forward(step)
            else:
                self._backward(step)
            self._hold(-workspace_bytes)
        self._run()

    def timeline(self, title: str) -> Timeline:
        """What was played."""
        return Timeline(tuple(self._spans()), tuple(self._memory()), title)

    @property
    def duration_s(self) -> float:
        """That of the timeline, which need not be made for it."""
        played = [task for task in chain(*self._tasks.values()) if task.amount]
        return max((task.end_s for task in played), default=0.0) - min((task.start_s for task in played), default=0.0)

    @property
    def stall_s(self) -> float:
        """That of the timeline, which need not be made for it."""
        return covered_s(merged(self._compute("stall"), _no_gap))

    def _add(self, task: _Task) -> _Task:
        self._tasks[task.lane].append(task)
        return task

    def _hold(self, nbytes: int, after: _Task | None = None) -> _Task:
        """From here on so many more (or fewer) bytes are on the device; compute waits for ``after`` before that."""
        return self._add(_Task("compute", "other", 0.0, after=after, taken_bytes=nbytes))

    def _forward(self, point: Point) -> None:
        label = repr(point)
        for piece in self._passes[point.layer].forward:
            task = _Task("compute", "forward", piece.seconds, label, point.layer)
            task.taken_bytes, task.freed_bytes = piece.taken_bytes, piece.freed_bytes
            self._add(task)
            if piece.travels:
                copy = _Task("d2h", "offload", piece.taken_bytes, f"offload {point.layer}", point.layer, task)
                self._copies[point.layer].append(self._add(copy))

    def _reload(self, layer: int) -> None:
        travelling = self._passes[layer].travelling
        here = self._hold(sum(travelling))
        copies = [_Task("h2d", "reload", nbytes, f"reload {layer}", layer, here) for nbytes in travelling]
        for copy in reversed(copies):
            self._add(copy)
        self._copies[layer] = copies

    def _backward(self, point: Point) -> None:
        label = repr(point)
        for piece in self._passes[point.layer].backward:
            after = None if piece.awaits is None else self._copies[point.layer][piece.awaits]
            if piece.taken_bytes or piece.recompute_s:
                again = _Task("compute", "recompute", piece.recompute_s, f"R{point.layer}", point.layer, after)
                again.taken_bytes, again.freed_bytes = piece.taken_bytes, piece.passing_bytes
                self._add(again)
                after = None
            task = _Task("compute", "backward", piece.seconds, label, point.layer, after)
            task.freed_bytes = piece.freed_bytes
            self._add(task)

    def _run(self) -> None:
        """Find when each task starts and ends: a stream runs one at a time, in order, and the copies share the link."""
        now_s = 0.0
        streams = list(self._tasks)
        queues = [tasks[::-1] for tasks in self._tasks.values()]  # the next one last
        left = [queue[-1].amount if queue else 0.0 for queue in queues]
        """What is left of each stream's next task."""
        known: dict[tuple[int, ...], list[float]] = {}
        """The rates of the streams that are busy together."""
        while True:
            # The loops of this function are most of what planning takes: they call nothing that they need not.
            for at, queue in enumerate(queues):  # what takes no time, first: nothing else changes meanwhile
                if not queue or queue[-1].amount:
                    continue
                while queue and not (task := queue[-1]).amount and (task.after is None or task.after.end_s <= now_s):
                    task.start_s = task.end_s = now_s
                    queue.pop()
                if queue:
                    left[at] = queue[-1].amount
            busy = tuple(
                [
                    at
                    for at, queue in enumerate(queues)
                    if queue and ((after := queue[-1].after) is None or after.end_s <= now_s)
                ]
            )
            if not busy:
                break
            speeds = known.get(busy)
            if speeds is None:
                copying = {streams[at] for at in busy}
                d2h, h2d = self._link.rates(d2h="d2h" in copying, h2d="h2d" in copying)
                rates = {"compute": 1.0, "d2h": d2h, "h2d": h2d}
                speeds = [rates[streams[at]] for at in busy]
                known[busy] = speeds
            ends = [now_s + left[at] / speed for at, speed in zip(busy, speeds, strict=True)]
            then_s = min(ends)
            past_s = then_s - now_s
            for at, speed, end_s in zip(busy, speeds, ends, strict=True):
                queue = queues[at]
                task = queue[-1]
                if task.start_s == math.inf:
                    task.start_s = now_s
                if end_s == then_s:
                    task.end_s = then_s
                    queue.pop()
                    if queue:
                        left[at] = queue[-1].amount
                else:
                    left[at] = max(0.0, left[at] - past_s * speed)
            now_s = then_s

    def _compute(self, *kinds: Kind) -> Iterator[Span]:
        """What compute did of these kinds, and its stalls: a task starts later than the one before ends, for a copy."""
        last_end_s = 0.0
        for task in self._tasks["compute"]:
            if task.after is not None and task.after.lane != "compute" and task.start_s > last_end_s:
                what = f"wait for {task.after.label}"
                yield Span("compute", "stall", last_end_s, task.start_s, what, task.after.layer)
            if task.amount and task.kind in kinds:
                yield Span("compute", task.kind, task.start_s, task.end_s, task.label, task.layer)
            last_end_s = task.end_s

    def _spans(self) -> Iterator[Span]:
        yield from merged(self._compute(*KINDS), _no_gap)
        for task in (*self._tasks["d2h"], *self._tasks["h2d"]):
            yield Span(task.lane, task.kind, task.start_s, task.end_s, task.label, task.layer, round(task.amount))

    def _memory(self) -> Iterator[tuple[float, int]]:
        """The bytes on the device, from each time on."""
        held = 0
        yield 0.0, held
        for task in self._tasks["compute"]:
            for time_s, change in ((task.start_s, task.taken_bytes), (task.end_s, -task.freed_bytes)):
                held += change
                if change:
                    yield time_s, held


def _no_gap(span: Span) -> float:
    """How far pieces of one span may be apart: pieces of a layer are one, what belongs to no layer stays apart."""
    return -1.0 if span.layer is None else 0.0
