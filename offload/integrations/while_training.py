"""What the callbacks share: find the layers of a model, offload them while it is trained, say what moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Self

import torch
from torch import nn

import offload
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.host.limits import WhenFull

LOGGED = ("offloaded_bytes", "wasted_bytes", "peak_resident_bytes", "pinned_bytes", "late_reloads", "stall_s")


class WhileTraining:
    """Offloads the layers of a model from the beginning of its training to the end.

    As a context manager it takes the hooks off the layers at the end of the block, however training ends.

    Args:
        num_layers: How many layers to offload, the first ones.
        layers: Where the layers are: the name of a list of modules in the model, such as ``"model.layers"``, with or
            without the names of what wraps the model; or a function that returns the layers of the model that it is
            given. By default, the one list of modules that is not inside another.
        schedule: A schedule of your own, in place of the default one.
        plan: The result of :func:`offload.plan`, in place of ``num_layers``.
        min_bytes: Storages smaller than this stay on the device, in bytes.
        max_host_bytes: The most pinned host memory to use, in bytes or as a text such as ``"40GiB"``.
        when_host_full: What happens to activations that find no room on the host, as in :func:`offload.offload_layers`.
    """

    def __init__(
        self,
        num_layers: int = 4,
        *,
        layers: str | Callable[[torch.nn.Module], Iterable[torch.nn.Module]] | None = None,
        schedule: offload.Schedule | None = None,
        plan: offload.Plan | None = None,
        min_bytes: int | str = DEFAULT_MIN_BYTES,
        max_host_bytes: int | str | None = None,
        when_host_full: WhenFull = "keep",
    ) -> None:
        super().__init__()
        self.handle: offload.OffloadedLayers | None = None
        """What :func:`offload.offload_layers` returned for the latest training; it has ``stats()``."""
        self._layers = layers
        self._offload = partial(
            offload.offload_layers,
            num_layers=num_layers,
            schedule=schedule,
            plan=plan,
            min_bytes=min_bytes,
            max_host_bytes=max_host_bytes,
            when_host_full=when_host_full,
        )

    def attach(self, model: nn.Module) -> None:
        """Offload the layers of ``model`` from now on; the trainer calls this when training begins."""
        self.remove()  # an earlier training may have ended by an error that the trainer told nobody
        self.handle = self._offload(find_layers(model, self._layers))

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


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
        name: module
        for name, module in model.named_modules()
        if name and isinstance(module, nn.ModuleList | nn.Sequential)
    }
    if layers is None:
        # Experts, say, are lists inside the layers; an nn.Sequential is more often a part of a model than its layers.
        inner = {id(part) for outer in lists.values() for part in outer.modules() if part is not outer}
        found: dict[str, nn.ModuleList | nn.Sequential] = {
            name: module
            for name, module in lists.items()
            if isinstance(module, nn.ModuleList) and len(module) > 1 and id(module) not in inner
        }
        wanted = "the name of the model's list of layers, or a function that returns them"
    else:
        found = {name: module for name, module in lists.items() if f".{name}".endswith(f".{layers}")}
        wanted = f"the name of one list of modules, got {layers!r}"
    if len(found) != 1:
        has = ", ".join(repr(name) for name in found or lists) or "no list of modules"
        raise ValueError(f"layers must be {wanted}; {type(model).__name__} has {has}.")
    return next(iter(found.values()))
