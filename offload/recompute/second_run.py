"""Which operations the second run of a layer executes, which it skips, and what is handed over in their place.

Pure logic over a :class:`~offload.recompute.learn.Trace`. Some saved tensors are dropped. The second run executes every
operation that a dropped tensor depends on, back to what is handed over and to the layer's inputs. A storage that was
kept is handed over where the operation that made it would run. All other operations are skipped: their results are
memory that no executed operation reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from offload.recompute.learn import Trace


@dataclass(frozen=True)
class SecondRun:
    """What the second run of a layer does.

    Args:
        dropped: Numbers of the saved tensors that it recomputes.
        executed: The operations that run; views always run, and are not listed.
        suppliers: For each storage that is handed over, the number of a kept saved tensor that looks into it.
        impossible: Numbers of dropped tensors that must be kept after all, as they depend on an operation that must not
            run twice.
        needed: The operations that dropped tensors depend on; the others of ``executed`` run for other reasons.
    """

    dropped: frozenset[int]
    executed: frozenset[int]
    suppliers: dict[int, int]
    impossible: frozenset[int] = frozenset()
    needed: frozenset[int] = frozenset()


def second_run(trace: Trace, dropped: Collection[int], *, draws: bool = True) -> SecondRun:
    """Plan the second run that recomputes ``dropped``; unless it ``draws``, no random numbers are drawn again."""
    dropped = frozenset(dropped)
    if not dropped:
        return SecondRun(frozenset(), frozenset(), {})
    steps, zone = trace.steps, trace.zone
    suppliers = _kept_storages(trace, dropped)
    forbidden = {time for time, step in enumerate(steps) if step.final or (step.draws and not draws)}
    while True:
        needed = _slice(trace, dropped, suppliers)
        executed = needed | _unseen(trace)
        if zone >= 0:
            executed |= set(range(zone, len(steps)))
        if draws:
            executed |= _draws_before(trace, executed)
        read = [(storage, time) for time in executed for storage in trace.steps[time].reads]
        executed = _demand(trace, read, executed, suppliers)
        # What an executed operation makes or writes need not or must not be handed over. That is so as well of what is
        # read before its last write: the writes before that are executed.
        wrong = {one for one in suppliers if any(time in executed for time in trace.storages[one].writers)}
        if not wrong:
            break
        suppliers = {storage: number for storage, number in suppliers.items() if storage not in wrong}
    impossible: set[int] = set()
    if executed & forbidden:
        every = _kept_storages(trace, ())
        for number in dropped:
            others = [storage for storage in every if storage != trace.saved[number].storage]
            own = _slice(trace, [number], {storage: every[storage] for storage in others})
            if own & forbidden:
                impossible.add(number)  # those that depend on it through such a tensor may be possible then
        impossible = impossible or set(dropped)
    return SecondRun(dropped, frozenset(executed), suppliers, frozenset(impossible), frozenset(needed))


def _kept_storages(trace: Trace, dropped: Collection[int]) -> dict[int, int]:
    """The storages that may be handed over: made by a seen operation, kept, and not written after they were saved."""
    found: dict[int, int] = {}
    for number, saved in enumerate(trace.saved[: trace.dynamic_from]):
        if saved.storage is None or number in dropped:
            continue
        storage = trace.storages[saved.storage]
        if storage.writers and not storage.unseen and storage.writers[-1] < saved.time:
            found.setdefault(saved.storage, number)
    return found


def _slice(trace: Trace, dropped: Iterable[int], suppliers: Collection[int]) -> set[int]:
    """The operations that saved tensors depend on, back to ``suppliers``."""
    saved = (trace.saved[number] for number in dropped)
    wanted = [(one.storage, one.time) for one in saved if one.storage is not None]
    return _demand(trace, wanted, set(), suppliers)


def _demand(trace: Trace, wanted: list[tuple[int, int]], executed: set[int], suppliers: Collection[int]) -> set[int]:
    """Add to ``executed`` the operations that write what is ``wanted``: storages, each read at a time."""
    while wanted:
        number, time = wanted.pop()
        storage = trace.storages[number]
        if number in suppliers and time > storage.writers[-1]:
            continue
        for writer in storage.writers or storage.changed_by:
            if writer < time and writer not in executed:
                executed.add(writer)
                step = trace.steps[writer]
                wanted += [(read, writer) for read in step.reads]
    return executed


def _unseen(trace: Trace) -> set[int]:
    """Everything up to the last place where something happened that was not seen: it may read anything before."""
    last = max((time for time, step in enumerate(trace.steps) if step.barrier), default=-1)
    last = max([last, *(one.first_seen - 1 for one in trace.storages if one.unseen)])
    return set(range(last + 1))


def _draws_before(trace: Trace, executed: Collection[int]) -> set[int]:
    """Operations that must advance a generator for a later one that draws. Those of others may draw unsaid."""
    may_draw = {time for time, step in enumerate(trace.steps) if step.draws or step.operation.custom}
    last = max(may_draw.intersection(executed), default=-1)
    return {time for time in may_draw if time < last}
