"""Device slots that layers take turns in, and the copies that load them.

Layer i always goes to slot i modulo their number. So the copy into a slot waits only for what compute still
does with the slot's previous layer, a neighbour; and at the end of forward the slots hold the
last layers, which backward needs first.
"""

from __future__ import annotations

import sys
from enum import Enum

from offload.base import trace
from offload.base.torch_private import address_of
from offload.device.backend import Backend
from offload.weights.layer import Slot, WeightLayer
from offload.weights.stats import WeightCounters


class WeightWait(Enum):
    """The only places where weight streaming waits, and what would go wrong without.

    The first seven are waits of one stream for another. The last three are waits of the host: of the worker
    that adds gradients, of ``backward()`` at its end, and of an optimizer at the start of its step.
    """

    LOADED = "compute reads a weight before its load has finished"
    SLOT = "a load overwrites weights that compute still reads"
    GRADIENT = "a copy to the host reads a gradient before compute has written it"
    SUM_LANDING = "a load of what gradients are added to overwrites memory that compute still uses"
    SUM = "a gradient is added to a sum that is still being copied to the device"
    AVERAGED = "a copy to the host reads a gradient before the ranks have averaged it"
    RELEASE = "compute reuses the memory of a gradient that is still being copied to the host"
    STAGED = "the worker reads a gradient that has not arrived on the host"
    WRITTEN = "backward() returns before its last gradient has arrived in p.grad"
    SOURCE = "the host changes a weight that is still being copied to the device"


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
        self.storages = {address_of(slot.flat.untyped_storage()) for slot in self.slots}
        for rank, layer in enumerate(layers):
            layer.bind(self.slots[rank % num_slots], rank)
        self._last = -1  # the rank of the layer whose forward began last

    def acquire(self, layer: WeightLayer, *, step: int) -> None:
        """Let compute have a layer's weights, and queue the loads of the next layers, as many as there are other slots.

        The ``step`` to the next is 1 in forward, which needs the weights that the host has now. It is -1 in backward,
        which needs those that forward had.
        """
        if step > 0:
            if layer.rank <= self._last:
                # A new forward of the model: .data may have changed weights since, which leaves no trace.
                self._make_stale()
            self._last = layer.rank
        if not _holds(layer, fresh=step > 0):
            self._counters["late_loads"] += 1
            self._load(layer)
        trace.point("wait", layer.number)
        # Compute alone waits; the host goes on and queues the layer's operations behind the load.
        self._backend.wait(self._backend.compute_stream(), layer.slot.loaded, WeightWait.LOADED)
        for distance in range(1, len(self.slots)):
            rank = layer.rank + step * distance
            if not 0 <= rank < len(self._layers):
                return
            coming = self._layers[rank]
            if step < 0 and not coming.needs_backward:
                return
            if not _holds(coming, fresh=step > 0):
                self._load(coming)

    def settle(self) -> None:
        """Block until no copy reads host memory any more. The host may then change weights: the next forward loads."""
        for slot in self.slots:
            if not slot.loaded.query():
                # Else the slot would hold a mixture of old and new values.
                self._backend.wait_on_host(slot.loaded, WeightWait.SOURCE)
        self._make_stale()

    def _make_stale(self) -> None:
        for slot in self.slots:
            slot.fresh = False

    def _load(self, layer: WeightLayer) -> None:
        slot = layer.slot
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
        slot.rank, slot.version, slot.fresh = layer.rank, layer.version(), True
        self._counters["loads"] += 1

    def __del__(self) -> None:
        # The device memory goes back to compute's allocator, and the host memory to the system.
        if not sys.is_finalizing():
            self.settle()


def _holds(layer: WeightLayer, *, fresh: bool) -> bool:
    """Whether the layer's weights are in its slot, or being loaded; with ``fresh``, as the host has them now."""
    slot = layer.slot
    return slot.rank == layer.rank and slot.version == layer.version() and (slot.fresh or not fresh)
