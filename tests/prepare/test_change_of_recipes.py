"""No step needs more than the budget, the one included at whose end another recipe is put in place."""

import sys

import pytest
import torch
from torch import nn

import offload
from offload.planning.training_bytes import RECIPES, Recipe

PREPARE = sys.modules["offload.prepare"]  # the function has its name
PREPARED = sys.modules["offload.prepared"]
_, STREAMED, CONSUMED, ALL_CONSUMED, ALL_STREAMED, _ = RECIPES
WIDTH, LAYERS = 640, 16
WEIGHTS = 4 * LAYERS * WIDTH * WIDTH
"""Bytes: many times more than of what the optimizer is tried with before the change."""


def train(
    before: Recipe, after: Recipe, budget: float, monkeypatch: pytest.MonkeyPatch, host: float = 8.0
) -> tuple[offload.PreparedTraining, float]:
    """The handle, and the peak of all steps. Budget, host memory and peak are in sizes of the weights."""
    monkeypatch.setattr("offload.measuring.follow_plan.measure_link", lambda _: offload.Link(1e8, 1e8, 1.5e8))
    monkeypatch.setattr("offload.planning.recipes.WORTH", 1e9)  # the first one that fits
    monkeypatch.setattr(PREPARE, "RECIPES", (after, before))
    monkeypatch.setattr(PREPARED, "_first_of", lambda plan: next(one for one in plan.recipes if one.recipe == before))
    sizes = round(budget * WEIGHTS), round(host * WEIGHTS)
    with offload.memory_meter("cpu") as meter:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters())
        options = {"layers": [*model], "device": "cpu", "min_bytes": 0, "step_in_backward": True}
        prepared = offload.prepare(model, optimizer, *sizes, **options)
        for _ in range(4):
            model(torch.ones(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    prepared.remove()
    return prepared, meter.peak_bytes / WEIGHTS


@pytest.mark.drawn(1)
@pytest.mark.parametrize("after", [CONSUMED, ALL_CONSUMED], ids=str)
def test_state_becomes_resident_while_gradients_are_there(after: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's gradients are on the device until the program drops them, after the change."""
    prepared, peak = train(STREAMED, after, 2.7, monkeypatch)
    assert prepared.recipe == after
    assert prepared.plan.chosen.state_bytes[0] > 0.3 * WEIGHTS
    assert 2 < peak <= 2.7


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("before", "budget", "host"),
    [
        pytest.param(ALL_CONSUMED, 2.6, 1.2, id="state that the host cannot hold beside the weights"),
        pytest.param(ALL_STREAMED, 1.9, 8.0, id="gradients on the host, which weights take to the device"),
    ],
)
def test_weights_remain_on_the_host_if_the_change_needs_too_much(
    before: Recipe, budget: float, host: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each recipe fits by itself."""
    prepared, _ = train(before, CONSUMED, budget, monkeypatch, host)
    assert prepared.recipe == before
    reason = "a change to it, between two steps, needs more memory"
    assert [one.reason for one in prepared.plan.recipes] == [reason, ""]
