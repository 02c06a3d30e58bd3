"""Where no recipe fits, the one that needs the least is followed, and what would fit is said."""

from __future__ import annotations

import functools
import re
import warnings

import pytest
import torch
from models import assert_same
from test_prepare import ALL_STREAMED, PREPARED, RESIDENT, STREAMED, WORDS, Model, adamw

import offload
from offload.base.checks import parse_bytes
from offload.planning.recipes import MARGIN
from offload.planning.training_bytes import Recipe

pytestmark = pytest.mark.slow
MIB = 1 << 20
TOKENS = 160
BUDGET = 30 * MIB
STEPS = 6


@pytest.fixture(autouse=True)
def _begins_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREPARED, "FIRST_SHARE", 0.6)


def train(
    budget: int | None, host: int | None = None, tokens: int = TOKENS
) -> tuple[list[torch.Tensor], list[int], list[Recipe], list[str]]:
    """Parameters after some steps, each step's peak, the recipe after each step, and what was said."""
    model = Model()
    optimizer = adamw(model)
    held = 0
    prepared = None if budget is None else offload.prepare(model, optimizer, budget, host, device="cpu", min_bytes=0)
    generator, peaks, recipes = torch.Generator().manual_seed(2), [], []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            if prepared is not None:
                held = prepared._training.held_bytes(prepared.recipe, prepared.resident_bytes)
            with offload.memory_meter("cpu") as meter:
                model(torch.randint(WORDS, (1, tokens), generator=generator)).backward()
            peaks.append(held + meter.peak_bytes)
            optimizer.step()
            optimizer.zero_grad()
            if prepared is not None:
                recipes.append(prepared.recipe)
    if prepared is not None:
        assert prepared.plan.chosen.recipe == prepared.recipe
        prepared.remove()
    return [one.detach() for one in model.parameters()], peaks, recipes, [str(one.message) for one in said]


@functools.cache
def parameters_without_a_budget() -> list[torch.Tensor]:
    return train(None)[0]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("margin", "recipe"), [(MARGIN, STREAMED), (0.0, ALL_STREAMED)], ids=str)
def test_the_recipe_that_needs_the_least_is_followed_and_what_would_fit_is_said(
    margin: float, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are streamed save less than the margin here."""
    monkeypatch.setattr("offload.planning.recipes.MARGIN", margin)
    expected = parameters_without_a_budget()
    found, peaks, recipes, said = train(BUDGET)
    assert_same(expected, found)
    assert recipes == [RESIDENT] * 2 + [recipe] * (STEPS - 2)  # it is not changed again
    assert max(peaks[3:]) < 0.9 * peaks[0]
    [line] = said
    needs = r"a step needs (\S+ \S+?)(?: with \S+ \S+ of host memory)?, of "
    told = re.search(rf"cannot be met, .*: {needs}.* less than weights .*: (\d+)% of the tokens .* fit", line)
    assert told, line
    # Each of them does.
    more, share = parse_bytes(told[1]), int(told[2])
    for budget, tokens in ((more, TOKENS), (BUDGET, TOKENS * share // 100)):
        _, peaks, _, said = train(budget, tokens=tokens)
        assert max(peaks[3:]) <= budget
        assert not any("cannot be met" in line for line in said)


def test_host_memory_that_would_do_is_said() -> None:
    _, _, recipes, [line] = train(40 * MIB, MIB)
    told = re.search(r"cannot be met, .* would fit, or with (.*) of host memory", line)
    assert told, line
    assert recipes[-1] == RESIDENT
    assert not any("cannot be met" in line for line in train(40 * MIB, parse_bytes(told[1]))[3])
