"""What the executor would do, and when: the steps of a schedule, given what layers cost and a link.

The rules are the executor's own. Copies to the host are queued when a tensor is saved and run one at a time, in order,
on the d2h stream. A release lets compute wait until the layer's copies are done. A reload allocates its buffers at
once, and its copies start no earlier than compute has come to that point, the tensor saved last first. Backward first
recomputes what was dropped, once the offloaded regions before the last dropped one are reloaded. Then backward waits
for one tensor at a time, and frees each when it is done with it. While both directions are busy they share the duplex
bandwidth. The host runs ahead, also into the next step: a step is as long as the host needs, if that is longer than the
device.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

from offload.base.checks import check_type
from offload.observe.timeline import COPY_LANES, LANES, Kind, Lane, Span, Timeline, merged
from offload.planning.layer_costs import LayerPieces, inputs_of, layer_pieces, saved_of
from offload.planning.profile import LayerProfile, Link, Profile, check_link, check_profile
from offload.recompute.costs import LayerPolicy
from offload.schedule.schedule import HasSchedule, Move, Point, Schedule, backward, forward, released_before


class Interlude(NamedTuple):
    """Compute that belongs to no layer, and copies that are no activations: queued where compute comes to them."""

    label: str
    duration_s: float
    nbytes: int = 0  # device memory that it needs while it runs
    loaded_bytes: int = 0  # copied to the device from its start on; an interlude that ``awaits`` the copy waits for it
    sent_bytes: int = 0  # copied to the host after that
    awaits: str = ""  # the label of the interlude whose load is over before it starts


def simulate(
    schedule: Schedule | HasSchedule,
    profile: Profile,
    link: Link,
    *,
    policies: Sequence[LayerPolicy | None] | None = None,
    title: str | None = None,
) -> Timeline:
    """Predict the timeline and the peak of one microbatch's step under a schedule, without running a model.

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
        check_type("schedule", schedule, HasSchedule, "a Schedule, such as Schedule.default(4, 32), or a plan")
        schedule = schedule.schedule
    check_profile(profile)
    check_link(link)
    if len(profile.layers) != schedule.model_layers:
        raise ValueError(
            f"profile must have as many layers as the schedule, {schedule.model_layers}, got "
            f"{len(profile.layers)}; profile the layers that the schedule speaks of."
        )
    policies = policies or (None,) * schedule.model_layers
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
    if title is None:
        title = f"{len(schedule.offloaded_layers)} of {schedule.model_layers} layers offloaded"
    layers, calls, releases = profile.layers, profile.calls, schedule.releases
    if calls:  # each as a layer
        before, ran, moves = released_before(calls, lambda one: releases(forward(one))), dict[int, int](), list[Move]()
        for now, (number, released) in enumerate(zip(calls, before, strict=False)):
            moves += [Move(ran[one], forward(now), backward(now - 1)) for one in released]
            ran[number] = now
        layers, policies = tuple(layers[one] for one in calls), [policies[one] for one in calls]
        schedule = Schedule(len(calls), tuple(moves))
    steps: list[Point | Interlude] = [*schedule.order, Interlude("rest of the step", profile.other_s)]
    loss = Interlude("loss", profile.loss_s, profile.loss_bytes)
    steps.insert(steps.index(backward(schedule.model_layers - 1)), loss)
    return run_steps(schedule, layers, link, steps, policies).timeline(title)


@dataclass(eq=False, slots=True)
class _Task:
    """What a stream does in one go: seconds of compute, or bytes of a copy."""

    lane: Lane
    kind: Kind
    amount: float
    label: str = ""
    layer: int | None = None
    after: _Task | None = None  # a task of another stream, over before this one starts
    taken_bytes: int = 0  # device memory that is allocated when the task starts, or freed if negative
    freed_bytes: int = 0  # when it ends
    start_s: float = math.inf
    end_s: float = math.inf

    @property
    def waits_until_s(self) -> float:
        return 0.0 if self.after is None else self.after.end_s


class Run(NamedTuple):
    """What each stream does, and when; and the host's seconds."""

    queues: dict[Lane, list[_Task]]
    host_s: float

    @property
    def seconds(self) -> float:
        """When the timeline's last span of compute ends."""
        return max(self.host_s, self.queues["compute"][-1].end_s)

    def timeline(self, title: str) -> Timeline:
        compute = self.queues["compute"]
        # Pieces of a layer without a pause are one span; compute that belongs to no layer is not joined.
        spans = [*merged(_compute_spans(compute), lambda span: -1.0 if span.layer is None else 0.0)]
        spans += [
            Span(lane, task.kind, task.start_s, task.end_s, task.label, task.layer, round(task.amount))
            for lane in COPY_LANES
            for task in self.queues[lane]
        ]
        if self.host_s > (end_s := max((task.end_s for task in compute), default=0.0)):
            spans.append(Span("compute", "late", end_s, self.host_s, "wait for the host"))
        changes = [edge for one in compute for edge in ((one.start_s, one.taken_bytes), (one.end_s, -one.freed_bytes))]
        held = accumulate(change for _, change in changes)
        memory = [(time_s, nbytes) for (time_s, change), nbytes in zip(changes, held, strict=True) if change]
        return Timeline(tuple(spans), ((0.0, 0), *memory), title)


def run_steps(
    schedule: Schedule,
    layers: Sequence[LayerProfile],
    link: Link,
    steps: Iterable[Point | Interlude],
    policies: Sequence[LayerPolicy | None] = (),
) -> Run:
    """Run any steps: the points of the schedule in their order, and what compute does between them."""
    offloaded, steps = {*schedule.offloaded_layers}, [*steps]
    pieces = [
        layer_pieces(layer, policy, offloads=number in offloaded)
        for number, (layer, policy) in enumerate(zip(layers, policies or (None,) * len(layers), strict=True))
    ]
    queues: dict[Lane, list[_Task]] = {lane: [] for lane in LANES}
    for task in _tasks(schedule, layers, pieces, steps):
        queues[task.lane].append(task)
    _find_times(queues, link)
    forwards = (one.layer for one in steps if isinstance(one, Point) and one.phase == "F")
    return Run(queues, math.fsum(pieces[layer].host_s for layer in forwards))


def _tasks(
    schedule: Schedule,
    layers: Sequence[LayerProfile],
    pieces: Sequence[LayerPieces],
    steps: Iterable[Point | Interlude],
) -> Iterator[_Task]:
    """What the three streams do, in the order in which it is queued."""
    copies = defaultdict[int, list[_Task]](list)  # of each layer's tensors in order: to the host, later back
    loads: dict[str, _Task] = {}  # of interludes, by their labels

    def hold(nbytes: int, after: _Task | None = None) -> _Task:
        """So many more, or fewer, bytes are on the device from here on; compute waits for ``after`` before that."""
        return _Task("compute", "other", 0.0, after=after, taken_bytes=nbytes)

    for step in steps:
        if isinstance(step, Interlude):
            yield (last := hold(0, loads.get(step.awaits)))
            if step.loaded_bytes:
                yield (last := _Task("h2d", "reload", step.loaded_bytes, step.label, after=last))
                loads[step.label] = last
            if step.sent_bytes:
                yield _Task("d2h", "offload", step.sent_bytes, step.label, after=last)
            nbytes = step.nbytes
            yield _Task("compute", "other", step.duration_s, step.label, taken_bytes=nbytes, freed_bytes=nbytes)
            continue
        for layer in schedule.releases(step):
            yield hold(-sum(pieces[layer].offloaded), next(reversed(copies[layer]), None))
        for layer in schedule.reloads(step):
            yield (reached := hold(sum(pieces[layer].offloaded)))
            copies[layer] = [
                _Task("h2d", "reload", nbytes, f"reload {layer}", layer, reached) for nbytes in pieces[layer].offloaded
            ]
            yield from reversed(copies[layer])
        layer, here = step.layer, repr(step)
        forward = step.phase == "F"
        workspace_bytes = (layers[layer].forward_workspace_bytes or 0) if forward else pieces[layer].workspace_bytes
        yield hold(workspace_bytes)
        for piece in pieces[layer].forward if forward else pieces[layer].backward:
            label = f"R{layer}" if piece.kind == "recompute" else here
            after = None if piece.awaits is None else copies[layer][piece.awaits]
            taken, freed = piece.taken_bytes, piece.freed_bytes
            yield (task := _Task("compute", piece.kind, piece.seconds, label, layer, after, taken, freed))
            if piece.offloads:
                copies[layer].append(_Task("d2h", "offload", taken, f"offload {layer}", layer, task))
                yield copies[layer][-1]
        yield hold(-workspace_bytes)


def _find_times(queues: Mapping[Lane, Sequence[_Task]], link: Link) -> None:
    """Find when each task starts and ends: a stream runs one at a time, in order, and the copies share the link."""
    # Compute waits for copies and is never slower for them, so it runs ahead, and the copies from event to event.
    computed_s = now_s = 0.0
    compute, *copies = (deque(queues[lane]) for lane in LANES)
    left = [queue[0].amount if queue else 0.0 for queue in copies]  # of the first copy in each queue
    every_rate = {busy: link.rates(d2h=busy[0], h2d=busy[1]) for busy in product((False, True), repeat=2)}
    while True:
        while compute and (sooner_s := compute[0].waits_until_s) < math.inf:
            task = compute.popleft()
            task.start_s = max(computed_s, sooner_s)
            computed_s = task.end_s = task.start_s + task.amount
        d2h_s, h2d_s = waiting_s = [queue[0].waits_until_s if queue else math.inf for queue in copies]
        rates = every_rate[d2h_s <= now_s, h2d_s <= now_s]  # zero of a stream that waits
        # When each stream comes to the end of its copy, or to its next one.
        events_s = [
            now_s + amount / rate if rate else until_s
            for amount, rate, until_s in zip(left, rates, waiting_s, strict=True)
        ]
        then_s = min(events_s)
        if then_s == math.inf:
            return
        for number, (queue, rate, event_s) in enumerate(zip(copies, rates, events_s, strict=True)):
            if not rate:
                continue
            task = queue[0]
            task.start_s = min(task.start_s, now_s)
            if event_s == then_s:
                task.end_s = then_s
                queue.popleft()
                left[number] = queue[0].amount if queue else 0.0
            else:
                left[number] = max(0.0, left[number] - (then_s - now_s) * rate)
        now_s = then_s


def _compute_spans(tasks: Iterable[_Task]) -> Iterator[Span]:
    """What compute did, and its stalls: a task starts later than the one before ends, for a copy."""
    last_end_s = 0.0
    for task in tasks:
        after = task.after
        if after is not None and after.lane != "compute" and task.start_s > last_end_s:
            yield Span("compute", "stall", last_end_s, task.start_s, f"wait for {after.label}", after.layer)
        if task.amount:
            yield Span("compute", task.kind, task.start_s, task.end_s, task.label, task.layer)
        last_end_s = task.end_s
