"""Device slots that layers take turns in, and the copies that load them.

Layer i always goes to slot i modulo their number. So the copy into a slot waits only for what compute still
does with the slot's previous layer, a neighbour; and at the end of forward the slots hold the
last layers, which backward needs first.
"""

from __future__ import annotations

import sys
from enum import Enum

from offload.base import trace
from offload.device.backend import Backend, Event
from offload.weights.layer import WeightLayer
from offload.weights.stats import WeightCounters


class WeightWait(Enum):
    """The only places where weight streaming waits, and what would go wrong without.

    The first four are waits of one stream for another. The last three are waits of the host: of the worker
    that adds gradients, of ``backward()`` at its end, and of an optimizer at the start of its step.
    """

    LOADED = "compute reads a weight before its load has finished"
    SLOT = "a load overwrites weights that compute still reads"
    GRADIENT = "a copy to the host reads a gradient before compute has written it"
    RELEASE = "compute reuses the memory of a gradient that is still being copied to the host"
    STAGED = "the worker reads a gradient that has not arrived on the host"
    WRITTEN = "backward() returns before its last gradient has arrived in p.grad"
    SOURCE = "the host changes a weight that is still being copied to the device"


class Slot:
    """Device memory of ``nbytes`` for one layer at a time."""

    def __init__(self, nbytes: int, backend: Backend) -> None:
        self.flat = backend.empty(nbytes)
        self.layer: WeightLayer | None = None
        """Whose weights it holds, or will hold once ``loaded``."""
        self.version = 0
        """The layer's version when it was loaded."""
        self.fresh = False
        """Whether nothing can have changed the weights on the host since the load, ``.data`` included, which leaves
        the version as it is."""
        self.used = backend.compute_stream().record_event()
        """After this event compute no longer needs what the slot holds."""
        self.loaded: Event = self.used
        """After this event the slot holds the layer's weights, and the copy reads the host no longer."""


class WeightSlots:
    """All slots of a device, and the h2d stream that fills them; ``layers`` are in the order of forward."""

    def __init__(self, backend: Backend, layers: list[WeightLayer], num_slots: int, counters: WeightCounters) -> None:
        self._backend = backend
        self._layers = layers
        self._counters = counters
        _, self._h2d_stream = backend.copy_streams
        turns = (layers[number::num_slots] for number in range(min(num_slots, len(layers))))
        self.slots = [Slot(max(layer.nbytes for layer in taking), backend) for taking in turns]
        counters["slot_bytes"] = sum(len(slot.flat) for slot in self.slots)
        self.storages = {slot.flat.untyped_storage()._cdata for slot in self.slots}
        for rank, layer in enumerate(layers):
            layer.rank = rank
            layer.bind(self._slot_of(layer).flat)

    def acquire(self, layer: WeightLayer, *, step: int) -> None:
        """Let compute have a layer's weights, and queue the loads of the next layers, as many as there are other slots.

        The ``step`` to the next is 1 in forward, which needs the weights that the host has now. It is -1 in backward,
        which needs those that forward had.
        """
        if not self._holds(layer, fresh=step > 0):
            self._counters["late_loads"] += 1
            self._load(layer)
        trace.point("wait", layer.number)
        # Compute alone waits; the host goes on and queues the layer's operations behind the load.
        self._backend.wait(self._backend.compute_stream(), self._slot_of(layer).loaded, WeightWait.LOADED)
        for distance in range(1, len(self.slots)):
            rank = layer.rank + step * distance
            if not 0 <= rank < len(self._layers):
                return
            coming = self._layers[rank]
            if step < 0 and not coming.needs_backward:
                return
            if not self._holds(coming, fresh=step > 0):
                self._load(coming)

    def release(self, layer: WeightLayer) -> None:
        """Compute has queued all that it does with the layer for now."""
        self._slot_of(layer).used = self._backend.compute_stream().record_event()

    def make_stale(self) -> None:
        """The host may change weights now: the next forward loads anew."""
        for slot in self.slots:
            slot.fresh = False

    def finish_loads(self) -> None:
        """Block until no copy reads host memory any more."""
        for slot in self.slots:
            if not slot.loaded.query():
                # Else the copy would bring a mixture of old and new values to the device.
                self._backend.wait_on_host(slot.loaded, WeightWait.SOURCE)

    def _slot_of(self, layer: WeightLayer) -> Slot:
        return self.slots[layer.rank % len(self.slots)]

    def _holds(self, layer: WeightLayer, *, fresh: bool) -> bool:
        slot = self._slot_of(layer)
        return slot.layer is layer and slot.version == layer.version() and (slot.fresh or not fresh)

    def _load(self, layer: WeightLayer) -> None:
        slot = self._slot_of(layer)
        if self._backend.poison:
            slot.flat.fill_(0xFF)
            slot.used = self._backend.compute_stream().record_event()
        # A neighbour's work, queued or running: slots are shared by layers that are not next to each other.
        self._backend.wait(self._h2d_stream, slot.used, WeightWait.SLOT)
        with trace.mark("h2d", layer.number):
            for target, source in layer.copies:
                self._backend.copy(self._h2d_stream, target, source)
                self._counters["loaded_bytes"] += len(source)
        slot.loaded = self._h2d_stream.record_event()
        slot.layer, slot.version, slot.fresh = layer, layer.version(), True
        self._counters["loads"] += 1

    def __del__(self) -> None:
        # The device memory goes back to compute's allocator, and the host memory to the system.
        if not sys.is_finalizing():
            self.finish_loads()
