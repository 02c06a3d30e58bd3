"""What becomes of gradients when backward has left a layer: copied to the host into ``p.grad``, or stepped with.

The first microbatch after ``zero_grad()`` is copied right into ``p.grad``. Later microbatches are copied into staging,
from which a worker thread adds them to ``p.grad``, so that no gradient is copied to the device again. Staging is
bounded: if the worker is so late that all of it is taken, backward waits on the host for the next buffer, for a device
cannot wait for a thread. The device's queue still holds a layer's work by then.

An optimizer whose state is streamed may step a layer's weights in backward, in their slot, and copies them to the host
with the state: see :mod:`offload.optimizer.early`. The slot is free for another layer after these copies. Where a
recomputation has led backward on to other layers, the slot has other weights by the time the gradients are complete,
and the step loads the weights from the host. Inside of ``no_step()``, and of parameters that several layers share,
gradients go to the host, and ``optimizer.step()`` steps with them.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from queue import LifoQueue
from typing import NamedTuple

import torch

from offload.base import trace
from offload.base.tensors import aligned, own_storage
from offload.base.torch_private import has_gradient_hooks, owners_of
from offload.base.worker import Worker
from offload.device.backend import Backend, Event
from offload.host.page_locked import page_locked
from offload.optimizer.early import BackwardSteps, Given
from offload.optimizer.state import WeightHolder
from offload.weights.layer import WeightLayer, WeightWait
from offload.weights.parameter import Gradients, HostParameter

STAGING = 3  # the gradients of so many layers may wait on the host to be added, each in a buffer of their own

_Staged = tuple[HostParameter, torch.Tensor, Callable[[torch.Tensor], object]]
"""A gradient on the device, and what adds its host copy to the sum, or replaces the sum by it."""


class _Flight(NamedTuple):
    """Gradients of a layer that are being copied to the host; held until compute waits for their copies."""

    layer: int
    gradients: list[torch.Tensor]
    arrived: Event


class GradientWriter:
    """Writes gradients to ``p.grad``, of at most ``num_flights`` layers at once while compute continues."""

    def __init__(self, backend: Backend, hosts: list[HostParameter], num_flights: int, counters: Counter[str]) -> None:
        self._backend = backend
        self._hosts = hosts
        self._d2h_stream, _ = backend.copy_streams
        self.num_flights = num_flights
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
        while len(self._flights) > self.num_flights:
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
            for host in self._hosts:
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
            for host, memory in zip(missing, flat.split(sizes), strict=True):
                self._memory[host] = host.over(own_storage(memory), host.gradient_dtype)
            held = (memory.untyped_storage().nbytes() for memory in self._memory.values())
            self.counters["gradient_host_bytes"] = sum(held)

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
            self._staging.put(torch.empty(0, dtype=torch.uint8, device="cpu"))

    def _land(self) -> None:
        gradients = self._flights.popleft().gradients
        while gradients:
            self._backend.discard(gradients.pop())


class LayerSteps(WeightHolder):
    """Gives the gradients of layers to an optimizer that steps in backward."""

    def __init__(self, backend: Backend, hosts: list[HostParameter], writer: GradientWriter, *, averaged: bool) -> None:
        self.device = backend.device
        self._backend = backend
        self._hosts = hosts
        self._writer = writer
        self._averaged = averaged
        self.parameters = {host.parameter for host in hosts}
        # Weak: the optimizer goes when the program drops it, with what its hooks hold.
        self._steps: weakref.ref[BackwardSteps] | None = None
        self._left: dict[WeightLayer, Gradients] = {}
        """The gradients of layers that backward has left, and that are not stepped yet."""
        self._stepped: set[WeightLayer] = set()  # layers that this backward has stepped
        self._updated: Event | None = None  # after it, all weights that this backward has stepped are on the host
        self._totals: list[torch.Tensor] = []  # sums on the host that are being loaded

    @property
    def steps(self) -> BackwardSteps | None:
        return None if self._steps is None else self._steps()

    def check_steps(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._averaged:
            raise ValueError(
                "in_backward must be False if the layers' gradients are averaged over a process_group, got True; leave "
                "it out: the step after backward is streamed as well."
            )
        if self.steps is not None:
            raise ValueError(
                "in_backward must be True for one optimizer of streamed layers, but another one steps these layers in "
                "backward already; build one optimizer, with groups."
            )
        some = set(parameters)
        hooked = next((h.name for h in self._hosts if h.parameter in some and has_gradient_hooks(h.parameter)), None)
        if hooked is not None:
            raise ValueError(
                f"in_backward must be False where parameters of streamed layers have hooks on their gradients, but "
                f"{hooked} has one; remove the hook, or leave in_backward out."
            )

    def begin_steps(self, steps: BackwardSteps, parameters: Iterable[torch.Tensor]) -> None:
        if self.steps is not steps:
            self._writer.free_memory()
        this = weakref.ref(self)
        self._steps = weakref.ref(steps, lambda _: None if (one := this()) is None else one.end_steps())
        some = set(parameters)
        for host in self._hosts:
            if host.parameter in some and not host.refusals:
                host.refuse_outside()

    def end_steps(self) -> None:
        self._steps = None
        for host in self._hosts:
            while host.refusals:
                host.refusals.pop().remove()

    def check_layer(self, layer: WeightLayer) -> None:
        """Raise if backward needs a layer again that has stepped."""
        if layer in self._stepped:
            raise RuntimeError(
                f"{layer} must get its gradients at once if it is stepped in backward, but it is needed again after "
                "the step; do not use in_backward=True with layers that are checkpointed twice per forward."
            )

    def take(self, layer: WeightLayer) -> None:
        """Backward has left the layer: take its gradients that are to be stepped, and leave the others there."""
        steps = self.steps
        if steps is None or not steps.enabled or not layer.gradients:
            return
        steps.begin_run(self)
        taken = self._left.setdefault(layer, {})
        for host in list(layer.gradients):
            if not host.shared and host.parameter in steps.groups:
                if host in taken:
                    raise host.second_gradient_error()
                taken[host] = layer.gradients.pop(host)

    def complete(self, entered: WeightLayer | None, in_slot: WeightLayer | None) -> None:
        """Backward is about to run nodes of the layer ``entered``: step all others that it has left.

        The weights of ``in_slot`` are still in its slot. To recompute several layers one by one completes none of them.
        """
        steps = self.steps
        for layer in [layer for layer in self._left if layer is not entered]:
            gradients = self._left.pop(layer)
            if gradients and steps is not None:
                self._step(steps, layer, gradients, in_slot=layer is in_slot)

    def _step(self, steps: BackwardSteps, layer: WeightLayer, gradients: Gradients, *, in_slot: bool) -> None:
        weights = {one.of: one.weights for one in layer.stand_ins} if in_slot else {}
        for host, one in gradients.items():
            # An optimizer may change it, and autograd gives the same one to several parameters, and to earlier layers.
            if owners_of(one.untyped_storage()) > 1:
                gradients[host] = one.clone()
        given: dict[torch.Tensor, Given]
        given = {host.parameter: (one, host.total, weights.get(host)) for host, one in gradients.items()}
        self._stepped.add(layer)
        self._updated = steps.step_layer(given, self._writer.num_flights)
        for host in gradients:
            if host.total is not None:
                self._totals.append(host.total)
            host.drop_gradient()
        if in_slot and self._updated is not None:
            layer.slot.used = layer.slot.updated = self._updated  # the updated weights are copied out of it
        self._writer.counters["early_steps"] += 1

    def finish(self, *, failed: bool) -> None:
        """Backward has ended: when this returns, all weights that it has stepped are on the host."""
        steps = self.steps
        self._left.clear()
        stepped, self._stepped = self._stepped, set()
        try:
            if steps is not None:
                try:
                    steps.end_run(self, failed=failed)
                finally:
                    if failed:
                        for layer in stepped:  # nothing uses the slot after settle(); its copies may have failed
                            layer.slot.used = self._backend.compute_stream().record_event()
                            layer.slot.updated = None
                        steps.settle()
            if self._updated is not None and not failed:
                # The program may read or change the weights next, and the next forward loads them.
                self._backend.wait_on_host(self._updated, WeightWait.UPDATED)
        except Exception:
            if steps is not None:
                steps.stepper.torn = "a copy of weights or of state has failed"
            raise
        finally:
            self._updated = None
            self._totals.clear()
