"""A thread that runs jobs in order beside the program; a forked child gets a thread of its own."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

_Errors = list[BaseException] | deque[BaseException]
_Jobs = SimpleQueue[tuple[Callable[[], object], _Errors] | None]


class Worker:
    """A thread that runs jobs in order, from the first job until the worker is garbage."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._starting = threading.Lock()
        self._jobs: _Jobs | None = None  # ``None`` as long as there is no thread
        self._pending: deque[None] = deque()  # one for each job that is not over, there before its job

    def submit(self, job: Callable[[], object], errors: _Errors) -> None:
        """Queue ``job``; what it raises is appended to ``errors``, and the thread goes on."""
        if os.getpid() != self._process:
            self._begin()  # a forked child has no other threads
        jobs = self._jobs
        self._pending.append(None)
        (self._start() if jobs is None else jobs).put((job, errors))

    @property
    def idle(self) -> bool:
        """Whether all jobs so far are over."""
        return not self._pending or os.getpid() != self._process

    def drain(self) -> None:
        if self._jobs is not None:
            done = threading.Event()
            self.submit(done.set, [])
            done.wait()

    def _start(self) -> _Jobs:
        with self._starting:
            if self._jobs is None:
                # The thread first: an interrupt may leave a thread without work, but no queue without a thread.
                jobs: _Jobs = SimpleQueue()
                name = f"offload::{self._name}"
                threading.Thread(target=_work, args=(jobs, self._pending), name=name, daemon=True).start()
                self._jobs = jobs
            return self._jobs

    def __del__(self) -> None:
        if self._jobs is not None:
            self._jobs.put(None)


_here = threading.local()


def in_worker() -> bool:
    """Whether this is a worker's thread. A finalizer that runs here must not wait for the worker, which runs it."""
    return hasattr(_here, "works")


def _work(jobs: _Jobs, pending: deque[None]) -> None:
    _here.works = True
    while (queued := jobs.get()) is not None:
        job, errors = queued
        try:
            job()
        except BaseException as error:  # noqa: BLE001  the program raises it when it waits
            errors.append(error)
        pending.popleft()
        del queued, job  # else the waiting thread would keep the job's tensors alive
