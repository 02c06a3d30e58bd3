"""A model that moves while some of its layers are streamed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import WIDTH, Composed, assert_same, build, loss_of, through
from streaming import backward, check_step, gradients
from torch import nn

from offload import offload_layers, stream_weights

pytestmark = pytest.mark.usefixtures("adverse")


def make(device: torch.device) -> tuple[Any, torch.Tensor]:
    """Layers, and a module outside of them."""
    layers, x = build("gpt", 4, device)
    torch.manual_seed(2)
    head = nn.Linear(WIDTH, WIDTH)
    return Composed(lambda own, x: own.head(through(own.layers, x)), layers=layers, head=head).to(device), x


def as_if_moved(model: nn.Module) -> nn.Module:
    """What ``to(device)`` does to a model on another device: the memory of each tensor is replaced."""
    return model._apply(torch.clone)


def once(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model(x)).backward()


def addresses(model: Any) -> list[int]:
    return [parameter.data_ptr() for parameter in model.layers.parameters()]


def test_only_modules_outside_the_layers_move(device: torch.device) -> None:
    model, x = make(device)
    expected = gradients(model, x, once)
    with stream_weights(model.layers, device), offload_layers(model.layers, 2, min_bytes=1) as offloaded:
        before, head = addresses(model), model.head.weight.data_ptr()
        assert as_if_moved(model) is model
        as_if_moved(model.layers[1])
        assert addresses(model) == before
        assert model.head.weight.data_ptr() != head
        assert_same(expected, gradients(model, x, once))
        model.to(device)
        assert_same(expected, gradients(model, x, once))
        assert offloaded.stats().offloaded_bytes > 0


def test_compiled_layers_do_not_move(device: torch.device) -> None:
    model, _ = make(device)
    model.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in model.layers)
    with stream_weights(model.layers, device):
        before = addresses(model)
        as_if_moved(model)
        assert addresses(model) == before


def test_moves_again_when_removed(device: torch.device) -> None:
    model, x = make(device)
    stream_weights(model.layers, device).remove()
    assert not [layer for layer in model.layers if "_apply" in vars(layer)]
    model.double()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert loss_of(model.to("cpu")(x.double().cpu())).isfinite()


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "is to become torch.float64": nn.Module.double,
    "is to become meta": lambda model: model.to("meta"),
    "is to become memory that processes share": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("said", CHANGES)
def test_other_changes_are_refused_at_once(said: str, device: torch.device) -> None:
    model, x = make(device)
    expected = gradients(model, x, once)
    with stream_weights(model.layers, device):
        with pytest.raises(
            RuntimeError, match=rf"^layer 0 \(GptBlock\) must remain .* {device}, but {said} .*remove\(\)"
        ):
            CHANGES[said](model.layers)
        assert_same(expected, gradients(model, x, once))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_parts_of_layers_in_torchscript(device: torch.device) -> None:
    def make() -> nn.Module:
        part = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)))
        return Composed(lambda own, x: x + own.part(x), part=part)

    layers, x = build(make, 3, device)
    check_step(layers, x, backward)
