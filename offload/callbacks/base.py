"""What the callbacks share: find the layers of a model, offload them while it is trained, say what moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
from torch import nn

import offload
from offload.base.layer_events import Handle

LOGGED = ("offloaded_bytes", "wasted_bytes", "peak_resident_bytes", "pinned_bytes", "late_reloads", "stall_s")


class WhileTraining(Handle):
    """Offloads the layers of a model from the beginning of its training to the end.

    As a context manager it takes the hooks off the layers at the end of the block, however training ends.

    Args:
        num_layers: How many layers to offload, the first ones.
        layers: Where the layers are: the name of a list of modules in the model, such as ``"model.layers"``, with or
            without the names of what wraps the model; or a function that returns the layers of the model that it is
            given. By default, the one list of modules that is not inside another.
        options: What else :func:`offload.offload_layers` takes, such as ``memory_budget``, ``plan`` or ``min_bytes``.

    Raises:
        TypeError: It does not take one of them.
    """

    def __init__(
        self,
        num_layers: int = 4,
        *,
        layers: str | Callable[[torch.nn.Module], Iterable[torch.nn.Module]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.handle: offload.OffloadedLayers | None = None
        """What :func:`offload.offload_layers` returned for the latest training; it has ``stats()``."""
        self._layers = layers
        self._options: dict[str, Any] = {"num_layers": num_layers, **options}
        # An option that there is not is refused here, and not when training begins.
        signature(offload.offload_layers).bind((), **self._options)

    def attach(self, model: nn.Module) -> None:
        """Offload the layers of ``model`` from now on; the trainer calls this when training begins."""
        self.remove()  # an earlier training may have ended by an error that the trainer told nobody
        self.handle = offload.offload_layers(find_layers(model, self._layers), **self._options)

    def remove(self) -> None:
        """Take the hooks off the layers; the trainer calls this when training ends. ``handle.stats()`` stays."""
        if self.handle is not None:
            self.handle.remove()

    def metrics(self) -> dict[str, float]:
        """What has moved since training began, under the names that are logged."""
        if self.handle is None:
            return {}
        stats = self.handle.stats()
        return {f"offload/{name}": float(getattr(stats, name)) for name in LOGGED}


def find_layers(
    model: nn.Module, layers: str | Callable[[nn.Module], Iterable[nn.Module]] | None
) -> Iterable[nn.Module]:
    """The layers of ``model`` that ``layers`` says, or its only list of modules.

    Raises:
        ValueError: There is no such list, or more than one.
    """
    if callable(layers):
        return layers(model)
    lists = {
        name: part for name, part in model.named_modules() if name and isinstance(part, nn.ModuleList | nn.Sequential)
    }
    found: dict[str, nn.ModuleList | nn.Sequential]
    if layers is None:
        # Experts, say, are lists inside the layers; an nn.Sequential is more often a part of a model than its layers.
        inner = {part for outer in lists.values() for part in outer.modules() if part is not outer}
        found = {
            name: part
            for name, part in lists.items()
            if isinstance(part, nn.ModuleList) and len(part) > 1 and part not in inner
        }
        wanted = "the name of the model's list of layers, or a function that returns them"
    else:
        found = {name: part for name, part in lists.items() if f".{name}".endswith(f".{layers}")}
        wanted = f"the name of one list of modules, got {layers!r}"
    if len(found) != 1:
        has = ", ".join(repr(name) for name in found or lists) or "no list of modules"
        raise ValueError(f"layers must be {wanted}; {type(model).__name__} has {has}.")
    return next(iter(found.values()))
