"""Steps through layers, with and without streamed weights, and their gradients compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offload import StreamedWeights


def plain(layers: Sequence[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def gradients_of(leaves: Sequence[torch.Tensor], step: Callable[[], object]) -> list[torch.Tensor | None]:
    """What ``step`` leaves in ``grad``, on the CPU, with the same dropout at each call."""
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(1)
    step()
    return [None if leaf.grad is None else leaf.grad.cpu().clone() for leaf in leaves]


def assert_same(expected: Sequence[torch.Tensor | None], found: Sequence[torch.Tensor | None]) -> None:
    assert len(expected) == len(found)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert (one is None) == (other is None), f"tensor {number}: only one has a gradient"
        if one is not None and other is not None:
            assert one.dtype is other.dtype
            assert torch.equal(one, other), f"tensor {number} of {len(expected)} differs"
    assert any(tensor is not None and tensor.any() for tensor in expected), "nothing was computed"


def assert_moved(handle: StreamedWeights) -> None:
    """Weights were loaded, and gradients came back through the library."""
    assert handle.stats().loads > 0
    assert handle.stats().gradient_bytes > 0
