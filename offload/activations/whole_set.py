"""The activation set of a layer that is one region, as compiled ones are: all of it stays, travels, or comes again."""

from __future__ import annotations

import logging
from typing import Any

import torch

from offload.activations.activation_set import ActivationSet
from offload.activations.handles import Handle
from offload.activations.region_set import RegionSet
from offload.activations.saved_storage import SavedStorage
from offload.recompute.costs import RegionProfile
from offload.recompute.policies import RECOMPUTE, SOURCE, Region
from offload.recompute.proof import differing, seconds_of
from offload.recompute.record import Value
from offload.recompute.whole import FORWARD, ChangedError, ForwardCall, ForwardRecorder

_logger = logging.getLogger(__name__)

_REGION = Region(FORWARD, 0, 0)


class WholeSet(RegionSet):
    """What one compiled layer of one microbatch saved; arguments as those of a :class:`RegionSet`."""

    _call: ForwardCall | None = None
    _stays_whole = False
    """Whether all of it stays although it would be computed again outside of a CUDA graph."""
    _buffers: tuple[int, ...] = ()
    """The versions of the layer's buffers when a first forward began."""

    def enter(self, inputs: object = None) -> None:
        policies = self._policies
        self._begin_learning()
        if not policies.learned:
            policies.name(_REGION, "")
            self._buffers = self._versions()
        recorder = self._recorder = ForwardRecorder(self.given)
        layer = policies.layer
        backend = self.transfers.backend
        # A CUDA graph draws other numbers in each of its replays, and has the host memory that its warm-up has needed.
        self._stays_whole = policies.draws and backend.capturing and policies.of(_REGION) is RECOMPUTE
        if layer is not None and inputs is not None and not self._stays_whole:
            runs_again = not policies.learned or policies.of(_REGION) is RECOMPUTE
            recorder.begin(layer, inputs, backend.device, draws=runs_again and not backend.capturing)
        self._call = recorder.call
        ActivationSet.enter(self)

    def leave(self, *, failed: bool) -> None:
        super().leave(failed=failed)
        self._call = None

    def returned(self, output: object) -> None:
        """What it returned is not written down."""
        self._over = None

    def pack(self, tensor: torch.Tensor, changes: int = 0) -> Handle:
        recorder = self._recorder
        if not isinstance(recorder, ForwardRecorder):
            return super().pack(tensor, changes)
        recorder.count(tensor)
        if type(tensor) is torch.Tensor:
            return super().pack(tensor, changes)
        self._recorder = None  # what a subclass is made of is not computed again
        try:
            return super().pack(tensor, changes)
        finally:
            self._recorder = recorder

    def _moves(self, storage: SavedStorage, value: Value) -> bool:
        return not self._stays_whole and super()._moves(storage, value)

    def _learn(self) -> None:
        policies, call = self._policies, self._call
        there = {value: storage for reference, value in self._waiting if (storage := reference()) is not None}
        made = [value for value in there if value.call is not None]

        def original(value: Value) -> torch.UntypedStorage | None:
            return there[value].memory if value in there else None

        if not policies.learned:
            policies.draws = call is not None and any(state.moved for state in call.states)
        if policies.lists_all or policies.of(_REGION) is RECOMPUTE:
            try:
                again = call is not None and self._buffers == self._versions() and not differing(made, original)
            except ChangedError:
                again = False
            if not again:
                policies.differs(_REGION)
                _logger.info("layer %d cannot be computed again as a whole, or comes out otherwise: kept", self.layer)
            policies.proven.add(_REGION)
        if not policies.learned:
            if policies.lists_all:
                self._list_whole(made, original)
            policies.follow_plan()
            policies.learned = True
        policies.settle()

    def _list_whole(self, made: list[Value], original: Any) -> None:
        policies = self._policies
        saved = {value for _, value in self._waiting}
        sources = list({**dict.fromkeys(self._sources), **{value: None for value in saved if value.call is None}})
        costs = [RegionProfile(SOURCE, one.nbytes, 0.0, saved=one in saved, recomputable=False) for one in sources]
        policies.order += [None] * len(sources)
        if made and self._call is not None:
            again = _REGION not in policies.differing
            runs = [self._call] * (2 if policies.measures and again else 0)  # the compiler may be at work in one
            took_s = min(seconds_of(runs, original, self.transfers.backend), default=0.0)
            nbytes = sum(value.nbytes for value in made)
            reads = tuple(range(len(sources)))
            costs.append(RegionProfile(policies.names[_REGION], nbytes, took_s, reads, recomputable=again))
            policies.order.append(_REGION)
        policies.costs = tuple(costs)

    def _versions(self) -> tuple[int, ...]:
        """Of the layer's buffers: running it twice would count a batch twice."""
        layer = self._policies.layer
        return () if layer is None else tuple(buffer._version for buffer in layer.buffers())
