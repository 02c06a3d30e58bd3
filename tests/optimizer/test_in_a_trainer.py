"""Hugging Face's Trainer with a streamed optimizer: accumulation, clipping, a scheduler, and a run that is resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from training import stream

transformers = pytest.importorskip("transformers")

from llama import llama  # noqa: E402  it needs transformers

pytestmark = pytest.mark.slow

transformers.utils.logging.set_verbosity_error()


def make_trainer(folder: Path, *, streamed: bool, steps: int) -> Any:
    model = llama(transformers, torch.device("cpu"))
    tokens = torch.randint(64, (16, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if streamed:
        stream(optimizer)
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        max_steps=steps,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    return transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule))


def test_a_run_that_is_resumed_by_the_other_kind(tmp_path: Path) -> None:
    expected = make_trainer(tmp_path / "whole", streamed=False, steps=4)
    expected.train()
    for first in (False, True):
        folder = tmp_path / str(first)
        make_trainer(folder, streamed=first, steps=2).train()
        resumed = make_trainer(folder, streamed=not first, steps=4)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        pairs = zip(expected.model.parameters(), resumed.model.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
