"""What the callbacks share: find the layers of a model, offload them while it is trained, log what was offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, Literal

import torch
from torch import nn

import offload
from offload.base.layer_events import Handle, find_layers
from offload.offload_layers import check_choice

LOGGED = ("offloaded_bytes", "wasted_bytes", "peak_resident_bytes", "pinned_bytes", "late_reloads", "stall_s")


class WhileTraining(Handle):
    """Offloads the layers of a model from the beginning of its training to the end, or to the end of a ``with`` block.

    Args:
        num_layers: How many layers to offload, as :func:`offload.offload_layers` takes it.
        layers: Where the layers are: the name of a list of modules in the model, such as ``"model.layers"``, with or
            without the names of what wraps the model; or a function that returns the layers of a given model. By
            default, the one list of modules that is not inside another.
        options: Further arguments of :func:`offload.offload_layers`, whose values are checked when training begins.
    """

    def __init__(
        self,
        num_layers: int | Literal["auto"] | None = None,
        *,
        layers: str | Callable[[torch.nn.Module], Iterable[torch.nn.Module]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.handle: offload.OffloadedLayers | None = None
        """What :func:`offload.offload_layers` returned for the latest training; it has ``stats()``."""
        self._layers = layers
        self._options = options if num_layers is None else {"num_layers": num_layers, **options}
        signature(offload.offload_layers).bind((), **self._options)
        check_choice(
            **{name: self._options[name] for name in signature(check_choice).parameters if name in self._options}
        )

    def attach(self, model: nn.Module) -> None:
        """Offload the layers of ``model`` from now on; the trainer calls this when training begins."""
        self.remove()  # the trainer tells no callback of a training that raised
        self.handle = offload.offload_layers(find_layers(model, self._layers), **self._options)

    def remove(self) -> None:
        """Remove the hooks from the layers; the trainer calls this when training ends. ``handle.stats()`` remains."""
        if self.handle is not None:
            self.handle.remove()

    def metrics(self) -> dict[str, float]:
        """Statistics since training began, under the names that are logged."""
        stats = None if self.handle is None else self.handle.stats()
        return {} if stats is None else {f"offload/{name}": float(getattr(stats, name)) for name in LOGGED}
