"""What a context moves bytes with: its streams, its host memory and its counters."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from offload.activations.stats import Counters, OffloadStats
from offload.base import trace
from offload.device.backend import Backend, Event, Stream, Wait
from offload.device.capture import CaptureError, is_capturing
from offload.host.buffers import HostBuffer
from offload.host.limits import HostMemory
from offload.host.pool import HostPool


class CopyBatch:
    """Copies to the host that were queued one after the other, and the event after which all of them are done."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.event: Event | None = None
        """``None`` as long as copies are added."""


class Reload:
    """Copies to the device that were queued one after the other, the event after them, and who has waited for it.

    The device memory belongs to the compute stream ``stream``, which ``home`` tells from others.
    """

    def __init__(self, done: Event | None, stream: Stream, home: object) -> None:
        self._done = done
        self.stream = stream
        self.home = home
        self.awaited_by: object = None
        """The stream that has waited for it last, told as ``home`` is."""

    @property
    def done(self) -> Event:
        """The event; of what compute itself has made, it is recorded when another stream first asks for it."""
        if self._done is None:
            self._done = self.stream.record_event()
        return self._done


@dataclass
class Transfers:
    """The two copy streams of a context, with the memory they copy to and the counts they keep."""

    backend: Backend
    pool: HostPool
    d2h_stream: Stream
    h2d_stream: Stream
    counters: Counters
    host: HostMemory = field(default_factory=HostMemory)
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while bytes come back: several threads may read what was saved."""
    _ready: Event | None = None
    """What the d2h stream has waited for last."""
    _batch: CopyBatch | None = None
    """The copies to the host that were queued last, as long as there may be more."""
    _batches: int = 0

    def stats(self) -> OffloadStats:
        """A frozen snapshot of what has moved so far."""
        return self.counters.snapshot(self.pool.pinned_bytes)

    def wait_for_copies(self, compute_stream: Stream, copied: Event, why: Wait) -> None:
        """Let compute wait for copies, on the device, and count how long it stalls."""
        self.counters.expect_stall(self.backend, compute_stream, copied)
        self.backend.wait(compute_stream, copied, why)

    def join(self) -> None:
        """Let the compute stream wait for both copy streams, if a CUDA graph is being captured.

        Every stream that a capture has forked must be joined before it ends.
        """
        for stream in {self.d2h_stream, self.h2d_stream}:
            if is_capturing(stream):
                self.backend.compute_stream().wait_event(stream.record_event())

    def to_host(
        self, memory: torch.UntypedStorage, nbytes: int, ready: Event, layer: int
    ) -> tuple[CopyBatch, HostBuffer] | None:
        """Queue the copy of device ``memory``, written when ``ready`` is reached; ``None`` where it has to stay."""
        try:
            host = self.host.take(self.pool, nbytes)
        except CaptureError:
            self.join()  # else ending the capture fails as well, and hides what this error says
            raise
        if host is None:
            return None
        wait, stream = self.backend.wait, self.d2h_stream
        if ready is not self._ready:
            # One wait holds for all that comes after it on the stream, and storages of one operation share an event.
            wait(stream, ready, Wait.READY)
            self._ready = ready
        for event in host.events:
            # The buffer's last user may still read it, or write it.
            wait(stream, event, Wait.HOST_BUFFER)
        with trace.mark("d2h", layer):
            self.backend.to_host(stream, host.pieces, memory)
        if self._batch is None:
            self._batches += 1
            self._batch = CopyBatch(self._batches)
        return self._batch, host

    def end_batch(self) -> None:
        """Mark the copies to the host that were queued since this was called last, if there are any."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.event = self.backend.record_timed(self.d2h_stream)

    def done(self, batch: CopyBatch) -> Event:
        """The event after which the copies of ``batch`` are done."""
        if batch is self._batch:
            self.end_batch()
        if batch.event is None:  # an interrupt came before it was recorded, and a later one is as good
            batch.event = self.backend.record_timed(self.d2h_stream)
        return batch.event

    def to_device(self, memory: torch.UntypedStorage, host: HostBuffer, layer: int) -> None:
        """Queue the copy of ``host`` into device ``memory``, which the h2d stream has waited for."""
        self.pool.read(host)
        with trace.mark("h2d", layer):
            self.backend.to_device(self.h2d_stream, memory, host.pieces)
