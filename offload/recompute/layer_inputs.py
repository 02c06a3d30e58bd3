"""What a layer was called with, taken apart into its tensors and the rest, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.base.tensors import sides_of


class LayerInputs:
    """The arguments of one call of a layer, with places in place of tensors."""

    __slots__ = ("kind", "placed", "sizes", "tensors")

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.tensors: list[torch.Tensor] = []  # the tensors among the arguments, each once
        self.kind: list[Any] = [*kwargs]  # what tells this kind of input from another
        self.sizes: list[int] = []  # the dimensions of the tensors
        self.placed = self._take(args), dict(zip(kwargs, self._take(kwargs.values()), strict=True))
        """The arguments, without the tensors."""

    def _take(self, values: Any) -> list[Any]:
        """Arguments, or the items of one; in one loop, as a layer's forward waits for it."""
        kind, found = self.kind, list[Any]()
        kind.append(len(values))
        for value in values:
            taken = value
            if isinstance(value, torch.Tensor):
                taken = self._take_tensor(value)
            elif value is None or isinstance(value, _PLAIN):
                kind.append(value)
            elif isinstance(value, dict):
                kind += (dict, *map(str, value))
                taken = dict(zip(value, self._take(value.values()), strict=True))
            elif isinstance(value, tuple):
                kind.append(tuple)
                items = self._take(value)
                taken = _tuple_of(value, items)
            elif type(value) is list:
                kind.append(list)
                taken = self._take(value)
            else:
                kind.append(type(value))
            found.append(taken)
        return found

    def _take_tensor(self, tensor: torch.Tensor) -> Place:
        kind, shape = type(tensor), sides_of(tensor)
        self.sizes += shape
        # Results are laid out as the inputs are.
        plain = kind is torch.Tensor and tensor.layout is torch.strided
        stride, order = tensor.stride() if plain and not tensor.is_contiguous() else (), None
        if stride:  # how many dimensions share memory, as in an expanded tensor, and all from the innermost on
            order = stride.count(0), *sorted(range(len(stride)), key=stride.__getitem__)
        self.kind += (len(shape), tensor.dtype, tensor.device, tensor.requires_grad, kind, order)
        number = next((number for number, known in enumerate(self.tensors) if known is tensor), len(self.tensors))
        self.kind.append(number)  # of attention to itself, and of attention to something else
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return Place(number)


_PLAIN = (bool, int, float, str)


class Place:
    """The place of a tensor among the arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def _tuple_of(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """The items in a tuple of the same kind, without the ``__new__`` of a named one, which may look into tensors."""
    return tuple.__new__(type(value) if hasattr(value, "_fields") else tuple, items)


def with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Arguments with tensors in their places."""
    if type(value) is Place:
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [with_tensors(item, tensors) for item in value]
        return _tuple_of(value, items)
    return [with_tensors(item, tensors) for item in value] if type(value) is list else value


def same_layout(tensor: torch.Tensor, shape: torch.Size, stride: Sequence[int], sized: bool) -> bool:
    """Whether a tensor has these strides; if it is ``sized`` otherwise, strides in the same order."""
    now = tensor.stride()
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1 and shape[dim] > 1]  # others do not matter
    if sized:
        return sorted(dims, key=now.__getitem__) == sorted(dims, key=stride.__getitem__)
    return all(now[dim] == stride[dim] for dim in dims)


def changed_argument(before: Any, after: Any, inputs: Any) -> str | None:
    """Whether forward changes what an argument holds, as layers with a cache of keys and values do."""
    if before == after:
        return None
    names = [str(name) for name, value in inputs[1].items() if name in ("past_key_values", "past_key_value", "cache")]
    hint = "; pass use_cache=False" if names else ""
    return f"forward changes what an argument holds{f' ({names[0]})' if names else ''}{hint}"
