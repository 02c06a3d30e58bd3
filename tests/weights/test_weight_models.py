"""Streamed weights in whole models: Hugging Face's checkpointing and generation, and plans for activations."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab import Lab
from llama import LAYERS, enable_checkpointing, llama
from models import build, loss_of
from streaming import assert_same
from torch import nn

import offload
from offload import Link, offload_layers, plan, profile_layers, stream_weights

pytestmark = pytest.mark.slow

LINK = Link(d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9, duplex_bytes_per_s=2e9)


@pytest.fixture
def device(device: torch.device, lab: Lab) -> torch.device:
    lab.adverse()
    return device


@pytest.fixture(scope="module")
def transformers() -> Any:
    return importlib.import_module("transformers")  # takes seconds: only where it is needed


def gradients(model: nn.Module, step: Callable[[], object]) -> list[torch.Tensor]:
    model.zero_grad()
    step()
    return [parameter.grad.cpu().clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_hugging_face_training(
    reentrant: bool | None, activations: bool, transformers: Any, device: torch.device
) -> None:
    model = llama(transformers, device).train()
    tokens = torch.arange(24, device=device).view(2, 12) % 64
    if reentrant is not None:
        enable_checkpointing(model, reentrant)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    expected = gradients(model, step)
    with stream_weights(model.model.layers, device) as streamed:
        offloaded = offload_layers(model.model.layers, 2, min_bytes=0) if activations else None
        for _ in range(2):
            assert_same(expected, gradients(model, step))
        assert streamed.stats().loads == 2 * (2 * LAYERS - 2)
        if offloaded is not None:
            assert offloaded.stats().reloaded_bytes > 0
            offloaded.remove()


def test_hugging_face_generation(transformers: Any, device: torch.device) -> None:
    model = llama(transformers, device).eval()
    tokens = torch.arange(6, device=device).view(1, 6)
    new_tokens = 5

    def generate() -> torch.Tensor:
        found: torch.Tensor = model.generate(
            tokens,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        return found

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    expected, expected_gradients = generate(), gradients(model, step)
    with stream_weights(model.model.layers, device) as streamed:
        assert torch.equal(expected, generate())
        assert streamed.stats().loads == new_tokens * LAYERS
        assert_same(expected_gradients, gradients(model, step))
        assert torch.equal(expected, generate())


def test_a_plan_for_the_activations(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    layers.eval()  # dropout would differ from step to step

    def step() -> None:
        y = x
        for layer in layers:
            y = layer(y)
        loss_of(y).backward()

    expected = gradients(layers, step)
    with stream_weights(layers, device):
        profile = profile_layers(layers, step, min_bytes=0, device=device)
        kept_bytes = offload.simulate(offload.Schedule(LAYERS), profile, LINK).peak_bytes
        planned = plan(profile, int(0.8 * kept_bytes), LINK)
        assert planned.num_layers > 0
        with offload_layers(layers, plan=planned, min_bytes=0) as offloaded:
            assert_same(expected, gradients(layers, step))
            assert offloaded.stats().offloaded_bytes > 0
