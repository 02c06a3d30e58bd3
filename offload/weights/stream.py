"""Weight streaming at work: it turns the events of forward and backward into loads and write-backs.

One layer computes at a time. When its forward begins, its weights are there or compute waits for them,
and the next layer's load is queued; the same in backward, where leaving a layer also sends its gradients off.
Backward of a layer begins where autograd is about to run the node of one of its outputs, or where the layer is
recomputed; it ends where that of another layer begins, or where autograd has finished.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from functools import partial
from typing import NamedTuple

import torch

from offload.base import trace
from offload.base.autograd import before_backward, in_backward, tensors_in
from offload.device.backend import Backend
from offload.weights.gradients import GradientWriter
from offload.weights.layer import WeightLayer
from offload.weights.one_thread import OneThread
from offload.weights.slots import WeightSlots, WeightWait
from offload.weights.step import LayerSteps

logger = logging.getLogger(__name__)


class WeightStream:
    """What happens to the weights when the program reaches a layer's forward or backward.

    Module hooks and the graph's own hooks hold it, so that graphs outlive the handle that the user has.

    Args:
        backend: The device.
        layers: All layers with parameters, in the order of forward.
        slots: The device memory that they take turns in.
        writer: Where their gradients go.
    """

    def __init__(self, backend: Backend, layers: list[WeightLayer], slots: WeightSlots, writer: GradientWriter) -> None:
        self.device = backend.device
        """Where the layers compute."""
        self._backend = backend
        self._layers = layers
        self._slots = slots
        self._writer = writer
        self.steps: LayerSteps | None = None
        """Makes a layer's optimizer step as soon as its gradients are complete, if asked to."""
        self.parameters = frozenset(host.parameter for layer in layers for host in layer.parameters)
        """The user's parameters that are streamed."""
        self._computes: WeightLayer | None = None
        """Whose stand-ins the modules hold now."""
        self._stream = backend.compute_stream()
        """What the layer that computes runs on."""
        self._backward: weakref.ref[_Backward] | None = None
        """The backward that runs. Weak: autograd alone holds it, so that it goes when autograd gives up."""
        self._call: _Call | None = None
        """The forward whose backward runs now."""
        # Autograd's thread may drop a backward that failed while the program gives it up. The same thread may come
        # twice: what the first call lets go of may hold the backward.
        self._aborting = threading.RLock()
        self._one_thread = OneThread()
        self._last = -1
        """The number of the layer whose forward began last."""
        for layer in layers:
            layer.renew(backend.compute_stream_id())

    def begin_forward(self, layer: WeightLayer) -> None:
        """A layer's forward begins."""
        self._one_thread.enter(f"forward of {layer}", threading.get_ident())
        self._give_up()
        self._refuse_stepped(layer)
        layer.check()
        if layer.number <= self._last:
            # A new pass through the layers: what was done to the weights in between may have left no trace.
            self._slots.make_stale()
        self._last = layer.number
        trace.point("forward", layer.number)
        self._slots.acquire(layer, fresh=True)
        self._computes = layer
        self._stream = self._backend.compute_stream()
        layer.renew(self._backend.compute_stream_id())
        layer.swap_in()
        self._slots.prefetch(layer, step=1)

    def begin_recomputation(self, layer: WeightLayer) -> None:
        """Backward is about to run a layer's forward once more."""
        self._refuse_stepped(layer)
        self._enter_backward(layer)

    def end_forward(self, layer: WeightLayer, *, failed: bool, training: bool) -> None:
        """A layer's forward has returned or raised; not its recomputation, which is a part of backward.

        Raises:
            RuntimeError: It did what streamed weights do not allow; the message says what.
        """
        if failed and not self._one_thread.is_thread(threading.get_ident()):
            return  # it was refused
        try:
            self._end_forward(layer, failed=failed, training=training)
        finally:
            self._one_thread.leave()

    def _end_forward(self, layer: WeightLayer, *, failed: bool, training: bool) -> None:
        if self._computes is not layer:
            if failed:
                return
            raise RuntimeError(
                f"{layer} must run by itself, but another streamed layer ran inside its forward; list layers of one "
                "level."
            )
        written = layer.written()
        self._leave()
        if torch.is_autocast_enabled(self._backend.device.type):
            # Autocast would keep its copy of every weight until the end of the autocast region.
            torch.clear_autocast_cache()
        if failed:
            self._slots.finish_loads()  # no backward will: the program may change weights in its error handling
            return
        if written:
            raise RuntimeError(
                f"{written} must not be changed in forward, but an in-place operation did, on a copy that is dropped "
                "after the layer; change the parameter between steps."
            )
        if not training and layer is self._layers[-1] and not torch.is_grad_enabled():
            self._slots.finish_loads()  # the end of an evaluation, after which no backward and maybe no step comes

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
            self._refuse_weights(layer, tensor)
        if not found:
            raise TypeError(
                f"{layer} must return tensors, alone or in tuples, lists, mappings or dataclasses, got "
                f"{type(output).__name__}; without them its backward cannot be noticed."
            )
        call = _Call(layer, layer.version(), None if in_backward() else threading.get_ident())
        marked = before_backward(output, first_node, partial(self._begin_backward, call))
        if not in_backward():
            layer.needs_backward = marked

    def give_up(self) -> None:
        """Leave a forward or backward that an error or an interrupt has cut off, if there is one."""
        if in_backward():
            return
        self._one_thread.enter("what changes or reads the host's weights", threading.get_ident())
        try:
            self._give_up()
        finally:
            self._one_thread.leave()

    def _give_up(self) -> None:
        backward = self._backward() if self._backward is not None else None
        if backward is not None:
            # It has failed, and autograd's own thread has not let go of it yet.
            backward.cancel()
            self._abort_backward()
        elif self._computes is not None:
            self._leave()

    def settle(self) -> None:
        """The host is about to change weights: block until no copy reads them, and load anew afterwards."""
        self.give_up()
        self._slots.finish_loads()
        self._slots.make_stale()

    def end_backward(self) -> None:
        """Autograd has finished: when this returns, every gradient is in ``p.grad``."""
        self._leave_backward()
        self._step_layers_before(None)
        self._slots.finish_loads()  # the program may change weights now, in a way that nobody sees
        self._writer.finish()
        if self.steps is not None:
            self.steps.end_backward()
        self._one_thread.leave()

    def abort_backward(self) -> None:
        """Backward has raised: drop what it left unfinished. Safe from any thread."""
        self._abort_backward()
        self._one_thread.leave()

    def _abort_backward(self) -> None:
        with self._aborting:
            self._backward = None
            self._leave()
            for layer in self._layers:
                layer.drop_gradients()
            try:
                self._writer.finish()
            except Exception:
                logger.exception("a gradient could not be added after backward had failed")
            if self.steps is not None:
                self.steps.end_backward()

    def _refuse_weights(self, layer: WeightLayer, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()._cdata
        if any(storage == slot.flat.untyped_storage()._cdata for slot in self._slots.slots):
            raise RuntimeError(
                f"{layer} must not return a parameter or a view of one, whose memory the next layer takes over; "
                "return a clone."
            )

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

    def _refuse_stepped(self, layer: WeightLayer) -> None:
        if self.steps is not None:
            self.steps.check(layer)

    def _enter_backward(self, layer: WeightLayer, call: _Call | None = None) -> None:
        self._one_thread.enter(f"backward of {layer}", self._thread_of_backward(call))
        if self._backward is None or self._backward() is None:
            self._leave()  # a forward that was cut off before its end
            token = _Backward(self)
            torch.autograd.Variable._execution_engine.queue_callback(token)
            self._backward = weakref.ref(token)
        if self._computes is layer:
            if call is None or call is not self._call:
                # Another call of the same layer. Reentrant checkpoints add each call's gradient to p.grad by itself,
                # and a sum of both on the device would round otherwise.
                self._write_back(layer)
            self._call = call
            return
        self._leave_backward()
        self._call = call
        trace.point("backward", layer.number)
        self._slots.acquire(layer, fresh=False)
        self._computes = layer
        self._stream = self._backend.compute_stream()
        layer.swap_in()
        self._slots.prefetch(layer, step=-1)

    def _thread_of_backward(self, call: _Call | None) -> int | None:
        """For which thread of the program this backward runs, as far as that can be told."""
        if self.device.type == "cpu":
            return threading.get_ident()
        # Autograd has one thread for all backwards of a GPU: go by the one that ran forward.
        return None if call is None else call.thread

    def _leave_backward(self) -> None:
        layer = self._computes
        if layer is None:
            return
        self._leave()
        self._write_back(layer)

    def _write_back(self, layer: WeightLayer) -> None:
        if self.steps is not None:
            self.steps.collect(layer)
        self._writer.write_back(layer)

    def _step_layers_before(self, entered: WeightLayer | None) -> None:
        job = None if self.steps is None else self.steps.complete(entered)
        if job is not None:
            self._writer.when_written(job)

    def _leave(self) -> None:
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


class _Call(NamedTuple):
    """One forward of a layer, held by its graph."""

    layer: WeightLayer
    version: int
    thread: int | None
    """The program's, and not one of autograd's."""


class _Backward:
    """One run of autograd's engine, which owns it: called at its end, and gone without a call if it failed."""

    def __init__(self, stream: WeightStream) -> None:
        self._stream: WeightStream | None = stream

    def __call__(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                stream.end_backward()
            except BaseException:
                self._stream = stream  # an error or interrupt in here has left a part undone: __del__ ends it
                raise

    def cancel(self) -> None:
        """Do nothing from now on."""
        self._stream = None

    def __del__(self) -> None:
        if self._stream is not None and not sys.is_finalizing():
            self._stream.abort_backward()
