"""Habits that cost time or memory without an error: one warning each. None where the program is right."""

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


def around_the_loop(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    with offloaded.context:
        for layer in layers:
            x = layer(x)
    output: torch.Tensor = offloaded.sync(x)
    return output


def around_the_loop_without_sync(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    with offloaded.context:
        for layer in layers:
            x = layer(x)
    return x


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("forward", [without_sync, sync_at_the_end, around_the_loop_without_sync])
def test_sync_is_forgotten(
    forward: Callable[..., torch.Tensor], num_layers: int, layers: nn.ModuleList, x: torch.Tensor
) -> None:
    [message] = steps(layers, x, offloading(num_layers, LAYERS, x.device), forward)
    assert message.startswith("the output of each layer must be passed to the sync function, but that of layer ")
    assert message.endswith("write `output = sync(output)` after the block of each layer.")


@pytest.mark.parametrize("model_layers", [7, 8, 11, 12, 40])
def test_the_loop_enters_fewer_layers(model_layers: int, layers: nn.ModuleList, x: torch.Tensor) -> None:
    [message] = steps(layers, x, offloading(2, model_layers, x.device))
    assert message == (
        f"model_layers must be how often one forward enters the context, got {model_layers}, but after 6 of them "
        "backward ran and layer 0 came again; enter it around each layer, not around all of them, and pass their "
        "number."
    )


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("model_layers", [2, 3, 4, 5])
def test_the_loop_enters_more_layers(
    model_layers: int, microbatches: int, layers: nn.ModuleList, x: torch.Tensor
) -> None:
    [message] = steps(layers, x, offloading(1, model_layers, x.device), microbatches=microbatches)
    assert message == (
        f"model_layers must be how often one forward enters the context, got {model_layers}, but the layer after those "
        "reads what they return; pass their number."
    )


def test_fewer_layers_and_microbatches_in_flight(layers: nn.ModuleList, x: torch.Tensor) -> None:
    [message] = steps(layers, x, offloading(2, 8, x.device), microbatches=2)
    assert message.startswith("model_layers must be how often one forward enters the context, got 8")


def test_the_context_is_around_the_loop(layers: nn.ModuleList, x: torch.Tensor) -> None:
    [message] = steps(layers, x, offloading(2, LAYERS, x.device), around_the_loop)
    assert "got 6, but after 1 of them backward ran" in message
    assert "enter it around each layer, not around all of them" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("listed", "called"),
    [
        (range(5, -1, -1), range(6)),
        ([0, 2, 1, 3, 4, 5], range(6)),
        (range(6), [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]),
        (range(6), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
        (range(6), [0, 1, 2, 3, 2, 4, 5]),
    ],
    ids=["backwards", "two swapped", "all twice", "each twice", "one again"],
)
def test_layers_are_listed_in_another_order(
    listed: Iterable[int], called: list[int], layers: nn.ModuleList, x: torch.Tensor
) -> None:
    with offload.offload_layers([layers[number] for number in listed], 2, min_bytes=0):
        [message] = steps([layers[number] for number in called], x, Offloading())
    assert message.startswith("layers must be listed in the order in which forward calls them, and be called once, but")


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


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("forward", RIGHT, ids=lambda forward: forward.__name__)
def test_nothing_is_said_of(
    forward: Callable[..., torch.Tensor], microbatches: int, layers: nn.ModuleList, x: torch.Tensor
) -> None:
    assert steps(layers, x, offloading(2, LAYERS, x.device), forward, microbatches) == []


@pytest.mark.parametrize("chosen", [[0, 1], [3, 5], [0, 2, 4], [5], [0, 1, 2, 3, 4, 5]])
def test_nothing_is_said_of_layers_that_do_not_run(chosen: list[int], layers: nn.ModuleList, x: torch.Tensor) -> None:
    with offload.offload_layers(layers, 2, min_bytes=0):
        assert steps([layers[number] for number in chosen], x, Offloading(), microbatches=2) == []
        assert steps(layers, x, Offloading()) == []


def test_nothing_is_said_of_two_towers(layers: nn.ModuleList, x: torch.Tensor) -> None:
    """The same layers run twice in a forward, but neither pass reads what the other returned."""

    def towers(offloaded: Offloading, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return offloaded.forward(layers, x) * offloaded.forward(layers, 2 * x)

    for model_layers in (LAYERS, 2 * LAYERS):
        assert steps(layers, x, offloading(2, model_layers, x.device), towers) == []


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
