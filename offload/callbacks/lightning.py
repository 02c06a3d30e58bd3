"""A callback for Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from offload.callbacks.base import WhileTraining


class OffloadCallback(WhileTraining, Callback):
    """Fits what a Lightning ``Trainer`` trains into a memory budget, or offloads its layers, while it is trained.

    With ``memory_budget``, the module must have one optimizer. Statistics are logged
    after each batch, under names that begin with ``offload/``. The hooks are removed when fitting ends or raises::

        Trainer(callbacks=[OffloadCallback(memory_budget="24GiB")]).fit(module, data)

    The arguments are those of :class:`~offload.callbacks.base.WhileTraining`.
    """

    _loaded: Sequence[dict[str, Any]] = ()  # of the checkpoint from which this training resumes

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":  # and not to validate, with weights that a later training need not begin with
            self._loaded = checkpoint.get("optimizer_states", ())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        clips_at, [saved, *_] = trainer.gradient_clip_val, [*self._loaded, None]
        self._loaded = ()
        options = {"device": pl_module.device, "clips_at": clips_at, "saved": lambda: saved}
        self.attach(pl_module, *trainer.optimizers, **options)

    def on_train_batch_end(self, _: Trainer, pl_module: LightningModule, *__: Any) -> None:
        # Tensors on the host: Lightning would copy numbers to the device and wait for the copy.
        pl_module.log_dict({name: torch.tensor(value) for name, value in self.metrics().items()})

    def on_train_end(self, *_: Any) -> None:
        self.remove()

    def on_exception(self, *_: Any) -> None:
        self._loaded = ()
        self.remove()
