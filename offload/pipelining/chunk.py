"""One chunk of a pipeline: its saved tensors, cut into parts, which are the layers of a ``Round``.

A part is an equal share of the chunk's bytes. With policies by hand for the regions of the stage's layers, a part is
one of these layers, and tensors that the stage saves outside of its layers are kept.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import call
from typing import Any, Self

import torch
from torch import nn

from offload.activations.activation_set import ActivationSet, OffloadStateError
from offload.activations.handles import SavedHandle
from offload.activations.module_hooks import OffloadListener
from offload.activations.round import Round
from offload.activations.what_moves import offloaded_parts
from offload.base.find_layers import check_layers
from offload.base.layer_events import Attachment, Handle, LayerCall
from offload.base.torch_private import next_node, pop_hooks, push_hooks
from offload.recompute.layer_policies import LayerPolicies, alike
from offload.recompute.policies import OFFLOAD, Policy


class ChunkParts:
    """A chunk whose parts are equal shares of its bytes; as a context manager it surrounds the chunk's forward.

    A part ends with the operation that fills it, as what one operation saves may share memory: the parts up to there
    have ``part_bytes`` each. Backward reaches the parts from the last to the first. The round holds all chunks of this
    step, numbered in the order of forwards.
    """

    def __init__(self, microbatch: Round, number: int, parts: int, part_bytes: float = math.inf) -> None:
        self.parts = parts
        self._round = microbatch
        self._first_layer = number * parts
        self._part_bytes = part_bytes
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._nbytes: list[int] = []  # that each operation has saved
        self._node = -1  # the number of autograd's next node, which grows with each operation
        self._part = -1  # the part whose forward began last
        self._open: ActivationSet | None = None
        self._reached = parts

    def saved(self) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """As :class:`StageProfile` has them: ``tensors``, ``kept_bytes`` and ``layers``."""
        return tuple(filter(None, self._nbytes)), 0, ()

    def pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The pack hook; what it returns, the unpack hook calls."""
        opened: Any = self._open  # a part has begun where these hooks are on
        if self._node != (node := next_node()):
            while self._part < self.parts - 1 and sum(self._nbytes) >= (self._part + 1) * self._part_bytes:
                opened.close()
                opened = self._open = self._begin_part(self._part + 1)
            self._node = node
            self._nbytes.append(0)
        for storage in (one.untyped_storage() for one in offloaded_parts(tensor, self._round.rules)):
            if storage not in self._seen:
                self._seen.add(storage)
                self._nbytes[-1] += storage.nbytes()
        return partial(self._unpack, self._part, (opened.packing or opened.pack)(tensor))

    def _unpack(self, part: int, handle: SavedHandle) -> torch.Tensor:
        self.reach(part)
        return handle.unpack()

    def reach(self, part: int) -> None:
        """Backward asks for a tensor of ``part``, and so is past all later parts."""
        while self._reached > part:
            self._reached -= 1
            self._round.begin_backward(self._first_layer + self._reached)

    def __enter__(self) -> Self:
        self._open = self._begin_part(0)
        push_hooks(self.pack, call)
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            pop_hooks(self.pack)
            self._open.close()
        if self._part < self.parts - 1:
            self._begin_part(self.parts - 1).close()

    def _begin_part(self, part: int) -> ActivationSet:
        """Begin a part; the parts that were left out before it are empty."""
        for skipped in range(self._part + 1, part):
            self._round.begin_forward(self._first_layer + skipped).close()
        self._part = part
        return self._round.begin_forward(self._first_layer + part)


class LayeredChunk(ChunkParts):
    """A chunk of which each layer is a part; the last parts are empty if another stage of the rank has more layers."""

    def __init__(self, microbatch: Round, number: int, layers: StageLayers, stage: int) -> None:
        super().__init__(microbatch, number, layers.parts)
        self.policies = layers.policies[stage]
        self._layers = layers

    def begin_layer(self, part: int, inputs: object) -> None:
        if part <= self._part:
            raise OffloadStateError(
                f"the layers of a stage must run in their order, each once, but layer {part} came after layer "
                f"{self._part}; list them in the order of forward, or leave out policies."
            )
        self._open = self._begin_part(part)
        self._open.enter(inputs)
        push_hooks(self.pack, call)

    def end_layer(self, *, failed: bool) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            pop_hooks(self.pack)
            opened.leave(failed=failed)
            opened.close()

    def saved(self) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        held = [[*layer.held()] for layer in self.policies]
        moved = [[nbytes for nbytes, policy in layer if policy is OFFLOAD] for layer in held]
        kept_bytes = sum(nbytes for layer in held for nbytes, policy in layer if policy is not OFFLOAD)
        return tuple(chain.from_iterable(moved)), kept_bytes, tuple(map(len, moved))

    def __enter__(self) -> Self:
        self._layers.running = self
        return self

    def __exit__(self, *_: object) -> None:
        self.end_layer(failed=True)  # if it is still open, an interrupt has cut it off
        super().__exit__()
        self._layers.running = None


class StageLayers:
    """The layers of all stages of a rank, with the policies of their regions."""

    def __init__(self, stages: Sequence[Any], patterns: Mapping[str, Policy], handle: Handle) -> None:
        self.policies: dict[int, list[LayerPolicies]] = {}  # stage → the policies of each of its layers
        self.running: LayeredChunk | None = None
        lists = [largest_list(stage.submod) for stage in stages]
        for stage, layers in zip(stages, lists, strict=True):
            check_layers(layers, OffloadListener, "offloaded")
            self.policies[stage.stage_index] = alike([LayerPolicies(patterns, layer) for layer in layers])
        self._attachments = [
            Attachment(layers, [_StageLayer(self, number) for number in range(len(layers))], handle) for layers in lists
        ]

    @property
    def parts(self) -> int:
        """How many parts each chunk has: as many as the stage with the most layers."""
        return max(map(len, self.policies.values()))

    def policies_of(self, layer: int) -> LayerPolicies | None:
        """The policies of a layer of the round, which is a part of the chunk that runs."""
        policies = [] if self.running is None else self.running.policies
        part = layer % self.parts
        return policies[part] if part < len(policies) else None

    def remove(self) -> None:
        for attachment in self._attachments:
            attachment.remove()


class _StageLayer(OffloadListener):
    """Tells the chunk that runs that one of its layers begins and ends; the chunk knows when backward begins."""

    def __init__(self, layers: StageLayers, number: int) -> None:
        self._layers = layers
        self._number = number

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        if self._layers.running is not None and not call.recomputes:
            self._layers.running.begin_layer(self._number, inputs)

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        if self._layers.running is not None and not call.recomputes:
            self._layers.running.end_layer(failed=failed)

    def forward_returned(self, call: LayerCall, output: object) -> None:
        pass


def largest_list(module: nn.Module) -> list[nn.Module]:
    """The layers of a stage's module: the list of modules in it with the most parameters, or else the module itself."""
    kinds = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    lists = [one for one in module.modules() if isinstance(one, kinds)]
    largest = max(lists, key=lambda one: sum(parameter.numel() for parameter in one.parameters()), default=None)
    return [*largest.children()] if largest is not None and len(largest) else [module]
