"""What the executor would do, and when: a schedule played against what layers cost and a link.

What is played is any sequence of forwards and backwards, with other compute between them: a training step is one, a
pipeline rank's step another.

The rules are the executor's own. Copies to the host are queued when a tensor is saved and run one
at a time, in order, on the d2h stream. A release lets compute wait until the layer's copies are
done. A reload allocates its buffers at once, and its copies start no earlier than compute has
come to that point, the tensor saved last first. Backward waits for one tensor at a time and
frees each when it is done with it. While both directions are busy they share the duplex bandwidth.

Note:
    A profile says how many tensors a layer saves, not when. The n-th of m is taken to be ready
    after the fraction n/m of the forward, and to be used in the mirrored part of the backward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.observe.spans import COPY_LANES, Kind, Lane, Span
from offload.observe.timeline import Timeline
from offload.planning.link import Link
from offload.planning.profile import LayerProfile, Profile
from offload.schedule.points import Point, backward
from offload.schedule.schedule import HasSchedule, Schedule


class Interlude(NamedTuple):
    """Compute that belongs to no layer."""

    label: str
    duration_s: float


def simulate(schedule: Schedule | HasSchedule, profile: Profile, link: Link, *, title: str | None = None) -> Timeline:
    """One microbatch's step, as ``schedule`` would run it.

    Args:
        schedule: A :class:`Schedule`, or a plan.
        profile: What the layers cost.
        link: How fast copies are.
        title: The timeline's title; how many layers are offloaded, if left out.

    Raises:
        ValueError: The profile has another number of layers than the schedule.
    """
    if not isinstance(schedule, Schedule):
        schedule = schedule.schedule
    if len(profile.layers) != schedule.model_layers:
        raise ValueError(
            f"profile must have as many layers as the schedule, {schedule.model_layers}, got "
            f"{len(profile.layers)}; profile the layers that the schedule speaks of."
        )
    if title is None:
        title = f"{len(schedule.offloaded_layers)} of {schedule.model_layers} layers offloaded"
    steps: list[Point | Interlude] = [*schedule.order, Interlude("rest of the step", profile.other_s)]
    steps.insert(steps.index(backward(schedule.model_layers - 1)), Interlude("loss", profile.loss_s))
    return Simulation(schedule, profile.layers, link).run(steps, title)


@dataclass(eq=False)
class _Copy:
    lane: Lane
    layer: int
    nbytes: int
    ready_s: float
    left: float
    start_s: float = 0.0
    end_s: float = math.inf


class _Queues:
    """The two copy streams: each runs its copies in order, and both share the link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._now_s = 0.0
        self._waiting: dict[Lane, deque[_Copy]] = {lane: deque() for lane in COPY_LANES}
        self._done: list[_Copy] = []

    def push(self, lane: Lane, layer: int, nbytes: int, ready_s: float) -> _Copy:
        """Queue a copy that starts at ``ready_s`` or when its turn comes."""
        copy = _Copy(lane, layer, nbytes, ready_s, float(nbytes))
        self._waiting[lane].append(copy)
        return copy

    def finish(self, copy: _Copy) -> float:
        """When ``copy`` ends.

        Nothing may be queued later that is ready earlier than that: true for compute, which
        queues nothing while it waits.
        """
        while copy.end_s == math.inf:
            self._advance()
        return copy.end_s

    def drained(self) -> Iterator[Span]:
        """Run what is queued to its end; all copies that there were."""
        while any(self._waiting.values()):
            self._advance()
        for copy in self._done:
            kind: Kind = "offload" if copy.lane == "d2h" else "reload"
            label = f"{kind} {copy.layer}"
            yield Span(copy.lane, kind, copy.start_s, copy.end_s, label, copy.layer, copy.nbytes)

    def _advance(self) -> None:
        """Run until the next copy starts or ends."""
        heads = {lane: queue[0] for lane, queue in self._waiting.items() if queue}
        busy = {lane: copy for lane, copy in heads.items() if copy.ready_s <= self._now_s}
        rates = self._link.rates(d2h="d2h" in busy, h2d="h2d" in busy)
        rate = dict(zip(COPY_LANES, rates, strict=True))
        ends = {lane: self._now_s + copy.left / rate[lane] for lane, copy in busy.items()}
        starts = [copy.ready_s for lane, copy in heads.items() if lane not in busy]
        then_s = min([*ends.values(), *starts])
        for lane, copy in busy.items():
            if copy.left == copy.nbytes:
                copy.start_s = self._now_s
            if ends[lane] == then_s:
                copy.left, copy.end_s = 0.0, then_s
                self._done.append(self._waiting[lane].popleft())
            else:
                copy.left = max(0.0, copy.left - (then_s - self._now_s) * rate[lane])
        self._now_s = then_s


class Simulation:
    """The compute stream on its way from step to step, with what a schedule moves before each of its points."""

    def __init__(self, schedule: Schedule, layers: Sequence[LayerProfile], link: Link) -> None:
        self._schedule = schedule
        self._layers = layers
        self._queues = _Queues(link)
        self._now_s = 0.0
        self._spans: list[Span] = []
        self._memory: list[tuple[float, int]] = [(0.0, 0)]
        self._copies: dict[int, list[_Copy]] = {layer: [] for layer in schedule.offloaded_layers}
        """Per offloaded layer the copies of its tensors in the order of saving: to the host, later back."""

    def run(self, steps: Iterable[Point | Interlude], title: str) -> Timeline:
        """Play the points of the schedule in their order, and what compute does between them."""
        for step in steps:
            if isinstance(step, Interlude):
                self._compute("other", None, step.duration_s, step.label)
                continue
            for layer in self._schedule.releases(step):
                self._release(layer)
            for layer in self._schedule.reloads(step):
                self._reload(layer)
            workspace_bytes = self._layers[step.layer].workspace_bytes
            self._hold(workspace_bytes)
            if step.phase == "F":
                self._forward(step)
            else:
                self._backward(step)
            self._hold(-workspace_bytes)
        return Timeline((*self._spans, *self._queues.drained()), tuple(self._memory), title)

    def _forward(self, point: Point) -> None:
        layer = self._layers[point.layer]
        pieces = layer.pieces()
        for index, nbytes in enumerate(pieces):
            self._hold(nbytes, layer.forward_s * index / len(pieces))
            if point.layer in self._copies:
                ready_s = self._now_s + layer.forward_s * (index + 1) / len(pieces)
                self._copies[point.layer].append(self._queues.push("d2h", point.layer, nbytes, ready_s))
        self._compute("forward", point.layer, layer.forward_s, repr(point))

    def _backward(self, point: Point) -> None:
        layer = self._layers[point.layer]
        pieces = layer.pieces()
        copies = self._copies.get(point.layer)
        run_s = 0.0
        for index in reversed(range(len(pieces))):
            ready_s = self._queues.finish(copies[index]) if copies else 0.0
            if ready_s > self._now_s + run_s:
                self._compute("backward", point.layer, run_s, repr(point))
                run_s = 0.0
                self._stall(ready_s, f"reload {point.layer}", point.layer)
            run_s += layer.backward_s / len(pieces)
            self._hold(-pieces[index], run_s)
        self._compute("backward", point.layer, run_s if pieces else layer.backward_s, repr(point))

    def _release(self, layer: int) -> None:
        copies = self._copies[layer]
        if copies:
            self._stall(self._queues.finish(copies[-1]), f"offload {layer}", layer)
        self._hold(-self._layers[layer].saved_bytes)

    def _reload(self, layer: int) -> None:
        pieces = self._layers[layer].pieces()
        self._hold(sum(pieces))
        last_first = [self._queues.push("h2d", layer, nbytes, self._now_s) for nbytes in reversed(pieces)]
        self._copies[layer] = last_first[::-1]

    def _compute(self, kind: Kind, layer: int | None, duration_s: float, label: str) -> None:
        if duration_s:
            self._spans.append(Span("compute", kind, self._now_s, self._now_s + duration_s, label, layer))
            self._now_s += duration_s

    def _stall(self, until_s: float, what: str, layer: int) -> None:
        if until_s > self._now_s:
            self._spans.append(Span("compute", "stall", self._now_s, until_s, f"wait for {what}", layer))
            self._now_s = until_s

    def _hold(self, nbytes: int, after_s: float = 0.0) -> None:
        """So many more (or fewer) bytes are on the device, from ``after_s`` from now on."""
        if nbytes:
            self._memory.append((self._now_s + after_s, self._memory[-1][1] + nbytes))
