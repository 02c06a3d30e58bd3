"""Streamed layers stay where they are when the model that they are a part of moves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab import Lab
from models import build, loss_of
from torch import nn

from offload import offload_layers, stream_weights


@pytest.fixture
def device(device: torch.device, lab: Lab) -> torch.device:
    lab.adverse()
    return device


class Model(nn.Module):
    """Layers, and something outside of them."""

    def __init__(self, layers: nn.ModuleList, width: int) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make(device: torch.device) -> tuple[Model, torch.Tensor]:
    layers, x = build("gpt", 4, device)
    torch.manual_seed(2)
    return Model(layers, x.shape[-1]).to(device), x


def as_if_moved(model: nn.Module) -> nn.Module:
    """What ``to(device)`` does to a model that is not there yet: each tensor's memory is replaced."""
    return model._apply(torch.clone)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss_of(model(x)).backward()
    return [parameter.grad.cpu().clone() for parameter in model.parameters() if parameter.grad is not None]


def test_only_what_is_outside_moves(device: torch.device) -> None:
    model, x = make(device)
    expected = gradients(model, x)
    with stream_weights(model.layers, device):
        addresses = [parameter.data_ptr() for parameter in model.layers.parameters()]
        head = model.head.weight.data_ptr()
        assert as_if_moved(model) is model
        assert [parameter.data_ptr() for parameter in model.layers.parameters()] == addresses
        assert model.head.weight.data_ptr() != head
        found = gradients(model, x)
        model.to(device)
        again = gradients(model, x)
    assert len(found) == len(expected) == len(list(model.parameters()))
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, again, expected))


def test_a_layer_and_a_compiled_one_stay(device: torch.device) -> None:
    model, _ = make(device)
    compiled = [torch.compile(layer, backend="eager") for layer in model.layers]
    model.layers = nn.ModuleList(compiled)
    with stream_weights(model.layers, device):
        addresses = [parameter.data_ptr() for parameter in model.layers.parameters()]
        as_if_moved(model)
        as_if_moved(model.layers[1])
        assert [parameter.data_ptr() for parameter in model.layers.parameters()] == addresses


def test_moves_again_when_removed(device: torch.device) -> None:
    model, x = make(device)
    stream_weights(model.layers, device).remove()
    assert not [layer for layer in model.layers if "_apply" in vars(layer)]
    model.double()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert loss_of(model.to("cpu")(x.double().cpu())).isfinite()


def share(model: nn.Module) -> nn.Module:
    return model.share_memory()


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "is to become torch.float64": nn.Module.double,
    "is to become torch.float16": nn.Module.half,
    "is to become meta": lambda model: model.to("meta"),
    "is to become memory that processes share": share,
}


@pytest.mark.parametrize("said", CHANGES)
def test_other_changes_are_refused_at_once(said: str, device: torch.device) -> None:
    model, x = make(device)
    expected = gradients(model, x)
    with stream_weights(model.layers, device):
        with pytest.raises(
            RuntimeError, match=rf"^layer 0 \(GptBlock\) must stay .* {device}, but {said} .*remove\(\)"
        ):
            CHANGES[said](model.layers)
        assert all(map(torch.equal, gradients(model, x), expected))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_moves_as_any_module(copied: Callable[[Model], Model], device: torch.device) -> None:
    model, _ = make(device)
    with stream_weights(model.layers, device):
        twin = copied(copied(model))
        twin.double()
        assert {parameter.dtype for parameter in twin.parameters()} == {torch.float64}
        assert model.layers[0].norm1.weight.dtype is torch.float32
        with stream_weights(twin.layers, device), pytest.raises(RuntimeError, match="must stay what and where it is"):
            twin.float()
    twin.float()


def test_moves_beside_offloaded_activations(device: torch.device) -> None:
    model, x = make(device)
    expected = gradients(model, x)
    with stream_weights(model.layers, device), offload_layers(model.layers, 2, min_bytes=1):
        as_if_moved(model)
        assert all(map(torch.equal, gradients(model, x), expected))
