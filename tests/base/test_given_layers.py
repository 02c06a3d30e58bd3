"""What was put on layers comes off without its handle, and needs no garbage collector."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same, build, step_gradients
from torch import nn

import offload

CPU = torch.device("cpu")


def with_buffer() -> tuple[nn.ModuleList, torch.Tensor]:
    layers, x = build("decoder", 5, CPU)
    layers[0].register_buffer("scale", torch.ones(1))
    return layers, x


def activations(layers: nn.ModuleList) -> Any:
    return offload.offload_layers(layers, 2, min_bytes=0)


def budget(layers: nn.ModuleList) -> Any:
    return offload.offload_layers(layers, memory_budget="1GiB", min_bytes=0)


def weights(layers: nn.ModuleList) -> Any:
    return offload.stream_weights(layers, "cpu")


def weights_then_activations(layers: nn.ModuleList) -> Any:
    return weights(layers), activations(layers)


KINDS = [activations, budget, weights, weights_then_activations]


def is_as_it_was(layers: nn.ModuleList) -> bool:
    return not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("use", "steps"), [(activations, 0), (activations, 1), (budget, 1), (budget, 4), (weights, 1), (KINDS[-1], 4)]
)
def test_a_lost_handle(use: Callable[[nn.ModuleList], Any], steps: int) -> None:
    layers, x = with_buffer()
    expected = step_gradients(layers, x)
    use(layers)  # and nobody keeps what it returns
    for _ in range(steps):
        assert_same(expected, step_gradients(layers, x))
    assert not is_as_it_was(layers)
    offload.remove(layers)
    assert is_as_it_was(layers)
    assert_same(expected, step_gradients(layers, x))
    again = use(layers)
    assert_same(expected, step_gradients(layers, x))
    del again
    offload.remove(layers)


@pytest.mark.slow
@pytest.mark.parametrize("use", KINDS)
def test_given_as_the_model_or_as_one_of_its_layers(use: Callable[[nn.ModuleList], Any]) -> None:
    layers, _ = with_buffer()
    model = nn.Sequential(nn.Sequential(*layers), nn.Tanh())
    for given in (model, list(layers), [layers[3]]):
        use(layers)
        offload.remove(given)
        assert is_as_it_was(layers)


def test_a_handle_that_is_not_lost_knows() -> None:
    layers, _ = with_buffer()
    handle = activations(layers)
    offload.remove(layers)
    assert repr(handle).endswith(", removed)")
    handle.remove()
    offload.remove(layers)  # nothing is left to undo
    offload.remove(nn.Linear(2, 2))


def test_two_handles_in_one_model() -> None:
    layers, x = build("decoder", 6, CPU)
    offload.offload_layers(layers[:3], 1)
    with offload.offload_layers(layers[3:], 1, min_bytes=0) as second:
        offload.remove(layers[:3])
        step_gradients(layers, x)
        assert second.stats().offloaded_bytes > 0


@pytest.mark.parametrize(("given", "text"), [(3, "layers must be a list of modules"), ([3], "got int at 0")])
def test_what_is_no_layer(given: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        offload.remove(given)


@pytest.mark.parametrize(("use", "done"), [(activations, "offloaded"), (weights, "streamed")])
def test_the_error_names_it(use: Callable[[nn.ModuleList], Any], done: str) -> None:
    layers, _ = with_buffer()
    handle = use(layers)
    with pytest.raises(ValueError, match=rf"is {done} already; call remove\(\) .*, or offload\.remove"):
        use(layers)
    handle.remove()


def policies(layers: nn.ModuleList) -> Any:
    return offload.offload_layers(layers, 2, policies={"*mm": "offload", "*": "recompute"}, min_bytes=0)


def tight_budget(layers: nn.ModuleList) -> Any:
    return offload.offload_layers(layers, memory_budget="700KiB", min_bytes=0)


def plan(layers: nn.ModuleList) -> Any:
    x = build("decoder", 1, CPU)[1].detach().repeat(8, 1, 1).requires_grad_()
    profile = offload.profile_layers(layers, lambda: step_gradients(layers, x), regions=True, min_bytes=0)
    made = offload.plan(profile, memory_budget="700KiB", link=offload.Link(1e9, 1e9, 1e9))
    return offload.offload_layers(layers, plan=made, min_bytes=0)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("use", [activations, policies, budget, tight_budget, plan, weights])
def test_a_model_goes_with_its_last_reference(use: Callable[[nn.ModuleList], Any], steps: int) -> None:
    """The program's next model has the memory at once."""
    layers, x = with_buffer()
    x = x.detach().repeat(8, 1, 1).requires_grad_()
    use(layers)
    for _ in range(steps):
        step_gradients(layers, x)
    lives = [*map(weakref.ref, layers), *map(weakref.ref, layers.parameters())]
    gc.disable()
    try:
        del layers
        assert [one() for one in lives] == [None] * len(lives)
    finally:
        gc.enable()
