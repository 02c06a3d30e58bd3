"""List the regions of a layer with what each costs, for a planner."""

from __future__ import annotations

from collections.abc import Sequence

from offload.recompute.costs import RegionProfile
from offload.recompute.learn import Trace
from offload.recompute.policies import SOURCE, UNSEEN
from offload.recompute.way import Way


def list_regions(way: Way, seconds: Sequence[float], forward_s: float) -> tuple[RegionProfile, ...]:
    """The layer's inputs, the regions that autograd saves, and those that lead to them, in the order of forward.

    Args:
        way: What was learned.
        seconds: Of each operation.
        forward_s: Seconds of the whole forward, for what was computed unseen.
    """
    trace = way.trace
    saved = {one.storage: number for number, one in enumerate(trace.saved) if one.storage is not None and one.movable}
    listed = _leading_to(trace, list(saved))
    numbers: dict[int, int] = {}
    costs: list[RegionProfile] = []

    def add(storage: int, name: str, took_s: float, reads: Sequence[int], first: int | None) -> None:
        numbers[storage] = len(costs)
        number = saved.get(storage)
        again = name != SOURCE and way.reason is None and (number is None or number not in way.forced)
        nbytes = trace.storages[storage].nbytes
        costs.append(RegionProfile(name, nbytes, took_s, tuple(reads), number is not None, again, first))

    sources = [
        *(one for one in trace.given if one in trace.movable_inputs and any(one in step.reads for step in trace.steps)),
        *(one for one in saved if not trace.storages[one].writers and one not in way.names),
    ]
    for storage in dict.fromkeys(sources):
        add(storage, SOURCE, 0.0, (), None)
    given = tuple(range(len(costs)))
    unseen = [one for one in saved if way.names.get(one) == UNSEEN]
    if unseen:
        nbytes = sum(trace.storages[one].nbytes for one in unseen)
        again = way.reason is None and not way.forced
        numbers.update(dict.fromkeys(unseen, len(costs)))
        costs.append(RegionProfile(UNSEEN, nbytes, forward_s, given, recomputable=again))
    firsts: dict[int, int] = {}
    made = [one for one in listed if trace.storages[one].writers and one in way.names and one not in numbers]
    for storage in sorted(made, key=lambda one: (trace.storages[one].writers[-1], one)):
        writers = trace.storages[storage].writers
        read = {one for writer in writers for one in trace.steps[writer].reads}
        first = firsts.get(writers[0])
        took_s = sum(seconds[writer] for writer in writers) if first is None else 0.0
        add(storage, way.names[storage], took_s, sorted(numbers[one] for one in read if one in numbers), first)
        firsts.setdefault(writers[0], numbers[storage])
    return tuple(costs)


def _leading_to(trace: Trace, storages: list[int]) -> set[int]:
    found: set[int] = set()
    waiting = storages
    while waiting:
        storage = waiting.pop()
        if storage not in found:
            found.add(storage)
            for writer in trace.storages[storage].writers:
                waiting += [*trace.steps[writer].reads, *trace.steps[writer].makes]
    return found
