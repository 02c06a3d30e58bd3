"""Things that go wrong at a chosen moment: interrupts, memory that ends, copies that fail."""

import contextlib
import dis
import functools
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
import torch
from lab import Lab

import offload

LIBRARY = str(Path(offload.__file__).parent)


class Countdown:
    """Raises when it is called the n-th time, counted from 0; never where there is no n."""

    def __init__(self, error: Callable[[], BaseException], n: int | None) -> None:
        self.places: list[str] = []
        """Where each call came from."""
        self._error = error
        self._n = n

    def __call__(self, place: str = "") -> None:
        self.places.append(place)
        if len(self.places) - 1 == self._n:
            raise self._error()


Fault = Callable[[Lab, int | None], AbstractContextManager[Countdown]]


@contextmanager
def interrupt(lab: Lab, n: int | None) -> Iterator[Countdown]:
    """Ctrl-C, wherever CPython may deliver it in the library's code: before each line and after each call."""
    countdown = Countdown(KeyboardInterrupt, n)

    def on_call(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        frame.f_trace_opcodes = True
        return on_step

    def on_step(frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        calls, withs = _calls_and_withs(code)
        if (event == "line" and frame.f_lasti not in withs) or (event == "opcode" and frame.f_lasti in calls):
            countdown(f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname}, {event}")
        return on_step

    # A finalizer swallows what is raised in it: then nobody was interrupted, and all has to be right.
    unraisable, sys.unraisablehook = sys.unraisablehook, lambda _: None
    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield countdown
    finally:
        sys.settrace(before)
        sys.unraisablehook = unraisable


@functools.cache
def _calls_and_withs(code: CodeType) -> tuple[frozenset[int], frozenset[int]]:
    """Where a call has returned, and where a block under ``with`` ends: to its exit, CPython goes uninterrupted."""
    instructions = list(dis.get_instructions(code))
    calls = {
        after.offset for call, after in itertools.pairwise(instructions) if call.opname in ("CALL", "CALL_FUNCTION_EX")
    }
    runs = zip(instructions, instructions[1:], instructions[2:], strict=False)
    withs = {run[0].offset for run in runs if all(one.opname == "LOAD_CONST" and one.argval is None for one in run)}
    return frozenset(calls), frozenset(withs)


def slowly(*functions: FunctionType, seconds: float = 0.02) -> Callable[..., Any]:
    """For ``sys.settrace``: each line of these functions takes so long, so that threads meet in the midst of them."""
    codes = {function.__code__ for function in functions}

    def trace(frame: FrameType, *_: object) -> Any:
        if frame.f_code not in codes:
            return None
        time.sleep(seconds)
        return trace

    return trace


def in_threads(*functions: Callable[[], Any], patience_s: float = 30) -> list[Any]:
    """What these functions return, each in a thread of its own. One that hangs fails its test and delays no other."""
    found: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(number: int, function: Callable[[], Any]) -> None:
        try:
            found[number] = function()
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return [found[number] for number in range(len(functions))]


def _patched(name: str, error: Callable[[], BaseException]) -> Fault:
    """Let a method of the backend fail."""

    @contextmanager
    def fault(lab: Lab, n: int | None) -> Iterator[Countdown]:
        countdown = Countdown(error, n)
        method = getattr(lab.backend, name)

        def fails(*arguments: Any) -> Any:
            countdown()
            return method(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lab.backend, name, fails)
            yield countdown

    return fault


@contextmanager
def failing_copy(lab: Lab, n: int | None) -> Iterator[Countdown]:
    """A copy that fails while it runs, when the program has long gone on."""
    countdown = Countdown(lambda: OSError("the copy has failed"), n)
    copy = lab.backend.copy

    def copies(stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        try:
            countdown()
        except OSError as error:
            # Behind loads that are queued: which of them tell of it must not depend on how busy the machine is.
            for loads in (lab.h2d_stream, lab.weight_stream, lab.state_stream):
                stream.wait_event(loads.record_event())
            stream.submit(functools.partial(_raise, error))
        else:
            copy(stream, target, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab.backend, "copy", copies)
        yield countdown


def _raise(error: BaseException) -> None:
    raise error


def assert_interrupts_are_told(
    lab: Lab, make: Callable[[], Any], resident: Callable[[list[int]], list[torch.Tensor]], times: int
) -> None:
    """Ctrl-C in the third step of an optimizer: the step is made, or it is not, or the next use says so.

    The step is repeated at first, and then made from a checkpoint.
    """
    once, twice, reloaded = (resident(steps) for steps in ([0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 3]))
    told, places = 0, 1
    for number in (None, *range(times)):
        run = make()
        run.steps(range(2))
        saved = run.checkpoint
        with (
            contextlib.suppress(KeyboardInterrupt),
            interrupt(lab, None if number is None else number * places // times) as countdown,
        ):
            run.steps([2])
        if getattr(run, "streamed", None) is not None:
            run.streamed.synchronize()
        places = max(places, len(countdown.places))
        run.optimizer.zero_grad()
        try:
            run.steps([2])
            found = run.values
        except RuntimeError as error:
            if "belong to one step" not in str(error) and "got another after its step" not in str(error):
                raise
            told += 1
        else:
            # The interrupt came before the step or after it.
            assert any(all(map(torch.equal, one, found)) for one in (once, twice)), countdown.places[-1]
        run.load(saved)
        run.steps([2, 3])
        assert all(map(torch.equal, reloaded, run.values)), countdown.places[-1]
    assert told > times / 4


FAULTS: dict[str, Fault] = {
    "interrupt": interrupt,
    "host memory": _patched("page_lock", lambda: offload.HostMemoryError("no host memory is left")),
    "device memory": _patched("empty", lambda: torch.OutOfMemoryError("no device memory is left")),
    "copy is refused": _patched("copy", lambda: OSError("the copy was refused")),
    "copy fails": failing_copy,
}
EXPECTED = re.compile("^$|no host memory is left|no device memory is left|the copy was refused|the copy has failed")
"""What the errors say."""
