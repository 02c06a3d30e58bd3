"""The layers that users give, and those found in a model; and whether a forward calls them in that order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import nn

from offload.base.checks import describe
from offload.base.layer_events import Attachment, ForwardBegins, LayerListener, listeners_on


def check_layers(layers: Iterable[nn.Module], kind: type[LayerListener], done: str) -> list[nn.Module]:
    """The layers as a list, if listeners of this ``kind`` can be put on them, else an error: they are ``done``, say."""
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
        again = next(number for number, module in enumerate(modules) if module in modules[:number])
        raise ValueError(
            f"layers must hold each module once, got one again at {again}; list it where it is first called"
        )
    for number, module in enumerate(modules):
        inside = set(module.modules()) - {module}
        nested = [other for other, listed in enumerate(modules) if listed in inside]
        if nested:
            raise ValueError(f"layer {nested[0]} is a part of layer {number}; list layers of one level")
    return modules


def remove(layers: Iterable[nn.Module] | nn.Module) -> None:
    """Undo :func:`offload_layers` and :func:`stream_weights` where the handle is lost, in a notebook for example.

    It does what ``remove()`` of the handles does, for all layers that were given together with one of these, if any.

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


def find_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The outermost ``nn.ModuleList``s that may hold layers, by name, in the model's order.

    A list inside of a layer holds experts, say; one of single operations holds heads, or embeddings. An
    ``nn.Sequential`` is more often a part of a model than its layers.
    """
    lists = {name: part for name, part in _containers(model).items() if isinstance(part, nn.ModuleList)}
    inner = {part for outer in _containers(model).values() for part in outer.modules() if part is not outer}
    found = {name: part for name, part in lists.items() if len(part) > 1 and part not in inner}
    return {name: part for name, part in found.items() if any([*one.children()] for one in part)} or found


def find_layers(
    model: nn.Module, layers: str | Callable[[nn.Module], Iterable[nn.Module]] | None
) -> Iterable[nn.Module]:
    """The layers of ``model`` that ``layers`` names or returns; for ``None`` those of its only list of layers."""
    if callable(layers):
        return layers(model)
    every = _containers(model)
    if layers is None:
        found: Mapping[str, Iterable[nn.Module]] = find_lists(model)
        wanted = "the name of the model's list of layers, or a function that returns them"
    else:
        found = {name: part for name, part in every.items() if f".{name}".endswith(f".{layers}")}
        wanted = f"the name of one list of modules, got {layers!r}"
    if len(found) != 1:
        has = ", ".join(map(repr, found or every)) or "no list of modules"
        if isinstance(model, nn.Sequential):
            has += "; if its own parts are the layers, pass layers=[*model]"
        raise ValueError(f"layers must be {wanted}; {type(model).__name__} has {has}.")
    return next(iter(found.values()))


def _containers(model: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    kinds = (nn.ModuleList, nn.Sequential)
    return {name: part for name, part in model.named_modules() if name and isinstance(part, kinds)}


def watch_order(lists: Mapping[str, nn.ModuleList]) -> Attachment:
    """Let the first forward raise if it calls the lists in another order."""
    begun, names = list[str](), list(lists)

    def see(called: str, *_: object) -> None:
        if called in begun:
            return
        begun.append(called)
        if begun != [name for name in names if name in begun]:
            order = ", ".join(f"*model.{name}" for name in dict.fromkeys([*begun, *names]))
            raise ValueError(
                f"layers must be in the order in which forward calls them, got the lists {', '.join(names)} in the "
                f"model's own order; pass layers=lambda model: [{order}]."
            )

    listeners = [ForwardBegins(partial(see, name)) for name, part in lists.items() for _ in part]
    return Attachment([layer for part in lists.values() for layer in part], listeners)
