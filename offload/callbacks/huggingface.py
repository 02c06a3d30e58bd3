"""A callback for Hugging Face's Trainer, and for those made of it, such as TRL's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from offload.callbacks.base import WhileTraining
from offload.optimizer.stepped_gradients import norms_logged_by

if (logs_norm := getattr(Trainer, "_get_grad_norm", None)) is not None:  # clips nothing; older ones have no such log
    norms_logged_by.add(logs_norm.__code__)


class OffloadCallback(WhileTraining, TrainerCallback):
    """Fits what a Hugging Face ``Trainer`` trains into a memory budget, or offloads its layers, while it is trained.

    With ``memory_budget``, :func:`offload.prepare` decides where weights, gradients, optimizer state and activations
    are; ``step_in_backward`` needs ``max_grad_norm=0``, as ``Trainer`` clips otherwise, and no accumulation.
    Without a budget, activations are offloaded as by :func:`offload.offload_layers`.

    Statistics are logged with the loss, under names that begin with ``offload/``. ``Trainer`` tells a callback when
    training ends, but not when it raises: ``with`` removes the hooks then, too, as the next training does::

        with OffloadCallback(memory_budget="24GiB", max_host_bytes="100GiB") as offloading:
            Trainer(model, args, train_dataset=data, callbacks=[offloading]).train()
        print(offloading.handle.plan)

    The arguments are those of :class:`~offload.callbacks.base.WhileTraining`.
    """

    def on_train_begin(
        self, args: TrainingArguments, *_: Any, model: nn.Module, optimizer: Any = None, **__: Any
    ) -> None:
        if args.n_gpu > 1:  # nn.DataParallel runs copies of the layers in threads, and the copies share hooks
            raise RuntimeError(
                f"Trainer must run in one process per GPU, got {args.n_gpu} GPUs in one; start the script with "
                "torchrun, or with one GPU in CUDA_VISIBLE_DEVICES."
            )
        plain = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        self.attach(model, plain, device=args.device, clips_at=args.max_grad_norm, saved=_saved)

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:  # not for an evaluation, whose results the caller gets
            for entry in (logs, state.log_history[-1]):  # the history's entry is made before callbacks are called
                entry.update(self.metrics())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.remove()


def _saved() -> dict[str, Any] | None:
    """The optimizer's state in the checkpoint from which ``Trainer`` resumes, of which it tells no callback."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    checkpoint = None if frame is None else frame.f_locals.get("resume_from_checkpoint")
    if checkpoint is None or not (file := Path(checkpoint) / "optimizer.pt").is_file():
        return None
    found: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return found
