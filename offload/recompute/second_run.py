"""Which operations the second run of a layer executes, which it skips, and what is handed over in their place.

Pure logic over a :class:`~offload.recompute.learn.Trace`. Some saved tensors are dropped. The second run executes every
operation that a dropped tensor depends on, back to what is handed over and to the layer's inputs. A storage that was
kept is handed over where the operation that made it would run. All other operations are skipped: their results are
memory that no executed operation reads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable

from offload.recompute.learn import Step, StepResult, Trace


class SecondRun:
    """What the second run of a layer does to recompute the saved tensors with the ``dropped`` numbers.

    Random numbers are drawn again only if it ``draws``, and operations are skipped only if it ``skips``; views run.
    """

    def __init__(self, trace: Trace, dropped: Iterable[int], *, draws: bool = True, skips: bool = True) -> None:
        self.dropped = frozenset(dropped)
        steps, storages, zone = trace.steps, trace.storages, trace.zone
        suppliers = _kept_storages(trace, self.dropped)
        forbidden = {time for time, step in enumerate(steps) if step.final or (step.draws and not draws)}
        # They must advance a generator for a later one that draws. Those of others may draw without saying so.
        drawing = {time for time, step in enumerate(steps) if draws and (step.draws or step.operation.custom)}
        unseen = _unseen(trace)
        while True:
            needed = _slice(trace, self.dropped, suppliers)
            executed = needed | unseen
            if zone >= 0:
                executed |= set(range(zone, len(steps)))
            last_drawing = max(drawing & executed, default=-1)
            executed |= {time for time in drawing if time < last_drawing}
            read = [(storage, time) for time in executed for storage in steps[time].reads]
            executed = _demand(trace, read, executed, suppliers)
            # What an executed operation makes or writes need not or must not be handed over. That is so as well of what
            # is read before its last write: the writes before that are executed.
            wrong = {one for one in suppliers if any(time in executed for time in storages[one].writers)}
            if not wrong:
                break
            suppliers = {storage: number for storage, number in suppliers.items() if storage not in wrong}
        self.needed = needed  # the operations that dropped tensors depend on; others run for other reasons
        self.impossible: set[int] = set()
        """Numbers of dropped tensors that must be kept, as they depend on an operation that must not run twice."""
        if executed & forbidden:
            every = _kept_storages(trace, ())
            for number in self.dropped:
                others = every.keys() - {trace.saved[number].storage}
                if _slice(trace, [number], others) & forbidden:
                    self.impossible.add(number)  # those that depend on it through such a tensor may be possible then
            self.impossible = self.impossible or set(self.dropped)
        self.sized = False  # whether the results have other sizes than in the forward that was learned
        self.wrong = False  # whether a second run has gone another way
        self.unlike: set[int] = set()
        """Numbers of saved tensors that may come out with other bits when all operations run again: such as the small
        state of a generator that an attention kernel without dropout leaves as it found the memory."""
        self.may_change = zone >= 0  # whether operations after those of the plan may be others each time
        self.steps = steps[:zone] if self.may_change else steps  # the operations in their order
        self.results: dict[int, tuple[StepResult, ...] | None] = {
            time: step.outputs
            for time, step in enumerate(self.steps)
            if skips and time not in executed and not step.only_views
        }
        """What is given in place of the results of operations that do not run; ``None`` until their size is known."""
        calls = [(one.operation.function, one.operation.call) for one in self.steps]
        self.calls = [
            (one, None if time in self.results else call, time in executed) for time, (one, call) in enumerate(calls)
        ]
        """For each operation, its function, what runs it, if it runs, and whether all that it reads is there: views run
        that nobody needs. And what no function is, at the end."""
        self.calls.append((None, None, False))
        self.unsized: list[int] = []
        """Operations that must run with inputs of another size, as nobody else knows the size of their results."""
        last = max((trace.saved[number].time for number in self.dropped), default=0)
        self.reads_until = math.inf if zone >= 0 or unseen else last
        """No operation from this one on runs again, and so what only such operations read may have changed."""
        self.hands_over = any(time < last for time in self.results)
        """Whether anything is skipped or handed over before the last dropped tensor; else no mode is needed."""
        self.communicates = any(step.operation.collective for step in steps[:last])
        """Whether ranks wait for each other there, unless that is skipped."""
        self.suppliers = {
            storage: number
            for storage, number in suppliers.items()
            # What is made after the last dropped tensor is not needed, and is freed when backward has used it.
            if storages[storage].writers[0] in self.results and (self.may_change or storages[storage].writers[0] < last)
        }
        """For each storage that is handed over, the number of a kept saved tensor that looks into it."""
        self.numbers = set(self.suppliers.values())
        made = ((number, storage, steps[storages[storage].writers[0]]) for storage, number in self.suppliers.items())
        self.whole = {number for number, storage, step in made if _is_result(trace, number, storage, step)}
        """Those of them that are results of operations, and no other views of the same memory."""
        self.arrivals = {
            number: self.suppliers[saved.storage]
            for number, saved in enumerate(trace.saved[: trace.dynamic_from])
            if saved.storage in self.suppliers
        }
        """For each saved tensor whose storage is handed over, the number of the one that supplies it."""

    def at_other_size(self, *, skips: bool = True) -> SecondRun:
        """The same with results of other sizes; unless it ``skips`` operations, all run again."""
        found = copy.copy(self)
        found.sized, found.hands_over = True, self.hands_over and not self.unsized and skips
        found.results = dict.fromkeys(self.results) if found.hands_over else {}
        return found


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


def _is_result(trace: Trace, number: int, storage: int, step: Step) -> bool:
    saved = trace.saved[number]
    filled = math.prod(saved.shape) * saved.dtype.itemsize == trace.storages[storage].nbytes
    geometries = (one.geometry for one in step.outputs if one.storage == storage and one.geometry is not None)
    return filled and any((one[0], *one[2:4]) == (saved.dtype, saved.shape, saved.stride) for one in geometries)


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
    last = max([last, *(int(one.first_seen) - 1 for one in trace.storages if one.unseen)])
    return set(range(last + 1))


NOTHING = SecondRun(Trace(), ())
