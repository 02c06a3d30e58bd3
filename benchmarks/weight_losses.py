"""Losses over optimizer steps, with the weights on the device and streamed."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import offload
from benchmarks.instruments import give_memory_back, limit_memory
from benchmarks.weight_steps import Size
from benchmarks.workloads import loss_of

TRAINED = Size(512, 1376, 8, 6, torch.bfloat16, (2, 128), (2, 128), 0)
"""What most loss curves are of."""
TRAINED_TOKENS = (1, 256)
"""Batch and tokens of the loss curve of the model that the times are of."""


@dataclass(frozen=True)
class Curve:
    """Training on the device that streamed training is compared with."""

    name: str
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    dtype: torch.dtype = torch.bfloat16
    host_step: bool = False
    """Whether the weights are on the device and the host computes the optimizer's step, as it does when streaming."""


def sgd(parameters: Sequence[nn.Parameter], lr: float = 2.0**-1, momentum: float = 0.0) -> torch.optim.Optimizer:
    """With a power of two as its learning rate the product is exact, so it makes no difference where it is computed."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Its arithmetic is the host's or the device's, which round in different places."""
    return torch.optim.AdamW(parameters, lr=1e-3)


CURVES = (
    Curve("SGD", sgd),
    Curve("SGD with momentum", partial(sgd, lr=2.0**-4, momentum=0.9)),
    Curve("AdamW", adamw),
    Curve("AdamW, float32", adamw, torch.float32),
    Curve("AdamW, both stepped on the host", adamw, host_step=True),
    Curve("AdamW, float32, both stepped on the host", adamw, torch.float32, host_step=True),
)


def loss_curves(large: Size, trained: Size, device: torch.device, steps: int) -> list[dict[str, Any]]:
    """Losses over optimizer steps, on the device and streamed, with the same input each step.

    Args:
        large: The model that the times are of.
        trained: The model of most curves.
        device: Where they are trained.
        steps: How many steps.
    """
    limit_memory(device, math.inf)
    rows = []
    runs = [(curve, replace(trained, dtype=curve.dtype)) for curve in CURVES]
    runs.append((Curve("SGD, the large model", partial(sgd, lr=2.0**-10)), replace(large, few=TRAINED_TOKENS)))
    for curve, size in runs:
        give_memory_back(device)
        on_device = losses_of(curve, size, device, steps, streamed=False)
        streamed = losses_of(curve, size, device, steps, streamed=True)
        rows.append(
            {
                "optimizer": curve.name,
                "steps": steps,
                "first": on_device[0],
                "last": on_device[-1],
                "last_streamed": streamed[-1],
                "identical": on_device == streamed,
                "largest_difference": max(abs(1 - b / a) for a, b in zip(on_device, streamed, strict=True)),
                "losses": [on_device, streamed],
            }
        )
    return rows


def losses_of(curve: Curve, size: Size, device: torch.device, steps: int, *, streamed: bool) -> list[float]:
    """The loss before each step."""
    layers = size.build(device)
    x = size.inputs(size.few, device)
    with ExitStack() as stack:
        if streamed:
            stack.enter_context(offload.stream_weights(layers, device))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # deterministic
        parameters = list(layers.parameters())
        stepped = [p.detach().cpu() for p in parameters] if curve.host_step and not streamed else parameters
        optimizer = curve.make(stepped)
        losses = []
        for _ in range(steps):
            y = x
            for layer in layers:
                y = layer(y)
            loss = loss_of(y)
            loss.backward()
            losses.append(loss.item())
            for parameter, host in zip(parameters, stepped, strict=True):
                if host is not parameter:
                    host.grad = parameter.grad.cpu()
            optimizer.step()
            for parameter, host in zip(parameters, stepped, strict=True):
                if host is not parameter:
                    parameter.data.copy_(host)
                parameter.grad = None
    return losses
