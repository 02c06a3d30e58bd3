"""Find the layers of a model that somebody else has built."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn


def find_layers(
    model: nn.Module, layers: str | Callable[[nn.Module], Iterable[nn.Module]] | None
) -> Iterable[nn.Module]:
    """The layers of ``model`` that ``layers`` names or returns; for ``None`` the only outermost ``nn.ModuleList``.

    Raises:
        ValueError: The model has no such list, or several.
    """
    if callable(layers):
        return layers(model)
    kinds = (nn.ModuleList, nn.Sequential)
    lists = {name: part for name, part in model.named_modules() if name and isinstance(part, kinds)}
    if layers is None:
        # A list inside a layer holds experts, say. An nn.Sequential is more often a part of a model than its layers.
        inner = {part for outer in lists.values() for part in outer.modules() if part is not outer}
        candidates = (item for item in lists.items() if isinstance(item[1], nn.ModuleList) and len(item[1]) > 1)
        found = {name: part for name, part in candidates if part not in inner}
        wanted = "the name of the model's list of layers, or a function that returns them"
    else:
        found = {name: part for name, part in lists.items() if f".{name}".endswith(f".{layers}")}
        wanted = f"the name of one list of modules, got {layers!r}"
    if len(found) != 1:
        has = ", ".join(repr(name) for name in found or lists) or "no list of modules"
        raise ValueError(f"layers must be {wanted}; {type(model).__name__} has {has}.")
    return next(iter(found.values()))
