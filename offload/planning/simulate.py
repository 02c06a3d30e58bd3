"""What the executor would do, and when: the steps of a schedule, given what layers cost and a link.

The steps are any sequence of forwards and backwards, with other compute between them: those of a training step, or of a
pipeline rank's step.

The rules are the executor's own. Copies to the host are queued when a tensor is saved and run one at a time, in order,
on the d2h stream. A release lets compute wait until the layer's copies are done. A reload allocates its buffers at
once, and its copies start no earlier than compute has come to that point, the tensor saved last first. Backward first
recomputes what was dropped, once the offloaded regions before the last dropped one are reloaded. Then backward waits
for one tensor at a time, and frees each when it is done with it. While both directions are busy they share the duplex
bandwidth.

Note:
    A profile without regions says how many tensors a layer saves, not when. The n-th of m is taken to be ready
    after the fraction n/m of the forward, and to be used in the mirrored part of the backward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.observe.spans import KINDS, LANES, Kind, Lane, Span, covered_s, merged
from offload.observe.timeline import Timeline
from offload.planning.layer_passes import LayerPasses, LayerPolicy, Piece, layer_passes
from offload.planning.link import Link, check_link
from offload.planning.profile import LayerProfile, Profile, check_profile
from offload.planning.region_costs import inputs_of, saved_of
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
        policies: The policy of each layer's regions; those of the plan if left out. With ``None``, everything that the
            layer saves is kept, or offloaded.
        title: The timeline's title; how many layers are offloaded, if left out.

    Raises:
        ValueError: The profile has another number of layers than the schedule or the policies, or not the regions
            that are kept.
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
            "for a layer of which all regions are kept, or offloaded."
        )
    for number, (policy, layer) in enumerate(zip(policies, profile.layers, strict=True)):
        can_be_kept = saved_of(layer.regions) | inputs_of(layer.regions)
        if policy is not None and not policy.kept <= can_be_kept:
            raise ValueError(
                f"the policy of layer {number} must keep some of the regions {sorted(can_be_kept)}, which are saved or "
                f"inputs, got {sorted(policy.kept - can_be_kept)}; plan with the same profile."
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
    """Device memory that is allocated when the task starts, or freed if negative."""
    freed_bytes: int = 0
    """Device memory that is freed when the task ends."""
    start_s: float = math.inf
    end_s: float = math.inf
    left: float = 0.0
    """What is left of the amount."""


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
        offloaded = set(schedule.offloaded_layers)
        known: dict[tuple[int, int, bool], LayerPasses] = {}
        self._passes: list[LayerPasses] = []
        for number, (layer, policy) in enumerate(zip(layers, policies or (None,) * len(layers), strict=True)):
            key = id(layer), id(policy), number in offloaded
            if key not in known:
                known[key] = layer_passes(layer, policy, offloads=number in offloaded)
            self._passes.append(known[key])
        self._tasks: dict[Lane, list[_Task]] = {lane: [] for lane in LANES}
        self._copies: dict[int, list[_Task]] = {layer: [] for layer in schedule.offloaded_layers}
        """Per offloaded layer the copies of its tensors in the order of saving: to the host, later back."""

    def play(self, steps: Iterable[Point | Interlude]) -> None:
        """Run the points of the schedule in their order, and what compute does between them."""
        for step in steps:
            if isinstance(step, Interlude):
                other = _Task("compute", "other", step.duration_s, step.label)
                other.taken_bytes = other.freed_bytes = step.nbytes
                self._add(other)
                continue
            for layer in self._schedule.releases(step):
                self._hold(-sum(self._passes[layer].offloaded), after=next(reversed(self._copies[layer]), None))
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
        """What the streams did."""
        return Timeline(tuple(self._spans()), tuple(self._memory()), title)

    @property
    def stall_s(self) -> float:
        """Seconds that compute waits for copies; the timeline need not be made for them."""
        return covered_s(merged(self._compute_spans("stall"), _no_gap))

    def _add(self, task: _Task) -> _Task:
        task.left = task.amount
        self._tasks[task.lane].append(task)
        return task

    def _hold(self, nbytes: int, after: _Task | None = None) -> _Task:
        """From here on so many more (or fewer) bytes are on the device; compute waits for ``after`` before that."""
        return self._add(_Task("compute", "other", 0.0, after=after, taken_bytes=nbytes))

    def _forward(self, point: Point) -> None:
        number = point.layer
        for piece in self._passes[number].forward:
            task = self._piece("forward", piece, repr(point), number)
            if piece.offloads:
                copy = _Task("d2h", "offload", piece.taken_bytes, f"offload {number}", number, task)
                self._copies[number].append(self._add(copy))

    def _reload(self, layer: int) -> None:
        offloaded = self._passes[layer].offloaded
        here = self._hold(sum(offloaded))
        copies = [_Task("h2d", "reload", nbytes, f"reload {layer}", layer, here) for nbytes in offloaded]
        for copy in reversed(copies):
            self._add(copy)
        self._copies[layer] = copies

    def _backward(self, point: Point) -> None:
        passes = self._passes[point.layer]
        if passes.recompute is not None:
            self._piece("recompute", passes.recompute, f"R{point.layer}", point.layer)
        for piece in passes.backward:
            self._piece("backward", piece, repr(point), point.layer)

    def _piece(self, kind: Kind, piece: Piece, label: str, layer: int) -> _Task:
        after = None if piece.awaits is None else self._copies[layer][piece.awaits]
        return self._add(
            _Task("compute", kind, piece.seconds, label, layer, after, piece.taken_bytes, piece.freed_bytes)
        )

    def _run(self) -> None:
        """Find when each task starts and ends: a stream runs one at a time, in order, and the copies share the link."""
        now_s = 0.0
        waiting = [deque(tasks) for tasks in self._tasks.values()]
        while busy := [
            queue for queue in waiting if queue and ((after := queue[0].after) is None or after.end_s <= now_s)
        ]:
            lanes = {queue[0].lane for queue in busy}
            d2h, h2d = self._link.rates(d2h="d2h" in lanes, h2d="h2d" in lanes)
            rates = {"compute": 1.0, "d2h": d2h, "h2d": h2d}
            ends = [now_s + queue[0].left / rates[queue[0].lane] for queue in busy]
            then_s = min(ends)
            for queue, end_s in zip(busy, ends, strict=True):
                task = queue[0]
                task.start_s = min(task.start_s, now_s)
                if end_s == then_s:
                    task.end_s = then_s
                    queue.popleft()
                else:
                    task.left = max(0.0, task.left - (then_s - now_s) * rates[task.lane])
            now_s = then_s

    def _compute_spans(self, *kinds: Kind) -> Iterator[Span]:
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
        yield from merged(self._compute_spans(*KINDS), _no_gap)
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
