"""One warning if outputs are not passed to the sync function, and none where the program is right."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from lab import Lab
from models import Offloading, build, loss_of, offloading
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload

LAYERS = 6
STEPS = 3


@pytest.fixture
def layers(lab: Lab) -> nn.ModuleList:
    return build("decoder", LAYERS, lab.device)[0]


@pytest.fixture
def x(lab: Lab) -> torch.Tensor:
    return build("decoder", LAYERS, lab.device)[1]


def told(run: Callable[[], object]) -> list[str]:
    """The warnings, each as often as it comes; each has to point at this file or at what tests share."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all("/tests/" in warning.filename for warning in caught)
    return [str(warning.message) for warning in caught if "freed no device memory" not in str(warning.message)]


def steps(
    layers: Iterable[nn.Module],
    x: torch.Tensor,
    offloaded: Offloading,
    forward: Callable[..., torch.Tensor] = Offloading.forward,
    microbatches: int = 1,
) -> list[str]:
    def run() -> None:
        for _ in range(STEPS):
            losses = [loss_of(forward(offloaded, layers, x)) for _ in range(microbatches)]
            for loss in losses:
                loss.backward()

    return told(run)


def without_sync(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        with offloaded.context:
            x = layer(x)
    return x


def sync_at_the_end(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = offloaded.sync(without_sync(offloaded, layers, x))
    return output


def around_the_loop_without_sync(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    with offloaded.context:
        for layer in layers:
            x = layer(x)
    return x


@pytest.mark.parametrize(
    ("forward", "num_layers"), [(without_sync, 1), (sync_at_the_end, 3), (around_the_loop_without_sync, 1)]
)
def test_sync_is_forgotten(
    forward: Callable[..., torch.Tensor], num_layers: int, layers: nn.ModuleList, x: torch.Tensor
) -> None:
    [message] = steps(layers, x, offloading(num_layers, LAYERS, x.device), forward)
    assert message.startswith("the output of each layer must be passed to the sync function, but that of layer ")
    assert message.endswith("write `output = sync(output)` after the block of each layer.")


# What is right


def evaluates(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for layer in layers:
            with offloaded.context:
                layer(x)
    return offloaded.forward(layers, x)


def generates(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x
        for _ in range(4):
            y = offloaded.forward(layers, y)
    return offloaded.forward(layers, x)


def evaluates_with_gradients(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    offloaded.forward(layers, x)  # and drops the graph
    return offloaded.forward(layers, x)


def fails(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise KeyError

    with contextlib.suppress(KeyError):
        offloaded.forward([*list(layers)[:3], fail], x)
    return offloaded.forward(layers, x)


def checkpoints(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return offloaded.forward([lambda x, layer=layer: checkpoint(layer, x, use_reentrant=False) for layer in layers], x)


def is_frozen_below(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(layers):
        layer.requires_grad_(number > 0)
    return offloaded.forward(layers, x.detach())


def has_a_loss_for_each(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = offloaded.layer(layer, x.detach())
        loss_of(x).backward(retain_graph=True)
    return x


def goes_back_twice(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    output = offloaded.forward(layers, x)
    loss_of(output).backward(retain_graph=True)
    return output


def shares_parameters(offloaded: Offloading, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return offloaded.forward([layers[0]] * LAYERS, x)


RIGHT = [
    Offloading.forward,
    evaluates,
    generates,
    evaluates_with_gradients,
    fails,
    checkpoints,
    is_frozen_below,
    has_a_loss_for_each,
    goes_back_twice,
    shares_parameters,
]


@pytest.mark.parametrize("forward", RIGHT, ids=lambda forward: forward.__name__)
def test_nothing_is_said_of(forward: Callable[..., torch.Tensor], layers: nn.ModuleList, x: torch.Tensor) -> None:
    assert steps(layers, x, offloading(2, LAYERS, x.device), forward, microbatches=2) == []


@pytest.mark.parametrize("chosen", [[0, 1], [0, 2, 4], [5]])
def test_nothing_is_said_of_layers_that_do_not_run(chosen: list[int], layers: nn.ModuleList, x: torch.Tensor) -> None:
    with offload.offload_layers(layers, 2, min_bytes=0):
        assert steps([layers[number] for number in chosen], x, Offloading(), microbatches=2) == []
        assert steps(layers, x, Offloading()) == []


# Handles


def handles(layers: nn.ModuleList) -> Iterator[Any]:
    yield offload.offload_layers(layers, 2)
    yield offload.offload_layers(layers, memory_budget="1GiB")
    yield offload.stream_weights(layers, "cpu")


def test_a_removed_handle_is_no_context() -> None:
    layers, _ = build("decoder", LAYERS, torch.device("cpu"))
    for handle in handles(layers):
        with handle as entered:
            assert entered is handle
        with pytest.raises(RuntimeError, match="the handle must be in use, but it was removed"), handle:
            pass
