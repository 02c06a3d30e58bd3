"""The optimizer's step of a layer, made as soon as its gradients are complete, beside the rest of backward.

``torch.optim``'s steps treat each parameter by itself, so it makes no difference when they are made, one
layer at a time or all at once. The step belongs to backward then, and ``optimizer.step()`` ends it: it steps what is
left, and refuses whatever has changed in between, which a step after backward would have used.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from offload.base.checks import warn_caller
from offload.weights.gradients import GradientWriter
from offload.weights.layer import WeightLayer
from offload.weights.parameter import HostParameter

_NO_HOOKS: OrderedDict[int, Any] = OrderedDict()
"""The hooks of a part of an optimizer: none. A part is known by having this very object."""


class LayerSteps:
    """Splits one optimizer's step by layers; does nothing before :meth:`use`."""

    def __init__(self, layers: list[WeightLayer], writer: GradientWriter) -> None:
        self._hosts = {host for layer in layers for host in layer.parameters}
        self._writer = writer
        self.optimizer: torch.optim.Optimizer | None = None
        self.enabled = True  # not while gradients are still to be added to
        self._arriving: set[HostParameter] = set()  # whose gradients are on their way, and may not be all
        # Those that the worker was told to step in this backward; it has begun to when they are held no longer.
        self._announced: set[HostParameter] = set()
        # Held while the worker begins a step, and while autograd says that it adds to parameter.grad by itself.
        # Between reading parameter.grad and writing the sum there, such a gradient would be lost.
        self._beginning = threading.Lock()
        self._due = False  # whether backward has stepped layers, and optimizer.step() has not been called since
        self._state: object = None
        self._groups: list[dict[str, Any]] = []  # the hyperparameters that all steps of one backward use
        # The parameters that have been stepped: their names, and what they and their gradients were then.
        self._stepped: dict[torch.Tensor, tuple[str, object, object]] = {}
        self._late: set[torch.Tensor] = set()  # to which autograd has added a gradient since their steps began
        self._hooks: list[RemovableHandle] = []

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with the user's optimizer, which has parameters of these layers, from now on."""
        _check_splittable(optimizer)
        streamed = {host.parameter for host in self._hosts}
        if streamed.isdisjoint(parameter for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                "optimizer must have parameters of the streamed layers, got none of them; build it from the same model."
            )
        self.optimizer = optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._begin_rest),
            optimizer.register_step_post_hook(self._end_rest),
            optimizer.register_state_dict_pre_hook(self.warn_of_state_dict),
        ]
        for host in self._hosts:
            self._hooks += host.watch_outside(self._see_gradient)

    def check(self, layer: WeightLayer) -> None:
        """Raise if the layer, which is about to run forward or backward, may have been stepped already."""
        if self._announced and not self._announced.isdisjoint(layer.parameters):
            raise RuntimeError(
                f"{layer} must get its gradients at once if its step is made in backward, but it is needed again after "
                "the step; do not use step_in_backward with layers that are checkpointed twice per forward."
            )
        if self._due and not self._announced:
            raise RuntimeError(
                f"{layer} must not run between a backward that has stepped layers (see step_in_backward) and "
                "optimizer.step(), which ends that step. Run all backwards but the last inside no_step(), and skip a "
                "bad loss before its backward. What has been stepped stays so; optimizer.step() steps what is left, "
                "after a backward that failed too."
            )

    def warn_of_state_dict(self, *_: object) -> None:
        """Say so if what is being saved has made a part of a step."""
        if self._due:
            warn_caller(
                "state_dict() between a backward that has stepped layers (see step_in_backward) and optimizer.step() "
                "holds some parameters before and others after their step; call optimizer.step() first."
            )

    def collect(self, layer: WeightLayer) -> None:
        """The gradients that this layer has now are about to leave the device; more of them may come."""
        if self.optimizer is None:
            return
        if not self._due and not self._announced:
            self._forget_steps()  # kept until now, as an optimizer.step() that has raised may be called again
        self._arriving |= {host for host in layer.gradients if not host.shared}

    def complete(self, entered: WeightLayer | None) -> None:
        """Let the worker step what was collected, when it is in ``p.grad``.

        Backward runs the nodes of ``entered`` from now on: no more gradients come of the other layers. (They may come
        after the recomputation of several layers, in which backward passes through them all.)
        """
        hosts = self._arriving.difference(() if entered is None else entered.parameters)
        self._arriving -= hosts
        if hosts and self.enabled and self.optimizer is not None:
            self._announced |= hosts
            self._writer.when_written(partial(self._step, self.optimizer, hosts))

    def _step(self, optimizer: torch.optim.Optimizer, hosts: set[HostParameter]) -> None:
        """Step parameters whose gradients are complete. Runs on the worker.

        Parameters that several layers share, or that the loss turns out to use by itself, are left to
        ``optimizer.step()``: more gradients of these may come.
        """
        with self._beginning:
            complete = {host.parameter: host for host in hosts if not host.shared}
            params = [[item for item in group["params"] if item in complete] for group in optimizer.param_groups]
            if not any(params):
                return
            if not self._due:
                self._due = True
                self._forget_steps()
                self._state = optimizer.state
                self._groups = [_hyperparameters(group) for group in optimizer.param_groups]
                # The last of the hooks sees what the others change.
                optimizer._optimizer_step_pre_hooks.move_to_end(self._hooks[0].id)  # type: ignore[attr-defined]
            for host in complete.values():
                host.give_back_gradient()
        groups = [{**used, "params": mine} for used, mine in zip(self._groups, params, strict=False) if mine]
        part = _part_of(optimizer, groups)
        step: Any = type(part).step
        try:
            getattr(step, "__wrapped__", step)(part)
        except Exception as error:
            names = ", ".join(sorted(host.name for host in complete.values()))
            error.add_note(f"In the step in backward of {names}. optimizer.step() makes it again, and no other twice.")
            raise
        for parameter in [item for mine in params for item in mine]:
            self._stepped[parameter] = (complete[parameter].name, _seen(parameter), _seen(parameter.grad))
        self._writer.counters["early_steps"] += 1

    def end_backward(self) -> None:
        """Backward has ended or failed; the next one may bring gradients of the same layers."""
        self._arriving.clear()
        self._announced.clear()

    def close(self) -> None:
        """Leave the optimizer to itself, with the gradients that it may still step."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._stepped:
            parameter.grad = None

    def _see_gradient(self, host: HostParameter) -> None:
        """Autograd is about to add to ``parameter.grad`` by itself."""
        with self._beginning:
            if host.held:
                host.shared = True  # in time: the worker leaves its step to optimizer.step()
            elif host in self._announced:
                self._late.add(host.parameter)

    def _begin_rest(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Let ``optimizer.step()`` step what is left."""
        if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
            raise RuntimeError(
                "optimizer.step must be called without a closure if step_in_backward is used; run backward first."
            )
        self._due = False
        if not self._stepped:
            return None
        changed = self._change(optimizer)
        if changed is not None:
            raise RuntimeError(
                f"{changed} must stay as it was when backward made the step, but was changed before optimizer.step() "
                "(by clip_grad_norm_, a GradScaler, zero_grad or a scheduler for example). Set hyperparameters before "
                "backward; a global norm needs every gradient before the first step, so it cannot be used together "
                f"with step_in_backward. {len(self._stepped)} parameters have made their step, and no other has; go on "
                "with zero_grad() and the next backward."
            )
        # Of this optimizer, or of what the steps of other streamed layers have left of it.
        return (_rest_of(args[0], self._stepped), *args[1:]), kwargs

    def _end_rest(self, optimizer: torch.optim.Optimizer, args: Any, _: object) -> None:
        """Keep what the step has counted in its groups and attributes, which those in backward have not."""
        if args[0] is not optimizer:
            for group, used in zip(optimizer.param_groups, args[0].param_groups, strict=True):
                group.update({key: value for key, value in used.items() if key not in ("params", "foreach")})
            kept = {key: value for key, value in vars(args[0]).items() if value is not _NO_HOOKS}
            vars(optimizer).update(kept, param_groups=optimizer.param_groups)
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._stepped.clear()
        self._late.clear()

    def _change(self, optimizer: torch.optim.Optimizer) -> str | None:
        """The name of what a step after backward would use otherwise, if there is such a thing."""
        if optimizer.state is not self._state:
            return "the optimizer's state"
        if getattr(optimizer, "grad_scale", None) is not None:  # so a GradScaler tells fused optimizers
            return "the gradients' scale"
        # Groups that were added since have not been used.
        for number, (used, group) in enumerate(zip(self._groups, optimizer.param_groups, strict=False)):
            for key, value in _hyperparameters(group).items():
                if key not in used or not _equal(used[key], value):
                    return f"{key} of param_groups[{number}]"
        for parameter, (name, value, gradient) in self._stepped.items():
            if parameter in self._late or (_seen(parameter), _seen(parameter.grad)) != (value, gradient):
                return f"{name} with its gradient"
        return None


def is_part(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it steps a part of what the user's optimizer steps."""
    return optimizer._optimizer_step_pre_hooks is _NO_HOOKS


def _check_splittable(optimizer: object) -> None:
    """Raise if parts of this optimizer would not make the steps that the whole makes."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        reason = "steps all at once"
    elif isinstance(optimizer, torch.optim.SparseAdam):
        reason = "takes sparse gradients"
    elif any(isinstance(held, torch.optim.Optimizer) for held in vars(optimizer).values()):
        reason = "holds another optimizer (pass that one)"
    else:
        return
    raise TypeError(
        f"optimizer must step each parameter by itself, got {type(optimizer).__name__}, which {reason}; call its "
        "step after backward."
    )


def _part_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A shallow copy that steps ``groups``, with the same state: the user's own stay as they are, for other threads.

    It has no hooks, which are the whole step's: neither its step nor one that this calls with super().step() runs them.
    """
    part: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(part).update(vars(optimizer))
    part.param_groups = groups
    part._optimizer_step_pre_hooks = part._optimizer_step_post_hooks = _NO_HOOKS
    return part


def _rest_of(optimizer: torch.optim.Optimizer, stepped: Container[torch.Tensor]) -> torch.optim.Optimizer:
    """The part that has the parameters that are not in ``stepped``."""
    groups = []
    for group in optimizer.param_groups:
        rest = {**group, "params": [parameter for parameter in group["params"] if parameter not in stepped]}
        if group.get("foreach", False) is None and len(rest["params"]) < len(group["params"]):
            # PyTorch's choice for a group with parameters on the host. The others alone may all be on a GPU, where
            # it would step all at once, which rounds otherwise.
            rest["foreach"] = False
        groups.append(rest)
    return _part_of(optimizer, groups)


def _seen(tensor: torch.Tensor | None) -> object:
    """What tells whether a tensor is still what it was: its address, its version, and the bits of some values."""
    if tensor is None:
        return None
    # The version does not grow where .data is changed, nor where a GradScaler unscales. Hence values, evenly spread.
    some = tensor.detach().reshape(-1)[:: tensor.numel() // 64 + 1].contiguous()
    return tensor.data_ptr(), tensor._version, some.view(torch.uint8).tolist()


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """What a group holds beside its parameters; tensors are copied, which schedulers change in place."""
    values = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)
