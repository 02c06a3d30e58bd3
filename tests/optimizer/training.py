"""A small model that is trained with an optimizer whose state is streamed, and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from offload import StreamedOptimizer, stream_optimizer

WIDTH = 48
SMALL = "24KiB"
"""A chunk that the model's largest parameter is split for, and that several small ones share."""

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


def build(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.LayerNorm(4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)]
    return nn.Sequential(*layers).to(device, dtype)


def batch(number: int, model: nn.Module) -> torch.Tensor:
    some = next(model.parameters())
    numbers = torch.Generator().manual_seed(number)
    return torch.randn(8, WIDTH, generator=numbers).to(some.device, some.dtype)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(batch(number, model)).float().square().mean()


def stream(optimizer: torch.optim.Optimizer, **options: Any) -> StreamedOptimizer:
    return stream_optimizer(optimizer, **{"chunk_bytes": SMALL, **options})


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for number in steps:
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and all tensors of the state, in order, on the CPU."""
    state = optimizer.state_dict()["state"]
    found = [parameter.detach() for parameter in model.parameters()]
    for _, entry in sorted(state.items()):
        found += [torch.as_tensor(value) for _, value in sorted(entry.items()) if value is not None]
    return [value.cpu().clone() for value in found]


def assert_same(expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
