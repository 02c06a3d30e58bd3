"""A layer's input that the layer before computes again: layers that are joined hold one input for all of them.

What a layer has returned is kept in mind until the next one ends, with the record that leads to it. Where that one
reads the very same bytes, its input needs neither device nor host. In its backward the record of the layer before runs,
once, and all that it makes on the way is let go; that layer's own backward runs it once more. So of a group of layers
all but the last run forward once more than without, as far as that leads to their outputs, and the inputs that were
computed again are on the device, each until its layer has read it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.activations.saved_storage import shares_versions, version_counter
from offload.base.layer_events import compute_device
from offload.base.tensors import copy_of_storage, is_plain
from offload.base.torch_private import tensors_in
from offload.device.backend import Backend
from offload.recompute.policies import LayerPolicies, region_of
from offload.recompute.proof import Original, differing, same_bits
from offload.recompute.record import Value
from offload.recompute.recorder import Recorder
from offload.recompute.replay import make_meanwhile, running

_logger = logging.getLogger(__name__)


class Returned(NamedTuple):
    """A tensor that a layer has returned and can compute again."""

    value: Value
    version: int
    versions: torch.Tensor
    memory: StorageWeakRef
    """While it lives, no other storage has the same address."""
    proof: torch.UntypedStorage | None
    """What it held then, until it is known that nobody writes there unseen before the next layer reads it."""


Outputs = dict[int, Returned]
"""By the storage's address."""


class EarlierLayer:
    """The layer before, as what keeps a layer's input: it computes that again, once, when backward asks."""

    __slots__ = ("_held", "_memory", "_value")

    def __init__(self, value: Value) -> None:
        self._value = value
        self._held = False
        self._memory: torch.UntypedStorage | None = None

    @property
    def held(self) -> bool:
        return self._held

    def here(self) -> torch.UntypedStorage | None:
        return self._memory

    def hold(self) -> bool:
        value = self._value
        if not self._held:
            self._held = True
            value.uses += 1
            if value.call is not None and not (value.keeper is not None and value.hold()):
                value.call.need()
        return True

    def bytes_on_device(self) -> torch.UntypedStorage:
        with running:  # autograd may ask in several threads
            if self._memory is None:
                for before in reversed(self._unmade()):
                    before._memory = make_meanwhile(before._value)
                self._memory = make_meanwhile(self._value)
            return self._memory

    def _unmade(self) -> list[EarlierLayer]:
        """Those that this one asks, and they ask, while nothing is made: all of them would be many frames."""
        found: list[EarlierLayer] = []
        for one in chain((self,), found):  # which grows meanwhile
            call = one._value.call
            calls = [] if call is None or one._value.held or one._value.memory is not None else call.before()
            asked = {read.keeper: None for call in calls for read in call.reads if read.memory is None}
            found += [keeper for keeper in asked if isinstance(keeper, EarlierLayer) and keeper._memory is None]
        return found


Memory = dict[int, torch.UntypedStorage]
"""Of values, by their identity."""


def memory_of(sources: Iterable[Value]) -> Memory:
    """The program's own memory of what a layer was given."""
    return {id(source): source.given.untyped_storage() for source in sources if source.given is not None}


def outputs_of(
    output: object, policies: LayerPolicies, backend: Backend, recorder: Recorder, inputs: Memory
) -> Outputs:
    """What a layer has returned and can compute again; in a first forward, after a proof of that.

    Args:
        output: What it has returned.
        policies: The layer's.
        backend: Where it computes; nothing can be compared there while a CUDA graph is captured.
        recorder: It has seen the layer's forward.
        inputs: What the layer was given, where a proof may be needed.
    """
    found: Outputs = {}
    layer = policies.layer
    if layer is not None and compute_device([layer]) is not None:
        _logger.info("the layer's weights are streamed, and away in the next one's backward: its output is held")
        return found
    for tensor in tensors_in(output):
        value = recorder.holds(tensor) if type(tensor) is torch.Tensor and is_plain(tensor) else None
        region = None if value is None else region_of(value)
        if value is None or region is None or value.empty or value.overwritten:
            continue
        memory, proof = tensor.untyped_storage(), None
        if region not in policies.proven_outputs:
            if backend.capturing or differing([value], _originals(value, memory, inputs)):
                continue
            policies.proven_outputs.add(region)
            proof = copy_of_storage(memory)
        found[memory._cdata] = Returned(value, tensor._version, version_counter(tensor), StorageWeakRef(memory), proof)
    return found


def _originals(value: Value, memory: torch.UntypedStorage, inputs: Memory) -> Original:
    """Where the forward's own results are, as far as they are there."""

    def original(asked: Value) -> torch.UntypedStorage | None:
        if asked is value:
            return memory
        if asked.overwritten or asked.keeper is None:
            return inputs.get(id(asked))
        there = asked.keeper.here()
        return inputs.get(id(asked)) if there is None else there

    return original


def earlier_layer(tensor: torch.Tensor, outputs: Outputs, policies: LayerPolicies) -> EarlierLayer | None:
    """What computes again what a layer reads for the first time; ``None`` if the layer before has not made it so."""
    memory = tensor.untyped_storage()
    output = outputs.get(memory._cdata)
    if output is None or output.version != tensor._version or output.value.overwritten:
        return None
    if output.version and not shares_versions(output.versions, tensor):
        return None
    if output.proof is not None and not same_bits(output.proof, memory):
        policies.joined = False  # somebody writes there in a way that no version tells, and may do so in each step
        return None
    return EarlierLayer(output.value) if _is_sound(output.value) else None


def _is_sound(value: Value) -> bool:
    """Whether all that it is computed from is still there, and as it was: a sharded weight may be gone by now."""
    reads = (read for call in ([] if value.call is None else value.call.before()) for read in call.reads)
    return all(
        not read.changed and (read.given is None or read.given.untyped_storage().nbytes() == read.nbytes)
        for read in reads
    )
