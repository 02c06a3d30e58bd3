"""A callback for Hugging Face's Trainer, and for those made of it, such as TRL's."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import offload
from offload.base.checks import parse_bytes
from offload.callbacks.base import WhileTraining


class OffloadCallback(WhileTraining, TrainerCallback):
    """Offloads the layers of the model that a Hugging Face ``Trainer`` trains, while it trains it.

    Statistics are logged with the loss, under names that begin with ``offload/``. ``Trainer`` tells a callback when
    training ends, but not when it raises: ``with`` removes the hooks then, too, as the next training does::

        with OffloadCallback(num_layers=4) as offloading:
            Trainer(model, args, train_dataset=data, callbacks=[offloading]).train()
        print(offloading.handle.stats())

    The arguments are those of :class:`~offload.callbacks.base.WhileTraining`.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        _check_process(args)
        self.attach(model)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logs: dict[str, float], **_: Any
    ) -> None:
        if "loss" in logs:  # not for an evaluation, whose results the caller gets
            for entry in (logs, state.log_history[-1]):  # the history's entry is made before callbacks are called
                entry.update(self.metrics())

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.remove()


class PrepareCallback(TrainerCallback):
    """Fits the whole training of a Hugging Face ``Trainer`` into one budget: :func:`offload.prepare` while it trains.

    ``Trainer`` clips gradients and may accumulate them, so leave ``step_in_backward`` out unless it does neither::

        callback = PrepareCallback(memory_budget="24GiB", max_host_bytes="100GiB")
        Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
        print(callback.handle.plan)

    The arguments are those of :func:`offload.prepare` behind the optimizer.
    """

    def __init__(self, memory_budget: int | str, max_host_bytes: int | str | None = None, **options: Any) -> None:
        # Wrong arguments raise here, and not only when training begins.
        signature(offload.prepare).bind(None, None, memory_budget, max_host_bytes, **options)
        parse_bytes(memory_budget, "memory_budget")
        parse_bytes(0 if max_host_bytes is None else max_host_bytes, "max_host_bytes")
        self.handle: offload.PreparedTraining | None = None
        """What :func:`offload.prepare` returned for the latest training."""
        self._arguments = (memory_budget, max_host_bytes)
        self._options = options

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **_: Any,
    ) -> None:
        _check_process(args)
        if self.handle is not None:
            self.handle.remove()  # the trainer tells no callback of a training that raised
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        self.handle = offload.prepare(model, inner, *self._arguments, device=args.device, **self._options)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.handle is not None:
            self.handle.remove()


def _check_process(args: TrainingArguments) -> None:
    """Raise if one process trains on several GPUs."""
    if args.n_gpu > 1:  # nn.DataParallel runs copies of the layers in threads, and the copies share hooks
        raise RuntimeError(
            f"Trainer must run in one process per GPU, got {args.n_gpu} GPUs in one; start the script with "
            "torchrun, or with one GPU in CUDA_VISIBLE_DEVICES."
        )
