"""What is in ``parameter.grad`` between a step in backward and ``optimizer.step()``: an error for who is too late.

The step was made with the gradient as it was. So what reads a freed one raises, and changes of one that is not freed
are seen by its version.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Container, Iterable
from types import CodeType, FrameType
from typing import Any

import torch

from offload.base.torch_private import make_wrapper
from offload.optimizer.proof import gradient_dtype

norms_logged_by: set[CodeType] = set()
"""Code of trainers that takes the norm of all gradients for a log: freed ones are zero there."""

_UNTYPED: Any = torch.Tensor


class FreedGradient(torch.Tensor):
    """In ``parameter.grad`` until ``optimizer.step()``, if the gradient was freed: what computes with it raises.

    Clipping and the like would pass over a gradient that is ``None``, without a word.
    """

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> FreedGradient:
        return make_wrapper(cls, parameter.shape, dtype=gradient_dtype(parameter), device=parameter.device)

    @classmethod
    def __torch_dispatch__(cls, function: Any, *given: Any) -> Any:
        if norms_logged_by and caller(norms_logged_by) is not None:
            this = given[1][0]
            if function is torch.ops.aten.mul_.Tensor:  # by 1
                return this
            if function is torch.ops.aten.linalg_vector_norm.default:
                return torch.zeros((), dtype=this.dtype, device=this.device)
        raise RuntimeError(
            "a parameter must get one gradient in each step if in_backward=True, and gradients must be final then, but "
            f"{function} was called with one that was stepped with and freed; leave in_backward (in prepare: "
            "step_in_backward) out if gradients are clipped, scaled or read, and run all microbatches of a step but "
            "the last in handle.no_step()."
        )

    def __repr__(self) -> str:  # type: ignore[override]  # PyTorch's takes what its own printing passes on
        return f"FreedGradient(shape={tuple(self.shape)})"


class SteppedGradient(torch.Tensor):
    """In ``parameter.grad`` until ``optimizer.step()``, if it is not freed: changes through ``data`` are seen, too."""

    __torch_function__ = torch.nn.Parameter.__torch_function__  # of no function
    data: Any = property(_UNTYPED.detach, _UNTYPED.copy_)  # with the version of the gradient

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.detach(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


def drop_freed(parameters: Iterable[torch.Tensor]) -> None:
    """Leave ``parameter.grad`` as the program expects it: ``None`` where the gradient was freed."""
    for one in parameters:
        if isinstance(one.grad, FreedGradient):
            one.grad = None
        elif isinstance(one.grad, SteppedGradient):
            one.grad.__class__ = _UNTYPED


def caller(codes: Container[CodeType]) -> FrameType | None:
    """The innermost call of one of these functions."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame
