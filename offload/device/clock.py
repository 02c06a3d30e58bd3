"""Time as a device's compute stream sees it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.device.backend import Event
from offload.device.select import get_backend


class Clock:
    """Marks in the compute stream, and the seconds between them.

    Args:
        device: Whose stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._backend = get_backend(device)

    def mark(self) -> Event:
        """The point that the stream reaches with what is queued so far."""
        return self._backend.record_timed(self._backend.compute_stream())

    def seconds(self, marks: Iterable[tuple[Event, Event]]) -> list[float]:
        """From the first mark of each pair to the second; waits until the stream has reached them."""
        self._backend.synchronize()  # else some marks would have no time yet
        return [self._backend.elapsed_s(begin, end) or 0.0 for begin, end in marks]
