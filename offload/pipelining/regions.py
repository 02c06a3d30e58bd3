"""A stage whose layers' regions are treated each in its own way: kept, offloaded, or computed again.

Each of the stage's layers is a part of its chunks, with an activation set that sees the layer's operations. What the
stage saves outside of its layers stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import nn

from offload.activations.activation_set import ActivationSet
from offload.activations.round import Round
from offload.activations.states import OffloadStateError
from offload.base.given_layers import check_layers
from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn, listeners_on
from offload.base.torch_private import pop_hooks, push_hooks
from offload.pipelining.chunk import ChunkParts, PackedTensor, unpack
from offload.pipelining.order import Chunk
from offload.pipelining.pipeline_regions import everything_again, treated
from offload.pipelining.probe import Saved
from offload.pipelining.stage_profile import StageProfile
from offload.planning.passes import LayerPolicy
from offload.planning.profile import LayerProfile
from offload.recompute.policies import OFFLOAD, RECOMPUTE, LayerPolicies, Policy

Layers = Callable[[nn.Module], Iterable[nn.Module]]
"""A stage's module → its layers, in the order of forward."""


def layers_in(module: nn.Module) -> list[nn.Module]:
    """The layers of a stage's module: the list of modules in it with the most parameters, or else the module itself."""
    lists = [
        list(found.values() if isinstance(found, nn.ModuleDict) else found)
        for found in module.modules()
        if isinstance(found, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    ]
    return max(lists, key=_parameters, default=[]) or [module]


def _parameters(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


class StageRegions:
    """The layers of one stage, and what happens to their regions.

    Args:
        layers: The stage's layers, in the order of forward.
        patterns: Of regions' names; the first that matches decides.
        measures: Whether the first forward measures what each region costs.

    Raises:
        TypeError: ``layers`` does not hold modules.
        ValueError: There are no layers, one is listed twice or inside another, or its activations move already.
    """

    def __init__(self, layers: Iterable[nn.Module], patterns: Mapping[str, Policy], *, measures: bool) -> None:
        modules = check_layers(layers, _StageLayer, "offloaded", "cannot be treated by region")
        for number, layer in enumerate(modules):
            if any(listener.turn is Turn.ACTIVATIONS for listener in listeners_on(layer, LayerListener)):
                raise ValueError(f"layer {number} is offloaded already; call remove() on the first handle")
        self.policies = [LayerPolicies(patterns, layer, measures=measures) for layer in modules]
        self.at_work: LayeredChunk | None = None
        """The chunk whose forward runs."""
        self._attachment = Attachment(modules, [_StageLayer(self, number) for number in range(len(modules))])

    def __len__(self) -> int:
        """How many layers the stage has."""
        return len(self.policies)

    @property
    def saved(self) -> Saved:
        """What the first forward saved."""
        travelling, kept_bytes = [], 0
        for layer in self.policies:
            for cost, region in zip(layer.costs, layer.order, strict=True):
                policy = layer.of(region)
                if policy is RECOMPUTE or not (cost.saved or region in layer.unsaved):
                    continue
                if policy is OFFLOAD:
                    travelling.append(cost.nbytes)
                else:
                    kept_bytes += cost.nbytes
        return Saved(travelling, kept_bytes=kept_bytes)

    def remove(self) -> None:
        """Take the hooks off the layers."""
        self._attachment.remove()

    def follow(self, policies: Iterable[LayerPolicy]) -> None:
        """Treat the regions by their numbers from now on."""
        for layer, policy in zip(self.policies, policies, strict=True):
            if layer.costs:
                layer.follow(policy)

    def with_layers(self, costs: StageProfile) -> StageProfile:
        """What a chunk costs that computes nothing again, with its layers; ``costs`` is one that computes all again."""
        seconds = [sum(cost.seconds for cost in layer.costs) for layer in self.policies]
        total_s = sum(seconds)
        shares = [one / total_s if total_s else 1 / len(seconds) for one in seconds]

        def layers(backward_s: float) -> list[LayerProfile]:
            return [
                LayerProfile.from_regions(layer.costs, costs.forward_s * share, backward_s * share)
                for layer, share in zip(self.policies, shares, strict=True)
            ]

        found = StageProfile.of_layers(layers(costs.backward_s))
        again = treated(found, everything_again(found))
        again_s = again.backward_s - found.backward_s
        return StageProfile.of_layers(
            layers(max(0.0, costs.backward_s - again_s)),
            weight_s=costs.weight_s,
            weight_bytes=max(0, costs.weight_bytes - again.again_bytes),
        )


class _StageLayer(LayerListener):
    """Tells the chunk at work that one of its layers begins and ends."""

    turn = Turn.ACTIVATIONS

    def __init__(self, stage: StageRegions, number: int) -> None:
        self._stage = stage
        self._number = number

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        if self._stage.at_work is not None and not call.recomputes:
            self._stage.at_work.begin_layer(self._number)

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        if self._stage.at_work is not None and not call.recomputes:
            self._stage.at_work.end_layer(failed=failed)


class LayeredChunk(ChunkParts):
    """A chunk's forward and backward, of which each layer of the ``stage`` is a part.

    It has more parts than layers if another stage has more; the last ones are empty then.
    """

    def __init__(
        self,
        microbatch: Round,
        number: int,
        parts: int,
        stage: StageRegions,
        held: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__(microbatch, number, parts, held)
        self._stage = stage
        self._part = -1
        self._open: ActivationSet | None = None
        stage.at_work = self

    def begin_layer(self, part: int) -> None:
        """A layer's forward begins; one that was left out is an empty part."""
        if part <= self._part:
            raise OffloadStateError(
                f"the layers of a stage must run in their order, each once, but layer {part} came after layer "
                f"{self._part}; list them in the order of forward, or treat no regions."
            )
        self._skip_to(part)
        opened = self._open = self._round.begin_forward(self._first_layer + part, self._held)
        self._part = part
        opened.enter()
        push_hooks(self.pack, unpack)

    def end_layer(self, *, failed: bool) -> None:
        """It has ended, or ``failed``."""
        opened, self._open = self._open, None
        if opened is not None:
            pop_hooks(self.pack)
            opened.leave(failed=failed)
            opened.close()

    def pack(self, tensor: torch.Tensor) -> PackedTensor:
        """The pack hook."""
        opened = self._open
        if opened is None:
            raise RuntimeError("a layer's hooks were called outside of its forward; please report this.")
        return PackedTensor(self, self._part, opened.pack(tensor))

    @property
    def saved(self) -> Saved:
        return self._stage.saved

    def __exit__(self, *_: object) -> None:
        self.end_layer(failed=True)  # if it is still open, an interrupt has cut it off
        self._skip_to(self.parts)
        self._stage.at_work = None

    def _skip_to(self, part: int) -> None:
        for skipped in range(self._part + 1, part):
            self._round.begin_forward(self._first_layer + skipped, self._held).close()
            self._part = skipped


class RankRegions:
    """The layers of all stages of a rank; of none, where no regions are treated."""

    def __init__(self) -> None:
        self.stages: dict[int, StageRegions] = {}
        """Stage → its layers."""

    @classmethod
    def of(cls, stages: Iterable[Any], layers: Layers, patterns: Mapping[str, Policy], *, measures: bool) -> Self:
        """The layers of these stages; none has hooks left if one of them cannot be had."""
        rank = cls()
        try:
            for stage in stages:
                rank.stages[stage.stage_index] = StageRegions(layers(stage.submod), patterns, measures=measures)
        except BaseException:
            rank.remove()
            raise
        return rank

    @property
    def parts(self) -> int:
        """How many layers of a round each chunk has: as many as the stage with the most; 0 without stages."""
        return max(map(len, self.stages.values()), default=0)

    def remove(self) -> None:
        """Take the hooks off all layers."""
        for stage in self.stages.values():
            stage.remove()

    def follow(self, policies: Mapping[int, Iterable[LayerPolicy]]) -> None:
        """Treat the regions of each stage's layers by their numbers from now on."""
        for stage, of_layers in policies.items():
            self.stages[stage].follow(of_layers)

    def with_layers(self, profile: Mapping[int, StageProfile]) -> dict[int, StageProfile]:
        """The profile of a step that computed everything again, with the layers of each stage, where there are some."""
        return {
            stage: self.stages[stage].with_layers(costs) if stage in self.stages and not costs.layers else costs
            for stage, costs in profile.items()
        }

    def of_round(self, numbers: Mapping[Chunk, int]) -> Callable[[int], LayerPolicies | None] | None:
        """What gives the policies of a layer of a round, whose chunks get their ``numbers`` as they come."""

        def policies_of(layer: int) -> LayerPolicies | None:
            number, part = divmod(layer, self.parts)
            chunk = next(chunk for chunk, one in numbers.items() if one == number)
            layers = self.stages[chunk.stage].policies
            return layers[part] if part < len(layers) else None

        return policies_of if self.stages else None
