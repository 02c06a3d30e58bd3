"""Streamed weights in whole models: Hugging Face's, plans for activations, and models that move."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llama import LAYERS, enable_checkpointing, llama
from models import WIDTH, assert_same, build, loss_of
from streaming import backward, gradients
from torch import nn

import offload
from offload import Link, offload_layers, plan, profile_layers, stream_optimizer, stream_weights

LINK = Link(d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9, duplex_bytes_per_s=2e9)


pytestmark = pytest.mark.usefixtures("adverse")


@pytest.fixture(scope="module")
def transformers() -> Any:
    return importlib.import_module("transformers")  # takes seconds: only where it is needed


def train(model: nn.Module, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reentrant", "activations"), [(None, False), (None, True), (False, True), (True, False), (True, True)]
)
def test_hugging_face_training(
    reentrant: bool | None, activations: bool, transformers: Any, device: torch.device
) -> None:
    model = llama(transformers, device).train()
    tokens = torch.arange(24, device=device).view(2, 12) % 64
    if reentrant is not None:
        enable_checkpointing(model, reentrant)
    expected = gradients(model, tokens, train)
    with stream_weights(model.model.layers, device) as streamed:
        offloaded = offload_layers(model.model.layers, 2, min_bytes=0) if activations else None
        for _ in range(2):
            assert_same(expected, gradients(model, tokens, train))
        assert streamed.stats().loads == 2 * (2 * LAYERS - 2)
        if offloaded is not None:
            assert offloaded.stats().reloaded_bytes > 0
            offloaded.remove()


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_hugging_face_training_stepped_in_backward(
    reentrant: bool | None, transformers: Any, device: torch.device
) -> None:
    """In bfloat16 with float32 moments: the weights are stepped in their slots, and are not loaded for the step."""
    trained = []
    for streamed in (False, True):
        model = llama(transformers, device).bfloat16()
        if reentrant is not None:
            enable_checkpointing(model, reentrant)
        weights = stream_weights(model.model.layers, device) if streamed else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        options = {"in_backward": True, "consume_gradients": True} if streamed else {"resident_bytes": "1TiB"}
        state = stream_optimizer(optimizer, state_dtype=torch.float32, **options)
        for step in range(4):
            train(model, (torch.arange(24, device=device).view(2, 12) * (step + 1)) % 64)
            optimizer.step()
            optimizer.zero_grad()
        trained.append([parameter.detach().cpu().clone() for parameter in model.parameters()])
        if weights is not None:
            assert weights.stats().early_steps == 4 * LAYERS
            assert weights.stats().gradient_host_bytes == 0
            assert state.stats().loaded_bytes == 3 * state.stats().host_bytes
            state.remove()
            weights.remove()
    assert_same(*trained)


@pytest.mark.slow
def test_a_plan_for_the_activations(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    layers.eval()  # dropout would differ from step to step
    expected = gradients(layers, x)
    with stream_weights(layers, device):
        profile = profile_layers(layers, lambda: backward(layers, x), min_bytes=0, device=device)
        kept_bytes = offload.simulate(offload.Schedule(LAYERS), profile, LINK).peak_bytes
        planned = plan(profile, int(0.8 * kept_bytes), LINK)
        assert planned.num_layers > 0
        with offload_layers(layers, plan=planned, min_bytes=0) as offloaded:
            assert_same(expected, gradients(layers, x))
            assert offloaded.stats().offloaded_bytes > 0


class Model(nn.Module):
    """Layers, and a module outside of them."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make(device: torch.device) -> tuple[Model, torch.Tensor]:
    layers, x = build("gpt", 4, device)
    torch.manual_seed(2)
    return Model(layers).to(device), x


def as_if_moved(model: nn.Module) -> nn.Module:
    """What ``to(device)`` does to a model on another device: the memory of each tensor is replaced."""
    return model._apply(torch.clone)


def once(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model(x)).backward()


def addresses(model: Model) -> list[int]:
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
