"""The CPU as a device: each stream is a worker thread with a queue, each event a real event.

Copies are as asynchronous as a GPU's, so code that forgets a wait computes wrong numbers here too. The caller's thread,
where the model's operations run, is the compute stream, so a wait on it blocks the caller.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, cast
from weakref import WeakSet

import torch

from offload.base import trace
from offload.base.worker import Worker, in_worker
from offload.device.backend import Backend, Event, Stream, Wait


class CpuEvent(threading.Event):
    """Set when the worker of its stream reaches it."""

    def __init__(self, backend: CpuBackend) -> None:
        super().__init__()
        self._backend = backend
        self._errors = backend.errors
        self.error: BaseException | None = None
        """The first error of the work before the event, whichever the stream. Without its traceback, which would keep
        the tensors of the copy alive as long as the event."""
        self.reached_s = 0.0  # when the event was reached, by `time.perf_counter`

    def set(self) -> None:
        self.reached_s = time.perf_counter()
        self.error = self._errors[0].with_traceback(None) if self._errors else None
        super().set()

    def query(self) -> bool:
        return self.is_set()

    def synchronize(self) -> None:
        """Block until the work before the event is done; raise a ``RuntimeError`` if it has failed."""
        self.wait()
        if self.error is not None:
            if self._backend.errors is self._errors:
                self._backend.errors = []  # the program knows, so they do not fail what it queues from now on
            # A new error for each who waits, as raising it adds a traceback to it, and the event lives on.
            raise RuntimeError(f"a copy has failed: {type(self.error).__name__}: {self.error}") from self.error


class CpuStream:
    """A queue of work that a thread of its own runs in order."""

    def __init__(self, name: str, backend: CpuBackend) -> None:
        self.delay_s = 0.0  # extra time before each piece of work, to make races visible in tests
        self._backend = backend
        self._worker = Worker(name)

    def submit(self, work: Callable[[], object]) -> None:
        """Queue ``work``; what it raises comes out where the program waits for it."""
        if self.delay_s:
            self._worker.submit(functools.partial(time.sleep, self.delay_s), self._backend.errors)
        self._worker.submit(work, self._backend.errors)

    def record_event(self) -> CpuEvent:
        event = CpuEvent(self._backend)
        if self._worker.idle:
            event.set()  # to ask another thread takes longer, and so does every operation while two threads run
        else:
            self._worker.submit(event.set, self._backend.errors)
        return event

    def wait_event(self, event: CpuEvent) -> None:
        """Let work queued from now on start after ``event``, also after one that failed: the program gets the error."""
        if not event.is_set():
            self._worker.submit(event.wait, self._backend.errors)

    def synchronize(self) -> None:
        """Block until all work queued so far is done; raise what it has raised."""
        self.record_event().synchronize()


class ComputeStream(CpuStream):
    """The caller's own thread, plus work that a test submits to make compute late."""

    def wait_event(self, event: CpuEvent) -> None:
        """Block the caller, whose next operation runs at once."""
        begin = time.perf_counter()
        event.synchronize()
        recorder = trace.recorder()
        if recorder is not None:
            recorder.waits.append((begin, time.perf_counter()))


class CpuBackend(Backend):
    """Host memory stands for the device's, and copies are made by two worker threads."""

    locks_any_memory = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.errors: list[BaseException] = []
        """What queued work has raised, of all streams: an event after a failed copy fails too, whichever streams lead
        from one to the other. Once the program has been told, where it waited, what it queues next has a new list."""
        self._compute = ComputeStream("compute", self)
        # Weakly, as a stream's thread ends when nobody holds the stream; then it has nothing to do any more.
        self._streams: WeakSet[CpuStream] = WeakSet([self._compute])

    def new_stream(self, name: str) -> CpuStream:
        stream = CpuStream(name, self)
        self._streams.add(stream)
        return stream

    def running_on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()  # operations run in the caller's thread

    def compute_stream(self) -> ComputeStream:
        return self._compute

    def wait(self, stream: Stream, event: Event, why: Enum) -> None:
        if why is Wait.UNREAD:
            # A finalizer asks, whose errors nobody would see. Who reads the bytes is told.
            self.end_useless_copy(event)
        else:
            stream.wait_event(event)

    def end_useless_copy(self, copied: Event) -> None:
        # The queued copy holds the memory, which an accelerator would free at once.
        if not in_worker():
            cast("CpuEvent", copied).wait()

    def record_timed(self, stream: Stream) -> Event:
        if stream is not self._compute:
            return stream.record_event()
        # The caller's thread is the compute stream, so the event is reached now, whatever tests have queued.
        reached = CpuEvent(self)
        reached.set()
        return reached

    def elapsed_s(self, begin: Event, end: Event) -> float | None:
        begin, end = cast("CpuEvent", begin), cast("CpuEvent", end)
        return end.reached_s - begin.reached_s if begin.query() and end.query() else None

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        recorder = trace.recorder()
        what = recorder.marks[-1][1] if recorder is not None and recorder.marks else trace.Mark("other", None)

        def run() -> None:
            begin = time.perf_counter()
            # Backward may run in inference mode, and what it allocates there can be written in that mode only.
            with torch.inference_mode():
                target.copy_(source)
            if recorder is not None:
                recorder.copies.append((begin, time.perf_counter(), what, source.nbytes))

        cast("CpuStream", stream).submit(run)

    def collective(self, stream: Stream, start: Callable[[], Any]) -> None:
        queue = cast("CpuStream", stream)
        # All ranks must start their collectives in one order, so the caller's thread starts it. Until then it waits for
        # the stream's earlier work, which writes what the collective reads.
        queue.synchronize()
        queue.submit(start().wait)

    def synchronize(self) -> None:
        # wait(), as a failed copy is done too, and its error belongs to those who need its bytes.
        for stream in list(self._streams):
            stream.record_event().wait()
