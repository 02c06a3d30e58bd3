"""How long the arithmetic of an optimizer's step takes on a device, if nothing waits for a copy."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from offload.device.select import get_backend
from offload.optimizer.chunks import ChunkStepper
from offload.optimizer.proof import prove, stand_in_for, with_groups

TIMED_STEPS = 3
STATE_BYTES = 8  # of an element, as AdamW has it in float32: this sizes the parameter that is stepped, no more
FILLING = 64  # copies that keep an accelerator busy until the host has queued the step: kernels are timed, no gaps


def seconds_per_element(
    optimizer: torch.optim.Optimizer,
    state_dtype: torch.dtype | None,
    device: torch.device,
    chunk_bytes: int,
    *,
    master_weights: bool = False,
) -> float:
    """Seconds of a step for each element, of a parameter like the largest whose state is resident and fills a chunk."""
    trained = [pair for pair in with_groups(optimizer) if pair[1].requires_grad and pair[1].ndim and pair[1].numel()]
    if not trained:
        return 0.0
    number, largest = max(trained, key=lambda pair: pair[1].numel())
    columns = math.prod(largest.shape[1:])
    size = max(1, min(len(largest), chunk_bytes // STATE_BYTES // columns)), *largest.shape[1:]
    parameter = nn.Parameter(torch.zeros(size, dtype=largest.dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    alone = stand_in_for(optimizer, [{**optimizer.param_groups[number], "params": [parameter]}], defaultdict(dict))
    backend, proof = get_backend(device), prove(alone, state_dtype, device)
    options: dict[str, Any] = {"state_dtype": state_dtype, "master_weights": master_weights, "max_host_bytes": None}
    stepper = ChunkStepper(alone, backend, max(1, chunk_bytes), proof=proof, resident_bytes=1 << 60, **options)
    with torch.no_grad():
        stepper.step([(0, parameter)])  # which makes the state
        for _ in range(FILLING if device.type != "cpu" else 0):
            parameter.data.copy_(parameter.grad)
        marks = [backend.mark()]
        for _ in range(TIMED_STEPS):
            stepper.step([(0, parameter)])
            marks.append(backend.mark())
    return min(backend.seconds(pairwise(marks))) / parameter.numel()
