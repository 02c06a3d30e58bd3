"""Steps through layers, with and without streamed weights, and their gradients compared."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import WIDTH, assert_same, loss_of
from models import through as forward
from torch import nn

from offload import StreamedWeights, stream_weights

Step = Callable[[nn.ModuleList, torch.Tensor], object]


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def backward(layers: Sequence[nn.Module], x: Any) -> None:
    loss_of(forward(layers, x)).backward()


def gradients_of(leaves: Sequence[torch.Tensor], step: Callable[[], object]) -> list[torch.Tensor | None]:
    """The gradients that ``step`` leaves in ``grad``, on the CPU, with the same dropout at each call."""
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(1)
    step()
    return [None if leaf.grad is None else leaf.grad.cpu().clone() for leaf in leaves]


def gradients(model: nn.Module, x: torch.Tensor, step: Step = backward) -> list[torch.Tensor | None]:
    return gradients_of(list(model.parameters()), lambda: step(model, x))


def assert_moved(handle: StreamedWeights) -> None:
    """Weights were loaded, and gradients came back through the library."""
    assert handle.stats().loads > 0
    assert handle.stats().gradient_bytes > 0


def check_step(
    layers: nn.ModuleList, x: torch.Tensor, step: Step, *, reference: Step | None = None, **options: Any
) -> StreamedWeights:
    """Compare the gradients of two steps with those without streaming; the handle returned is removed already."""
    leaves = [*([x] if x.is_leaf and x.requires_grad else []), *layers.parameters()]
    expected = gradients_of(leaves, lambda: (reference or step)(layers, x))
    with stream_weights(layers, x.device, **options) as handle:
        for _ in range(2):
            assert_same(expected, gradients_of(leaves, lambda: step(layers, x)))
            assert all(parameter.device.type == "cpu" for parameter in layers.parameters())
    assert_moved(handle)
    return handle
