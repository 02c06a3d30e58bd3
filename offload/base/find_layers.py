"""Find the layers of a model, and see that a forward calls them in the order in which they were found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import nn

from offload.base.layer_events import Attachment, ForwardBegins


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
