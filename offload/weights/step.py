"""Optimizer steps in backward: the optimizer of each layer steps once the layer's gradients are in ``p.grad``.

The worker that adds gradients makes the steps while backward continues, and sets the gradients to ``None``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from offload.weights.gradients import GradientWriter
from offload.weights.layer import WeightLayer
from offload.weights.parameter import HostParameter

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

REMEDY = "write step_in_backward=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), for example"


class LayerSteps:
    """Steps the optimizers that ``make`` returns, one per layer; does nothing where ``make`` is ``None``.

    A parameter that several layers share is in the optimizer of the first.
    """

    def __init__(self, layers: list[WeightLayer], writer: GradientWriter, make: MakeOptimizer | None) -> None:
        self.enabled = True  # False inside no_step()
        self.stepping: torch.optim.Optimizer | None = None  # the one that the worker steps now
        self._writer = writer
        self.of_layer: dict[WeightLayer, tuple[torch.optim.Optimizer, list[HostParameter]]] = {}
        # The layers of which this backward has copied gradients, and whether their step is queued or made.
        self.queued: dict[WeightLayer, bool] = {}
        known: set[nn.Parameter] = set()
        for layer in layers if make is not None else ():
            own = {host.parameter: host for host in layer.parameters if host.parameter not in known}
            known.update(own)
            if make is None or not own:
                continue
            optimizer = make(list(own))
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(
                    f"step_in_backward must return a torch.optim.Optimizer, got {type(optimizer).__name__}; {REMEDY}."
                )
            stepped = _parameters_of(optimizer)
            if not own.keys() >= set(stepped):
                raise ValueError(
                    "step_in_backward must make an optimizer of the parameters that it is given, those of one layer, "
                    f"but that of {layer} has others; {REMEDY}."
                )
            self.of_layer[layer] = optimizer, [own[parameter] for parameter in stepped]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer, _ in self.of_layer.values()]

    @property
    def hosts(self) -> list[HostParameter]:
        return [host for _, hosts in self.of_layer.values() for host in hosts]

    def check_layer(self, layer: WeightLayer) -> None:
        """Raise if backward needs a layer again that has stepped."""
        if self.queued.get(layer):
            raise RuntimeError(
                f"{layer} must get its gradients at once if its step is made in backward, but it is needed again after "
                "the step; do not use step_in_backward with layers that are checkpointed twice per forward."
            )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer of the program is about to step a parameter that backward steps."""
        names = {host.parameter: host.name for host in self.hosts}
        for parameter in _parameters_of(optimizer) if optimizer not in self.optimizers else ():
            if parameter in names:
                raise RuntimeError(
                    f"optimizer must leave {names[parameter]} alone, which is stepped in backward (see "
                    "step_in_backward); build it from the parameters outside the streamed layers."
                )

    def collect(self, layer: WeightLayer) -> None:
        """The layer's gradients are about to be copied to the host."""
        if layer.gradients:
            self.queued.setdefault(layer, False)

    def complete(self, entered: WeightLayer) -> None:
        """Queue the steps of the layers that backward has left for ``entered``, whose nodes it runs from now on.

        Recomputation of several layers passes through them all before their backward, and completes no layer.
        """
        for layer, queued in self.queued.items() if self.enabled and self.of_layer else ():
            # Of a shared parameter, another layer may give more gradients: it steps at the end.
            if not queued and layer is not entered and not any(host.shared for host in layer.parameters):
                self.queued[layer] = True
                self._writer.when_written(partial(self._step, layer))

    def finish(self) -> None:
        """Backward has ended: queue the steps of all layers that still have a gradient."""
        for layer in self.of_layer if self.enabled and self.queued else ():
            self._writer.when_written(partial(self._step, layer))

    def _step(self, layer: WeightLayer) -> None:
        optimizer, hosts = self.of_layer[layer]
        if self._writer.errors:
            return  # a gradient may be wrong; backward raises
        for host in hosts:
            if not host.undecided:
                host.give_back_gradient()
        if all(host.parameter.grad is None for host in hosts):
            return
        self.stepping = optimizer
        try:
            optimizer.step()
        except Exception as error:
            error.add_note(f"In the step in backward of {layer}.")
            raise
        finally:
            self.stepping = None
        optimizer.zero_grad()
        self._writer.counters["early_steps"] += 1


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
