"""Which parameters have their weights on the host, held by another part of the library, and how that part steps them.

:mod:`offload.weights` is above this folder and holds such weights. It registers what holds them, so that an optimizer
with these parameters steps them on the device that they compute on, and not where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import torch


class WeightHolder(Protocol):
    """Holds the weights of some parameters on the host, and loads the weights when their layer computes."""

    device: torch.device  # where the layers compute
    parameters: AbstractSet[torch.Tensor]

    def check_steps(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise if these parameters cannot be stepped in backward; nothing has been changed by then."""

    def begin_steps(self, steps: Any, parameters: Iterable[torch.Tensor]) -> None:
        """From now on, give the gradients of these parameters to ``steps``, the ``BackwardSteps`` of an optimizer."""

    def end_steps(self) -> None:
        """Give nothing to an optimizer any more."""


holders: weakref.WeakSet[WeightHolder] = weakref.WeakSet()  # all that hold the weights of their parameters now


def holder_of(parameter: torch.Tensor) -> WeightHolder | None:
    """What holds the weights of ``parameter`` on the host, if anything does."""
    return next((one for one in holders if parameter in one.parameters), None)


def holders_of(parameters: Iterable[torch.Tensor]) -> list[WeightHolder]:
    """What holds the weights of some of these parameters."""
    some = set(parameters)
    return [one for one in holders if not some.isdisjoint(one.parameters)]
