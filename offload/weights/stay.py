"""Streamed layers stay where they are when a model moves: trainers call ``model.to(device)`` on what they are given.

``to``, ``cuda``, ``half`` and their like call ``_apply`` of every module in a model. A streamed layer has one of its
own, which leaves parameters and buffers alone: the former belong on the host, the latter are on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from offload.base.torch_private import APPLY, ordinary_apply


class _Stays:
    """In place of the ``_apply`` of one layer, which is streamed to ``device``."""

    def __init__(self, module: nn.Module, name: str, device: torch.device) -> None:
        self._module = weakref.ref(module)  # the module holds this
        self._name = name
        self._device = device
        self._dtypes = {tensor.dtype for tensor in (*module.parameters(), *module.buffers())}

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError(f"{self._name} must be there when its parameters are moved, but it is gone.")
        for dtype in self._dtypes:
            # What is asked for shows in what becomes of a tensor without memory.
            made = fn(torch.empty(0, dtype=dtype))
            elsewhere = made.device.type != "cpu" and made.device != self._device
            if made.dtype is not dtype or elsewhere or (made.device.type == "cpu" and made.is_shared()):
                what = "memory that processes share" if made.device.type == "cpu" else str(made.device)
                raise RuntimeError(
                    f"{self._name} must stay what and where it is while its weights are streamed to {self._device}, "
                    f"but is to become {made.dtype if made.dtype is not dtype else what} (by .to(), .half() or "
                    "share_memory() for example); call remove(), change the model, then stream again."
                )
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        return _ordinary, (self._module(),)  # a copy of the module is not streamed


def _ordinary(module: nn.Module) -> MethodType:
    return ordinary_apply(module)


def let_stay(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Have these layers stay when the model that they are a part of moves."""
    for number, module in enumerate(modules):
        # In the dictionary itself: a compiled module hands what is set on to the module that it was made of.
        vars(module)[APPLY] = _Stays(module, f"layer {number} ({type(module).__name__})", device)


def let_go(modules: Iterable[nn.Module]) -> None:
    """Have them move again."""
    for module in modules:
        vars(module).pop(APPLY, None)
