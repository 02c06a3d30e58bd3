"""Optimizer steps in backward: each layer's own optimizer steps once the layer's gradients are in ``p.grad``.

The worker that adds gradients makes the steps, beside the rest of backward, and sets the gradients to ``None``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from offload.base.checks import describe
from offload.weights.gradients import GradientWriter
from offload.weights.layer import WeightLayer
from offload.weights.parameter import HostParameter

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


_WRITE = "write step_in_backward=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), for example"


def check_make_optimizer(make: object) -> None:
    """Raise a ``TypeError`` for what cannot make an optimizer."""
    if not callable(make):
        raise TypeError(
            "step_in_backward must be a function that makes the optimizer of one layer's parameters, got "
            f"{describe(make)}; {_WRITE}."
        )


class LayerSteps:
    """Steps the optimizers that ``make`` returns, one per layer; does nothing where ``make`` is ``None``."""

    def __init__(self, layers: list[WeightLayer], writer: GradientWriter, make: MakeOptimizer | None) -> None:
        self.enabled = True  # not while gradients are still to be added to
        self.stepping: torch.optim.Optimizer | None = None  # the one that the worker steps now
        self._writer = writer
        self._of: dict[WeightLayer, tuple[torch.optim.Optimizer, list[HostParameter]]] = {}
        self._collected = False  # whether this backward has brought a gradient
        self._arriving: list[WeightLayer] = []  # their gradients are being copied; more of these gradients may follow
        self._announced: set[WeightLayer] = set()  # their steps are queued, or made
        known: set[HostParameter] = set()
        for layer in layers if make is not None else ():
            own = {host.parameter: host for host in layer.parameters if host not in known}
            known.update(own.values())
            if make is not None and own:
                optimizer = make(list(own))
                self._of[layer] = optimizer, [own[parameter] for parameter in _parameters_of(optimizer, own, layer)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """In the order of the layers; a parameter that several layers share is in the optimizer of the first."""
        return [optimizer for optimizer, _ in self._of.values()]

    @property
    def hosts(self) -> list[HostParameter]:
        """The parameters that are stepped in backward."""
        return [host for _, hosts in self._of.values() for host in hosts]

    def check_layer(self, layer: WeightLayer) -> None:
        """Raise if backward needs a layer again that has stepped."""
        if layer in self._announced:
            raise RuntimeError(
                f"{layer} must get its gradients at once if its step is made in backward, but it is needed again after "
                "the step; do not use step_in_backward with layers that are checkpointed twice per forward."
            )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer of the program's is about to step what backward steps."""
        names = {host.parameter: host.name for host in self.hosts}
        if optimizer not in self.optimizers:
            for parameter in (item for group in optimizer.param_groups for item in group["params"]):
                if parameter in names:
                    raise RuntimeError(
                        f"optimizer must leave {names[parameter]} alone, which is stepped in backward (see "
                        "step_in_backward); build it from the parameters outside the streamed layers."
                    )

    def collect(self, layer: WeightLayer) -> None:
        """The layer's gradients are about to leave the device."""
        if layer.gradients:
            self._collected = True
            if layer in self._of and layer not in self._arriving:
                self._arriving.append(layer)

    def complete(self, entered: WeightLayer) -> None:
        """Queue the steps of the layers that backward has left for ``entered``, whose nodes it runs from now on.

        Recomputation of several layers passes through them all before their backward: it completes nothing.
        """
        if not self.enabled:
            return
        for layer in [layer for layer in self._arriving if layer is not entered]:
            self._arriving.remove(layer)
            if not any(host.shared for host in self._of[layer][1]):  # else another layer may bring more
                self._announced.add(layer)
                self._writer.when_written(partial(self._step, layer))

    def finish(self) -> None:
        """Backward has ended: queue the steps of all layers that still have a gradient."""
        if self.enabled and self._collected:
            self._writer.when_written(self._step_rest)

    def reset(self) -> None:
        """Backward has ended or failed; the next one may bring gradients of the same layers."""
        self._collected = False
        self._arriving.clear()
        self._announced.clear()

    def close(self) -> None:
        """Step nothing any more."""
        self._of.clear()

    def _step(self, layer: WeightLayer) -> None:
        optimizer, hosts = self._of[layer]
        if self._writer.failed:
            return  # a gradient may be wrong; backward raises
        for host in hosts:
            if host.used or not host.averaged:  # else the ranks still have to say whether one of them has a gradient
                host.give_back_gradient()
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

    def _step_rest(self) -> None:
        for host in self.hosts:
            host.give_back_gradient()
        for layer, (_, hosts) in self._of.items():
            if any(host.parameter.grad is not None for host in hosts):
                self._step(layer)


def _parameters_of(
    optimizer: object, given: dict[nn.Parameter, HostParameter], layer: WeightLayer
) -> list[nn.Parameter]:
    """The parameters of an optimizer that was made for ``given`` ones."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"step_in_backward must return a torch.optim.Optimizer, got {type(optimizer).__name__}; {_WRITE}."
        )
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not given.keys() >= set(found):
        raise ValueError(
            f"step_in_backward must make an optimizer of the parameters that it is given, those of one layer, but that "
            f"of {layer} has others; {_WRITE}."
        )
    return found
