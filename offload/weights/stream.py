"""Weight streaming at work: it turns the events of forward and backward into loads and write-backs.

One layer computes at a time. When its forward begins, its weights are there or compute waits for them,
and the next layer's load is queued; the same in backward, where leaving a layer also sends its gradients off.
Backward of a layer begins where autograd is about to run the node of one of its outputs, or where the layer is
recomputed; it ends where that of another layer begins, or where autograd has finished.

Two threads would take turns in the same device memory, and each would compute with the other's weights. So a second
one is refused while one is in a layer's forward or in a backward.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from offload.base import trace
from offload.base.autograd import before_backward, in_backward, tensors_in
from offload.device.backend import Backend
from offload.weights.gradients import GradientWriter
from offload.weights.layer import WeightLayer
from offload.weights.slots import WeightSlots, WeightWait
from offload.weights.stats import WeightCounters
from offload.weights.step import LayerSteps

logger = logging.getLogger(__name__)


class WeightStream:
    """What happens to the weights when the program reaches a layer's forward or backward.

    Module hooks and the graph's own hooks hold it, so that graphs outlive the handle that the user has.

    Args:
        backend: The device.
        layers: All layers with parameters, in the order of forward.
        num_slots: Of how many of them the device holds the weights.
        num_staging: Of how many the gradients may wait on the host to be added.
    """

    def __init__(self, backend: Backend, layers: list[WeightLayer], num_slots: int, num_staging: int) -> None:
        self.device = backend.device
        """Where the layers compute."""
        self.layers = layers
        hosts = {host for layer in layers for host in layer.parameters}
        self.parameters = {host.parameter for host in hosts}
        """The user's parameters that are streamed."""
        self.steps: LayerSteps | None = None
        """Makes a layer's optimizer step as soon as its gradients are complete, if asked to."""
        self.counters = WeightCounters(weight_bytes=sum(len(host.flat) for host in hosts))
        self._backend = backend
        self._slots = WeightSlots(backend, layers, num_slots, self.counters)
        self._writer = GradientWriter(
            backend, layers, num_flights=num_slots - 1, num_staging=num_staging, counters=self.counters
        )
        self.counters["slot_bytes"] = sum(len(slot.flat) for slot in self._slots.slots)
        self._slot_storages = {slot.flat.untyped_storage()._cdata for slot in self._slots.slots}
        self._computes: WeightLayer | None = None
        """Whose stand-ins the modules hold now."""
        self._stream = backend.compute_stream()
        """What the layer that computes runs on."""
        self._backward: Callable[[], _Backward | None] = lambda: None
        """The backward that runs. Weak: autograd alone holds it, so that it goes when autograd gives up."""
        self._call: _Call | None = None
        """The forward whose backward runs now."""
        self._last = -1
        """The number of the layer whose forward began last."""
        # Autograd's thread may drop a backward that failed while the program gives it up. The same thread may come
        # twice: what the first call lets go of may hold the backward.
        self._aborting = threading.RLock()
        self._entering = threading.Lock()  # two threads may enter at the same moment
        self.thread: threading.Thread | None = None
        """The thread that is in a layer's forward or in a backward."""
        self._what = ""
        """What it does, for messages."""
        for layer in layers:
            layer.renew(backend.compute_stream_id())

    def begin_forward(self, layer: WeightLayer) -> None:
        """A layer's forward begins."""
        self._enter_thread(threading.current_thread(), f"forward of {layer}")
        self._give_up()
        self._refuse_stepped(layer)
        layer.check()
        if layer.number <= self._last:
            # A new pass through the layers: what was done to the weights in between may have left no trace.
            self._slots.make_stale()
        self._last = layer.number
        layer.renew(self._backend.compute_stream_id())
        self._enter(layer, "forward", step=1)

    def end_forward(self, layer: WeightLayer, *, failed: bool, training: bool) -> None:
        """A layer's forward has returned or raised; not its recomputation, which is a part of backward.

        Raises:
            RuntimeError: It did what streamed weights do not allow; the message says what.
        """
        if failed and self.thread is not threading.current_thread():
            return  # it was refused
        try:
            alone = self._computes is layer
            written = layer.written()
            self._leave()
            if torch.is_autocast_enabled(self.device.type):
                # Autocast would keep its copy of every weight until the end of the autocast region.
                torch.clear_autocast_cache()
            if failed:
                self._slots.finish_loads()  # no backward will: the program may change weights in its error handling
            elif not alone:
                raise RuntimeError(
                    f"{layer} must run by itself, but another streamed layer ran inside its forward; list layers of "
                    "one level."
                )
            elif written:
                raise RuntimeError(
                    f"{written} must not be changed in forward, but an in-place operation did, on a copy that is "
                    "dropped after the layer; change the parameter between steps."
                )
            elif not training and layer is self.layers[-1] and not torch.is_grad_enabled():
                self._slots.finish_loads()  # the end of an evaluation, after which no backward and maybe no step comes
        finally:
            self.thread = None

    def mark(self, layer: WeightLayer, output: object, first_node: int) -> None:
        """Let a layer's outputs tell when its backward begins.

        Args:
            layer: The layer, whose forward has returned, or its recomputation.
            output: What it returned.
            first_node: The number of the first node that autograd made in it.

        Raises:
            RuntimeError: It returned a weight.
            TypeError: Its output holds no tensor.
        """
        found = False
        for tensor in tensors_in(output):
            found = True
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._slot_storages:
                raise RuntimeError(
                    f"{layer} must not return a parameter or a view of one, whose memory the next layer takes over; "
                    "return a clone."
                )
        if not found:
            raise TypeError(
                f"{layer} must return tensors, alone or in tuples, lists, mappings or dataclasses, got "
                f"{type(output).__name__}; without them its backward cannot be noticed."
            )
        call = _Call(layer, layer.version(), None if in_backward() else threading.current_thread())
        marked = before_backward(output, first_node, partial(self._begin_backward, call))
        if not in_backward():
            layer.needs_backward = marked

    def begin_recomputation(self, layer: WeightLayer) -> None:
        """Backward is about to run a layer's forward once more."""
        self._refuse_stepped(layer)
        self._enter_backward(layer)

    def _begin_backward(self, call: _Call, _: object) -> None:
        layer = call.layer
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True must not be used with streamed weights, got it in backward of {layer}; a second "
                "backward would find other layers' weights."
            )
        self._refuse_stepped(layer)
        if call.version != layer.version():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"weights of {layer}, between its forward and its backward; run backward before the optimizer's step."
            )
        self._enter_backward(layer, call)
        self._step_layers_before(layer)

    def _enter_backward(self, layer: WeightLayer, call: _Call | None = None) -> None:
        if self.device.type == "cpu":
            self._enter_thread(threading.current_thread(), f"backward of {layer}")
        elif call is not None and call.thread is not None:
            # Autograd has one thread for all backwards of a GPU: go by the one that ran forward.
            self._enter_thread(call.thread, f"backward of {layer}")
        if self._backward() is None:
            self._leave()  # a forward that was cut off before its end
            token = _Backward(self)
            torch.autograd.Variable._execution_engine.queue_callback(token)
            self._backward = weakref.ref(token)
        if self._computes is not layer:
            self._leave_backward()
            self._enter(layer, "backward", step=-1)
        elif call is None or call is not self._call:
            # Another call of the same layer. Reentrant checkpoints add each call's gradient to p.grad by itself,
            # and a sum of both on the device would round otherwise.
            self._write_back(layer)
        self._call = call

    def end_backward(self) -> None:
        """Autograd has finished: when this returns, every gradient is in ``p.grad``."""
        self._leave_backward()
        self._step_layers_before(None)
        self._slots.finish_loads()  # the program may change weights now, in a way that nobody sees
        self._writer.finish()
        if self.steps is not None:
            self.steps.end_backward()
        self.thread = None

    def abort_backward(self) -> None:
        """Backward has raised: drop what it left unfinished. Safe from any thread."""
        with self._aborting:
            self._backward = lambda: None
            self._leave()
            for layer in self.layers:
                layer.gradients.clear()
            try:
                self._writer.finish()
            except Exception:
                logger.exception("a gradient could not be added after backward had failed")
            if self.steps is not None:
                self.steps.end_backward()

    def give_up(self) -> None:
        """Leave a forward or backward that an error or an interrupt has cut off, if there is one."""
        if in_backward():
            return
        self._enter_thread(threading.current_thread(), "what changes or reads the host's weights")
        try:
            self._give_up()
        finally:
            self.thread = None

    def settle(self) -> None:
        """The host is about to change weights: block until no copy reads them, and load anew afterwards."""
        self.give_up()
        self._slots.finish_loads()
        self._slots.make_stale()

    def _give_up(self) -> None:
        backward = self._backward()
        if backward is not None:
            # It has failed, and autograd's own thread has not let go of it yet.
            backward.stream = None
            self.abort_backward()
        else:
            self._leave()

    def _enter(self, layer: WeightLayer, what: str, *, step: int) -> None:
        """Let a layer compute, after which comes the one that is ``step`` further."""
        trace.point(what, layer.number)
        self._slots.acquire(layer, step=step)
        self._computes = layer
        self._stream = self._backend.compute_stream()
        layer.swap_in()

    def _leave(self) -> None:
        """The layer that computes, if there is one, has queued its work."""
        layer = self._computes
        if layer is not None:
            trace.point("other")
            compute = self._backend.compute_stream()
            if compute != self._stream:
                # Autograd ends where backward() was called, which may be on another stream than forward.
                self._backend.wait(compute, self._stream.record_event(), WeightWait.GRADIENT)
            layer.swap_out()
            self._slots.release(layer)
            self._computes = None  # last: what an interrupt cuts off here is done again

    def _leave_backward(self) -> None:
        layer = self._computes
        if layer is not None:
            self._leave()
            self._write_back(layer)

    def _write_back(self, layer: WeightLayer) -> None:
        """Send off what backward has left in ``layer.gradients``, on the device; nothing is added to it any more."""
        if self.steps is not None:
            self.steps.collect(layer)
        self._writer.write_back(layer)

    def _step_layers_before(self, entered: WeightLayer | None) -> None:
        job = None if self.steps is None else self.steps.complete(entered)
        if job is not None:
            self._writer.when_written(job)

    def _refuse_stepped(self, layer: WeightLayer) -> None:
        if self.steps is not None:
            self.steps.check(layer)

    def _enter_thread(self, thread: threading.Thread, what: str) -> None:
        """Let a thread use the layers until :attr:`thread` is ``None`` again.

        Raises:
            RuntimeError: Another thread does. One that has ended, in the middle of what it did, does not.
        """
        with self._entering:
            user = self.thread
            if user is not None and user is not thread and user.is_alive():
                raise RuntimeError(
                    f"streamed layers must be used by one thread at a time, but {thread.name} begins {what} while "
                    f"{user.name} is in {self._what}; hold a lock from forward to the end of backward, or give each "
                    "thread a model of its own."
                )
            self.thread, self._what = thread, what


class _Call(NamedTuple):
    """One forward of a layer, held by its graph."""

    layer: WeightLayer
    version: int
    thread: threading.Thread | None
    """The program's, and not one of autograd's."""


class _Backward:
    """One run of autograd's engine, which owns it: called at its end, and gone without a call if it failed."""

    def __init__(self, stream: WeightStream) -> None:
        self.stream: WeightStream | None = stream
        """``None`` if there is nothing to do any more."""

    def __call__(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            try:
                stream.end_backward()
            except BaseException:
                self.stream = stream  # an error or interrupt in here has left a part undone: __del__ ends it
                raise

    def __del__(self) -> None:
        stream = self.stream
        if stream is not None and not sys.is_finalizing():
            stream.abort_backward()
            stream.thread = None
