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
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from offload.base import trace
from offload.base.layer_events import LayerCall, LayerListener, Turn
from offload.base.tensors import tensors_in
from offload.base.torch_private import address_of, before_backward, in_backward, when_backward_ends
from offload.device.backend import Backend
from offload.weights.gradients import GradientWriter
from offload.weights.layer import WeightLayer
from offload.weights.reduce import GradientReducer
from offload.weights.slots import WeightSlots, WeightWait
from offload.weights.stats import WeightCounters
from offload.weights.step import LayerSteps, MakeOptimizer

logger = logging.getLogger(__name__)


class StreamedLayer(LayerListener):
    """What happens to the weights at the events of one layer.

    The layer's hooks and graphs hold it, and so the stream: graphs outlive the handle that the user has.
    """

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
        layer.check(averaged=stream.grouped)
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
            written = layer.written()
            stream.leave()
            if torch.is_autocast_enabled(stream.device.type):
                # Autocast would keep its copy of every weight until the end of the autocast region.
                torch.clear_autocast_cache()
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
        if not torch.is_grad_enabled():
            return
        stream, layer = self._stream, self._layer
        tensors = list(tensors_in(output))
        if not tensors:
            raise TypeError(
                f"{layer} must return tensors, alone or in tuples, lists, mappings or dataclasses, got "
                f"{type(output).__name__}; without them its backward cannot be noticed."
            )
        for tensor in tensors:
            if tensor.layout is torch.strided and address_of(tensor.untyped_storage()) in stream.slots.storages:
                raise RuntimeError(
                    f"{layer} must not return a parameter or a view of one, whose memory the next layer takes over; "
                    "return a clone."
                )
        forward = _Forward(layer, layer.version(), None if call.recomputes else threading.current_thread())
        marked = before_backward(tensors_in(output), call.first_node, partial(stream.begin_backward, forward))
        if not call.recomputes:
            layer.needs_backward = bool(marked)

    def before_state_dict(self) -> None:
        self._stream.settle()

    def before_load(self) -> None:
        self._stream.settle()


class WeightStream:
    """The layer that computes, the backward that runs, and what is done when one of them ends.

    Args:
        backend: The device.
        layers: All layers with parameters, in the order of forward.
        num_slots: Of how many of them the device holds the weights.
        num_staging: Of how many the gradients may wait on the host to be added.
        group: Over whose ranks gradients are averaged.
        make_optimizer: What makes the optimizer of a layer that is stepped in backward.
    """

    def __init__(
        self,
        backend: Backend,
        layers: list[WeightLayer],
        num_slots: int,
        num_staging: int,
        group: ProcessGroup | None = None,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        hosts = {host for layer in layers for host in layer.parameters}
        self.device = backend.device
        self.backend = backend
        self.layers = layers
        self.parameters = {host.parameter for host in hosts}
        self.counters = WeightCounters(weight_bytes=sum(len(host.flat) for host in hosts))
        self.slots = WeightSlots(backend, layers, num_slots, self.counters)
        self.computes: WeightLayer | None = None  # whose stand-ins the modules hold now
        self.thread: threading.Thread | None = None  # that is in a layer's forward or in a backward
        self._what = ""  # what it does, for messages
        self._entering = threading.Lock()  # two threads may enter at the same moment
        averaged = group is not None and group.size() > 1
        self._writer = GradientWriter(backend, layers, num_slots - 1, num_staging, self.counters, averaged=averaged)
        self._compute = backend.compute_stream()  # what the layer that computes runs on
        self.backward: object = None  # the one that runs
        # Autograd's thread and the program may drop a failed backward at once. Reentrant: what the drop frees may hold
        # the backward, which then drops itself in the same thread.
        self._dropping = threading.RLock()
        for layer in layers:
            layer.renew(backend.compute_stream_id())
        self.grouped = group is not None
        self.reducer = (
            GradientReducer(backend, layers, group, self.counters) if group is not None and averaged else None
        )
        self.steps = LayerSteps(layers, self._writer, make_optimizer)
        self._layer_only = hosts if self.reducer is not None else self.steps.hosts
        for host in self._layer_only:
            host.refuse_outside()

    def close(self) -> None:
        """Average and step nothing any more, and let gradients come from anywhere."""
        self.settle()
        self.steps.close()
        for host in self._layer_only:
            host.allow_outside()

    def enter_thread(self, thread: threading.Thread, what: str) -> None:
        """Let a thread use the layers, to do ``what``, until :attr:`thread` is ``None`` again.

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

    def enter(self, layer: WeightLayer, what: str, *, step: int) -> None:
        """Let a layer compute, after which comes the one that is ``step`` further."""
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
        self.computes = None  # last: what an interrupt cuts off here is done again

    def begin_backward(self, forward: _Forward, _: object) -> None:
        """Autograd is about to run a node of this forward's outputs."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True must not be used with streamed weights, got it in backward of {forward.layer}; a "
                "second backward would find other layers' weights."
            )
        self.enter_backward(forward.layer, forward)
        self.steps.complete(forward.layer)

    def enter_backward(self, layer: WeightLayer, forward: _Forward | None = None) -> None:
        """Backward is about to run a layer's nodes, or its forward once more."""
        self.steps.check_layer(layer)
        if forward is not None and forward.version != layer.version():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"weights of {layer}, between its forward and its backward; run backward before the optimizer's step."
            )
        if self.device.type == "cpu":
            self.enter_thread(threading.current_thread(), f"backward of {layer}")
        elif forward is not None and forward.thread is not None:
            # Autograd has one thread for all backwards of a GPU: go by the one that ran forward.
            self.enter_thread(forward.thread, f"backward of {layer}")
        if self.backward is None:
            self.leave()  # a forward that was cut off before its end
            key = object()
            when_backward_ends(_Backward(self, key))
            self.backward = key
        if self.computes is not layer:
            self._leave_backward()
            self.enter(layer, "backward", step=-1)

    def end_backward(self) -> None:
        """Autograd has finished: when this returns, every gradient is in ``p.grad``."""
        self._leave_backward()
        reducer = self._averaging()
        if reducer is not None:
            self._average(reducer, None)
            reducer.finish()
        self.slots.settle()  # the program may change weights now, in a way that nobody sees
        self.steps.finish()
        self._writer.finish()
        self.steps.reset()
        self.backward = self.thread = None

    def drop_backward(self, backward: object) -> bool:
        """Drop what a backward that has raised left undone, unless that was done before. Safe from any thread."""
        with self._dropping:
            if backward is None or backward is not self.backward:
                return False
            self.leave()
            for layer in self.layers:
                layer.gradients.clear()
            if self.reducer is not None:
                self.reducer.reset()
            try:
                self._writer.finish()
            except Exception:
                logger.exception("a gradient could not be added after backward had failed")
            self.steps.reset()
            self.backward = None
            return True

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

    def _leave_backward(self) -> None:
        layer = self.computes
        if layer is not None:
            self.leave()
            self._write_back(layer)

    def _write_back(self, layer: WeightLayer) -> None:
        """Send off ``layer.gradients``, to which nothing of this call is added any more; they are on the device."""
        self.steps.collect(layer)
        reducer = self._averaging()
        if reducer is not None and layer.gradients:
            self._average(reducer, layer)
        else:
            self._writer.write_back(layer)

    def _average(self, reducer: GradientReducer, layer: WeightLayer | None) -> None:
        """Send off what all ranks have, of all layers down to ``layer``."""
        for due in reducer.due(layer):
            self._writer.write_back(due, reducer.average(due))

    def _averaging(self) -> GradientReducer | None:
        """What averages the gradients of the backward that runs."""
        return self.reducer if self.reducer is not None and self.reducer.averages else None


class _Forward(NamedTuple):
    """One forward of a layer, held by its graph."""

    layer: WeightLayer
    version: int
    thread: threading.Thread | None  # the program's, and not one of autograd's


class _Backward:
    """One run of autograd's engine, which owns this object: called at its end, and gone without a call if it failed."""

    def __init__(self, stream: WeightStream, key: object) -> None:
        self._stream = stream
        self._key = key

    def __call__(self) -> None:
        if self._stream.backward is self._key:
            self._stream.end_backward()

    def __del__(self) -> None:
        if not sys.is_finalizing() and self._stream.drop_backward(self._key):
            self._stream.thread = None
