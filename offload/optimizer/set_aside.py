"""The gradient of a large head, set aside on the host: its chunks are stepped between those of the layers.

Backward begins with it, beside all activations, and the state of a head takes longer to be loaded than the last layer
to be recomputed. So its memory is taken back at once, and no layer waits behind the whole head on the link.
"""

from __future__ import annotations

from collections import deque

import torch

from offload.base import trace
from offload.optimizer.chunks import ChunkStepper, StateChunk, StepWait

BETWEEN = 8
"""Behind so many chunks of others comes one of the head's: that of Llama-8B is stepped within 25 of its 32 layers.

One behind three delays the first layers' steps so far that compute waits for them: 1% of a step of 16,384 tokens.
"""


class SetAside:
    """The ``parameter`` whose gradient is set aside in the backward that runs, if any is."""

    def __init__(self, stepper: ChunkStepper) -> None:
        self.parameter: torch.Tensor | None = None
        self._stepper = stepper
        self._chunks: deque[StateChunk] = deque()
        self._since = 0  # chunks of others since the last one

    def take(self, group: int, parameter: torch.Tensor) -> bool:
        """Copy a gradient to the host, if there is memory for it. Compute waits for the copy, and has the memory."""
        stepper, backend = self._stepper, self._stepper.backend
        state, d2h = stepper.store.of(parameter), stepper.d2h_stream
        gradient, home = state.gradient, state.set_aside
        if gradient is None or home is None or gradient.stride() != home.stride():
            return False
        backend.wait(d2h, backend.compute_stream().record_event(), StepWait.GRADIENT)
        with trace.mark("d2h"):
            backend.copy(d2h, home, gradient)
        stepper.counters["written_bytes"] += home.nbytes
        state.written = d2h.record_event()  # which the loads of all chunks wait for
        backend.wait(backend.compute_stream(), state.written, StepWait.RELEASE)
        state.gradient, state.total = None, home
        backend.discard(gradient)
        self.parameter = parameter
        self._chunks.extend(stepper.split([(group, parameter)]))
        return True

    def between(self, chunks: list[StateChunk]) -> list[StateChunk]:
        """The chunks of others, and chunks of this parameter between them."""
        found: list[StateChunk] = []
        for chunk in chunks:
            found.append(chunk)
            self._since += 1
            if self._chunks and self._since >= BETWEEN:
                found.append(self._chunks.popleft())
                self._since = 0
        return found

    def rest(self, chunks: list[StateChunk]) -> list[StateChunk]:
        """The chunks of others, and all that are left of this parameter's behind them."""
        return [*chunks, *self._chunks]

    def forget(self) -> None:
        """The step is made, or will not be."""
        if self.parameter is not None:
            self._stepper.store.of(self.parameter).forget_step()
        self.parameter, self._since = None, 0
        self._chunks.clear()
