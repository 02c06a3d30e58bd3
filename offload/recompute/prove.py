"""Prove that a layer can be run again: run it at once after its first forward, and compare all saved tensors' bits.

A kernel that adds in whatever order its threads arrive gives other bits each time. Its result is kept, and what is
computed from the result is recomputed from what was kept.
"""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import Context
from functools import partial

import torch

from offload.base.checks import format_bytes
from offload.base.tensors import geometry_of, look_into, plain_memory, same_bits, whole
from offload.base.torch_private import address_of, is_compiled
from offload.device.backend import Backend
from offload.recompute.learn import LayerMode, Learn, ModuleNames, Trace
from offload.recompute.run_again import Comparison, Frame, HandOver, NotReturnedError, OtherRunError
from offload.recompute.second_run import SecondRun
from offload.recompute.way import Way

_logger = logging.getLogger(__name__)

Lend = Callable[[Sequence[int]], AbstractContextManager[list[torch.UntypedStorage]]]
"""Lends host memory of these sizes, in bytes, as long as its block lasts."""

ROUNDS = 8  # so many tensors that differ are told apart from those that differ only because they are computed from them


def _comparison(
    frame: Frame, originals: Sequence[torch.Tensor], dropped: Iterable[int], *, hand_over: bool
) -> Comparison:
    """Compares what the second run saves with what forward has saved, as if forward had dropped some of it."""
    # Behind what depends on data, a forward may save fewer tensors than the one that was learned.
    there = [number for number in dropped if number < len(originals)]
    frame.dropped = {number: (originals[number].shape, originals[number].dtype) for number in there}
    return Comparison(frame, originals, hand_over=hand_over)


def memories_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors that :func:`on_host` can move, by their addresses."""
    found = (plain_memory(one) for one in tensors if type(one) is torch.Tensor and not one.requires_grad)
    return {address_of(memory): memory for memory in found if memory is not None}


def memory_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of these storages."""
    return sum(memory.nbytes() for memory in memories_of(tensors).values())


@contextmanager
def on_host(tensors: Iterable[torch.Tensor], lend: Lend) -> Iterator[None]:
    """Have the tensors on the host meanwhile. Storages that somebody else holds stay where they are as well.

    Raises a :class:`NotReturnedError` if the device has no memory for them afterwards.
    """
    tensors = [one for one in tensors if memories_of([one])]
    memories = memories_of(tensors)
    places = [(one, address_of(one.untyped_storage()), geometry_of(one)) for one in tensors]
    devices = {address: memory.device for address, memory in memories.items()}  # attention reads its seed on the CPU
    with lend([memory.nbytes() for memory in memories.values()]) as lent:
        copies = {address: lent.pop(0).copy_(memory) for address, memory in memories.items()}
        held = {address: weakref.ref(memory) for address, memory in memories.items()}
        del memories
        for one, address, geometry in places:
            one.data = look_into(copies[address], geometry)
        try:
            yield
        finally:
            lost = 0
            for address, copy in copies.items():
                memory = held[address]()
                if memory is None:
                    try:  # by an operation, as a memory meter sees no other memory
                        empty = torch.empty(copy.nbytes(), dtype=torch.uint8, device=devices[address])
                    except torch.OutOfMemoryError:  # the pool has the copy's memory back
                        lost, empty = lost + copy.nbytes(), torch.empty(copy.nbytes(), dtype=torch.uint8, device="cpu")
                    memory = empty.untyped_storage().copy_(copy)
                copies[address] = memory
            for one, address, geometry in places:
                one.data = look_into(copies[address], geometry)
            if lost:
                raise NotReturnedError(
                    f"the device has no memory for {format_bytes(lost)} that a layer has saved, which were on the host "
                    "while the layer ran again to be compared; use smaller microbatches, or keep more memory free."
                )


def prove_all(
    frame: Frame,
    way: Way,  # gets ``forced``, ``differing``, ``differing_small`` and ``reason``
    learn: Learn,  # the mode under which forward ran
    originals: Sequence[torch.Tensor],  # what forward has saved
    backend: Backend | None,  # measures each operation; ``None`` measures nothing
    lend: Lend,  # where the originals are if ``short``
    *,
    short: bool,  # whether the device has room for the second run only while the originals are on the host
) -> tuple[list[float], float] | None:
    """Run the whole layer again and find what differs, and why the layer cannot be run again, if it cannot.

    Returns the seconds of each operation, and of the whole forward, if they are measured.
    """
    trace = way.trace
    plain = [
        number for number, one in enumerate(originals) if type(one) is torch.Tensor and plain_memory(one) is not None
    ]
    proof = _comparison(frame, originals, plain, hand_over=False)
    again = Learn(ModuleNames(None), learn.outside, clock=None if backend is None else backend.mark)
    contents = {number: memory.clone() for number, memory in learn.unseen_writes.items()}
    begin = None if backend is None else backend.mark()
    lacks = False
    try:
        frame.random.update(learn.first_states)
        with on_host(originals, lend) if short else nullcontext():
            # Without the program's context variables: Hugging Face's collect what layers return, and would do so twice.
            Context().run(frame.run_under, proof, None if is_compiled(frame.layer) else again)
    except NotReturnedError:
        raise
    except torch.OutOfMemoryError as error:
        lacks, way.reason, way.again = not short, str(error), short
    except OtherRunError as error:
        way.reason, way.again = f"run again, it {error.what} than before", True
    except Exception as error:  # noqa: BLE001  # whatever the layer raises when it runs again: then it does not
        way.reason = str(error)
    finally:
        frame.dropped = {}
        for number in [number for number in contents if learn.same_storage(number, again)]:
            learn.unseen_writes[number].copy_(contents[number])
            way.reason = "forward writes into a tensor that is no attribute of it"
    if lacks:
        way.reason = None
        return prove_all(frame, way, learn, originals, backend, lend, short=True)
    if again.left_behind(learn) and (gc.collect(), again.left_behind(learn))[1]:
        raise RuntimeError(
            f"{type(frame.layer).__name__} cannot be recomputed: a hook, a list or a global variable keeps tensors "
            "that the layer computes, and has those of a second run now. Keep or offload this layer, "
            'policies={"*": "offload"}, take the hook off, or let the layer return these tensors.'
        )
    if way.reason is not None:
        return None
    end = None if backend is None else backend.mark()
    steps = trace.steps if trace.zone < 0 else trace.steps[: trace.zone]
    if [step.operation for step in again.trace.steps[: len(steps)]] != [step.operation for step in steps]:
        way.reason, way.again = "run again, it runs other operations than before", True
        return None
    _find_constants(trace, learn, again)
    movable = way.droppable()
    written = {
        number
        for number, saved in enumerate(trace.saved)
        if saved.storage is not None and max(trace.storages[saved.storage].writers, default=-1) >= saved.time
    }
    way.differing = proof.differing & set(movable)
    way.differing_small = proof.differing - way.differing
    way.forced = written | _origins(frame, way, originals, lend, short=short)
    if backend is None:
        return None
    marks = [(step.begin, step.end) for step in again.trace.steps] + [(begin, end)]
    *seconds, whole_s = backend.seconds(marks)
    # Behind what depends on data the operations may be others each time: their seconds are those of the first of them.
    rest_s = [math.fsum(seconds[len(steps) :]), *[0.0] * (len(trace.steps) - len(steps))]
    return [*seconds[: len(steps)], *rest_s][: len(trace.steps)], whole_s


def _find_constants(trace: Trace, learn: Learn, again: Learn) -> None:
    """Tell tensors that were there before the layer ran, which both runs have seen, from those that it makes unseen."""
    for number in list(trace.constants):
        if learn.same_storage(number, again):
            trace.storages[number].unseen = False
        else:
            del trace.constants[number]


def _origins(frame: Frame, way: Way, originals: Sequence[torch.Tensor], lend: Lend, *, short: bool) -> set[int]:
    """Of the tensors that differ, those that differ by themselves, with what cannot be told from them."""
    trace, forced, differing = way.trace, set[int](), set(way.differing)
    for _ in range(ROUNDS):
        if not differing:
            return forced
        first = min(differing, key=lambda number: trace.saved[number].time)
        storage = trace.saved[first].storage
        forced |= {number for number, saved in enumerate(trace.saved) if saved.storage == storage and saved.movable}
        rest = [number for number in way.droppable() if number not in forced]
        frame.replay = SecondRun(trace, rest)
        found = None
        with suppress(torch.OutOfMemoryError):
            found = _hand_over(frame, originals, lend, short=short) if storage in frame.replay.suppliers else None
        if found is None:
            break
        differing = found
    return forced | differing


def prove_hand_over(frame: Frame, originals: Sequence[torch.Tensor], lend: Lend | None, *, short: bool) -> bool | None:
    """Run the layer again as backward will, and see whether what is dropped comes out the same.

    ``None`` if the device has no memory for that, and none is lent.
    """
    with suppress(torch.OutOfMemoryError):
        return _hand_over(frame, originals, lend, short=short) == set()
    return None


def prove_all_again(frame: Frame, originals: Sequence[torch.Tensor], lend: Lend, *, short: bool) -> bool:
    """Run all of the layer's operations again, as backward will, and see whether what is dropped comes out the same."""
    proof = _comparison(frame, originals, frame.replay.dropped, hand_over=False)
    try:
        with on_host(originals, lend) if short else nullcontext():
            Context().run(frame.run_under, proof, LayerMode() if frame.learned else None)
    except NotReturnedError:
        raise
    except Exception:  # noqa: BLE001  # whatever the layer raises when it runs again, or for want of memory
        return False
    finally:
        frame.dropped = {}
    return not proof.differing


def _hand_over(frame: Frame, originals: Sequence[torch.Tensor], lend: Lend | None, *, short: bool) -> set[int] | None:
    """The tensors that differ in a second run with what was kept; ``None`` if the run changes that, or fails.

    The run is given what was kept, as backward gives it. Copies tell whether the run changes it, and put it back. Where
    the device has no memory for copies, they are on the host, and so is what was not kept.
    """
    numbers = frame.replay.numbers
    memories = [*{address_of(one): one for one in (originals[number].untyped_storage() for number in numbers)}.values()]
    others = [one for number, one in enumerate(originals) if number not in numbers]
    for place in (lend,) if short or lend is None else (None, lend):
        with nullcontext() if place is lend else suppress(torch.OutOfMemoryError), ExitStack() as stack:
            if place:
                lent = stack.enter_context(place([memory.nbytes() for memory in memories]))
                copies = [copy.copy_(memory) for copy, memory in zip(lent, memories, strict=True)]
                stack.enter_context(on_host(others, place))
            else:
                copies = [memory.clone() for memory in memories]
            frame.kept = {number: partial(originals.__getitem__, number) for number in numbers}
            return _run_with(frame, originals, [*zip(memories, copies, strict=True)])
    return None


def _run_with(
    frame: Frame, originals: Sequence[torch.Tensor], pairs: list[tuple[torch.UntypedStorage, torch.UntypedStorage]]
) -> set[int] | None:
    proof = _comparison(frame, originals, frame.replay.dropped, hand_over=True)
    same = True
    try:
        Context().run(frame.run_under, proof, HandOver(frame, proof))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever the layer raises when it runs again, or AnotherWayError
        same = False
        _logger.debug("%s, run again with what was kept, raises %r", frame.name, error)
    finally:
        frame.kept, frame.dropped = {}, {}
        for memory, copy in pairs:
            if not same_bits(whole(memory), whole(copy)):
                memory.copy_(copy)
                same = False
                _logger.debug("%s, run again with what was kept, changes that", frame.name)
    _logger.debug("%s, run again with what was kept: %s differ", frame.name, sorted(proof.differing))
    return proof.differing if same else None
