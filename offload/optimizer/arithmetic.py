"""How long the device takes for an optimizer's arithmetic: reading and writing weights, gradients and state there."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

import torch
from torch import nn

from offload.device.select import get_backend
from offload.optimizer.stand_in import stand_in_for, with_groups
from offload.optimizer.stream import stream_optimizer

TIMED_STEPS = 3
STATE_BYTES = 8
"""Of an element, as AdamW has it in float32: this sizes the parameter that is stepped, no more."""
FILLING = 64
"""Copies that keep an accelerator busy until the host has queued the step: its kernels are timed, and no gaps."""


def seconds_per_element(
    optimizer: torch.optim.Optimizer, state_dtype: torch.dtype | None, device: torch.device, chunk_bytes: int
) -> float:
    """Seconds of a step for each element: of a parameter like the largest, whose state is resident and fills a chunk.

    Neither the optimizer nor its parameters are changed. 0 where nothing is trained.
    """
    trained = [
        (number, one) for number, one in with_groups(optimizer) if one.requires_grad and one.ndim and one.numel()
    ]
    if not trained:
        return 0.0
    number, largest = max(trained, key=lambda pair: pair[1].numel())
    columns = math.prod(largest.shape[1:])
    size = max(1, min(len(largest), chunk_bytes // STATE_BYTES // columns)), *largest.shape[1:]
    parameter = nn.Parameter(torch.zeros(size, dtype=largest.dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    group = {**optimizer.param_groups[number], "params": [parameter]}
    alone = stand_in_for(optimizer, [group], defaultdict(dict))
    backend = get_backend(device)
    options = {"state_dtype": state_dtype, "resident_bytes": "1TiB", "chunk_bytes": max(1, chunk_bytes)}
    with stream_optimizer(alone, **options):  # type: ignore[arg-type]
        alone.step()  # which makes the state
        for _ in range(FILLING if device.type != "cpu" else 0):
            parameter.data.copy_(parameter.grad)
        marks = [backend.mark()]
        for _ in range(TIMED_STEPS):
            alone.step()
            marks.append(backend.mark())
    return min(backend.seconds(pairwise(marks))) / parameter.numel()
