"""Time as a device's compute stream sees it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch


class Clock:
    """Marks in the compute stream, and the seconds between them.

    Args:
        device: Whose stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """The point that the stream reaches with what is queued so far."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Iterable[tuple[Any, Any]]) -> list[float]:
        """From the first mark of each pair to the second; waits until the stream has reached them."""
        if self._device.type == "cpu":
            return [end - start for start, end in marks]
        torch.accelerator.synchronize(self._device)
        return [start.elapsed_time(end) / 1e3 for start, end in marks]
