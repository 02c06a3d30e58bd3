"""Each forward is recomputed as it ran, however much it looks like the ones before it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab import Lab
from models import WIDTH, Composed, assert_same, build, gradients, leaves_of, loss_of, through
from torch import nn

import offload

LAYERS = 3
STEPS = 5


def changing(function: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]) -> nn.Module:
    """A layer that is told which step of training it is in."""
    weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))
    return Composed(lambda own, x: function(x, own.weight, own.step), weight=weight, step=0)


def _another_scalar(x: torch.Tensor, w: torch.Tensor, step: int) -> torch.Tensor:
    y = (x @ w * (step + 2)).tanh()
    return torch.clamp(y, -0.5, 0.1 * step + 0.2) * y


def _in_place_now_and_then(x: torch.Tensor, w: torch.Tensor, step: int) -> torch.Tensor:
    y = x @ w
    z = y.tanh()
    if step % 2:
        y.mul_(2)
        z = z * 1
        z.add_(y)
    return z.sigmoid() * y


def _input_in_place_now_and_then(x: torch.Tensor, w: torch.Tensor, step: int) -> torch.Tensor:
    y = (x * 3).sin() @ w  # recomputation reads x, and autograd does not save it
    if step % 2 and not x.is_leaf:
        x.mul_(2)
    return x + y


def _looked_into_in_another_way_by_data(x: torch.Tensor, w: torch.Tensor, step: int) -> torch.Tensor:
    y = (w @ w).detach() * 2
    if step % 2:
        y.data = y.data.t()  # the same object, over the same memory, and nobody is told
    z = w * y  # saves y as it is now
    return x @ (z.tanh() * y)


def _other_memory_by_data(x: torch.Tensor, w: torch.Tensor, step: int) -> torch.Tensor:
    y = (w @ w).detach() * 2
    if step % 2:
        y.data = (w - 3).detach()
    return x @ ((w * y).tanh() * y)


def _sparse(x: torch.Tensor, w: torch.Tensor, step: int) -> torch.Tensor:
    mask = (w > 0).to(w.dtype).to_sparse()
    y = (x @ w * 0.1).tanh().flatten(0, -2)
    return (torch.sparse.mm(mask, y.t()).t() * y).reshape(x.shape)


FUNCTIONS: dict[str, Any] = {
    function.__name__[1:]: function
    for function in (
        *(_another_scalar, _in_place_now_and_then, _sparse),
        *(_looked_into_in_another_way_by_data, _other_memory_by_data),
    )
}


def steps_of(layers: nn.ModuleList, inputs: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The gradients of several steps, each with its input."""
    found = []
    for step, x in enumerate(inputs):

        def forward_and_backward(x: torch.Tensor = x, step: int = step) -> None:
            for layer in layers:
                layer.step = step
                x = layer(x)
            loss_of(x).backward()

        torch.manual_seed(step)
        found.append(gradients(leaves_of(layers, x), forward_and_backward))
    return found


POLICIES: dict[str, dict[str, str]] = {
    "all": {"*": "recompute"},
    "some": {"*mm": "offload", "tanh": "keep", "*": "recompute"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shapes", "policies"),
    [("same shapes", POLICIES["some"]), ("other shapes", POLICIES["all"])],
    ids=["same shapes", "other shapes"],
)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_each_forward_is_recomputed_as_it_ran(shapes: str, function: Any, policies: dict[str, str], lab: Lab) -> None:
    layers, x = build(lambda: changing(function), LAYERS, lab.device)
    inputs = [x.detach().clone().requires_grad_() for _ in range(STEPS)]
    if shapes == "other shapes":
        inputs = [
            torch.rand(1 + step % 3, WIDTH + step % 2, WIDTH, device=lab.device, requires_grad=True)
            for step in range(STEPS)
        ]
    expected = steps_of(layers, inputs)
    lab.adverse()
    with offload.offload_layers(layers, 0, policies=policies, min_bytes=0, device=lab.device) as handle:
        for wanted, found in zip(expected, steps_of(layers, inputs), strict=True):
            assert_same(wanted, found)
        assert "recompute" in handle.regions(0).values()


def test_an_input_that_the_layer_changes_in_place_is_not_recomputed_from(lab: Lab) -> None:
    """The second run would read the changed input: backward raises, as autograd does for what it has saved."""
    layers, x = build(lambda: changing(_input_in_place_now_and_then), LAYERS, lab.device)
    with offload.offload_layers(layers, 0, policies={"*": "recompute"}, min_bytes=0, device=lab.device):
        expected = steps_of(layers, [x])
        for wanted, found in zip(expected, steps_of(layers, [x]), strict=True):
            assert_same(wanted, found)
        for layer in layers:
            layer.step = 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(layers[1](layers[0](x * 1))).backward()


def test_a_dropped_tensor_that_is_changed_afterwards(lab: Lab) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, step: int) -> torch.Tensor:
        y = (x @ w).tanh()
        z = y * x
        if step == 3:
            y.data.add_(1)
        return z

    layers, x = build(lambda: changing(function), LAYERS, lab.device)
    expected = steps_of(layers, [x])[0]
    with offload.offload_layers(layers, 0, policies={"*": "recompute"}, min_bytes=0, device=lab.device) as handle:
        for found in steps_of(layers, [x] * 3):
            assert_same(expected, found)
        assert handle.regions(0)["tanh"] == "recompute"
        for layer in layers:
            layer.step = 3
        y = through(layers, x)
        assert_same(expected, gradients(leaves_of(layers, x), lambda: loss_of(y).backward()))
