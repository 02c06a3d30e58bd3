"""The proof that what is to be computed again comes out the same: in a layer's first forward, bit by bit.

A kernel that PyTorch's dispatcher does not see may have written into memory that it did; one that adds in whatever
order its threads arrive gives other bits each time. What does not come out the same is kept from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from offload.base.tensors import whole
from offload.device.backend import Backend
from offload.recompute.operations import Kind
from offload.recompute.random import RandomState, default_generator
from offload.recompute.record import Call, Value
from offload.recompute.replay import below_autograd

POISON = 0xA5
"""What is in new memory that nobody was seen to write: not what happens to lie there, which may be the right bits."""


Original = Callable[[Value], torch.UntypedStorage | None]
"""The memory of a value as the forward has computed it, if it is still there."""


def differing(wanted: Iterable[Value], original: Original) -> list[Value]:
    """Compute values again, and compare: those whose bits are others, or whose originals are not there."""
    compared = {id(value): value for value in wanted}
    wrong = []

    def compare(value: Value, again: torch.UntypedStorage) -> torch.UntypedStorage:
        there = original(value)
        if id(value) not in compared or (there is not None and same_bits(there, again)):
            return again
        wrong.append(value)
        return again if there is None else there  # for what is computed from it

    calls = calls_for(compared.values(), lambda value: id(value) not in compared and original(value) is not None)
    _run(calls, original, compare, lambda _: nullcontext())
    return wrong + [value for value in _unsound(calls, original) if id(value) in compared and value not in wrong]


def _unsound(calls: list[Call], original: Original) -> list[Value]:
    """What is computed from sources that were changed unseen since: backward will not read them."""
    lost: set[int] = set()
    found = []
    for call in calls:
        if any(value.changed or id(value) in lost for value in call.reads):
            made = [value for value in (reference() for reference in call.makes) if value is not None]
            lost |= {id(value) for value in made if original(value) is None}
            found += made
    return found


def seconds_of(calls: Sequence[Call], original: Original, backend: Backend) -> list[float]:
    """What calls take, one after the other, each with what the forward has given it."""
    marks = []

    @contextmanager
    def marked(_: Call) -> Iterator[None]:
        begin = backend.mark()
        yield
        marks.append((begin, backend.mark()))

    _run(calls, original, lambda _, again: again, marked)
    return backend.seconds(marks)


def _run(
    calls: Sequence[Call],
    original: Original,
    made: Callable[[Value, torch.UntypedStorage], torch.UntypedStorage],
    around: Callable[[Call], AbstractContextManager[None]],
) -> None:
    """Run calls in order without a trace: the record stays as it is, and so do the generators."""
    memory: dict[int, torch.UntypedStorage] = {}
    last_use = {id(value): call.number for call in calls for value in call.reads}

    def bytes_of(value: Value) -> torch.UntypedStorage:
        if id(value) in memory:
            return memory[id(value)]
        there = original(value)
        if there is None and value.given is not None:
            there = value.given.untyped_storage()  # changed or not
        return value.bytes() if there is None else there

    devices = {value.given.device for call in calls for value in call.reads if value.given is not None}
    generators = [RandomState(default_generator(device)) for device in devices | {torch.device("cpu")}]
    with below_autograd():
        for call in calls:
            with around(call):
                results = call.results(bytes_of)
            if call.operation.kind is Kind.EMPTY:
                for result in results:
                    whole(result).fill_(POISON)
            for reference in call.makes:
                value = reference()
                if value is not None:
                    memory[id(value)] = made(value, results[value.place])
            del results
            for value in call.reads:
                if last_use[id(value)] == call.number:
                    memory.pop(id(value), None)
    for state in generators:  # a kernel that draws without saying so has moved them on
        state.restore()


def calls_for(wanted: Iterable[Value], is_there: Callable[[Value], bool]) -> list[Call]:
    """The calls that lead to values, in the order of the forward."""
    found: dict[int, Call] = {}
    waiting = [value.call for value in wanted if value.call is not None]
    while waiting:
        call = waiting.pop()
        if call.number not in found:
            found[call.number] = call
            waiting += [value.call for value in call.reads if value.call is not None and not is_there(value)]
    return [found[number] for number in sorted(found)]


def same_bits(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Whether two storages of a device hold the same."""
    return one.device == other.device and torch.equal(whole(one), whole(other))
