"""Optimizer steps of layers in backward, on the device: gradients are not copied to the host.

When backward has left a layer, the layer's gradients are complete. An optimizer whose state is streamed steps the
layer's weights then, in their slot, and copies them to the host with the state: see :mod:`offload.optimizer.early`. The
slot is free for another layer after these copies. Where a recomputation has led backward on to other layers, the slot
has other weights by the time the gradients are complete, and the step loads the weights from the host.

Gradients go to the host as without steps in backward, and ``optimizer.step()`` steps with them, inside of
``no_step()``, and of parameters that several layers share.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from offload.base.torch_private import has_gradient_hooks
from offload.device.backend import Backend, Event
from offload.optimizer.early import BackwardSteps, LayerGradient
from offload.optimizer.host_weights import WeightHolder
from offload.weights.gradients import GradientWriter
from offload.weights.layer import WeightLayer, WeightWait
from offload.weights.parameter import Gradients


class LayerSteps(WeightHolder):
    """Gives the gradients of layers to an optimizer that steps in backward."""

    def __init__(
        self, backend: Backend, layers: list[WeightLayer], most_flights: int, writer: GradientWriter, *, averaged: bool
    ) -> None:
        self.device = backend.device
        self._backend = backend
        self._hosts = list(dict.fromkeys(host for layer in layers for host in layer.parameters))
        self._most_flights = most_flights
        self._writer = writer
        self._averaged = averaged
        self.parameters = {host.parameter for host in self._hosts}
        # Weak: the optimizer goes when the program drops it, with what its hooks hold.
        self._steps: weakref.ref[BackwardSteps] | None = None
        self._left: dict[WeightLayer, Gradients] = {}
        """The gradients of layers that backward has left, and that are not stepped yet."""
        self._stepped: set[WeightLayer] = set()  # layers that this backward has stepped
        self._updated: Event | None = None  # after it, all weights that this backward has stepped are on the host
        self._totals: list[torch.Tensor] = []  # sums on the host that are being loaded

    @property
    def steps(self) -> BackwardSteps | None:
        return None if self._steps is None else self._steps()

    def check_steps(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._averaged:
            raise ValueError(
                "in_backward must be False if the layers' gradients are averaged over a process_group, got True; leave "
                "it out: the step after backward is streamed as well."
            )
        if self.steps is not None:
            raise ValueError(
                "in_backward must be True for one optimizer of streamed layers, but another one steps these layers in "
                "backward already; build one optimizer, with groups."
            )
        some = set(parameters)
        hooked = next((h.name for h in self._hosts if h.parameter in some and has_gradient_hooks(h.parameter)), None)
        if hooked is not None:
            raise ValueError(
                f"in_backward must be False where parameters of streamed layers have hooks on their gradients, but "
                f"{hooked} has one; remove the hook, or leave in_backward out."
            )

    def begin_steps(self, steps: BackwardSteps, parameters: Iterable[torch.Tensor]) -> None:
        if self.steps is not steps:
            self._writer.free_memory()
        this = weakref.ref(self)
        self._steps = weakref.ref(steps, lambda _: None if (one := this()) is None else one.end_steps())
        some = set(parameters)
        for host in self._hosts:
            if host.parameter in some and not host.refusals:
                host.refuse_outside()

    def end_steps(self) -> None:
        self._steps = None
        for host in self._hosts:
            while host.refusals:
                host.refusals.pop().remove()

    def check_layer(self, layer: WeightLayer) -> None:
        """Raise if backward needs a layer again that has stepped."""
        if layer in self._stepped:
            raise RuntimeError(
                f"{layer} must get its gradients at once if it is stepped in backward, but it is needed again after "
                "the step; do not use in_backward=True with layers that are checkpointed twice per forward."
            )

    def take(self, layer: WeightLayer) -> None:
        """Backward has left the layer: take its gradients that are to be stepped, and leave the others there."""
        steps = self.steps
        if steps is None or not steps.enabled or not layer.gradients:
            return
        steps.begin_run(self)
        taken = self._left.setdefault(layer, {})
        for host in list(layer.gradients):
            if not host.shared and host.parameter in steps.groups:
                if host in taken:
                    raise host.second_gradient_error()
                taken[host] = layer.gradients.pop(host)

    def complete(self, entered: WeightLayer | None, in_slot: WeightLayer | None) -> None:
        """Backward is about to run nodes of the layer ``entered``: step all others that it has left.

        The weights of ``in_slot`` are still in its slot.

        Recomputation of several layers passes through them all before their backward, and completes no layer.
        """
        steps = self.steps
        for layer in [layer for layer in self._left if layer is not entered]:
            gradients = self._left.pop(layer)
            if gradients and steps is not None:
                self._step(steps, layer, gradients, in_slot=layer is in_slot)

    def _step(self, steps: BackwardSteps, layer: WeightLayer, gradients: Gradients, *, in_slot: bool) -> None:
        weights = {one.of: one.weights for one in layer.stand_ins} if in_slot else {}
        given = [LayerGradient(host.parameter, one, host.total, weights.get(host)) for host, one in gradients.items()]
        self._stepped.add(layer)
        self._updated = steps.step_layer(given, self._most_flights)
        for host in gradients:
            if host.total is not None:
                self._totals.append(host.total)
            host.drop_gradient()
        if in_slot and self._updated is not None:
            layer.slot.used = layer.slot.updated = self._updated  # the updated weights are copied out of it
        self._writer.counters["early_steps"] += 1

    def finish(self, *, failed: bool) -> None:
        """Backward has ended: when this returns, all weights that it has stepped are on the host."""
        steps = self.steps
        self._left.clear()
        stepped, self._stepped = self._stepped, set()
        try:
            if steps is not None:
                try:
                    steps.end_run(self, failed=failed)
                finally:
                    if failed:
                        for layer in stepped:  # nothing uses the slot after settle(); its copies may have failed
                            layer.slot.used = self._backend.compute_stream().record_event()
                            layer.slot.updated = None
                        steps.settle()
            if self._updated is not None and not failed:
                # The program may read or change the weights next, and the next forward loads them.
                self._backend.wait_on_host(self._updated, WeightWait.UPDATED)
        except Exception:
            if steps is not None:
                steps.stepper.torn = "a copy of weights or of state has failed"
            raise
        finally:
            self._updated = None
            self._totals.clear()
