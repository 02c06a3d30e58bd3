"""The activation set of a layer whose regions are treated each in its own way: kept, offloaded, or computed again.

What is saved is matched with what was computed. A storage is dropped, kept or left to travel when the operation that
saved it is over. What is to be computed again for the first time waits for the forward's end: it is computed once, and
compared. In a layer's first forward so does everything.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Container
from functools import partial
from typing import Any

import torch

from offload.activations.activation_set import ActivationSet
from offload.activations.handles import Handle, MovedHandle
from offload.activations.joined import EarlierLayer, Memory, earlier_layer, memory_of, outputs_of
from offload.activations.keeper import Keeper
from offload.activations.saved_storage import COMPLETE, DROPPED, WRITTEN, SavedStorage, version_counter
from offload.activations.states import OffloadState
from offload.activations.what_moves import decide
from offload.base.tensors import geometry_of
from offload.base.torch_private import counting_versions, leave_modes, next_node
from offload.device.capture import CaptureError
from offload.recompute.costs import RegionProfile
from offload.recompute.modules import ModuleNames
from offload.recompute.policies import KEEP, RECOMPUTE, SOURCE, LayerPolicies, Region, region_of
from offload.recompute.proof import Original, calls_for, differing, seconds_of
from offload.recompute.record import Value
from offload.recompute.recorder import Recorder
from offload.recompute.replay import make_again, make_meanwhile

_logger = logging.getLogger(__name__)

_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
_MODES |= torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)


class RegionSet(ActivationSet):
    """What one layer of one microbatch saved, and what of it is computed again.

    Args:
        args: As an :class:`ActivationSet` takes them.
        policies: What happens to the layer's regions.
        stays: Whether the set never leaves the device.
    """

    _first_goes = False  # only after it is packed is it known what it is

    def __init__(self, *args: Any, policies: LayerPolicies, stays: bool) -> None:
        super().__init__(*args, stays=stays)
        self._policies = policies
        self._over: tuple[Recorder, Memory] | None = None
        """What has seen a forward that is over, and what a first one was given, until the layer's output is known."""
        self._recorder: Recorder | None = None
        """Sees the layer's forward, while that runs."""
        self._values: dict[int, Value] = {}
        """What is in saved storages, by the storage's address."""
        # Storages, handles and values weakly, here and below: the graph owns them, and lets them go meanwhile.
        self._dropping: list[tuple[weakref.ref[SavedStorage], Value]] = []
        """Those that are to be dropped when their operation is over, and what is in them."""
        self._handles: dict[Value, weakref.ref[MovedHandle]] = {}
        """The last handle of what a value holds: another operation often saves the very same tensor."""
        self._waiting: list[tuple[weakref.ref[SavedStorage], Value]] = []
        """What a first forward has saved: all of that is treated at its end."""
        self._sources: list[Value] = []
        """What the layer was given, as far as it may travel."""
        self._dropped: list[weakref.ref[Value]] = []
        self._from_before: Value | None = None
        """Of a layer that is measured: its input, if the layer before can compute it again."""

    def enter(self, inputs: object = None) -> None:
        leave_modes(Recorder)  # of a forward that an interrupt has kept from leaving it
        self._begin_learning()
        learned = self._policies.learned
        modules = ModuleNames(None if learned else self._policies.layer)
        wanted = not learned or self._policies.unsaved
        self._recorder = Recorder(self.given, partial(self.made, modules) if wanted else None)
        self._recorder.__enter__()
        super().enter()

    def _begin_learning(self) -> None:
        """A first forward begins, if it does; nothing can be compared while a CUDA graph is captured."""
        if self._policies.learned:
            return
        if self.transfers.backend.capturing:
            raise CaptureError(
                f"layer {self.layer} has policies, and must run outside of a capture first, to prove what can be "
                "computed again; warm up with a step before the capture."
            )
        self._policies.begin()

    def leave(self, *, failed: bool) -> None:
        super().leave(failed=failed)
        recorder, self._recorder = self._recorder, None
        self._known.outputs = {}
        if recorder is None:
            return
        leave_modes(Recorder)
        self._end_operation()
        if self._policies.joins and not failed:
            self._over = recorder, {} if self._policies.proven_outputs else memory_of(self._sources)
        first = not self._policies.learned
        if (first or self._waiting) and not (failed or self.transfers.backend.capturing):
            self._learn()
        for reference, value in self._waiting:
            storage = reference()
            if storage is not None and self._moves(storage, value):
                super()._follow(storage)
        for dropped in self._dropped:
            wanted = dropped()
            if wanted is not None and wanted.call is not None and wanted.uses:
                wanted.call.need()
        for number, source in enumerate(self._sources):
            if source.uses and source.given is not None:
                self._keep(source.given, source)
                self._policies.sources_read.add(number)
        self._end_operation()
        self._waiting, self._sources, self._dropped = [], [], []
        self._values, self._handles, self._from_before = {}, {}, None

    def returned(self, output: object) -> None:
        over, self._over = self._over, None
        if over:
            self._known.outputs = outputs_of(output, self._policies, self.transfers.backend, *over)

    def pack(self, tensor: torch.Tensor, changes: int = 0) -> Handle:
        recorder = self._recorder
        if recorder is None or type(tensor) is not torch.Tensor:
            return super().pack(tensor, changes)
        if (self._dropping or self._known.operation) and next_node() != self._known.node:
            self._end_operation()
        value = None if changes or tensor.layout is not torch.strided else recorder.holds(tensor)
        if value is not None and self._policies.drops(value):
            handle = self._pack_to_drop(tensor, value)
            if handle is not None:
                return handle
        with torch._C._ExcludeDispatchKeyGuard(_MODES):  # what is done to it here is not the layer's doing
            packed = super().pack(tensor, changes)
        if type(packed) is MovedHandle and self._values.get(packed.storage.original) is not (
            held := recorder.read(tensor)
        ):
            self._values[packed.storage.original] = held
            if held.keeper is None and (packed.storage.state is WRITTEN or held.call is None):
                # Else the storage may hold what was there before a write that its version does not tell.
                held.keeper = Keeper(packed.storage, packed.token, packed.version, packed.versions)
        return packed

    def _pack_to_drop(self, tensor: torch.Tensor, value: Value) -> MovedHandle | None:
        """The same, in fewer steps, of what is to be dropped when the operation is over; ``None`` if it is not."""
        as_made = value.tensor is not None and value.tensor() is tensor
        reference = self._handles.get(value) if as_made else None
        handle = None if reference is None else reference()
        if handle is None or handle.version != tensor._version or handle.storage.state not in (WRITTEN, DROPPED):
            maker = decide(tensor, self._rules)
            if not isinstance(maker, type):
                return None
            with torch._C._ExcludeDispatchKeyGuard(_MODES):
                storage = self._storage_of(tensor, maker, 0)
                if storage.state is not WRITTEN and storage.state is not DROPPED:
                    return None
                if as_made and value.geometry is None:
                    value.geometry = geometry_of(tensor)
                token = self.alive or self._new_token()
                handle = MovedHandle(tensor, token, storage, value.geometry if as_made else None)
            if storage.state is WRITTEN:
                if not (self._dropping or self._known.operation):
                    self._known.node, self._known.stream = next_node(), self._compute_stream
                self._dropping.append((weakref.ref(storage), value))
            self._handles[value] = weakref.ref(handle)
            self.in_graph = True
        handle.storage.tensors += 1
        if self.state is not OffloadState.RESIDENT:
            self.transfers.counters.offloaded_tensors += 1
        return handle

    def _end_operation(self) -> None:
        dropping, self._dropping = self._dropping, []
        for reference, value in dropping:
            storage = reference()
            if storage is not None and storage.layer == self.layer and not self._drop(storage, value):
                self._values[storage.original] = value
                self._await_operation(storage)
        if self._known.operation:
            with torch._C._ExcludeDispatchKeyGuard(_MODES):  # copies begin, which is not the layer's doing
                super()._end_operation()

    def _drop(self, storage: SavedStorage, value: Value) -> bool:
        """Drop a storage, if it can be; whether it was."""
        if value.empty or value.overwritten or (storage.state is not WRITTEN and storage.state is not COMPLETE):
            return False  # not yet written, not there any more, on its way already, or dropped
        value.uses += 1
        storage.drop(partial(_again, weakref.ref(self), value))  # weakly: the set must not outlive its handles
        self._dropped.append(weakref.ref(value))
        return True

    def _follow(self, storage: SavedStorage) -> None:
        value = self._values.get(storage.original)  # it stays there: one operation may save a storage several times
        if value is None:
            super()._follow(storage)
        elif not self._policies.learned or self._policies.awaits_proof(region_of(value)):
            self._waiting.append((weakref.ref(storage), value))
        elif self._moves(storage, value):
            super()._follow(storage)

    def _moves(self, storage: SavedStorage, value: Value) -> bool:
        """Drop a storage if that is its policy; whether it is left to move with the set."""
        if isinstance(value.keeper, EarlierLayer):
            return not (value.hold() and self._drop(storage, value))
        if self._policies.drops(value) and not value.empty and not value.overwritten:
            self._drop(storage, value)
            return False
        region = region_of(value)
        # A captured step has the host memory that its warm-up has needed: what was recomputed there stays here.
        if value.drawn or (self.transfers.backend.capturing and self._policies.awaits_proof(region)):
            return False
        return self._policies.of(region) is not KEEP

    def given(self, tensor: torch.Tensor, value: Value) -> None:
        """The layer has read a source."""
        if self._policies.joined and self._known.outputs:
            with torch._C._ExcludeDispatchKeyGuard(_MODES), counting_versions():
                value.keeper = earlier_layer(tensor, self._known.outputs, self._policies)
            if value.keeper is not None and self._policies.measures and not self._policies.learned:
                self._from_before, value.keeper = value, None
        if value.drawn or not isinstance(decide(tensor, self._rules), type):
            return
        if len(self._sources) in self._policies.sources_read and value.given is not None and value.keeper is None:
            # At the forward's end its copy would be the last, which the release waits for, and the first to come back,
            # although backward asks for it last.
            with torch._C._ExcludeDispatchKeyGuard(_MODES), counting_versions():
                self._keep(value.given, value)
        self._sources.append(value)

    def made(self, modules: ModuleNames, tensor: torch.Tensor, value: Value, new: bool) -> None:
        """The layer has computed a value."""
        region = region_of(value)
        if region is None:
            return
        if not self._policies.learned:
            self._policies.name(region, modules.current())
        elif new and region in self._policies.unsaved:
            with counting_versions():
                self._keep(tensor, value)

    def _keep(self, tensor: torch.Tensor, value: Value) -> None:
        """Keep in the set what recomputation reads, and autograd does not save."""
        maker = decide(tensor, self._rules)
        if not isinstance(maker, type) or tensor.is_inference():
            return
        if (self._dropping or self._known.operation) and next_node() != self._known.node:
            self._end_operation()
        storage = self._storage_of(tensor, maker, 0)
        self._values[storage.original] = value
        self._await_operation(storage)
        value.keeper = Keeper(storage, self.alive or self._new_token(), tensor._version, version_counter(tensor))
        value.hold()  # no handle does

    def _learn(self) -> None:
        """Prove what is to be computed again, and measure what it costs if that is asked for."""
        policies = self._policies
        there = {id(value): storage for reference, value in self._waiting if (storage := reference()) is not None}
        saved = [value for _, value in self._waiting if id(value) in there]
        made = [value for value in saved if value.call is not None and not value.empty and not value.overwritten]

        def original(value: Value) -> torch.UntypedStorage | None:
            if value.overwritten:
                return None
            if id(value) in there:
                return there[id(value)].memory
            return None if value.keeper is None else value.keeper.here()

        lists_all = policies.lists_all and not policies.learned
        wanted = made if lists_all else [v for v in made if policies.of(region_of(v)) is RECOMPUTE]
        for value in differing(wanted, original):
            region = region_of(value)
            if region is not None:
                policies.differs(region)
                _logger.info("%s comes out with other bits when it is computed again: kept", policies.names[region])
        policies.proven |= {region for region in map(region_of, wanted) if region is not None}
        policies.unsaved |= self._unsaved(wanted, there)
        if not policies.learned:
            if lists_all:
                self._list(saved, original)
                policies.joined = policies.joins = False
            policies.follow_plan()
            policies.learned = True
        policies.settle()

    def _unsaved(self, wanted: list[Value], saved: Container[int]) -> set[Region]:
        """What recomputation reads of what is to be kept, and autograd does not save by itself."""
        of = self._policies.of

        def is_kept(value: Value) -> bool:
            return value.call is not None and not value.overwritten and of(region_of(value)) is not RECOMPUTE

        again = [value for value in wanted if of(region_of(value)) is RECOMPUTE]
        read = (value for call in calls_for(again, is_kept) for value in call.reads)
        regions = (region_of(value) for value in read if id(value) not in saved and is_kept(value))
        return {region for region in regions if region is not None}

    def _list(self, saved: list[Value], original: Original) -> None:
        """List the regions with what each costs: those that autograd saves, and all that lead to them."""
        policies = self._policies
        calls = calls_for(saved, lambda _: False)
        seconds = seconds_of(calls, original, self.transfers.backend) if policies.measures else [0.0] * len(calls)
        kept = {id(value) for value in saved}
        numbers: dict[int, int] = {}
        costs: list[RegionProfile] = []

        def add(value: Value, region: Region | None, took_s: float, reads: tuple[int, ...], first: int | None) -> None:
            numbers[id(value)] = len(costs)
            policies.order.append(region)
            name = SOURCE if region is None else policies.names[region]
            again = region is not None and region not in policies.differing and not value.empty
            saved_too = id(value) in kept
            costs.append(RegionProfile(name, value.nbytes, took_s, reads, saved_too, again, first))

        for value in {id(value): value for value in [*self._sources, *saved] if value.call is None}.values():
            add(value, None, 0.0, (), None)
        for call, took_s in zip(calls, seconds, strict=True):
            reads = tuple(sorted(numbers[id(value)] for value in call.reads if id(value) in numbers))
            first: int | None = None
            for value in filter(None, (reference() for reference in call.makes)):
                add(value, region_of(value), took_s if first is None else 0.0, reads, first)
                first = numbers[id(value)] if first is None else first
        policies.costs = tuple(costs)


def _again(layer: weakref.ref[RegionSet], value: Value) -> torch.UntypedStorage:
    """The bytes of a dropped storage, made again; called once."""
    opened = layer()
    if opened is not None and opened._recorder is not None:  # the layer computes gradients itself
        with torch._C._ExcludeDispatchKeyGuard(_MODES):
            memory = make_meanwhile(value)
        value.uses -= 1
    else:
        memory = make_again(value)
        value.used()
    return memory
