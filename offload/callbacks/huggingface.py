"""A callback for Hugging Face's Trainer, and for those made of it, such as TRL's."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from offload.callbacks.base import WhileTraining


class OffloadCallback(WhileTraining, TrainerCallback):
    """Offloads the layers of the model that a Hugging Face ``Trainer`` trains, while it trains it.

    Statistics are logged with the loss, under names that begin with ``offload/``. ``Trainer`` tells a callback when
    training ends, but not when it raises. ``with`` removes the hooks then, too, and so does the next training with
    the same callback::

        with OffloadCallback(num_layers=4) as offloading:
            Trainer(model, args, train_dataset=data, callbacks=[offloading]).train()
        print(offloading.handle.stats())

    The arguments are those of :class:`~offload.callbacks.base.WhileTraining`.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        if args.n_gpu > 1:  # nn.DataParallel runs copies of the layers in threads, and the copies share hooks
            raise RuntimeError(
                f"Trainer must run in one process per GPU, got {args.n_gpu} GPUs in one; start the script with "
                "torchrun, or with one GPU in CUDA_VISIBLE_DEVICES."
            )
        self.attach(model)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logs: dict[str, float], **_: Any
    ) -> None:
        if "loss" in logs:  # not for an evaluation, whose results the caller gets
            for entry in (logs, state.log_history[-1]):  # the history's entry is made before callbacks are called
                entry.update(self.metrics())

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.remove()
