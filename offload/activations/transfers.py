"""What a context moves bytes with: its streams, its host memory and its counters."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from offload.activations.stats import Counters
from offload.base import trace
from offload.device.backend import Backend, Event, Stream, Wait
from offload.device.capture import CaptureError, is_capturing
from offload.host.buffers import HostBuffer
from offload.host.limits import HostMemory
from offload.host.pool import HostPool


class CopyBatch:
    """Copies to the host that were queued one after the other, and the event after which all of them are done."""

    __slots__ = ("empty", "event", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.empty = True
        self.event: Event | None = None
        """``None`` as long as copies are added."""


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
    _batch: CopyBatch = field(default_factory=lambda: CopyBatch(0))

    def wait(self, stream: Stream, event: Event, why: Wait) -> None:
        """Let ``stream`` wait for ``event``."""
        self.backend.wait(stream, event, why)

    def wait_until_ready(self, ready: Event) -> None:
        """Let copies to the host that are queued from now on wait for ``ready``, unless they do already."""
        if ready is not self._ready:
            # One wait holds for all that comes after it on the stream, and storages of one operation share an event.
            self.wait(self.d2h_stream, ready, Wait.READY)
            self._ready = ready

    def wait_for_copies(self, compute_stream: Stream, copied: Event, why: Wait) -> None:
        """Let compute wait for copies, on the device, and count how long it stalls."""
        stalls = self.counters.stalls
        if copied is not stalls.last:  # else compute has waited for it already
            stalls.expect(self.backend, compute_stream, copied)
        self.backend.wait(compute_stream, copied, why)

    def take_host(self, nbytes: int) -> HostBuffer | None:
        """A host buffer to copy to; ``None`` where the bytes have to stay on the device."""
        try:
            return self.host.take(self.pool, nbytes)
        except CaptureError:
            self.join()  # else ending the capture fails as well, and hides what this error says
            raise

    def join(self) -> None:
        """Let the compute stream wait for both copy streams, if a CUDA graph is being captured.

        Every stream that a capture has forked must be joined before it ends.
        """
        for stream in {self.d2h_stream, self.h2d_stream}:
            if is_capturing(stream):
                self.backend.compute_stream().wait_event(stream.record_event())

    def to_host(self, host: HostBuffer, device: torch.Tensor, layer: int) -> CopyBatch:
        """Queue the copy of the storage of ``device`` into ``host`` on the d2h stream."""
        with trace.mark("d2h", layer):
            self.backend.to_host(self.d2h_stream, host.pieces, device)
        self._batch.empty = False
        return self._batch

    def end_batch(self) -> None:
        """Mark the copies to the host that were queued since this was called last, if there are any."""
        if self._batch.empty:
            return
        batch, self._batch = self._batch, CopyBatch(self._batch.number + 1)
        batch.event = self.backend.record_timed(self.d2h_stream)

    def done(self, batch: CopyBatch) -> Event:
        """The event after which the copies of ``batch`` are done."""
        if batch.event is None:
            self.end_batch()
        if batch.event is None:  # an interrupt came before it was recorded, and a later one is as good
            batch.event = self.backend.record_timed(self.d2h_stream)
        return batch.event

    def to_device(self, device: torch.Tensor, host: HostBuffer, layer: int) -> None:
        """Queue the copy of ``host`` into the storage of ``device`` on the h2d stream."""
        self.pool.read(host)
        with trace.mark("h2d", layer):
            self.backend.to_device(self.h2d_stream, device, host.pieces)
