"""How long compute really waited for copies, told by the events on both sides of each wait.

Compute stalls from the moment when it reaches a wait until the copies that it waits for are done. So each wait
needs one event more, on the compute stream; the copies' own event is there already. Nobody waits for these events:
their times are read when both have passed.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.device.backend import Backend, Event, Stream

MOST_PENDING = 4096
"""Waits whose times are not known yet. What comes beyond is not counted, so that memory is bounded."""


class Stalls:
    """The waits of compute for copies, and the seconds that they took."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Backend, Event, Event]] = deque()
        self.last: Event | None = None
        """What compute was said to wait for last."""
        self._lock = threading.Lock()
        self.seconds = 0.0
        """The sum over all waits whose times have been collected."""

    def expect(self, backend: Backend, compute_stream: Stream, copied: Event) -> None:
        """Compute is about to wait for ``copied``, a timed event. Inside a CUDA graph nothing is measured."""
        if backend.capturing:
            return
        self.last = copied
        if len(self._pending) < MOST_PENDING and not copied.query():
            self._pending.append((backend, backend.record_timed(compute_stream), copied))

    def collect(self) -> None:
        """Read the times of the waits that compute has passed by now. Does not wait."""
        with self._lock:
            while self._pending:
                backend, reached, copied = self._pending[0]
                stall_s = backend.elapsed_s(reached, copied)
                if stall_s is None:
                    break
                self._pending.popleft()
                self.seconds += max(0.0, stall_s)
