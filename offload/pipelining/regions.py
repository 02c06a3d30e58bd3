"""Policies by hand for the regions of a stage's layers: keep, offload or recompute.

Each of the stage's layers is a part of its chunks. Tensors that the stage saves outside of its layers stay on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from offload.activations.activation_set import ActivationSet
from offload.activations.round import Round
from offload.activations.states import OffloadStateError
from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn, check_layers, listeners_on
from offload.base.torch_private import pop_hooks, push_hooks
from offload.pipelining.chunk import ChunkParts, PackedTensor, unpack_part
from offload.pipelining.probe import ChunkBytes
from offload.recompute.policies import OFFLOAD, LayerPolicies, Policy

FindLayers = Callable[[nn.Module], Iterable[nn.Module]]
"""A stage's module → its layers, in the order of forward."""


def layers_in(module: nn.Module) -> list[nn.Module]:
    """The layers of a stage's module: the list of modules in it with the most parameters, or else the module itself."""

    def parameters(modules: Iterable[nn.Module]) -> int:
        return sum(parameter.numel() for module in modules for parameter in module.parameters())

    lists = [
        list(found.values() if isinstance(found, nn.ModuleDict) else found)
        for found in module.modules()
        if isinstance(found, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    ]
    return max(lists, key=parameters, default=[]) or [module]


class RankRegions:
    """The layers of all stages of a rank, with the policies of their regions; empty without policies by hand."""

    def __init__(self) -> None:
        self.policies: dict[int, list[LayerPolicies]] = {}
        """Stage → the policies of each of its layers."""
        self.at_work: LayeredChunk | None = None
        """The chunk whose forward runs."""
        self._attachments: list[Attachment] = []

    def attach(
        self, stages: Iterable[Any], find_layers: FindLayers, patterns: Mapping[str, Policy], *, measures: bool
    ) -> None:
        """Put hooks on the layers of all ``stages``, or on none.

        Args:
            stages: The rank's stages.
            find_layers: Gives the layers of a stage's module.
            patterns: Of regions' names; the first that matches decides.
            measures: Whether the first forward measures what each region costs.

        Raises:
            TypeError: A stage's layers are no modules.
            ValueError: A stage has no layers, one is listed twice or inside another, or is offloaded already.
        """
        try:
            for stage in stages:
                modules = check_layers(
                    find_layers(stage.submod), _StageLayer, "offloaded", "cannot have policies of regions"
                )
                for number, layer in enumerate(modules):
                    if any(listener.turn is Turn.ACTIVATIONS for listener in listeners_on(layer, LayerListener)):
                        raise ValueError(f"layer {number} is offloaded already; call remove() on the first handle")
                self.policies[stage.stage_index] = [
                    LayerPolicies(patterns, layer, measures=measures) for layer in modules
                ]
                listeners = [_StageLayer(self, number) for number in range(len(modules))]
                self._attachments.append(Attachment(modules, listeners))
        except BaseException:
            self.remove()
            raise

    @property
    def parts(self) -> int:
        """How many layers of a round each chunk has: as many as the stage with the most; 0 without stages."""
        return max(map(len, self.policies.values()), default=0)

    def policies_of(self, layer: int) -> LayerPolicies | None:
        """The policies of a layer of the round, which is a part of the chunk at work."""
        policies = [] if self.at_work is None else self.at_work.policies
        part = layer % self.parts
        return policies[part] if part < len(policies) else None

    def remove(self) -> None:
        """Take the hooks off all layers."""
        for attachment in self._attachments:
            attachment.remove()


class _StageLayer(LayerListener):
    """Tells the chunk at work that one of its layers begins and ends."""

    turn = Turn.ACTIVATIONS

    def __init__(self, rank: RankRegions, number: int) -> None:
        self._rank = rank
        self._number = number

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        if self._rank.at_work is not None and not call.recomputes:
            self._rank.at_work.begin_layer(self._number, inputs)

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        if self._rank.at_work is not None and not call.recomputes:
            self._rank.at_work.end_layer(failed=failed)


class LayeredChunk(ChunkParts):
    """A chunk of which each layer is a part.

    It has more parts than layers if another stage of the ``rank`` has more; the last ones are empty then.
    """

    def __init__(
        self, microbatch: Round, number: int, rank: RankRegions, stage: int, held: Iterable[torch.Tensor]
    ) -> None:
        super().__init__(microbatch, number, rank.parts, held)
        self.policies = rank.policies[stage]
        self._rank = rank
        self._part = -1
        self._open: ActivationSet | None = None
        rank.at_work = self

    def begin_layer(self, part: int, inputs: object) -> None:
        """A layer's forward begins; a layer that was left out is an empty part."""
        if part <= self._part:
            raise OffloadStateError(
                f"the layers of a stage must run in their order, each once, but layer {part} came after layer "
                f"{self._part}; list them in the order of forward, or leave out policies."
            )
        self._skip_to(part)
        opened = self._open = self._round.begin_forward(self._first_layer + part, self._held)
        self._part = part
        opened.enter(inputs)
        push_hooks(self.pack, unpack_part)

    def end_layer(self, *, failed: bool) -> None:
        """The layer's forward has ended, or ``failed``."""
        opened, self._open = self._open, None
        if opened is not None:
            pop_hooks(self.pack)
            opened.leave(failed=failed)
            opened.close()

    def pack(self, tensor: torch.Tensor) -> PackedTensor:
        """The pack hook."""
        if self._open is None:
            raise RuntimeError("a layer's hooks were called outside of its forward; please report this.")
        return PackedTensor(self, self._part, self._open.hook(tensor))

    @property
    def saved(self) -> ChunkBytes:
        tensors, kept_bytes = [], 0
        for layer in self.policies:
            for nbytes, policy in layer.held():
                if policy is OFFLOAD:
                    tensors.append(nbytes)
                else:
                    kept_bytes += nbytes
        return ChunkBytes(tuple(tensors), kept_bytes)

    def __exit__(self, *_: object) -> None:
        self.end_layer(failed=True)  # if it is still open, an interrupt has cut it off
        self._skip_to(self.parts)
        self._rank.at_work = None

    def _skip_to(self, part: int) -> None:
        for skipped in range(self._part + 1, part):
            self._round.begin_forward(self._first_layer + skipped, self._held).close()
            self._part = skipped
