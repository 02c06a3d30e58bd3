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

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Any

from offload.base.checks import check_number, check_type, format_bytes, format_s, is_int, parse_bytes, warn_caller
from offload.observe.timeline import Timeline
from offload.pipelining.order import Action, Chunk, number_chunks, read_actions
from offload.planning.profile import LayerProfile, Link, check_link
from offload.planning.simulate import Interlude, run_steps
from offload.schedule.schedule import Move, Point, Schedule, backward, forward

Absent = dict[int, tuple[int, int]]  # offloaded part → indices of the points of its release and its reload


@dataclass(frozen=True)
class StageProfile:
    """What one chunk of a stage costs. By default, a backward takes two forwards."""

    forward_s: float = 1.0  #: Compute seconds of its forward.
    backward_s: float = 2.0  #: Compute seconds of its backward, or of the half for the inputs.
    weight_s: float = 0.0  #: Compute seconds of the half for the weights, where the schedule splits the backward.
    saved_bytes: int = 1  #: Bytes of its activation set that may be offloaded.
    tensors: tuple[int, ...] = ()  #: What each operation saves, or each tensor, in their order; any size if left out.
    weight_bytes: int = 0  #: Bytes beside the set that the half for the inputs leaves for the half for the weights.
    kept_bytes: int = 0  #: Bytes beside the set that are kept until backward.
    layers: tuple[int, ...] = ()  #: How many of these each layer saves, if each layer is a part.

    def __post_init__(self) -> None:
        vars(self).update(tensors=tuple(self.tensors), layers=tuple(self.layers))
        for name, value in vars(self).items():
            for one in value if isinstance(value, tuple) else (value,):
                check_number(name, one)
        if self.tensors and sum(self.tensors) != self.saved_bytes:
            raise ValueError(f"tensors must add up to saved_bytes = {self.saved_bytes}, got {sum(self.tensors)}")

    def cut(self, parts: int) -> list[LayerProfile]:
        """Cut the set into parts: layers, or about equal sizes, where a part ends with the operation that fills it."""
        found: list[list[int]] = [[] for _ in range(parts)]
        so_far = accumulate(self.tensors, initial=0)
        filled = [min(nbytes * parts // (self.saved_bytes or 1), parts - 1) for nbytes in so_far]
        own = [part for part, count in enumerate(self.layers) for _ in range(count)]
        for nbytes, part in zip(self.tensors, own or filled, strict=False):
            found[part].append(nbytes)
        sizes = [sum(part) for part in found] if self.tensors else _shares(self.saved_bytes, parts)
        seconds = self.forward_s / parts, self.backward_s / parts
        return [LayerProfile(*seconds, nbytes, tuple(part)) for nbytes, part in zip(sizes, found, strict=True)]


def _shares(nbytes: int, parts: int) -> list[int]:
    return [end - start for start, end in pairwise(nbytes * part // parts for part in range(parts + 1))]


class RankStep:
    """One step of a rank, whose chunks' sets are cut into ``parts``, the layers of an ordinary schedule.

    Part p of the n-th chunk to run forward is layer ``n * parts + p``. Bubbles of the pipeline count as no time.
    """

    def __init__(self, actions: tuple[Action, ...], profile: Mapping[int, StageProfile], parts: int) -> None:
        chunks = number_chunks(actions)
        cut = {stage: costs.cut(parts) for stage, costs in profile.items()}
        self.layers = [layer for chunk in chunks for layer in cut[chunk.stage]]
        self.nbytes = [layer.saved_bytes for layer in self.layers]
        self.steps: list[Point | Interlude] = []  # points, and the backwards for the weights between them
        self.order: list[Point] = []  # the points alone
        self.start_s = [0.0]  # when each point of the order begins, and when the last one has ended
        self.forward_at = [0] * len(self.layers)  # layer → index of its forward in the order
        self.backward_at = [0] * len(self.layers)
        weights_at: dict[int, int] = {}  # number of a chunk → index of the point after its half for weights
        for action in actions:
            number = chunks[action.chunk]
            if action.kind == "W":
                weight_s = profile[action.stage].weight_s
                self.steps.append(Interlude(repr(action), weight_s))
                self.start_s[-1] += weight_s
                weights_at[number] = len(self.order)
                continue
            runs_forward = action.kind == "F"
            for layer in range(number * parts, (number + 1) * parts)[:: 1 if runs_forward else -1]:
                costs = self.layers[layer]
                (self.forward_at if runs_forward else self.backward_at)[layer] = len(self.order)
                self.order.append(forward(layer) if runs_forward else backward(layer))
                self.steps.append(self.order[-1])
                self.start_s.append(self.start_s[-1] + (costs.forward_s if runs_forward else costs.backward_s))
        self._changes = [0] * len(self.start_s)  # of the bytes before each point if nothing is offloaded
        for chunk, number in chunks.items():
            beside = profile[chunk.stage]
            kept, waiting = _shares(beside.kept_bytes, parts), _shares(beside.weight_bytes, parts)
            for part, layer in enumerate(range(number * parts, (number + 1) * parts)):
                end = weights_at.get(number, self.backward_at[layer] + 1)
                held, waits = self.nbytes[layer] + kept[part], waiting[part] if number in weights_at else 0
                self._changes[self.forward_at[layer]] += held
                self._changes[self.backward_at[layer]] += waits
                self._changes[end] -= held + waits

    def peak_bytes(self, absent: Absent) -> int:
        return max(self._resident_bytes(absent))

    def _resident_bytes(self, absent: Absent) -> list[int]:
        changes = self._changes.copy()
        for layer, (release, reload) in absent.items():
            changes[release] -= self.nbytes[layer]
            changes[reload] += self.nbytes[layer]
        return list(accumulate(changes))

    def host_bytes(self, offloaded: Iterable[int]) -> int:
        """The most bytes on the host at once, if host memory is held from forward to backward."""
        changes = [0] * len(self.start_s)
        for layer in offloaded:
            changes[self.forward_at[layer]] += self.nbytes[layer]
            changes[self.backward_at[layer] + 1] -= self.nbytes[layer]
        return max(accumulate(changes))

    def choose(self, link: Link, is_enough: Callable[[Absent], bool]) -> Absent:
        """Offload the longest-lived layers first, each if both copies have time beside those before, until enough."""
        at = zip(self.forward_at, self.backward_at, strict=True)
        lives = [(self.start_s[made + 1] - self.start_s[needed], layer) for layer, (made, needed) in enumerate(at)]
        absent: Absent = {}
        # All layers at once where possible, else one half after the other: one at a time is slow for 512 of them.
        groups = [[layer for _, layer in sorted(lives) if self.nbytes[layer]]]
        while groups and not is_enough(absent):
            group = groups.pop()
            trial = self._place([*absent, *group], link)
            if trial is not None and (len(group) == 1 or not is_enough(trial)):
                absent = trial
            elif len(group) > 1:
                groups += [group[len(group) // 2 :], group[: len(group) // 2]]
        return absent

    def _place(self, layers: list[int], link: Link) -> Absent | None:
        """When each of ``layers`` is absent; ``None`` if one of them has no time on the host."""
        d2h, h2d = link.rates(d2h=True, h2d=True)
        release: dict[int, int] = {}
        free_s = 0.0  # when the link has copied all before
        for layer in sorted(layers):
            after = self.forward_at[layer] + 1
            free_s = max(free_s, self.start_s[after]) + self.nbytes[layer] / d2h
            release[layer] = bisect_left(self.start_s, free_s, after)
        absent = {}
        free_s = self.start_s[-1]  # when the link has to begin with all behind
        for layer in sorted(layers, key=self.backward_at.__getitem__, reverse=True):
            needed, gone = self.backward_at[layer], release[layer]
            free_s = min(free_s, self.start_s[needed]) - self.nbytes[layer] / h2d
            reload = min(bisect_right(self.start_s, free_s) - 1, needed)
            if not gone < reload <= needed:
                return None
            absent[layer] = gone, reload
        return absent

    def relax(self, absent: Absent, limit_bytes: float) -> Absent:
        """Release later and reload earlier, in the same order, as ``limit_bytes`` allow: slack for slower copies."""
        relaxed = dict(absent)
        resident = self._resident_bytes(absent)

        def hold(layer: int, index: int) -> bool:
            """Keep the layer on the device during one more point, if there is memory and it stays absent."""
            release, reload = relaxed[layer]
            fits = release + 1 < reload and resident[index] + self.nbytes[layer] <= limit_bytes
            resident[index] += self.nbytes[layer] * fits
            return fits

        before: Absent = {}
        while relaxed != before:
            before, latest, earliest = dict(relaxed), len(self.order), 0
            for layer in sorted(relaxed, reverse=True):
                release, reload = relaxed[layer]
                latest = release + (release < latest and hold(layer, release))
                relaxed[layer] = latest, reload
            for layer in sorted(relaxed, key=self.backward_at.__getitem__):
                release, reload = relaxed[layer]
                earliest = reload - (earliest < reload and hold(layer, reload - 1))
                relaxed[layer] = release, earliest
        return relaxed


WAITS = tuple(0.05 * 1.4**n for n in range(18))  # how long compute may wait for copies, in steps

LONGER_WAITS = 4  # as many that are long enough are tried: with longer ones, fewer bytes may be offloaded

INSTANT_LINK = Link(1e30, 1e30, 2e30)  # the last resort: released and reloaded at once, at whatever cost


@dataclass(frozen=True, repr=False)
class PipelinePlan:
    """What a pipeline rank offloads and when, with its predicted cost."""

    actions: tuple[Action, ...]  #: What the rank runs, in order.
    parts: int  #: Into how many parts each chunk's set is cut.
    profile: Mapping[int, StageProfile]  #: What a chunk of each stage costs.
    link: Link  #: The link that the plan was made for.
    schedule: Schedule  #: What is released and reloaded when, over ``chunks * parts`` layers.

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
        return run_steps(self.schedule, self._step.layers, self.link, self._step.steps).timeline(repr(self))

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
