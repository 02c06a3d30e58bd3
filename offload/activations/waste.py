"""Copies that freed nothing, because something else kept the device memory alive: whose they were, and a warning."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from offload.base.caller import warn_caller
from offload.base.units import format_bytes

NAMED = 3
"""Operations in the warning."""

_Reshaped: Any = vars(torch._C._functions)["UnsafeViewBackward0"]
"""How a matrix product's result gets its shape; not the operation that users would look for."""


def maker_of(tensor: torch.Tensor) -> Any:
    """The autograd node whose operation made the memory of ``tensor``, if any."""
    base = tensor._base
    return tensor.grad_fn if base is None else base.grad_fn


def kind_of(maker: Any) -> type | None:
    """What can be kept of :func:`maker_of`, which holds the tensor: its type, as far as it is of use to users."""
    if type(maker) is _Reshaped:
        return type(maker.next_functions[0][0])
    return None if maker is None else type(maker)


def operation_name(kind: type | None) -> str:
    """``"Addmm"`` for ``AddmmBackward0``; ``"leaf"`` for what autograd has seen no operation make, such as inputs."""
    if kind is None:
        return "leaf"
    return kind.__name__.rstrip("0123456789").removesuffix("Backward")


def warn_of_waste(wasted: Counter[str], offloaded_bytes: int) -> None:
    """Say that too much was copied in vain; ``wasted`` has the bytes of each operation."""
    named = [f"{name} ({format_bytes(nbytes)})" for name, nbytes in wasted.most_common(NAMED)]
    more = ", ..." if len(wasted) > NAMED else ""
    warn_caller(
        f"{format_bytes(wasted.total())} of the {format_bytes(offloaded_bytes)} that were copied to the host so far "
        "freed no device memory, because something else holds the tensors, by the operation that made them: "
        f"{', '.join(named)}{more}. Drop them before the layer is released (outputs collected in a list or by a hook, "
        "tensors stored on a module, a variable that wants `del`), or pass what must stay to mark_not_offload; see "
        "stats().wasted."
    )
