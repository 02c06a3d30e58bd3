"""What the steps of layers in one backward have used, to find what has changed since."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class StepRecord:
    """The hyperparameters that all these steps use, and each parameter and gradient as its step has left it.

    Args:
        optimizer: Whose steps they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = optimizer.state
        self.groups = [_hyperparameters(group) for group in optimizer.param_groups]
        """What each of the optimizer's groups held beside parameters."""
        self.stepped: dict[torch.Tensor, _Left] = {}
        """The parameters that have been stepped."""
        self.late: set[torch.Tensor] = set()
        """Those that autograd has added a gradient to since their steps began."""

    def add(self, parameter: torch.Tensor, name: str) -> None:
        """The parameter has been stepped."""
        self.stepped[parameter] = _Left(name, _Seen.of(parameter), _Seen.of(parameter.grad))

    def clear(self) -> None:
        """The step has ended: there is nothing to compare any more."""
        self.stepped.clear()
        self.late.clear()

    def changes(self) -> Iterator[str]:
        """Names of what a step after backward would use otherwise. Groups that were added since have not been used."""
        if self._optimizer.state is not self._state:
            yield "the optimizer's state"
        if getattr(self._optimizer, "grad_scale", None) is not None:  # so a GradScaler tells fused optimizers
            yield "the gradients' scale"
        for number, (used, group) in enumerate(zip(self.groups, self._optimizer.param_groups, strict=False)):
            for name, value in _hyperparameters(group).items():
                if name not in used or not _equal(used[name], value):
                    yield f"{name} of param_groups[{number}]"
        for parameter, left in self.stepped.items():
            seen = _Seen.of(parameter), _Seen.of(parameter.grad)
            if parameter in self.late or seen != (left.value, left.gradient):
                yield f"{left.name} with its gradient"


class _Seen(NamedTuple):
    """Tells whether a tensor is still what it was.

    Its version does not grow where ``.data`` is changed, nor where a ``GradScaler`` unscales. So some of the values,
    evenly spread, are compared by their bits as well.
    """

    address: int
    version: int
    values: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> _Seen | None:
        if tensor is None:
            return None
        some = tensor.detach().reshape(-1)[:: tensor.numel() // 64 + 1].contiguous()
        return cls(tensor.data_ptr(), tensor._version, bytes(some.view(torch.uint8).tolist()))


class _Left(NamedTuple):
    name: str
    value: _Seen | None
    gradient: _Seen | None


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """What a group holds beside its parameters; tensors are copied, which schedulers change in place."""
    values = group.items()
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values if k != "params"}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)
