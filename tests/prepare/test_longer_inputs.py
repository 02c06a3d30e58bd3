"""A recipe that fitted the first microbatches gives way where longer ones come."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import assert_same
from test_prepare import RESIDENT, STREAMED, Model, adamw, weight_bytes
from torch import nn

import offload
from offload.base.checks import format_bytes
from offload.planning.training_bytes import Recipe

LENGTHS = (8, 8, 16, 16, 16, *[100] * 8, 16, 100)


@pytest.fixture
def in_place_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first recipe is the one that is chosen for the first microbatches."""
    monkeypatch.setattr("offload.prepared.FIRST_SHARE", 0.6)


def train(budget: int | None, lengths: Sequence[int] = LENGTHS) -> tuple[list[torch.Tensor], list[int], list[Recipe]]:
    """Parameters after a step of each length, the most on the device in each step, and the recipe of each."""
    model = Model()
    optimizer = adamw(model)
    prepared = None if budget is None else offload.prepare(model, optimizer, budget, device="cpu", min_bytes=0)
    generator, most, recipes = torch.Generator().manual_seed(2), [], []
    for length in lengths:
        tokens = torch.randint(64, (1, length), generator=generator)
        held = 3 * weight_bytes()
        if prepared is not None:
            recipes.append(prepared.recipe)
            held = prepared._training.held_bytes(prepared.recipe, prepared.resident_bytes)
        with offload.memory_meter("cpu") as meter:
            model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        most.append(meter.peak_bytes + held)
    if prepared is not None:
        assert prepared.plan.chosen.recipe == prepared.recipe, "also where none fits"
        prepared.remove()
    return [parameter.detach() for parameter in model.parameters()], most, recipes


@pytest.mark.usefixtures("in_place_from_the_start")
@pytest.mark.slow
def test_state_moves_to_the_host_where_longer_inputs_need_its_memory() -> None:
    expected, plain, _ = train(None)
    budget = max(plain) - weight_bytes()
    with pytest.warns(UserWarning, match="was broken"):  # but not by the first of the longer ones
        found, most, recipes = train(budget)
    assert_same(expected, found)
    assert recipes[4] == RESIDENT
    assert recipes[-1] == STREAMED
    assert most[-1] <= budget < most[6]


@pytest.mark.slow
def test_it_is_said_once_where_no_recipe_fits_longer_inputs() -> None:
    expected, plain, _ = train(None)
    with pytest.warns(UserWarning, match="memory_budget") as caught:
        found, _, _ = train(max(plain) - 3 * weight_bytes())
    assert_same(expected, found)
    assert len([one for one in caught if "memory_budget" in str(one.message)]) == 1


@pytest.mark.usefixtures("in_place_from_the_start")
def test_one_long_microbatch_that_breaks_the_budget_is_said() -> None:
    """No later one is as long, so that no plan is made again."""
    lengths = (8, 8, 16, 16, 100, 8, 8, 8)
    expected, plain, _ = train(None, lengths)
    budget = max(plain) - 3 * weight_bytes()
    with pytest.warns(UserWarning, match="was broken") as told:
        found, most, _ = train(budget, lengths)
    assert f"memory_budget = {format_bytes(budget)} was" in str(told[0].message)
    assert f"needed {format_bytes(most[4])}," in str(told[0].message)
    assert_same(expected, found)
    assert max(most[:4] + most[5:]) <= budget < most[4]


def test_what_plans_leave_free_of_the_budget_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the part that an accelerator's allocator needs; it counts to the budget that is said to be broken."""
    lengths = (8, 8, 16, 16, 100, 8, 8, 8)
    _, plain, _ = train(None, lengths)
    whole = max(plain)
    for budget in (whole, whole - weight_bytes()):
        monkeypatch.setattr("offload.prepared.usable_bytes", lambda *_, budget=budget: budget - 2 * weight_bytes())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            _, most, _ = train(budget, lengths)
        said = [str(one.message) for one in told]
        assert [f"needed {format_bytes(most[4])}," in one for one in said] == [True] * (most[4] > 1.02 * budget), said


def test_the_table_is_for_the_longest_inputs_so_far() -> None:
    """The recipe in place fits them as well: the rows of others are planned again when somebody looks."""
    model = Model()
    optimizer = adamw(model)
    with offload.prepare(model, optimizer, "1GiB", device="cpu", min_bytes=0) as prepared:
        peaks = []
        for length in (8, 8, 8, 8, 200, 200, 200):
            model(torch.ones(1, length, dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append([one.device_bytes for one in prepared.plan.recipes])
    assert all(after > before for after, before in zip(peaks[-1], peaks[3], strict=True))


def test_the_first_steps_fit_where_activations_need_most_of_the_budget() -> None:
    """Nothing is known of them when the first recipe is put in place."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    optimizer = adamw(model)
    budget = 3 * sum(parameter.nbytes for parameter in model.parameters())
    options: dict[str, Any] = {"layers": list, "device": "cpu", "min_bytes": 0, "step_in_backward": True}
    with offload.prepare(model, optimizer, budget, **options) as prepared:
        for _ in range(2):
            with offload.memory_meter("cpu") as meter:
                model(torch.ones(112, 64)).square().mean().backward()
            assert meter.peak_bytes + prepared._training.held_bytes(prepared.recipe, prepared.resident_bytes) <= budget
            optimizer.step()
            optimizer.zero_grad()


def test_inputs_that_no_recipe_fits_are_said_before_they_run() -> None:
    """Where that is an error, the program goes on with others as if these had not come."""
    lengths = (64, 100, 100, 100, 100, 145, 140, 100, 115, 115)
    refused = (145, 140)
    expected, _, _ = train(None, [one for one in lengths if one not in refused])
    model = Model()
    optimizer = adamw(model)
    ran: list[int] = []
    model.layers[0].register_forward_hook(lambda _, inputs, __: ran.append(inputs[0].shape[1]))
    generator, said = torch.Generator().manual_seed(2), []
    with offload.prepare(model, optimizer, 30 << 20, device="cpu", min_bytes=0) as prepared:
        for length in lengths:
            tokens = torch.randint(64, (1, length), generator=None if length in refused else generator)
            before = prepared.activations
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    model(tokens).backward()
                except UserWarning as error:
                    said.append(f"{length}: {error}")
                    assert prepared.activations is before
                    continue
            optimizer.step()
            optimizer.zero_grad()
        assert prepared.activations is not None
        assert prepared.activations.peak_bytes <= prepared.activations.memory_budget
    assert [one.partition(" = ")[0] for one in said] == [f"{one}: memory_budget" for one in refused]
    assert all("cannot be met" in one for one in said)
    assert not {*refused} & {*ran}
    assert_same(expected, [parameter.detach() for parameter in model.parameters()])
