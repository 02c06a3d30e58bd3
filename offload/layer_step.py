"""The optimizer's step of a layer, made as soon as its gradients are complete, beside the rest of backward.

``torch.optim``'s steps treat each parameter by itself, so it makes no difference when they are made, one
layer at a time or all at once. ``optimizer.step()`` after backward then passes over what has been stepped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch

from offload.weight_layer import WeightLayer
from offload.weight_parameter import HostParameter
from offload.weight_stats import WeightCounters

_PART = "_offload_part_of_step"
"""The attribute that marks the copies of an optimizer that step one layer."""


class _Stepped(NamedTuple):
    """Tells whether a gradient is still the one that the step has used."""

    address: int
    version: int

    @classmethod
    def of(cls, gradient: torch.Tensor) -> _Stepped:
        return cls(gradient.data_ptr(), gradient._version)


class LayerSteps:
    """Splits one optimizer's step by layers.

    Args:
        optimizer: The user's.
        layers: The streamed layers, some of whose parameters it has.
        counters: What is counted.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``, or its step is one of all parameters.
        ValueError: It has none of the layers' parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layers: list[WeightLayer], counters: WeightCounters) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "optimizer must step each parameter by itself, got LBFGS, which steps all at once; call its step after "
                "backward."
            )
        streamed = {host.parameter for layer in layers for host in layer.parameters}
        if not any(parameter in streamed for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                "optimizer must have parameters of the streamed layers, got none of them; build it from the same model."
            )
        self._optimizer = optimizer
        self._counters = counters
        self._arriving: set[HostParameter] = set()
        self._announced: set[HostParameter] = set()
        self._stepped: dict[HostParameter, _Stepped] = {}
        self._hidden: list[tuple[HostParameter, torch.Tensor]] = []
        self._whole_step: FrameType | None = None
        self.enabled = True
        """Whether layers are stepped; not while gradients are still to be added to."""
        self._hooks = [
            optimizer.register_step_pre_hook(self._begin_step),
            optimizer.register_step_post_hook(self._end_step),
        ]

    def check(self, layer: WeightLayer) -> None:
        """Raise if the layer, whose forward or backward is about to run in backward, may have been stepped already.

        Raises:
            RuntimeError: It was handed to the worker in this backward.
        """
        announced = self._announced.intersection(layer.parameters)
        if announced:
            raise RuntimeError(
                f"{announced.pop().name} must get its gradient at once if its step is made in backward, but {layer} is "
                "needed again after the step; do not use step_in_backward with layers that are checkpointed twice per "
                "forward."
            )

    def collect(self, layer: WeightLayer) -> None:
        """The gradients that this layer has now are about to leave the device; more of them may come."""
        hosts = {item.of for item in layer.stand_ins if item.gradient is not None and not item.of.shared}
        for host in hosts:
            self._stepped.pop(host, None)
        self._arriving |= hosts

    def complete(self, entered: WeightLayer | None) -> Callable[[], None] | None:
        """What the worker is to do when all that was collected is in ``p.grad``.

        Args:
            entered: The layer whose nodes backward runs from now on: no more gradients come of the others. They may
                come after the recomputation of several layers, in which backward passes through them all.
        """
        hosts = self._arriving.difference(() if entered is None else entered.parameters)
        self._arriving -= hosts
        if not hosts or not self.enabled:
            return None
        self._announced |= hosts
        return partial(self.step, hosts)

    def step(self, hosts: set[HostParameter]) -> None:
        """Step parameters whose gradients are complete. Runs on the worker.

        Parameters that several layers share are left to ``optimizer.step()``.
        """
        for host in hosts:
            host.give_back_gradient()
        complete = {host.parameter: host for host in hosts}
        optimizer = self._optimizer
        groups = []
        for group in optimizer.param_groups:
            params = [parameter for parameter in group["params"] if parameter in complete]
            if params:
                groups.append({**group, "params": params})
        if not groups:
            return
        # A shallow copy with the same state: the user's own groups stay as they are, for the other threads. It has no
        # hooks, which are the whole step's: neither its step nor one that this calls with super().step() runs them.
        part = object.__new__(type(optimizer))
        own = {"param_groups": groups, "_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}, _PART: True}
        vars(part).update(vars(optimizer), **own)
        step: Any = type(optimizer).step
        getattr(step, "__wrapped__", step)(part)
        for parameter in [parameter for group in groups for parameter in group["params"]]:
            if parameter.grad is not None:
                self._stepped[complete[parameter]] = _Stepped.of(parameter.grad)
        self._counters.early_steps += 1

    def end_backward(self) -> None:
        """The next backward may bring gradients of the same layers."""
        self._arriving.clear()
        self._announced.clear()

    def close(self) -> None:
        """Leave the optimizer to itself."""
        for hook in self._hooks:
            hook.remove()

    def _begin_step(self, _: Any, args: Any, kwargs: Any) -> None:
        caller = sys._getframe(1)
        if self._whole_step is not None and _is_running(self._whole_step, caller):
            return  # a step that calls super().step(), which has hooks as well
        self._show()
        if args[1:] or kwargs.get("closure") is not None:
            raise RuntimeError(
                "optimizer.step must be called without a closure if step_in_backward is used; run backward first."
            )
        for host, used in self._stepped.items():
            gradient = host.parameter.grad
            if gradient is not None and _Stepped.of(gradient) != used:
                raise RuntimeError(
                    f"the gradient of {host.name} was changed after its step had been made in backward (by "
                    "clip_grad_norm_ or a GradScaler for example); a global norm needs every gradient before the first "
                    "step, so it cannot be used together with step_in_backward."
                )
        for host in self._stepped:
            if host.parameter.grad is not None:
                self._hidden.append((host, host.parameter.grad))
                host.parameter.grad = None
        self._whole_step = caller

    def _end_step(self, *_: Any) -> None:
        if sys._getframe(1) is self._whole_step:
            self._whole_step = None
            self._stepped.clear()
            self._show()

    def _show(self) -> None:
        while self._hidden:
            host, gradient = self._hidden.pop()
            if host.parameter.grad is None:
                host.parameter.grad = gradient


def is_part_of_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is the step of one layer, for which nothing has to be settled first."""
    return _PART in vars(optimizer)


def _is_running(frame: FrameType, caller: FrameType | None) -> bool:
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is frame
