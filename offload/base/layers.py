"""What users give as a list of layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from offload.base.layer_events import LayerListener, listeners_on


def check_layers(
    layers: Iterable[nn.Module], kind: type[LayerListener], done: str, called_twice: str
) -> list[nn.Module]:
    """The layers as a list, if listeners of this ``kind`` can be put on them; the other arguments are for messages.

    Raises:
        TypeError: ``layers`` does not hold modules, or compiled ones of TorchScript.
        ValueError: There are no layers, or one is listed twice, inside another or has such a listener already.
    """
    if isinstance(layers, nn.Module) and not isinstance(layers, nn.ModuleList | nn.Sequential):
        raise TypeError(f"layers must be several modules, got one {type(layers).__name__}; pass its list of layers")
    modules = list(layers)
    if not modules:
        raise ValueError("layers must hold at least one module, got none")
    for number, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(f"layers must hold modules, got {type(module).__name__} at {number}")
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"layers must hold modules of Python, got {type(module).__name__} at {number}: TorchScript calls no "
                "hooks; pass the layers that it was made of, and train with those."
            )
        if listeners_on(module, kind):
            raise ValueError(
                f"layer {number} ({type(module).__name__}) is {done} already; call remove() on the first handle"
            )
    if len(set(modules)) < len(modules):
        raise ValueError(f"layers must hold each module once; a layer that forward calls twice {called_twice}")
    for number, module in enumerate(modules):
        inside = set(module.modules()) - {module}
        nested = [other for other, listed in enumerate(modules) if listed in inside]
        if nested:
            raise ValueError(f"layer {nested[0]} is a part of layer {number}; list layers of one level")
    return modules
