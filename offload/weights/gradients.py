"""Copies gradients to the host and into ``p.grad``: the d2h stream, pinned staging, and the worker that adds.

The first microbatch after ``zero_grad()`` is copied right into ``p.grad``. Later microbatches are copied into staging,
from which a worker thread adds them to ``p.grad``, so that no gradient is copied to the device again. Staging is
bounded: if the worker is so late that all of it is taken, backward waits on the host for the next buffer, for a device
cannot wait for a thread. The device's queue still holds a layer's work by then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from queue import LifoQueue
from typing import NamedTuple

import torch

from offload.base import trace
from offload.base.tensors import aligned, own_storage
from offload.base.torch_private import owners_of
from offload.base.worker import Worker
from offload.device.backend import Backend, Event
from offload.host.page_locked import page_locked
from offload.weights.layer import WeightLayer, WeightWait
from offload.weights.parameter import Gradients, HostParameter

STAGING = 3
"""The gradients of so many layers may wait on the host to be added, each in a buffer of their own."""

_Staged = tuple[HostParameter, torch.Tensor, Callable[[torch.Tensor], object]]
"""A gradient on the device, and what adds its host copy to the sum, or replaces the sum by it."""


class _Flight(NamedTuple):
    """Gradients of a layer that are being copied to the host; held until compute waits for their copies."""

    layer: int
    gradients: list[torch.Tensor]
    arrived: Event


class GradientWriter:
    """Writes gradients to ``p.grad``, of at most ``num_flights`` layers at once while compute continues."""

    def __init__(self, backend: Backend, layers: list[WeightLayer], num_flights: int, counters: Counter[str]) -> None:
        self._backend = backend
        self._layers = layers
        self._d2h_stream, _ = backend.copy_streams
        self._num_flights = num_flights
        self.counters = counters
        self._flights: deque[_Flight] = deque()
        # The memory of p.grad, kept from step to step: page-locking stops the device.
        self._memory: dict[HostParameter, torch.Tensor] = {}
        # The buffers that are free. The one used last is taken first, so that those never needed stay empty.
        self._staging: LifoQueue[torch.Tensor] = LifoQueue()
        self._fill_staging()
        self._worker = Worker("host")
        self.errors: deque[BaseException] = deque()  # of the worker's jobs since the last backward

    def write_back(self, layer: WeightLayer, held: Iterable[torch.Tensor] = ()) -> None:
        """Queue the copies of a layer's gradients, and keep these and ``held`` on the device until they are done."""
        if not layer.gradients:
            return
        compute = self._backend.compute_stream()
        # The host has queued what computes these gradients, and is far ahead of the device.
        self._backend.wait(self._d2h_stream, compute.record_event(), WeightWait.GRADIENT)
        with trace.mark("d2h", layer.number):
            self._copy_out(layer.gradients)
        leaving = [*layer.gradients.values(), *held]
        self._flights.append(_Flight(layer.number, leaving, self._d2h_stream.record_event()))
        # The flight alone holds them now, and frees each as soon as compute has waited.
        layer.gradients.clear()
        del leaving
        while len(self._flights) > self._num_flights:
            trace.point("wait", self._flights[0].layer)
            # From here on compute may reuse the memory: it is told to wait for the copy that reads it.
            self._backend.wait(compute, self._flights[0].arrived, WeightWait.RELEASE)
            self._land()

    def free_memory(self) -> None:
        """Keep no memory for gradients that will not be copied."""
        self._memory.clear()
        self.counters["gradient_host_bytes"] = 0

    def finish(self) -> None:
        """Block until every gradient is in ``p.grad``, at the end of backward. Raises the first error of the worker."""
        try:
            if self._flights:
                # The program reads p.grad next. Copies run in order: the last one's end is that of all.
                self._backend.wait_on_host(self._flights[-1].arrived, WeightWait.WRITTEN)
        finally:  # the next backward begins anew, even after an error
            while self._flights:
                self._land()
            self._worker.drain()  # additions that are still queued
            for layer in self._layers:
                for host in layer.parameters:
                    host.give_back_gradient()
            self._fill_staging()
            errors = list(self.errors)
            self.errors.clear()
        if errors:
            raise errors[0]

    def _copy_out(self, gradients: Gradients) -> None:
        """Queue copies into the memory of ``p.grad``, or into staging where something is to be added."""
        self._provide_memory([host for host in gradients if host.total is None and host.before is None])
        staged: list[_Staged] = []
        for host, gradient in gradients.items():
            self.counters["gradient_bytes"] += gradient.nbytes
            first = host.total is None or host.replaces
            if host.total is None:
                # .data: with a version of its own. The gradient from before is added at the end, from ordinary memory.
                host.total = self._memory[host].data if host.before is None else torch.empty_like(host.before)
            if first and host.before is None and host.total.dtype is gradient.dtype:
                self._backend.copy(self._d2h_stream, host.total, gradient)
            else:
                staged.append((host, gradient, host.total.copy_ if first else host.total.add_))
        if staged:
            self._stage(staged)

    def _provide_memory(self, hosts: list[HostParameter]) -> None:
        """Allocate memory for gradients, in one piece, where there is none or the program still uses it."""
        missing = []
        for host in hosts:
            memory = self._memory.get(host)
            # Without other owners, the program has dropped parameter.grad and all its views.
            if memory is None or memory.dtype is not host.gradient_dtype or owners_of(memory.untyped_storage()) > 1:
                missing.append(host)
        sizes = [aligned(host.parameter.numel() * host.gradient_dtype.itemsize) for host in missing]
        if missing:
            flat = page_locked(sum(sizes), self._backend)
            self.counters["gradient_host_bytes"] += len(flat)
            for host, memory in zip(missing, flat.split(sizes), strict=True):
                self._memory[host] = host.over(own_storage(memory), host.gradient_dtype)

    def _stage(self, staged: list[_Staged]) -> None:
        sizes = [aligned(gradient.nbytes) for _, gradient, _ in staged]
        buffer = self._take_buffer(sum(sizes))
        additions = []
        for (host, gradient, add), memory in zip(staged, buffer[: sum(sizes)].split(sizes), strict=True):
            landed = host.over(memory, gradient.dtype)
            self._backend.copy(self._d2h_stream, landed, gradient)
            additions.append((add, landed))  # the worker does not hold device memory

        arrived = self._d2h_stream.record_event()

        def add_all() -> None:
            try:
                self._backend.wait_on_host(arrived, WeightWait.STAGED)  # the worker waits alone: backward continues
                with torch.no_grad():  # grad mode is each thread's own
                    for add, landed in additions:
                        self.counters["added_bytes"] += landed.nbytes
                        add(landed)
            finally:
                self._staging.put(buffer)  # even after an error: backward may wait for it

        self._worker.submit(add_all, self.errors)

    def _take_buffer(self, nbytes: int) -> torch.Tensor:
        """A staging buffer of at least ``nbytes``. Blocks until the worker has freed one: host memory is bounded."""
        self.counters["staging_waits"] += self._staging.empty()
        buffer = self._staging.get()
        if len(buffer) < nbytes:
            self.counters["staging_bytes"] += nbytes - len(buffer)
            buffer = page_locked(nbytes, self._backend)
        return buffer

    def _fill_staging(self) -> None:
        """Let there be all buffers: an interrupt or an error may have lost some."""
        for _ in range(STAGING - self._staging.qsize()):
            self._staging.put(torch.empty(0, dtype=torch.uint8))

    def _land(self) -> None:
        gradients = self._flights.popleft().gradients
        while gradients:
            self._backend.discard(gradients.pop())
