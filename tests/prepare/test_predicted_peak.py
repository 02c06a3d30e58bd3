"""The predicted peak of a step by the recipe that is followed, against the peak that is measured on the CPU."""

import sys
from typing import Any

import pytest
import torch
from models import WIDTH, build, through
from torch import nn

import offload
from offload.planning.training_bytes import RECIPES, Recipe

PREPARE = sys.modules["offload.prepare"]  # the function has its name
RESIDENT, STREAMED, CONSUMED, ALL_CONSUMED, *_ = RECIPES
WORDS = 512
KIB = 1 << 10


class Layer(nn.Module):
    """As in large models: autograd does not save the input, and an MLP needs the most."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """An embedding, whose gradient is larger than that of a layer, and layers; perhaps a head, as large."""

    def __init__(self, *, head: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers, _ = build(Layer, 6, torch.device("cpu"))
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if head else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = through(self.layers, self.embed(tokens))
        return y.mean() if self.head is None else y.mean() + self.head(y[:, :1]).mean()


def peaks(
    recipe: Recipe,
    budget: int,
    accumulate: int,
    monkeypatch: pytest.MonkeyPatch,
    *others: Recipe,
    head: bool = False,
) -> tuple[int, int]:
    """The predicted peak and the measured one of a step, without weights, state and slots."""
    monkeypatch.setattr(PREPARE, "RECIPES", (recipe, *others))
    model = Model(head=head).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"step_in_backward": True, "state_dtype": torch.float32, "min_bytes": 0, "device": "cpu"}
    tokens = torch.arange(256).view(2, 128)

    def step() -> None:
        for _ in range(accumulate - 1):
            with prepared.no_step():
                model(tokens).backward()
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    with offload.prepare(model, optimizer, budget, **options) as prepared:
        for _ in range(6):
            step()
        with offload.memory_meter("cpu") as meter:
            step()
        planned, weights = prepared.plan.chosen, prepared.stats().get("weights")
        assert not planned.reason
        assert planned.recipe == recipe
        held = sum(one.nbytes for one in model.parameters()) + planned.state_bytes[0]
        if isinstance(weights, offload.WeightStats):
            held += weights.slot_bytes - sum(one.nbytes for one in model.layers.parameters())
        if recipe.optimizer == "streamed":
            held += 6 * (budget // 180)  # as slots are predicted
        return planned.device_bytes - held, meter.peak_bytes


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("recipe", "kib", "accumulate"),
    [
        pytest.param(RESIDENT, 2200, 1, id="all resident"),
        pytest.param(STREAMED, 1000, 1, id="kept layers, whose backward is after no second run"),
        pytest.param(ALL_CONSUMED, 1000, 1, id="the same beside streamed weights"),
        pytest.param(ALL_CONSUMED, 640, 1, id="a plan that needs less than the measured step"),
        pytest.param(CONSUMED, 800, 1, id="gradients that are freed once they are stepped with"),
        pytest.param(CONSUMED, 1100, 3, id="the same of several microbatches"),
        pytest.param(CONSUMED, 1300, 2, id="the same of two, of which the second one makes the first step"),
    ],
)
def test_a_predicted_peak_is_the_measured_one(
    recipe: Recipe, kib: int, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted, measured = peaks(recipe, kib * KIB, accumulate, monkeypatch)
    assert measured <= predicted <= 1.01 * measured


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("recipe", "kib"), [(CONSUMED, 820), (ALL_CONSUMED, 740)])
def test_the_gradient_of_a_head_that_waits_on_the_host_is_not_in_the_peak(
    recipe: Recipe, kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted, measured = peaks(recipe, kib * KIB, 1, monkeypatch, head=True)
    assert measured <= predicted <= 1.01 * measured
    without_head = peaks(recipe, kib * KIB - WORDS * WIDTH * 2, 1, monkeypatch)[1]
    assert measured <= 1.01 * without_head


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("recipe", "kib", "accumulate"),
    [
        pytest.param(STREAMED, 900, 1, id="layers measured while gradients were consumed"),
        pytest.param(RESIDENT, 2200, 2, id="layers timed in a microbatch that makes all gradients"),
        pytest.param(RESIDENT, 2200, 3, id="the same of more microbatches"),
    ],
)
def test_the_peak_of_another_recipe_than_the_first_is_predicted_too(
    recipe: Recipe, kib: int, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What layers need is not what they need beside other gradients than those of the microbatch that was timed."""
    monkeypatch.setattr("offload.planning.recipes.WORTH", 1e9)  # the first one that fits
    predicted, measured = peaks(recipe, kib * KIB, accumulate, monkeypatch, CONSUMED)
    assert measured <= predicted <= 1.01 * measured
