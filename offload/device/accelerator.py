"""Any accelerator that PyTorch knows: its streams, events and memory through ``torch.accelerator``."""

from __future__ import annotations

from typing import Any

import torch

from offload.device.backend import Backend


class AcceleratorBackend(Backend):
    """Whatever ``torch.accelerator`` offers; CUDA has more, see :mod:`offload.device.cuda`."""

    def new_stream(self, name: str) -> Any:
        return torch.Stream(device=self.device)

    def compute_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device.index)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        with stream:
            target.copy_(source, non_blocking=True)

    def record_timed(self, stream: Any) -> Any:
        if self.capturing:
            return stream.record_event()
        event = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return event

    def elapsed_s(self, begin: Any, end: Any) -> float | None:
        if self.capturing or not (begin.query() and end.query()):
            return None
        return float(begin.elapsed_time(end)) * 1e-3

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)
