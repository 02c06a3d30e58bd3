"""Gradients on their way to ``p.grad``: the d2h stream, pinned staging, and the worker that adds on the host.

Where ``p.grad`` is ``None``, the first microbatch after ``zero_grad()``, the copy lands in it: nothing is staged,
nothing is added, the host has nothing to do. Later microbatches are copied into staging and
added to ``p.grad`` by a worker thread, so that no gradient goes up to the device again.

Note:
    Staging is bounded. If the worker is so far behind that all of it is taken, backward waits on the host for the
    next buffer: a device cannot wait for a thread. The queue of the device still holds a layer's work by then. The
    counter ``staging_waits`` tells how often that happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import NamedTuple

import torch

from offload.base import trace
from offload.base.worker import Worker
from offload.device.backend import Backend, Event
from offload.host.page_locked import page_locked, pageable
from offload.weights.host_parameter import HostParameter, aligned, nbytes_of
from offload.weights.layer import WeightLayer
from offload.weights.slots import WeightWait
from offload.weights.stats import WeightCounters


class _Staged(NamedTuple):
    """A gradient that the worker adds on the host."""

    host: HostParameter
    gradient: torch.Tensor
    target: torch.Tensor | None
    """What the worker adds to; ``None`` keeps the sum apart until the end of backward."""
    first: bool
    """Whether the worker overwrites what is there."""


class _Flight(NamedTuple):
    """Gradients of a layer on their way to the host; held until compute waits for their copies."""

    layer: int
    gradients: list[torch.Tensor]
    arrived: Event


class GradientWriter:
    """Takes the gradients of each layer when its backward has ended, and sees that they end up in ``p.grad``.

    Args:
        backend: The device.
        hosts: All parameters.
        num_flights: Of how many layers the gradients may be on their way while compute goes on.
        num_staging: How many staging buffers there may be.
        staging_bytes: Of the largest layer's gradients.
        counters: What is counted.
    """

    def __init__(
        self,
        backend: Backend,
        hosts: Iterable[HostParameter],
        *,
        num_flights: int,
        num_staging: int,
        staging_bytes: int,
        counters: WeightCounters,
    ) -> None:
        self._backend = backend
        self._hosts = list(hosts)
        self._d2h_stream, _ = backend.copy_streams
        self._num_flights = num_flights
        self._num_staging = num_staging
        self._staging_bytes = staging_bytes
        self._counters = counters
        self._flights: deque[_Flight] = deque()
        self._staging: SimpleQueue[torch.Tensor] = SimpleQueue()
        """The buffers that are free."""
        self._staging_made = 0
        self._worker = Worker("host")
        self._errors: deque[BaseException] = deque()
        """What the worker's jobs have raised since the last backward."""

    def write_back(self, layer: WeightLayer) -> None:
        """Queue the copies of a layer's gradients, which compute has been told to write.

        Args:
            layer: The layer; its stand-ins forget their gradients.
        """
        taken = layer.take_gradients()
        if not taken:
            return
        compute = self._backend.compute_stream()
        # The host has queued what computes these gradients, and is far ahead of the device.
        self._backend.wait(self._d2h_stream, compute.record_event(), WeightWait.GRADIENT)
        self._provide_memory([host for host, _ in taken if host.total is None])
        with trace.mark("d2h", layer.number):
            self._copy_out(taken)
        self._flights.append(
            _Flight(layer.number, [gradient for _, gradient in taken], self._d2h_stream.record_event())
        )
        del taken  # the flight alone holds the gradients now, and lets each go as soon as compute has waited
        while len(self._flights) > self._num_flights:
            trace.point("wait", self._flights[0].layer)
            # From here on compute may reuse the memory: it is told to wait for the copy that reads it.
            self._backend.wait(compute, self._flights[0].arrived, WeightWait.RELEASE)
            self._land()

    def when_written(self, job: Callable[[], None]) -> None:
        """Let the worker do ``job`` when what was queued so far is in ``p.grad``."""
        self._submit(self._flights[-1].arrived, job)

    def finish(self) -> None:
        """Block until every gradient is in ``p.grad``: the end of backward.

        Raises:
            BaseException: What the first of the worker's jobs that failed has raised.
        """
        try:
            if self._flights:
                # The program reads p.grad next. Copies run in order: the last one's end is that of all.
                self._backend.wait_on_host(self._flights[-1].arrived, WeightWait.WRITTEN)
        finally:
            # Whatever has failed, the next backward begins anew.
            while self._flights:
                self._land()
            try:
                self._worker.drain()  # additions that still wait in its queue
            finally:
                self._staging_made = self._staging.qsize()  # an interrupt or error may have lost one
                for host in self._hosts:
                    host.give_back_gradient()
            if self._errors:
                error = self._errors[0]
                self._errors.clear()
                raise error

    def _provide_memory(self, hosts: list[HostParameter]) -> None:
        """Make sure of memory for gradients that nobody else looks into, one piece for all that is missing."""
        missing = [host for host in hosts if host.lacks_memory()]
        for landing in (True, False):
            # Pinned is only what copies land in; a conversion to another dtype is the worker's.
            group = [host for host in missing if (host.gradient_dtype is host.parameter.dtype) is landing]
            sizes = [aligned(nbytes_of(host.parameter, host.gradient_dtype)) for host in group]
            if group:
                flat = page_locked(sum(sizes), self._backend) if landing else pageable(sum(sizes))
                self._counters["gradient_host_bytes"] += len(flat)
                for host, memory in zip(group, flat.split(sizes), strict=True):
                    host.keep_memory(memory)

    def _copy_out(self, taken: list[tuple[HostParameter, torch.Tensor]]) -> None:
        """Queue copies into what ``p.grad`` will be, or into staging where something is to be added."""
        staged = []
        for host, gradient in taken:
            first = host.total is None
            target = host.total = host.give_memory() if host.total is None else host.total
            if first and target.dtype is gradient.dtype:
                self._backend.copy(self._d2h_stream, target, gradient)
            else:
                # Autograd sums what one backward gives before it adds the sum to p.grad: rounding demands the same.
                apart = host.shared and not host.from_nothing
                staged.append(_Staged(host, gradient, None if apart else target, first))
            self._counters["gradient_bytes"] += host.nbytes
        if staged:
            self._stage(staged)

    def _stage(self, staged: list[_Staged]) -> None:
        """Copy gradients into a staging buffer, from which the worker adds them."""
        sizes = [aligned(item.host.nbytes) for item in staged]
        buffer = self._take_buffer(sum(sizes))
        additions = []
        for item, memory in zip(staged, buffer[: sum(sizes)].split(sizes), strict=True):
            landed = item.host.over(memory, item.gradient.dtype)
            self._backend.copy(self._d2h_stream, landed, item.gradient)
            additions.append(item._replace(gradient=landed))  # the worker does not hold device memory
        self._submit(self._d2h_stream.record_event(), lambda: self._add(additions, buffer))

    def _take_buffer(self, nbytes: int) -> torch.Tensor:
        """A free staging buffer, a new one, or the next that the worker lets go."""
        if self._staging_made == self._num_staging and self._staging.empty():
            self._counters["staging_waits"] += 1
        if self._staging_made == self._num_staging or not self._staging.empty():
            buffer = self._staging.get()  # blocks until the worker has freed one: host memory is bounded
            if len(buffer) >= nbytes:
                return buffer
            # Parameters were unfrozen since the buffers were made.
            self._counters["staging_bytes"] -= len(buffer)
            self._staging_made -= 1
        self._staging_made += 1
        self._staging_bytes = max(self._staging_bytes, nbytes)
        self._counters["staging_bytes"] += self._staging_bytes
        return page_locked(self._staging_bytes, self._backend)

    def _submit(self, arrived: Event, job: Callable[[], None]) -> None:
        """Let the worker do ``job`` when the copies before the event ``arrived`` are done."""

        def when_arrived() -> None:
            self._backend.wait_on_host(arrived, WeightWait.STAGED)  # the worker's only: backward goes on
            with torch.no_grad():  # the worker is a thread, and grad mode is each thread's own
                job()

        self._worker.submit(when_arrived, self._errors)

    def _add(self, additions: list[_Staged], buffer: torch.Tensor) -> None:
        try:
            for host, landed, target, first in additions:
                self._counters["added_bytes"] += host.nbytes
                if target is not None:
                    target.copy_(landed) if first else target.add_(landed)
                elif host.apart is not None:
                    host.apart.add_(landed)
                else:
                    host.apart = landed.clone()
        finally:
            self._staging.put(buffer)  # also after an error: backward may wait for a buffer

    def _land(self) -> None:
        gradients = self._flights.popleft().gradients
        while gradients:
            self._backend.discard(gradients.pop())
