"""What a layer was called with, taken apart into its tensors and the rest, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def placed(inputs: tuple[Any, Any], given: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """Arguments with tensors in place of their numbers."""
    return _placed(inputs[0], given), _placed(inputs[1], given)


def _placed(value: Any, given: Sequence[torch.Tensor]) -> Any:
    if type(value) is Place:
        return given[value.number]
    if isinstance(value, dict):
        return {key: _placed(item, given) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [_placed(item, given) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return [_placed(item, given) for item in value] if type(value) is list else value


class Place:
    """The place of a tensor among the arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def take_apart(value: Any, take: Callable[[torch.Tensor], int], key: list[Any], sizes: list[int]) -> Any:
    """A value with places instead of tensors; ``key`` and ``sizes`` get what tells this kind of input from another."""
    if isinstance(value, torch.Tensor):
        shape = value.shape
        sizes.extend(shape)
        key.append((len(shape), value.dtype, value.device, value.requires_grad, type(value)))
        return Place(take(value))
    if isinstance(value, dict):
        key.append(tuple(map(str, value)))
        return {name: take_apart(item, take, key, sizes) for name, item in value.items()}
    if isinstance(value, tuple):
        key.append(len(value))
        items = [take_apart(item, take, key, sizes) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if type(value) is list:
        key.append(len(value))
        return [take_apart(item, take, key, sizes) for item in value]
    key.append(value if isinstance(value, (bool, int, float, str, type(None))) else type(value))
    return value
