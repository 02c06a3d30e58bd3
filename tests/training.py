"""A small model that is trained with an optimizer whose state is streamed, and without."""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from models import assert_same
from torch import nn

from offload import StreamedOptimizer, stream_optimizer

WIDTH = 48
SMALL = "24KiB"
"""A chunk that the model's largest parameter is split for, and that several small ones share."""

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
OPTIMIZERS: dict[str, Make] = {
    "AdamW": adamw,
    "AdamW fused": functools.partial(adamw, fused=True),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
}


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


class Training:
    """The model, its optimizer, and the handle if the optimizer's state is streamed."""

    def __init__(
        self,
        device: torch.device,
        make: Make = adamw,
        *,
        streamed: bool = True,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.model = build(device, dtype)
        self.optimizer = make(self.model.parameters())
        self.handle = stream(self.optimizer, **options) if streamed else None

    def steps(self, numbers: Iterable[int]) -> None:
        """Train, and see that the state was streamed if it should be."""
        before = self.handle.stats() if self.handle else None
        plain_steps(self.model, self.optimizer, numbers)
        if self.handle and before:
            made = self.handle.stats() - before
            assert min(made.chunks, made.written_bytes) > 0

    def backward(self, number: int) -> None:
        loss_of(self.model, number).backward()

    @property
    def values(self) -> list[torch.Tensor]:
        return values(self.model, self.optimizer)

    @property
    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, checkpoint: tuple[dict[str, Any], dict[str, Any]]) -> None:
        self.model.load_state_dict(checkpoint[0])
        self.optimizer.load_state_dict(checkpoint[1])
        self.optimizer.zero_grad()


def resident(device: torch.device, steps: Iterable[int], make: Make = adamw) -> list[torch.Tensor]:
    """The values after these steps of the resident optimizer."""
    run = Training(device, make, streamed=False)
    run.steps(steps)
    return run.values


def assert_same_training(train: Callable[[bool], list[torch.Tensor]]) -> None:
    """The same values with resident (``False``) and with streamed state (``True``)."""
    assert_same(train(False), train(True))
