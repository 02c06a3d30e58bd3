"""What users give as layers: what may be, and how to undo what was put on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from offload.base.checks import describe
from offload.base.layer_events import LayerListener, listeners_on


def check_layers(
    layers: Iterable[nn.Module], kind: type[LayerListener], done: str, called_twice: str
) -> list[nn.Module]:
    """The layers as a list, if listeners of this ``kind`` can be put on them; the other arguments are for errors."""
    if isinstance(layers, nn.Module) and not isinstance(layers, nn.ModuleList | nn.Sequential):
        name = next((name for name, part in layers.named_modules() if isinstance(part, nn.ModuleList)), "")
        raise TypeError(
            f"layers must be several modules, got one {type(layers).__name__}; pass its list of layers"
            + (f", such as model.{name}" if name else "")
        )
    modules = as_modules(layers)
    if not modules:
        raise ValueError("layers must hold at least one module, got none")
    for number, module in enumerate(modules):
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"layers must hold modules of Python, got {type(module).__name__} at {number}: TorchScript calls no "
                "hooks; pass the layers that it was made of, and train with those."
            )
        if listeners_on(module, kind):
            raise ValueError(
                f"layer {number} ({type(module).__name__}) is {done} already; call remove() on the first handle, or "
                "offload.remove(layers) if it is lost."
            )
    if len(set(modules)) < len(modules):
        raise ValueError(f"layers must hold each module once; a layer that forward calls twice {called_twice}")
    for number, module in enumerate(modules):
        inside = set(module.modules()) - {module}
        nested = [other for other, listed in enumerate(modules) if listed in inside]
        if nested:
            raise ValueError(f"layer {nested[0]} is a part of layer {number}; list layers of one level")
    return modules


def remove(layers: Iterable[nn.Module] | nn.Module) -> None:
    """Undo :func:`offload_layers` and :func:`stream_weights` where the handle is lost, in a notebook for example.

    It does what ``remove()`` of the handles does, for all layers that were given together with one of these. Where
    there is nothing to undo, it does nothing.

    Args:
        layers: The layers, or a model that holds them.

    Raises:
        TypeError: ``layers`` does not hold modules.
    """
    modules = list(layers.modules() if isinstance(layers, nn.Module) else as_modules(layers))
    handles = {one.handle: None for module in modules for one in reversed(listeners_on(module, LayerListener))}
    for handle in handles:
        if handle is not None:
            handle.remove()


def as_modules(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers as a list; a ``TypeError`` for anything but modules."""
    if not isinstance(layers, Iterable) or isinstance(layers, str | Mapping):
        raise TypeError(f"layers must be a list of modules, such as model.layers, got {describe(layers)}")
    modules = list(layers)
    for number, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(f"layers must hold modules, got {type(module).__name__} at {number}")
    return modules
