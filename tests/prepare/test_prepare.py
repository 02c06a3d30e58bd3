"""A whole training within a memory budget: the same parameters whatever recipe is in place, and when it changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lab import Lab
from models import WIDTH, assert_same, build
from torch import nn

import offload
from offload.planning.recipes import RECIPES, Recipe, TrainingBytes, TrainingPlan, plan_recipes, without_activations

STEPS = 8
WORDS = 16384
"""So many that weights, gradients and optimizer state are larger than activations."""
KIB = 1 << 10
PREPARE = sys.modules["offload.prepare"]  # the function has its name
RESIDENT, STREAMED, CONSUMED, ALL_CONSUMED, ALL_STREAMED, ON_HOST = RECIPES


class Model(nn.Module):
    """An embedding, decoder layers, and a head."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers, _ = build("decoder", layers, torch.device("cpu"))
        torch.manual_seed(1)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = self.embed(tokens)
        for layer in self.layers:
            y = layer(y)
        return nn.functional.cross_entropy(self.head(y).flatten(0, -2), tokens.flatten())


Made = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(
    lab: Lab,
    budget: int | None,
    make: Made = adamw,
    *,
    clip: bool = False,
    accumulate: int = 1,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    after_step: Callable[[], object] = lambda: None,
    **options: Any,
) -> tuple[list[torch.Tensor], list[Recipe]]:
    """The parameters after some steps, and the recipe of each step."""
    model = Model().to(dtype)
    if budget is None:
        model.to(lab.device)
    optimizer = make(model)
    if budget is None and options:
        offload.stream_optimizer(optimizer, resident_bytes=1 << 40, **options)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    prepared = None
    if budget is not None:
        prepared = offload.prepare(model, optimizer, budget, device=lab.device, min_bytes=0, **options)
    generator = torch.Generator().manual_seed(2)
    recipes = []
    for _ in range(steps):
        for microbatch in range(accumulate):
            tokens = torch.randint(WORDS, (1, 4), generator=generator).to(lab.device)
            if prepared is not None and microbatch < accumulate - 1:
                with prepared.no_step():
                    model(tokens).backward()
            else:
                model(tokens).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if prepared is not None:
            recipes.append(prepared.recipe)
        after_step()
    if prepared is not None:
        assert prepared.state == "following"
        assert prepared.plan.chosen.recipe == prepared.recipe
        prepared.remove()
        assert prepared.state == "removed"
        resident = recipes[-1].weights == "resident"
        assert not resident or {parameter.device for parameter in model.parameters()} == {lab.device}
        assert all(entry for entry in optimizer.state.values())
    return [parameter.detach().cpu() for parameter in model.parameters()], recipes


def assert_trained(expected: list[torch.Tensor], found: list[torch.Tensor], lab: Lab) -> None:
    """The same bits on the CPU; on a GPU as good as the same, if steps were made by the CPU, which rounds otherwise."""
    if lab.device.type == "cpu":
        assert_same(expected, found)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def weight_bytes() -> int:
    return sum(parameter.nbytes for parameter in Model().parameters())


def test_all_fits(lab: Lab) -> None:
    found, recipes = train(lab, 1 << 30)
    assert_same(train(lab, None)[0], found)
    assert recipes == [RESIDENT] * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("clip", [False, True])
def test_state_on_the_host(clip: bool, lab: Lab) -> None:
    """The budget holds weights and gradients, and not the state."""
    budget = 3 * weight_bytes()
    found, recipes = train(lab, budget, clip=clip, accumulate=2)
    # Where it begins with gradients on the host, a GPU sums norms otherwise.
    expected = train(lab, None, clip=clip, accumulate=2)[0]
    if clip:
        assert_trained(expected, found, lab)
    else:
        assert_same(expected, found)
    assert RESIDENT not in recipes
    assert recipes[-1] == STREAMED


def test_it_begins_with_little_and_changes_to_what_fits(lab: Lab) -> None:
    """The first recipe leaves room for activations that nobody knows yet; all parameters are the same after."""
    budget = 5 * weight_bytes()
    found, recipes = train(lab, budget)
    assert_same(train(lab, None)[0], found)
    assert recipes[0] != RESIDENT
    assert recipes[-1] == RESIDENT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [(STREAMED, CONSUMED), (CONSUMED, STREAMED), (STREAMED, RESIDENT), (RESIDENT, CONSUMED)],
    ids=str,
)
def test_a_change_of_recipes_rounds_no_state(
    before: Recipe, after: Recipe, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments in float32 of parameters in bfloat16, whose next step shows what they have lost."""

    def to_the_other(*given: Any) -> offload.TrainingPlan:
        made = plan_recipes(*given)
        return replace(made, recipes=tuple(one for one in made.recipes if one.recipe == after))

    options: dict[str, Any] = {"dtype": torch.bfloat16, "state_dtype": torch.float32}
    expected = train(lab, None, **options)[0]
    monkeypatch.setattr(PREPARE, "_first_recipe", lambda _: before)
    monkeypatch.setattr(PREPARE, "plan_recipes", to_the_other)
    found, recipes = train(lab, 1 << 30, step_in_backward=True, **options)
    assert (recipes[0], recipes[-1]) == (before, after)
    assert_same(expected, found)


def test_a_change_of_recipes_needs_no_memory_for_the_state(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the device nor, pinned, a second time on the host."""
    monkeypatch.setattr(PREPARE, "RECIPES", (STREAMED, CONSUMED))
    monkeypatch.setattr(PREPARE, "_first_recipe", lambda _: STREAMED)
    model = Model().to(lab.device)
    optimizer = adamw(model)
    state = 2 * weight_bytes()
    options: dict[str, Any] = {"device": lab.device, "min_bytes": 0, "step_in_backward": True}
    with offload.prepare(model, optimizer, 1 << 30, state + (4 << 20), **options) as prepared:
        peaks = []
        while prepared.recipe != CONSUMED:
            model(torch.ones(1, 4, dtype=torch.long, device=lab.device)).backward()
            with offload.memory_meter(lab.device) as meter:
                optimizer.step()
            peaks.append(meter.peak_bytes)
            optimizer.zero_grad()
            assert len(peaks) < STEPS
    assert max(peaks[1:]) < 3 * state // 4  # slots and what a chunk's step allocates


def test_weights_on_the_host(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREPARE, "RECIPES", (ON_HOST,))
    found, recipes = train(lab, 1 << 30)
    assert_trained(train(lab, None)[0], found, lab)
    assert recipes == [ON_HOST] * STEPS


def test_weights_on_the_host_and_gradients_consumed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREPARE, "RECIPES", (ALL_CONSUMED,))
    found, recipes = train(lab, 1 << 30, accumulate=2, step_in_backward=True)
    assert_same(train(lab, None, accumulate=2)[0], found)
    assert recipes == [ALL_CONSUMED] * STEPS


def test_what_the_parts_hold_is_what_the_table_says(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the gaps between tensors in flat memory, of at most 256 bytes each."""
    monkeypatch.setattr(PREPARE, "RECIPES", (ALL_CONSUMED,))
    model = Model()
    optimizer = adamw(model)
    gaps = 256 * len(list(model.parameters()))
    with offload.prepare(model, optimizer, 1 << 30, device=lab.device, step_in_backward=True, min_bytes=0) as prepared:
        for _ in range(2):
            model(torch.ones(2, 4, dtype=torch.long, device=lab.device)).backward()
            optimizer.step()
        [planned], stats = prepared.plan.recipes, prepared.stats()
        weights, state = stats["weights"], stats["optimizer"]
        assert isinstance(weights, offload.WeightStats)
        assert isinstance(state, offload.OptimizerStats)
        outside = weight_bytes() - sum(parameter.nbytes for parameter in model.layers.parameters())
        pinned = weights.weight_bytes + weights.gradient_host_bytes + weights.staging_bytes + state.host_bytes
        assert planned.host_bytes <= pinned <= planned.host_bytes + gaps
        assert outside + weights.slot_bytes + state.slot_bytes <= planned.device_bytes + gaps


def test_weights_on_the_host_and_gradients_clipped_there(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREPARE, "RECIPES", (ALL_STREAMED,))
    found, recipes = train(lab, 1 << 30, clip=True, accumulate=2)
    assert_trained(train(lab, None, clip=True, accumulate=2)[0], found, lab)  # a GPU sums norms otherwise
    assert recipes == [ALL_STREAMED] * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("last", [RESIDENT, CONSUMED, ALL_CONSUMED])
def test_from_weights_on_the_host_to_less_on_the_host(last: Recipe, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that is pinned already remains where it is."""
    first = ALL_STREAMED if last is ALL_CONSUMED else ALL_CONSUMED
    monkeypatch.setattr(PREPARE, "RECIPES", (last, first))
    monkeypatch.setattr(PREPARE, "_first_recipe", lambda plan: first)
    monkeypatch.setattr(PREPARE.TrainingPlan, "chosen", property(lambda plan: plan.recipes[0]))
    pinned: list[int] = []
    found, recipes = train(lab, 1 << 30, step_in_backward=True, after_step=lambda: pinned.append(lab.pool.pinned_bytes))
    assert_same(train(lab, None)[0], found)
    assert (recipes[0], recipes[-1]) == (first, last)
    assert pinned[-1] <= pinned[0] + weight_bytes()  # the state has twice as many


@pytest.mark.slow
def test_from_streamed_weights_to_resident_ones(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREPARE, "RECIPES", (RESIDENT, ON_HOST))
    monkeypatch.setattr(PREPARE, "FIRST_SHARE", 0.0)
    found, recipes = train(lab, 1 << 30)
    assert_trained(train(lab, None)[0], found, lab)
    assert recipes[0] == ON_HOST
    assert recipes[-1] == RESIDENT


def test_gradients_are_consumed_in_backward(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREPARE, "RECIPES", (CONSUMED, ON_HOST))
    found, recipes = train(lab, 1 << 30, accumulate=2, step_in_backward=True)
    assert_same(train(lab, None, accumulate=2)[0], found)
    assert recipes[-1] == CONSUMED


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
        lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    ],
    ids=["SGD", "Adafactor", "RMSprop"],
)
def test_other_optimizers(make: Made, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(lab, None, make)[0]
    assert_same(expected, train(lab, 1 << 30, make)[0])
    monkeypatch.setattr(PREPARE, "FIRST_SHARE", 0.0)  # from the host to the device
    assert_trained(expected, train(lab, 1 << 30, make)[0], lab)


@pytest.mark.slow
def test_state_that_is_there_already(lab: Lab) -> None:
    """As when training goes on from a checkpoint: from the CPU to where the recipe has it."""

    def resumed(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    expected = train(lab, None, resumed)[0]
    assert_trained(expected, train(lab, 1 << 30, resumed)[0], lab)  # its first step is made on the CPU


def test_the_table_names_what_each_recipe_needs(lab: Lab) -> None:
    model = Model()
    with offload.prepare(model, adamw(model), 1 << 30, max_host_bytes=1, device=lab.device, min_bytes=0) as prepared:
        text = str(prepared.plan)
        assert prepared.state == "measuring"
        assert prepared.activations is None
    assert "weights   gradients  optimizer" in text
    assert "of host memory without activations" in text
    assert "chosen" in text
    assert set(prepared.stats()) == set()


def test_nothing_fits() -> None:
    model = Model()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(
        ValueError, match=r"memory_budget must hold weights, .*got 64.00 KiB and no limit of host memory"
    ):
        offload.prepare(model, adamw(model), 64 * KIB, device="cpu")
    with pytest.raises(ValueError, match=r"optimizer streamed: needs .* of host memory without activations; weights"):
        offload.prepare(model, adamw(model), 3 * weight_bytes(), 64 * KIB, device="cpu")
    assert before == [parameter.data_ptr() for parameter in model.parameters()]
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_refuses_what_is_no_training() -> None:
    model, other = Model(), nn.Linear(3, 2)
    with pytest.raises(TypeError, match="model must be a module"):
        offload.prepare([model], adamw(model), "1GiB")
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer of the model's parameters"):
        offload.prepare(model, model, "1GiB")
    with pytest.raises(ValueError, match=r"optimizer must hold parameters of the model, got 2 others, .*\(2, 3\)"):
        offload.prepare(model, adamw(other), "1GiB")
    with pytest.raises(ValueError, match="memory_budget must be a number and a unit"):
        offload.prepare(model, adamw(model), "24")
    with pytest.raises(ValueError, match="layers must be the name of one list of modules"):
        offload.prepare(model, adamw(model), "1GiB", layers="blocks")


def test_an_error_in_a_step_leaves_the_recipe(lab: Lab) -> None:
    model = Model()
    optimizer = adamw(model)
    with offload.prepare(model, optimizer, 1 << 30, device=lab.device, min_bytes=0) as prepared:
        with pytest.raises(IndexError):
            model(torch.full((2, 4), WORDS, device=lab.device) if lab.device.type == "cpu" else _out_of_range())
        for _ in range(4):
            model(torch.ones(2, 4, dtype=torch.long, device=lab.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert prepared.state == "following"


def _out_of_range() -> torch.Tensor:
    raise IndexError  # on a GPU, the kernel would end the process


# The arithmetic.

GIB = 1 << 30
LLAMA = TrainingBytes(
    weights=15 * GIB,
    gradients=15 * GIB,
    state=60 * GIB,
    layer_weights=(13 * GIB // 32,) * 32,
    layer_gradients=(13 * GIB // 32,) * 32,
    layer_state=(52 * GIB // 32,) * 32,
    largest_gradient=GIB,
    slots=GIB,
    trained_elements=8 * 10**9,
)


def test_sizes_of_recipes() -> None:
    held = {one.recipe: (one.device_bytes / GIB, one.host_bytes / GIB) for one in _without(200).recipes}
    assert held[RESIDENT] == (90, 0)
    assert held[STREAMED] == (31, 60)
    assert held[CONSUMED] == (17, 60)
    layer = 13 / 32
    # Two layers' weights, and gradients: here the largest of one parameter is larger.
    assert held[ALL_CONSUMED] == pytest.approx((2 + 2 * layer + 1 + 1, 13 + 60))
    assert held[ALL_STREAMED] == pytest.approx((2 + 2 * layer + 1 + 2 + 2 * layer, 26 + 60))
    device, host = held[ON_HOST]
    assert device == pytest.approx(2 + 2 * layer + 8 + 2 + 2 * layer)
    assert host == pytest.approx(26 + 52)


def _without(budget_gib: int, host_gib: int | None = None) -> offload.TrainingPlan:
    return without_activations(LLAMA, budget_gib * GIB, None if host_gib is None else host_gib * GIB)


def test_what_fits() -> None:
    def fits(plan: TrainingPlan) -> list[Recipe]:
        return [one.recipe for one in plan.recipes if not one.reason]

    assert fits(_without(140)) == [*RECIPES]
    assert fits(_without(80)) == [STREAMED, CONSUMED, ALL_CONSUMED, ALL_STREAMED, ON_HOST]
    assert fits(_without(24)) == [CONSUMED, ALL_CONSUMED, ALL_STREAMED, ON_HOST]
    assert fits(_without(14, 100)) == [ALL_CONSUMED, ALL_STREAMED, ON_HOST]
    assert fits(_without(24, 85)) == [CONSUMED, ALL_CONSUMED, ON_HOST]
    assert fits(_without(24, 70)) == [CONSUMED]
    assert fits(_without(80, 50)) == []


def test_seconds_of_the_link() -> None:
    """In forward, in backward and in the step, both directions at once at half of both directions' speed."""
    link = offload.Link(60e9, 60e9, 100e9)
    layers_s, both_s = 13 * GIB / 60e9, GIB / 50e9
    assert LLAMA.link_s(CONSUMED, link) == pytest.approx((0, 60 * both_s, 0))
    # Loads of weights and state; copies of state and new weights.
    assert LLAMA.link_s(ALL_CONSUMED, link) == pytest.approx((layers_s, 73 * both_s, 0))
    assert LLAMA.link_s(ALL_STREAMED, link) == pytest.approx((layers_s, 13 * both_s, 86 * both_s))
    assert LLAMA.link_s(ON_HOST, link)[:2] == pytest.approx((layers_s, 13 * both_s))


def test_the_shortest_recipe_is_chosen() -> None:
    """The link carries state, weights and activations: a budget that holds the state has the shorter step."""
    link = offload.Link(50e9, 50e9, 100e9)
    layer = offload.LayerProfile(0.05, 0.1, GIB)
    profile = offload.Profile((layer,) * 32)

    def plan(device: int, host: int | None, left: offload.Link) -> offload.Plan:
        return offload.plan(profile, device, left, max_host_bytes=host)

    def made(budget_gib: int, missing_gib: int = 17) -> offload.TrainingPlan:
        return plan_recipes(LLAMA, budget_gib * GIB, None, link, plan, missing_gib * GIB, STREAMED)

    assert made(140).chosen.recipe == RESIDENT
    assert made(70).chosen.recipe == CONSUMED
    by_recipe = {one.recipe: one for one in made(70).recipes}
    assert by_recipe[RESIDENT].plan is None
    assert by_recipe[STREAMED].step_s - by_recipe[CONSUMED].step_s == pytest.approx(60 * GIB / 50e9, rel=0.01)
    assert all(one.device_bytes <= 70 * GIB for one in made(70).recipes if not one.reason)
    # Two GiB beside gradients and activations, in every recipe.
    assert by_recipe[STREAMED].device_bytes == 33 * GIB + by_recipe[STREAMED].plan.peak_bytes


def test_activations_get_what_the_state_leaves_of_the_link() -> None:
    """Loads of activations beside the state would make backward longer than recomputing them does."""
    link = offload.Link(50e9, 50e9, 100e9)
    regions = (
        offload.RegionProfile("linear", GIB, 0.015, saved=True),
        offload.RegionProfile("gelu", GIB, 1e-3, reads=(0,), saved=True),
    )
    layer = offload.LayerProfile(0.016, 0.032, 2 * GIB, regions=regions)
    profile = offload.Profile((layer,) * 32)
    planned_for: list[offload.Link] = []

    def plan(device: int, host: int | None, left: offload.Link) -> offload.Plan:
        planned_for.append(left)
        return offload.plan(profile, device, left, max_host_bytes=host)

    made = plan_recipes(LLAMA, 40 * GIB, None, link, plan, 17 * GIB, STREAMED, [CONSUMED])
    alone = offload.plan(profile, made.chosen.plan.memory_budget, link)
    assert {one.h2d_bytes_per_s < link.h2d_bytes_per_s for one in planned_for} == {False, True}
    assert made.chosen.plan.host_bytes < alone.host_bytes
    state_s, backward_s = 60 * GIB / 50e9, 32 * 0.032
    assert made.chosen.step_s < 32 * 0.016 + state_s + alone.host_bytes / 50e9
    assert made.chosen.step_s >= 32 * 0.016 + max(backward_s, state_s)
