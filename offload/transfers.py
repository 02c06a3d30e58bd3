"""What a context moves bytes with: its streams, its host memory and its counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from offload import trace
from offload.backend import Backend, Wait
from offload.graphs import CaptureError, is_capturing
from offload.host_memory import HostMemory
from offload.host_pool import HostBuffer, HostPool
from offload.stats import Counters


@dataclass
class Transfers:
    """The two copy streams of a context, with the memory they copy to and the counts they keep."""

    backend: Backend
    pool: HostPool
    d2h_stream: Any
    h2d_stream: Any
    counters: Counters
    host: HostMemory = field(default_factory=HostMemory)

    def wait(self, stream: Any, event: Any, why: Wait) -> None:
        """Let ``stream`` wait for ``event``."""
        self.backend.wait(stream, event, why)

    def take_host(self, nbytes: int) -> HostBuffer | None:
        """A host buffer to copy to; ``None`` where the bytes have to stay on the device."""
        try:
            return self.host.take(self.pool, nbytes)
        except CaptureError:
            self.join()
            raise

    def join(self) -> None:
        """Let the compute stream wait for both copy streams, if a CUDA graph is being captured.

        Every stream that a capture has forked must be joined before it ends.
        """
        for stream in {self.d2h_stream, self.h2d_stream}:
            if is_capturing(stream):
                self.backend.compute_stream().wait_event(stream.record_event())

    def to_host(self, host: HostBuffer, flat: torch.Tensor, layer: int) -> None:
        """Queue the copy of ``flat`` into ``host`` on the d2h stream."""
        with trace.mark("d2h", layer):
            for piece, source in zip(host.pieces, _split(flat, host), strict=True):
                self.backend.copy(self.d2h_stream, piece, source)
        self.counters.offloaded_bytes += host.nbytes
        self.counters.offloaded_storages += 1

    def to_device(self, flat: torch.Tensor, host: HostBuffer, layer: int) -> None:
        """Queue the copy of ``host`` into ``flat`` on the h2d stream."""
        self.pool.read(host)
        with trace.mark("h2d", layer):
            for piece, target in zip(host.pieces, _split(flat, host), strict=True):
                self.backend.copy(self.h2d_stream, target, piece)
        self.counters.reloaded_bytes += host.nbytes


def _split(flat: torch.Tensor, host: HostBuffer) -> tuple[torch.Tensor, ...]:
    if len(host.pieces) == 1:
        return (flat,)
    return torch.split(flat, [len(piece) for piece in host.pieces])
