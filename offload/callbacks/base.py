"""What the callbacks share: fit a training into a budget or offload its layers, and log what was offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
from torch import nn

import offload
from offload.base.checks import parse_bytes
from offload.base.find_layers import find_layers
from offload.base.layer_events import Handle
from offload.offload_layers import check_choice

LOGGED = ("offloaded_bytes", "wasted_bytes", "peak_resident_bytes", "pinned_bytes", "late_reloads", "stall_s")


class WhileTraining(Handle):
    """Applies :func:`offload.prepare` or :func:`offload.offload_layers` from the beginning of a training to its end.

    Args:
        num_layers: How many layers to offload, as :func:`offload.offload_layers` takes it.
        memory_budget: All device memory that the training may use, with weights, gradients and optimizer state, as
            :func:`offload.prepare` takes it. An optimizer that :func:`offload.stream_optimizer` refuses is refused. For
            a budget of activations alone, call :func:`offload.offload_layers` before training, without a callback.
        layers: Where the layers are: the name of a list of modules in the model, such as ``"model.layers"``, with or
            without the names of what wraps the model; or a function that returns the layers of a given model. By
            default, the one list of modules that is not inside another; with a budget, all of them.
        options: Further arguments of :func:`offload.prepare` if there is a ``memory_budget``, and of
            :func:`offload.offload_layers` if there is none. Some values are checked when training begins.
    """

    def __init__(
        self,
        num_layers: int | None = None,
        *,
        memory_budget: int | str | None = None,
        layers: str | Callable[[torch.nn.Module], Iterable[torch.nn.Module]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.handle: offload.OffloadedLayers | offload.PreparedTraining | None = None
        """What :func:`offload.prepare` or :func:`offload.offload_layers` returned for the latest training."""
        self._layers = layers
        given = {"num_layers": num_layers, "memory_budget": memory_budget, **options}
        check_choice(**{name: given[name] for name in signature(check_choice).parameters if name in given})
        parse_bytes(options.get("max_host_bytes") or 0, "max_host_bytes")
        self._options = options | {name: value for name, value in given.items() if value is not None}
        if memory_budget is None:
            signature(offload.offload_layers).bind((), **self._options)
        else:
            signature(offload.prepare).bind(None, None, **self._options)

    def attach(
        self,
        model: nn.Module,
        *optimizers: Any,
        device: torch.device | None = None,
        clips_at: float | None = None,
        saved: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        """Begin to train ``model`` on ``device``: the trainer calls this, which may clip gradients.

        ``saved`` returns the optimizer's ``state_dict`` of the checkpoint that the trainer has loaded, if it has.
        """
        self.remove()  # the trainer tells no callback of a training that raised
        if "memory_budget" not in self._options:
            self.handle = offload.offload_layers(find_layers(model, self._layers), **self._options)
            return
        if len(optimizers) != 1:
            raise ValueError(
                f"memory_budget needs a model with one optimizer, got {len(optimizers)}; leave it out, and write "
                "num_layers or policies."
            )
        if clips_at and self._options.get("step_in_backward"):  # which would find no gradients, and clip nothing
            raise ValueError(
                f"step_in_backward must be False where the trainer clips gradients, got both, at {clips_at}; leave it "
                "out, or train with max_grad_norm=0 (Trainer) or without gradient_clip_val (Lightning)."
            )
        options = {"device": device, "layers": self._layers, **self._options}
        again = None if self._options.get("state_dtype") is None else saved()
        if again is not None:
            optimizers[0].state.clear()  # PyTorch has rounded it to the dtype of the parameters
        self.handle = offload.prepare(model, *optimizers, **options)
        if again is not None:
            optimizers[0].load_state_dict(again)

    def remove(self) -> None:
        """Remove the hooks from the layers; the trainer calls this when training ends. ``handle.stats()`` remains."""
        if self.handle is not None:
            self.handle.remove()

    def metrics(self) -> dict[str, float]:
        """Statistics of activations since training began, under the names that are logged."""
        found = {} if self.handle is None else self.handle.stats()
        stats = found.get("activations") if isinstance(found, dict) else found
        return {} if stats is None else {f"offload/{name}": float(getattr(stats, name)) for name in LOGGED}
