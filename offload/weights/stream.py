"""Loads and write-backs at the events of forward and backward.

One layer computes at a time. When its forward begins, compute waits for its weights, and the next layer's load is
queued; the same in backward, where the end of a layer also queues the copies of its gradients. Backward of a layer
begins where autograd is about to run the node of one of its outputs, or where the layer is recomputed; it ends where
backward of another layer begins, or where autograd has finished.

Two threads would take turns in the same device memory, and each would compute with the other's weights. So a second
thread is refused while one is in a layer's forward or in a backward.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.distributed import ProcessGroup

from offload.base import trace
from offload.base.layer_events import EndOfBackward, LayerCall, LayerListener, Turn
from offload.base.tensors import plain_address, tensors_in
from offload.base.torch_private import (
    before_backward,
    before_its_error,
    in_backward,
    is_transformed,
    when_backward_ends,
)
from offload.device.backend import Backend
from offload.optimizer.state import holders
from offload.optimizer.stream import streams_any_of
from offload.weights.gradients import GradientWriter, LayerSteps
from offload.weights.layer import WeightLayer, WeightSlots, WeightWait
from offload.weights.reduce import GradientReducer

_logger = logging.getLogger(__name__)

streams: weakref.WeakSet[WeightStream] = weakref.WeakSet()
"""All there are. Weak: a stream lives as long as its layers' hooks and graphs."""


class StreamedLayer(LayerListener):
    """Tells the stream of the events of one layer, whose hooks and graphs hold it: graphs outlive the handle."""

    turn = Turn.WEIGHTS

    def __init__(self, stream: WeightStream, layer: WeightLayer) -> None:
        self.device = stream.device
        self._stream = stream
        self._layer = layer

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        stream, layer = self._stream, self._layer
        if call.recomputes:
            stream.enter_backward(layer)
            return
        stream.enter_thread(threading.current_thread(), f"forward of {layer}")
        stream.drop_unfinished()
        layer.check_reducers(averaged=stream.grouped)
        layer.check_held()
        if stream.reducer is not None and (call.training or torch.is_grad_enabled()):
            stream.reducer.see_forward()
        layer.renew(stream.backend.compute_stream_id())
        stream.enter(layer, "forward", step=1)

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        stream, layer = self._stream, self._layer
        if call.recomputes or (failed and stream.thread is not threading.current_thread()):
            return  # it is a part of backward; or it was refused
        try:
            alone = stream.computes is layer
            written = next((each.of.name for each in layer.stand_ins if each.shown._version != each.version), None)
            stream.leave()
            if failed:
                stream.slots.settle()  # no backward will: the program may change weights in its error handling
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
            elif not call.training and layer is stream.layers[-1] and not torch.is_grad_enabled():
                stream.slots.settle()  # an evaluation ends, after which no backward and maybe no step comes
        finally:
            stream.thread = None

    def forward_returned(self, call: LayerCall, output: object) -> None:
        """Let the layer's outputs tell when its backward begins."""
        stream, layer = self._stream, self._layer
        tensors = list(tensors_in(output))
        for tensor in tensors:
            if plain_address(tensor) in stream.slots.storages:
                raise RuntimeError(
                    f"{layer} must not return a parameter or a view of one, whose memory the next layer takes over; "
                    "return a clone."
                )
        if not torch.is_grad_enabled():
            return
        if is_transformed():
            raise RuntimeError(
                f"{layer} must not run in torch.vmap or torch.func while its weights are streamed and gradients are "
                "needed, as its backward cannot be noticed; run it under torch.no_grad(), or call remove() first."
            )
        if not tensors:
            raise TypeError(
                f"{layer} must return tensors, alone or in tuples, lists, mappings or dataclasses, got "
                f"{type(output).__name__}; without them its backward cannot be noticed."
            )
        thread = None if call.recomputes else threading.current_thread()
        begin = partial(stream.begin_backward, layer, layer.version(), thread)
        before_backward(tensors, call.first_node, begin)

    def before_access(self) -> None:
        self._stream.settle()


def _drop_failed() -> None:
    """Drop what this thread's backward, which has failed, left undone: the program may drop ``p.grad`` next."""
    for stream in list(streams):
        if stream.backward is not None and stream.last_thread is threading.current_thread():
            stream.end_run(stream.backward, failed=True)


class WeightStream:
    """The layer that computes, the backward that runs, and the work at the end of each."""

    def __init__(
        self, backend: Backend, layers: list[WeightLayer], num_slots: int, group: ProcessGroup | None = None
    ) -> None:
        hosts = list(dict.fromkeys(host for layer in layers for host in layer.parameters))
        self.device = backend.device
        self.backend = backend
        self.layers = layers
        self.parameters: set[nn.Parameter] = {host.parameter for host in hosts}
        self.counters = Counter(weight_bytes=sum(len(host.flat) for host in hosts))
        self.slots = WeightSlots(backend, layers, num_slots, self.counters)
        self.computes: WeightLayer | None = None  # whose stand-ins the modules hold now
        self._compute = backend.compute_stream()  # the stream that this layer runs on
        self.backward: object = None  # the one that runs
        self.thread: threading.Thread | None = None  # that is in a layer's forward or in a backward
        self.last_thread: threading.Thread | None = None  # the last that was
        self._what = ""  # what it does, for messages
        self._entering = threading.Lock()  # two threads may enter at the same moment
        # Autograd's thread and the program may drop a failed backward at once. Reentrant: what the drop frees may hold
        # the backward, which then drops itself in the same thread.
        self._dropping = threading.RLock()
        for layer in layers:
            layer.renew(backend.compute_stream_id())
        self.grouped = group is not None
        self._writer = GradientWriter(backend, hosts, num_slots - 1, self.counters)
        self.reducer: GradientReducer | None = None
        if group is not None and group.size() > 1:
            self.reducer = GradientReducer(backend, layers, group, self._writer)
            for host in hosts:
                host.refuse_outside()
        self.steps = LayerSteps(backend, hosts, self._writer, averaged=self.reducer is not None)
        holders.add(self.steps)
        streams.add(self)
        before_its_error(_drop_failed)

    def close(self) -> None:
        """Let gradients come from anywhere."""
        if streams_any_of(self.parameters):
            raise RuntimeError(
                "the handle of stream_optimizer must be removed before that of stream_weights, but the optimizer of "
                "the layers is still streamed; call its remove() first."
            )
        self.settle()
        holders.discard(self.steps)
        self.steps.end_steps()

    def enter_thread(self, thread: threading.Thread, what: str) -> None:
        """Let a thread alone use the layers, to do ``what``, until :attr:`thread` is ``None`` again."""
        with self._entering:
            user = self.thread
            if user is not None and user is not thread and user.is_alive():
                raise RuntimeError(
                    f"streamed layers must be used by one thread at a time, but {thread.name} begins {what} while "
                    f"{user.name} is in {self._what}; hold a lock from forward to the end of backward, or give each "
                    "thread a model of its own."
                )
            self.thread = self.last_thread = thread
            self._what = what

    def enter(self, layer: WeightLayer, what: str, *, step: int) -> None:
        """Let a layer compute; the layer ``step`` further is next."""
        trace.point(what, layer.number)
        self.slots.acquire(layer, step=step)
        self.computes = layer
        self._compute = self.backend.compute_stream()
        for stand_in in layer.stand_ins:
            stand_in.swap_in()

    def leave(self) -> None:
        """The layer that computes, if there is one, has queued its work."""
        layer = self.computes
        if layer is None:
            return
        trace.point("other")
        compute = self.backend.compute_stream()
        if compute != self._compute:
            # Autograd ends on the stream on which backward() was called, maybe not that of the layer. What follows here
            # relies on compute being one stream.
            self.backend.wait(compute, self._compute.record_event(), WeightWait.GRADIENT)
        for stand_in in layer.stand_ins:
            stand_in.swap_out()
        layer.slot.used = compute.record_event()
        self.computes = None  # last: after an interrupt above, this is done again

    def begin_backward(self, layer: WeightLayer, version: int, thread: threading.Thread | None, _: object) -> None:
        """Autograd is about to run a node of a forward's outputs: with these weights, in this thread of the program."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True must not be used with streamed weights, got it in backward of {layer}; a "
                "second backward would find other layers' weights."
            )
        self.enter_backward(layer, thread, recomputes=False)
        if version != layer.version():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"weights of {layer}, between its forward and its backward; run backward before the optimizer's step."
            )

    def enter_backward(
        self, layer: WeightLayer, thread: threading.Thread | None = None, *, recomputes: bool = True
    ) -> None:
        """Backward is about to run a layer's nodes, or its forward once more."""
        self.steps.check_layer(layer)
        if self.device.type == "cpu":
            thread = threading.current_thread()
        if thread is not None:  # autograd has one thread for all backwards of a GPU: go by the one that ran forward
            self.enter_thread(thread, f"backward of {layer}")
        if self.backward is None:
            self.leave()  # a forward that was cut off before its end
            key = object()
            when_backward_ends(EndOfBackward(partial(self.end_run, key)))
            self.backward = key
        left = None
        if self.computes is not layer:
            left = self._leave_backward()
            layer.check_held()  # not before: the layer that has just computed may share modules with this one
        if not recomputes:
            self.steps.complete(layer, left)  # before the loads that follow, of which one overwrites the weights left
        if self.computes is None:
            self.enter(layer, "backward", step=-1)

    def end_backward(self, *, failed: bool = False) -> None:
        """Autograd has finished, or ``failed``: when this returns, every gradient that it has is in ``p.grad``."""
        cut_off = None
        if failed:
            steps = self.steps.steps
            if not ((steps is not None and steps.enabled) or (self.reducer is not None and self.reducer.averages)):
                cut_off = self.computes  # as without streaming, it has the gradients that are complete
            self.leave()
        else:
            left = self._leave_backward()
            if self.reducer is not None and self.reducer.averages:
                self.reducer.finish()
            self.steps.complete(None, left)
            self.slots.settle()  # the program may change weights now, in a way that leaves no trace
        try:
            with ExitStack() as ends:  # all of these, whatever fails
                ends.callback(self._writer.finish)
                ends.callback(self.steps.finish, failed=failed)
                if cut_off is not None:
                    self._writer.write_back(cut_off)
        except Exception:
            if not failed:
                raise
            _logger.exception("a copy or an addition has failed, too, after backward had failed")
        finally:
            for layer in self.layers:
                layer.gradients.clear()
        if self.reducer is not None:
            self.reducer.reset()
        self.backward = None

    def end_run(self, backward: object, *, failed: bool) -> None:
        """Autograd has finished this backward, or freed it without an end as it had failed."""
        if failed:
            ended = self.drop_backward(backward)
        elif ended := backward is self.backward:
            try:
                self.end_backward()
            except BaseException:  # its traceback holds what else would drop it, maybe until p.grad is another one
                self.drop_backward(backward)
                self.thread = None
                raise
        if ended:
            self.thread = None

    def drop_backward(self, backward: object) -> bool:
        """Drop what a failed backward left undone, and return whether it was there. Safe from any thread."""
        with self._dropping:
            there = backward is not None and backward is self.backward
            if there:
                self.end_backward(failed=True)
            return there

    def drop_unfinished(self) -> None:
        """Leave a forward or backward that an error or an interrupt has cut off, if there is one."""
        self.drop_backward(self.backward)  # autograd's own thread may hold a failed one for a moment
        self.leave()

    def settle(self) -> None:
        """The host is about to use or change weights: drop what was cut off, and block until no copy reads them."""
        if not in_backward():
            self.enter_thread(threading.current_thread(), "what changes or reads the host's weights")
            try:
                self.drop_unfinished()
            finally:
                self.thread = None
        self.slots.settle()

    def _leave_backward(self) -> WeightLayer | None:
        """Have the gradients of the layer that backward leaves stepped with or written back; returns the layer."""
        layer = self.computes
        if layer is None:
            return None
        self.leave()
        self.steps.take(layer)
        if self.reducer is not None and self.reducer.averages:
            self.reducer.write_back(layer)
        else:
            self._writer.write_back(layer)
        return layer
