"""One rank that trains with Hugging Face's Trainer, with and without streamed weights: DEVICE FOLDER."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from llama import llama

import offload

transformers.utils.logging.set_verbosity_error()


def train(folder: Path, device: str, *, streamed: bool) -> dict[str, object]:
    model = llama(transformers, torch.device("cpu"))
    tokens = torch.randint(64, (16, 16), generator=torch.Generator().manual_seed(0))
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=device == "cpu",
        ddp_backend="gloo" if device == "cpu" else "nccl",
        optim="sgd",
        learning_rate=2.0**-6,  # so that steps round alike on the CPU and on a GPU
        lr_scheduler_type="constant",
        max_grad_norm=1.0 if device == "cpu" else 0.0,
    )
    loads = 0
    handle = None
    if streamed:
        handle = offload.stream_weights(model.model.layers, arguments.device, process_group=dist.group.WORLD)
        handle.prepare_ddp(model)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens]
    )
    trainer.train()
    if handle is not None:
        loads = handle.stats().loads
        handle.remove()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "parameters": [parameter.detach().cpu().clone() for parameter in model.parameters()],
        "wrapper": type(trainer.model_wrapped).__name__,
        "loads": loads,
    }


def main() -> None:
    device, folder = sys.argv[1], Path(sys.argv[2])
    found = {name: train(folder, device, streamed=name == "found") for name in ("expected", "found")}
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()


main()
