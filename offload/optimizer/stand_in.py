"""An optimizer of the user's class that steps other tensors: the user's own object is never changed meanwhile."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch

Group = dict[str, Any]  # a parameter group: options, and ``params``


OWN = {"param_groups", "state"}  # the attributes, beside hooks, that a stand-in has of its own


def with_groups(optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor]]:
    """All parameters, each with the number of its group, in the order of their numbers in a ``state_dict``."""
    return [(number, one) for number, group in enumerate(optimizer.param_groups) for one in group["params"]]


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step of the optimizer's class, a function of an optimizer, without the hooks that PyTorch runs around it."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def stand_in_for(optimizer: torch.optim.Optimizer, groups: list[Group], state: dict[Any, Any]) -> torch.optim.Optimizer:
    """An optimizer of the same class, with the same attributes, that has these groups, this state and no hooks."""
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    hooks = {name: OrderedDict[int, Any]() for name in vars(optimizer) if name.endswith("hooks")}
    vars(other).update(vars(optimizer) | hooks | {"param_groups": groups, "state": state})
    vars(other).pop("step", None)  # a scheduler wraps the step of the instance
    return other


def without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One whose step does nothing."""
    return stand_in_for(optimizer, [{**group, "params": []} for group in optimizer.param_groups], defaultdict(dict))


def changes(before: dict[str, Any], after: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    """What a step has set: an optimizer may count its steps in its groups, or in its attributes."""
    found = {key: value for key, value in after.items() if key not in own and not key.endswith("hooks")}
    return {key: value for key, value in found.items() if key not in before or before[key] is not value}
