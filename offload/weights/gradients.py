"""Copies gradients to the host and into ``p.grad``: the d2h stream, pinned staging, and the worker that adds.

Where ``p.grad`` is ``None``, the first microbatch after ``zero_grad()``, the copy lands in it, and the host has nothing
to do. Later microbatches are copied into staging and added to ``p.grad`` by a worker thread, so that no gradient goes
up to the device again. Staging is bounded. If the worker is so far behind that all of it is taken, backward waits on
the host for the next buffer: a device cannot wait for a thread. Its queue still holds a layer's work by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch

from offload.base import trace
from offload.base.worker import Worker
from offload.device.backend import Backend, Event, owners
from offload.host.page_locked import page_locked, pageable
from offload.weights.layer import WeightLayer
from offload.weights.parameter import Gradients, HostParameter, aligned, own_storage
from offload.weights.slots import WeightWait
from offload.weights.stats import WeightCounters

_Staged = tuple[HostParameter, torch.Tensor, torch.Tensor, bool]
"""A gradient, what the worker adds it to, and whether it is the first there, which overwrites."""


class _Flight(NamedTuple):
    """Gradients of a layer that are being copied to the host; held until compute waits for their copies."""

    layer: int
    gradients: list[torch.Tensor]
    arrived: Event


class GradientWriter:
    """Takes the gradients of each layer when its backward has ended, and sees that they end up in ``p.grad``.

    Gradients of ``num_flights`` layers may be copied while compute goes on.
    """

    def __init__(
        self,
        backend: Backend,
        layers: list[WeightLayer],
        num_flights: int,
        num_staging: int,
        counters: WeightCounters,
        *,
        averaged: bool,
    ) -> None:
        self._backend = backend
        self._layers = layers
        self._d2h_stream, _ = backend.copy_streams
        self._num_flights = num_flights
        self._num_staging = num_staging
        self._averaged = averaged  # then what p.grad holds is copied to the device as well
        self.counters = counters
        self._flights: deque[_Flight] = deque()
        # Where p.grad lies, kept from step to step: page-locking stops the device.
        self._memory: dict[HostParameter, torch.Tensor] = {}
        self._staging: SimpleQueue[torch.Tensor] = SimpleQueue()  # the buffers that are free
        self._staging_made = 0
        self._worker = Worker("host")
        self._errors: deque[BaseException] = deque()  # of the worker's jobs since the last backward

    def write_back(self, layer: WeightLayer, held: Iterable[torch.Tensor] = ()) -> None:
        """Queue the copies of a layer's gradients, which compute has been told to write; the layer forgets them.

        Device memory in ``held`` is not reused before they have arrived either.
        """
        if not layer.gradients:
            return
        compute = self._backend.compute_stream()
        # The host has queued what computes these gradients, and is far ahead of the device.
        self._backend.wait(self._d2h_stream, compute.record_event(), WeightWait.GRADIENT)
        with trace.mark("d2h", layer.number):
            for gradients in layer.gradients:
                self._copy_out(gradients)
        leaving = [gradient for gradients in layer.gradients for gradient in gradients.values()]
        self._flights.append(_Flight(layer.number, [*leaving, *held], self._d2h_stream.record_event()))
        # The flight alone holds them now, and lets each go as soon as compute has waited.
        layer.gradients.clear()
        del leaving, gradients
        while len(self._flights) > self._num_flights:
            trace.point("wait", self._flights[0].layer)
            # From here on compute may reuse the memory: it is told to wait for the copy that reads it.
            self._backend.wait(compute, self._flights[0].arrived, WeightWait.RELEASE)
            self._land()

    def when_written(self, job: Callable[[], None], cleanup: Callable[[], None] = lambda: None) -> None:
        """Have the worker do ``job`` after the copies that are queued by now, and ``cleanup`` whatever fails."""
        arrived = self._d2h_stream.record_event()

        def when_arrived() -> None:
            try:
                self._backend.wait_on_host(arrived, WeightWait.STAGED)  # the worker's only: backward goes on
                with torch.no_grad():  # the worker is a thread, and grad mode is each thread's own
                    job()
            finally:
                cleanup()

        self._worker.submit(when_arrived, self._errors)

    @property
    def failed(self) -> bool:
        """Whether a job of this backward has raised."""
        return bool(self._errors)

    def finish(self) -> None:
        """Block until every gradient is in ``p.grad``: the end of backward. Raises what a job of the worker's has."""
        try:
            if self._flights:
                # The program reads p.grad next. Copies run in order: the last one's end is that of all.
                self._backend.wait_on_host(self._flights[-1].arrived, WeightWait.WRITTEN)
        finally:  # whatever has failed, the next backward begins anew
            while self._flights:
                self._land()
            self._worker.drain()  # additions that still wait in its queue
            self._staging_made = self._staging.qsize()  # an interrupt may have lost one
            for layer in self._layers:
                for host in layer.parameters:
                    host.give_back_gradient()
            errors = list(self._errors)
            self._errors.clear()
        if errors:
            raise errors[0]

    def _copy_out(self, gradients: Gradients) -> None:
        """Queue copies into what ``p.grad`` will be, or into staging where something is to be added."""
        new = {host: gradient for host, gradient in gradients.items() if host.total is None and host.before is None}
        self._provide_memory(new)
        staged: list[_Staged] = []
        for host, gradient in gradients.items():
            self.counters["gradient_bytes"] += gradient.nbytes
            first = host.total is None or host.replaces
            host.replaces = False
            if host.total is None:
                # .data: with a version of its own. What is there before is added at the end, out of ordinary memory.
                host.total = self._memory[host].data if host.before is None else torch.empty_like(host.before)
            if first and host.before is None and host.total.dtype is gradient.dtype:
                self._backend.copy(self._d2h_stream, host.total, gradient)
            else:
                staged.append((host, gradient, host.total, first))
        if staged:
            self._stage(staged)

    def _provide_memory(self, gradients: Gradients) -> None:
        """Make sure of memory for gradients that nobody else looks into, one piece for all that is missing."""
        missing = []
        for host in gradients:
            memory = self._memory.get(host)
            # Without other owners, the user has dropped parameter.grad and all its views.
            if memory is None or memory.dtype is not host.gradient_dtype or owners(memory) > 1:
                missing.append(host)
        for landing in (True, False):
            # Pinned is only what copies use; a conversion to another dtype is the worker's.
            group = [
                host for host in missing if (self._averaged or host.gradient_dtype is gradients[host].dtype) is landing
            ]
            sizes = [aligned(host.parameter.numel() * host.gradient_dtype.itemsize) for host in group]
            if group:
                flat = page_locked(sum(sizes), self._backend) if landing else pageable(sum(sizes))
                self.counters["gradient_host_bytes"] += len(flat)
                for host, memory in zip(group, flat.split(sizes), strict=True):
                    self._memory[host] = host.over(own_storage(memory), host.gradient_dtype)

    def _stage(self, staged: list[_Staged]) -> None:
        """Copy gradients into a staging buffer, from which the worker adds them."""
        sizes = [aligned(gradient.nbytes) for _, gradient, *_ in staged]
        buffer = self._take_buffer(sum(sizes))
        additions: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
        for (host, gradient, target, first), memory in zip(staged, buffer[: sum(sizes)].split(sizes), strict=True):
            landed = host.over(memory, gradient.dtype)
            self._backend.copy(self._d2h_stream, landed, gradient)
            additions.append((landed, target, first))  # the worker does not hold device memory

        def add() -> None:
            for landed, target, first in additions:
                self.counters["added_bytes"] += landed.nbytes
                target.copy_(landed) if first else target.add_(landed)

        self.when_written(add, partial(self._staging.put, buffer))  # also after an error: backward may wait for it

    def _take_buffer(self, nbytes: int) -> torch.Tensor:
        """A free staging buffer, a new one, or the next that the worker frees."""
        buffer = None
        if self._staging.empty() and self._staging_made < self._num_staging:
            self._staging_made += 1
        else:
            self.counters["staging_waits"] += self._staging.empty()
            buffer = self._staging.get()  # blocks until the worker has freed one: host memory is bounded
        if buffer is None or len(buffer) < nbytes:  # parameters may have been unfrozen since it was made
            trained = ([host for host in layer.parameters if host.parameter.requires_grad] for layer in self._layers)
            largest = max(nbytes, *(sum(aligned(host.nbytes) for host in hosts) for hosts in trained))
            self.counters["staging_bytes"] += largest - (0 if buffer is None else len(buffer))
            buffer = page_locked(largest, self._backend)
        return buffer

    def _land(self) -> None:
        gradients = self._flights.popleft().gradients
        while gradients:
            self._backend.discard(gradients.pop())
