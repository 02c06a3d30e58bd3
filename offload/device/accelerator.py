"""Any accelerator that PyTorch knows: its streams, events and memory through ``torch.accelerator``."""

from __future__ import annotations

from typing import cast

import torch

from offload.device.backend import Backend, Event, Stream


class AcceleratorBackend(Backend):
    """What ``torch.accelerator`` offers on every device; :mod:`offload.device.cuda` knows more."""

    locks_any_memory = False

    def new_stream(self, name: str) -> Stream:
        return torch.Stream(device=self.device)

    def compute_stream(self) -> Stream:
        return torch.accelerator.current_stream(self.device.index)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with cast("torch.Stream", stream):
            target.copy_(source, non_blocking=True)

    def record_timed(self, stream: Stream) -> Event:
        if self.capturing:
            return stream.record_event()  # in a graph that is replayed later, a mark has no time
        event = torch.Event(self.device, enable_timing=True)
        event.record(cast("torch.Stream", stream))
        return event

    def elapsed_s(self, begin: Event, end: Event) -> float | None:
        if self.capturing or not (begin.query() and end.query()):  # a query would break the capture
            return None
        return cast("torch.Event", begin).elapsed_time(cast("torch.Event", end)) * 1e-3

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)
