"""What tensor subclasses are made of: they travel by their inner tensors, each at its own size.

Two protocols say what a subclass is made of. Transformer Engine's takes the tensors out of an object
(``prepare_for_saving``) and puts them back (``restore_from_saved``). PyTorch's, that of traceable wrapper
subclasses, names them (``__tensor_flatten__``) and makes a new object of them (``__tensor_unflatten__``). The first
is preferred where a class has both: the object stays, with all of it that is no tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Parts(NamedTuple):
    """What a subclass is made of, and what makes it of them again."""

    inner: list[torch.Tensor]
    rebuild: Callable[[list[torch.Tensor]], torch.Tensor]


def parts_of(tensor: torch.Tensor) -> Parts | None:
    """The tensors that a subclass is made of, subclasses themselves perhaps; ``None`` if it does not tell."""
    subclass: Any = tensor
    if hasattr(subclass, "trigger_wait"):
        # The result of a collective that may still run: whoever copies it has to wait for it as compute does.
        return Parts([subclass.trigger_wait()], _only)
    if hasattr(subclass, "prepare_for_saving"):
        return _taken_out(subclass)
    if hasattr(subclass, "__tensor_flatten__"):
        return _flattened(subclass)
    return None


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory of their own that ``tensor`` is made of in the end: itself, unless it is a wrapper."""
    parts = None if type(tensor) in (torch.Tensor, torch.nn.Parameter) else parts_of(tensor)
    if parts is None:
        return [tensor]
    return [innermost for inner in parts.inner for innermost in inner_tensors(inner)]


def _only(inner: list[torch.Tensor]) -> torch.Tensor:
    (tensor,) = inner
    return tensor


# What rebuilds an object must not hold the tensors that were taken out of it: they are to be freed meanwhile.


def _flattened(tensor: Any) -> Parts:
    names, context = tensor.__tensor_flatten__()
    stays = {name: getattr(tensor, name) for name in names}  # a DTensor names its mesh too, which is no tensor
    # A jagged tensor's ragged size is known by the very object that holds its offsets.
    moves = ["_values"] if tensor.layout is torch.jagged else names
    inner = {name: stays.pop(name) for name in moves if isinstance(stays[name], torch.Tensor)}
    kind, taken, size, stride = type(tensor), list(inner), tensor.size(), tensor.stride()

    def rebuild(tensors: list[torch.Tensor]) -> torch.Tensor:
        attributes = stays | dict(zip(taken, tensors, strict=True))
        rebuilt: torch.Tensor = kind.__tensor_unflatten__(attributes, context, size, stride)
        return rebuilt

    return Parts(list(inner.values()), rebuild)


def _taken_out(tensor: Any) -> Parts:
    # A detached object shares the tensors, so that the one in the program's hands keeps its own.
    tensors, emptied = tensor.detach().prepare_for_saving()
    present = [inner is not None for inner in tensors]

    def refill(inner: list[torch.Tensor]) -> torch.Tensor:
        left = iter(inner)
        emptied.restore_from_saved([next(left) if there else None for there in present])
        filled: torch.Tensor = emptied.detach()  # one per unpacking, as a graph may be retained
        return filled

    return Parts([inner for inner in tensors if inner is not None], refill)
