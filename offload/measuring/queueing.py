"""Times of a layer that are the device's, although the host takes longer to queue the layer than the device to run it.

The time between marks at both ends of the layer would be the host's. So the device is delayed before such a layer,
until the host is ahead, and the host's time is taken by its own clock.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Literal, get_args

from offload.device.backend import Backend, Event

MOST_DELAY_S = 0.02
"""How long the device is delayed at most, and before the first layer of a pass: longer than hosts need to queue one."""

AHEAD = 1.5  # before the others: by so many times the most that a layer of this pass has taken the host
NEAR = 4  # so many layers ahead of the device, the host does not yet wait for room in CUDA's queue, of 1024 kernels

Phase = Literal["forward", "backward"]
PASSES: tuple[Phase, ...] = get_args(Phase)


class Queueing:
    """How far the host is ahead of the device, layer by layer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._starts = deque([backend.mark()] * NEAR, NEAR)  # where the last layers start on the device
        self._start_s = 0.0  # when the host began the last one
        self._most_s: dict[Phase, float] = dict.fromkeys(PASSES, 0.0)  # the most that a layer has taken
        self._near = False

    def begin(self, phase: Phase) -> Event:
        """Delay the device unless the host is a layer ahead; where the next layer starts."""
        if self._backend.device.type != "cpu":  # where compute is the host's
            self._near = self._starts[0].query()
            if self._starts[-1].query():
                self._backend.delay(min(AHEAD * self._most_s[phase] or MOST_DELAY_S, MOST_DELAY_S))
        self._starts.append(self._backend.mark())
        self._start_s = time.perf_counter()
        return self._starts[-1]

    def end(self, phase: Phase) -> float:
        """Seconds since that on the host; 0 if these may be more than it needs to queue the layer.

        It waits for room in a queue if it is far ahead, and for the device if the layer asks that for a value.
        """
        took_s = time.perf_counter() - self._start_s
        self._most_s[phase] = max(self._most_s[phase], took_s)
        return took_s if self._near and not self._starts[-1].query() else 0.0
