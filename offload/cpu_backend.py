"""The CPU as a device: each stream is a worker thread with a queue, each event a real event.

Copies are as asynchronous as a GPU's, so code that forgets a wait computes wrong numbers here
too. Operations of the model itself run in the caller's thread; they are the compute stream,
which is why a wait on it blocks the caller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch

from offload import trace
from offload.backend import Backend
from offload.pinned import pageable


class CpuEvent:
    """Set when the worker of its stream reaches it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.reached_s = 0.0
        """When the event was reached, by ``time.perf_counter``."""

    def set(self) -> None:
        """Mark the event as reached."""
        self.reached_s = time.perf_counter()
        self._reached.set()

    def query(self) -> bool:
        """Whether the work before the event is done."""
        return self._reached.is_set()

    def synchronize(self) -> None:
        """Block until the work before the event is done."""
        self._reached.wait()


class CpuStream:
    """A queue of work that a thread of its own runs in order."""

    def __init__(self, name: str) -> None:
        self.delay_s = 0.0
        """Extra time before each piece of work, to make races visible in tests."""
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name=f"offload::{name}", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue ``work``."""

        def delayed() -> None:
            if self.delay_s:
                time.sleep(self.delay_s)
            work()

        self._work.put(delayed)

    def record_event(self) -> CpuEvent:
        """An event that is set when all work queued so far is done."""
        event = CpuEvent()
        self._work.put(event.set)
        return event

    def wait_event(self, event: CpuEvent) -> None:
        """Let work queued from now on start after ``event``."""
        self._work.put(event.synchronize)

    def synchronize(self) -> None:
        """Block until all work queued so far is done."""
        self.record_event().synchronize()


class ComputeStream(CpuStream):
    """The caller's own thread, plus work that a test submits to make compute late."""

    def wait_event(self, event: CpuEvent) -> None:
        """Block the caller, whose next operation runs at once."""
        begin = time.perf_counter()
        event.synchronize()
        if trace.recorder is not None:
            trace.recorder.waits.append((begin, time.perf_counter()))


class CpuBackend(Backend):
    """Host memory stands for the device's, and copies are made by two worker threads."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._compute = ComputeStream("compute")

    def new_stream(self, name: str) -> CpuStream:
        return CpuStream(name)

    def compute_stream(self) -> ComputeStream:
        return self._compute

    def record_timed(self, stream: CpuStream) -> CpuEvent:
        if stream is not self._compute:
            return stream.record_event()
        # The caller's thread is compute, and it has got here.
        reached = CpuEvent()
        reached.set()
        return reached

    def elapsed_s(self, begin: CpuEvent, end: CpuEvent) -> float | None:
        return end.reached_s - begin.reached_s if begin.query() and end.query() else None

    def copy(self, stream: CpuStream, target: torch.Tensor, source: torch.Tensor) -> None:
        recorder = trace.recorder
        if recorder is None:
            stream.submit(lambda: _copy(target, source))
        else:
            what = recorder.last_mark
            stream.submit(lambda: _record_copy(recorder, what, target, source))

    def pinned(self, nbytes: int) -> torch.Tensor:
        return pageable(nbytes)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _record_copy(recorder: trace.Recorder, what: trace.Mark, target: torch.Tensor, source: torch.Tensor) -> None:
    begin = time.perf_counter()
    _copy(target, source)
    recorder.copies.append((begin, time.perf_counter(), what, source.nbytes))
