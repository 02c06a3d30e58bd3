"""An optimizer that steps a part of another's parameters, with the same state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Any

import torch

_NO_HOOKS: OrderedDict[int, Any] = OrderedDict()
"""Those of every part, and what parts are known by."""


def check_splittable(optimizer: object) -> None:
    """Raise if parts of this optimizer would not make the steps that the whole makes.

    Raises:
        TypeError: It is no optimizer, or does not step each parameter by itself and by its dense gradient.
    """
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


def part_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A shallow copy that steps ``groups``: the user's own stay as they are, for the other threads.

    It has no hooks, which are the whole step's: neither its step nor one that this calls with super().step() runs them.
    """
    part: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(part).update(vars(optimizer), **_own(groups))
    return part


def rest_of(optimizer: torch.optim.Optimizer, stepped: Container[torch.Tensor]) -> torch.optim.Optimizer:
    """The part that has the parameters that are not in ``stepped``."""
    groups = []
    for group in optimizer.param_groups:
        rest = {**group, "params": [parameter for parameter in group["params"] if parameter not in stepped]}
        if group.get("foreach", False) is None and len(rest["params"]) < len(group["params"]):
            # PyTorch's choice for a group with parameters on the host. The others alone may all be on a GPU, where
            # it would step all at once, which rounds otherwise.
            rest["foreach"] = False
        groups.append(rest)
    return part_of(optimizer, groups)


def is_part(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :func:`part_of` has made it."""
    return optimizer._optimizer_step_pre_hooks is _NO_HOOKS


def keep_counts(part: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Take over what the step of a part has left in its groups and attributes, such as a count of steps."""
    for group, used in zip(optimizer.param_groups, part.param_groups, strict=True):
        group.update({name: value for name, value in used.items() if name not in ("params", "foreach")})
    vars(optimizer).update({name: value for name, value in vars(part).items() if name not in _own([])})


def _own(groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {"param_groups": groups, "_optimizer_step_pre_hooks": _NO_HOOKS, "_optimizer_step_post_hooks": _NO_HOOKS}
