"""One microbatch's pass through the layers, and the schedule at work on it."""

from __future__ import annotations

import math
from collections.abc import Callable

from offload.activations.activation_set import ActivationSet, OffloadState, Saved
from offload.activations.copies import Transfers
from offload.activations.region_set import RegionSet
from offload.activations.what_moves import Rules
from offload.base import trace
from offload.recompute.layer_policies import LayerPolicies
from offload.schedule.schedule import Point, Schedule, backward, forward


class Round:
    """The activation sets of one microbatch, layers 0 to N-1. The graph's backward hooks hold it.

    Without a schedule, the manual synchronizer says what moves when. ``policies_of`` gives the policies of a layer's
    regions, or ``None``.
    """

    def __init__(
        self,
        schedule: Schedule | None,
        transfers: Transfers,
        min_bytes: int,
        *,
        policies_of: Callable[[int], LayerPolicies | None] | None = None,
    ) -> None:
        self.schedule = schedule
        self.transfers = transfers
        self.sets: dict[int, ActivationSet] = {}
        self.last_layer = -1  # the layer whose forward began last
        self._position = 0  # in the schedule's order: of the point that is next unless layers are skipped
        self._policies_of = policies_of or (lambda _: None)
        self._known = Saved()
        self._offloaded = frozenset(schedule.offloaded_layers) if schedule else frozenset[int]()
        self._last_offloaded = max(self._offloaded, default=-2) if schedule else math.inf
        self.rules = Rules(transfers.backend.device, min_bytes)

    @property
    def abandoned(self) -> bool:
        """Whether the last layer's graph has gone without a backward."""
        last = self.sets.get(self.last_layer)
        return last is not None and last.gone and not last.backward_begun

    def keeps(self, layer: int) -> bool:
        """Whether the layer needs no hooks: it is kept, and neither the one before nor a later one is offloaded.

        What the first kept layer saves as well as the one before it must not be offloaded, so that one has hooks.
        """
        return layer > self._last_offloaded + 1 and self._policies_of(layer) is None

    def begin_forward(self, layer: int) -> ActivationSet:
        """The layer's forward begins: act on the schedule, then open its activation set."""
        if not self.sets:
            self.transfers.begin_round()
        self._reach(forward(layer))
        trace.point("forward", layer)
        stays = self.schedule is not None and layer not in self._offloaded
        policies = self._policies_of(layer)
        if policies is None:
            opened = ActivationSet(layer, self.transfers, self.rules, self._known, stays=stays)
        else:
            opened = RegionSet(layer, self.transfers, self.rules, self._known, stays=stays, policies=policies)
        self.sets[layer] = opened
        self.last_layer = layer
        if layer in self._offloaded:
            opened.start_offload()
        return opened

    def begin_backward(self, layer: int) -> None:
        """The layer's backward begins: act on the schedule."""
        self.sets[layer].backward_begun = True
        trace.point("backward", layer)
        self._reach(backward(layer))

    def _reach(self, point: Point) -> None:
        """Act on the schedule at ``point``, and at the points before it that belong to layers which were skipped.

        A layer that was to be released at one of these, and to be reloaded by now, stays.
        """
        schedule, sets = self.schedule, self.sets
        if schedule is None or not self._offloaded:
            return
        position = schedule.position(point)
        points = schedule.order[min(self._position, position) : position + 1]
        self._position = max(self._position, position + 1)
        reloads = [layer for one in points for layer in schedule.reloads(one)]
        for one in points:
            for layer in schedule.releases(one):
                if layer in sets and layer not in reloads and sets[layer].state is OffloadState.OFFLOADING:
                    sets[layer].release()
        for layer in reloads:
            if layer in sets and sets[layer].state is OffloadState.OFFLOADED:
                sets[layer].start_reload()
