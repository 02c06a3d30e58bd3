"""Where weights, gradients and optimizer state are: sizes, seconds, and how much of the state is resident."""

import math
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

import offload
from offload.base.evenly import evenly
from offload.planning.plan import TooLittleMemoryError
from offload.planning.profile import HostSeconds
from offload.planning.recipes import WORTH, Prediction, RecipePlan, plan_recipes, without_activations
from offload.planning.training_bytes import RECIPES, Recipe, TrainingBytes

RESIDENT, STREAMED, CONSUMED, ALL_CONSUMED, ALL_STREAMED, ON_HOST = RECIPES

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


@pytest.mark.parametrize("layer", [-2, 0], ids=["behind the layers", "in a layer"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_last_large_parameter_has_host_memory_for_its_gradient(recipe: Recipe, layer: int) -> None:
    """Where gradients are consumed, and its own layer does not do that, as its weights are streamed."""

    def more(*state: int) -> int:
        sized = replace(LLAMA, parameter_state=state, parameter_layer=(-1, layer, -2), parameter_gradient=(1, GIB, 2))
        return sized.host_bytes(recipe) - LLAMA.host_bytes(recipe)

    large = LLAMA.slots + 1
    assert more(large, LLAMA.slots, 1) == 0
    counts = recipe == CONSUMED or (recipe == ALL_CONSUMED and layer < 0)
    assert more(large, large, 1) == (GIB if counts else 0)
    assert more(large, large, large) == (2 if recipe.gradients == "consumed" else 0)


@pytest.mark.parametrize("copies", range(5))
def test_a_head_whose_state_is_resident_has_no_host_memory_for_its_gradient(copies: int) -> None:
    one, resident = replace(EVEN, parameter_gradient=(1, 2, 3, 4)), copies * 4 * GIB
    more = one.host_bytes(CONSUMED, resident) - EVEN.host_bytes(CONSUMED, resident)
    assert more == (0 if 3 in [*evenly(4)][:copies] else 4)


def _without(budget_gib: int, host_gib: int | None = None) -> offload.TrainingPlan:
    return without_activations(LLAMA, budget_gib * GIB, None if host_gib is None else host_gib * GIB)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_gradients_of_two_layers_are_no_more_than_all(recipe: Recipe) -> None:
    one = replace(LLAMA, layer_weights=(13 * GIB,), layer_gradients=(13 * GIB,), layer_state=(52 * GIB,))
    assert one.gradient_bytes(recipe) == one.gradients


def test_what_fits() -> None:
    def fits(plan: offload.TrainingPlan) -> list[Recipe]:
        return [one.recipe for one in plan.recipes if not one.reason]

    assert fits(_without(140)) == [*RECIPES]
    assert fits(_without(80)) == [STREAMED, CONSUMED, ALL_CONSUMED, ALL_STREAMED, ON_HOST]
    assert fits(_without(24)) == [CONSUMED, ALL_CONSUMED, ALL_STREAMED, ON_HOST]
    assert fits(_without(14, 100)) == [ALL_CONSUMED, ALL_STREAMED, ON_HOST]
    assert fits(_without(24, 85)) == [CONSUMED, ALL_CONSUMED, ON_HOST]
    assert fits(_without(24, 70)) == [CONSUMED]
    assert fits(_without(80, 50)) == []


def test_what_a_resident_step_allocates_has_to_fit() -> None:
    training, link = replace(LLAMA, step=20 * GIB), offload.Link(60e9, 60e9, 100e9)
    profile = offload.Profile((offload.LayerProfile(0.05, 0.1, GIB // 32),) * 32)

    def plan(device: int, host: int | None, left: offload.Link) -> offload.Plan:
        return offload.plan(profile, device, left, max_host_bytes=host)

    for budget_gib, reason in ((40, "needs 90"), (100, "optimizer.step() needs 110"), (120, "")):
        first = without_activations(training, budget_gib * GIB, None)
        predicted, recipes = Prediction(training, link, RESIDENT), (RESIDENT, STREAMED)
        made = plan_recipes(predicted, budget_gib * GIB, None, plan, 15 * GIB, recipes)
        for every in (first.recipes, made.recipes):
            found = {one.recipe: one for one in every}
            assert found[RESIDENT].reason.startswith(reason)
            assert bool(found[RESIDENT].reason) == bool(reason)
            assert not found[STREAMED].reason
        assert math.isinf(found[RESIDENT].step_s) == bool(reason)


def test_seconds_of_the_link() -> None:
    """In forward, in backward and in the step, both directions at once at half of both directions' speed."""
    link = offload.Link(60e9, 60e9, 100e9)
    layers_s, both_s = 13 * GIB / 60e9, GIB / 50e9
    assert LLAMA.link_s(CONSUMED, link) == pytest.approx((0, 60 * both_s, 0))
    # Loads of weights and state; copies of state and new weights.
    assert LLAMA.link_s(ALL_CONSUMED, link) == pytest.approx((layers_s, 73 * both_s, 0))
    assert LLAMA.link_s(ALL_STREAMED, link) == pytest.approx((layers_s, 13 * both_s, 86 * both_s))
    assert LLAMA.link_s(ON_HOST, link)[:2] == pytest.approx((layers_s, 13 * both_s))


def test_a_step_of_a_recipe_takes_no_less_than_the_host_needs_to_queue_it() -> None:
    layer = offload.LayerProfile(0.05, 0.1, GIB, host=HostSeconds(1.0))
    link = offload.Link(50e9, 50e9, 100e9)
    made = offload.plan(offload.Profile((layer,) * 32), 40 * GIB, link)
    assert made.step_s >= 32
    assert Prediction(LLAMA, link, RESIDENT).step_s(made, RESIDENT, 0) == made.step_s


@pytest.mark.slow
def test_the_shortest_recipe_is_chosen() -> None:
    """The link carries state, weights and activations: a budget that holds the state has the shorter step."""
    link = offload.Link(50e9, 50e9, 100e9)
    layer = offload.LayerProfile(0.05, 0.1, GIB)
    profile = offload.Profile((layer,) * 32)

    def plan(device: int, host: int | None, left: offload.Link) -> offload.Plan:
        return offload.plan(profile, device, left, max_host_bytes=host)

    @cache
    def made(budget_gib: int) -> offload.TrainingPlan:
        return plan_recipes(Prediction(LLAMA, link, STREAMED), budget_gib * GIB, None, plan, 17 * GIB)

    assert made(140).chosen.recipe == RESIDENT
    assert made(70).chosen.recipe == CONSUMED
    by_recipe = {one.recipe: one for one in made(70).recipes}
    assert by_recipe[RESIDENT].plan is None
    assert by_recipe[STREAMED].step_s - by_recipe[CONSUMED].step_s == pytest.approx(60 * GIB / 50e9, rel=0.01)
    assert all(one.device_bytes <= 70 * GIB for one in made(70).recipes if not one.reason)
    # Two GiB beside gradients and activations, in every recipe.
    assert by_recipe[STREAMED].device_bytes == 33 * GIB + by_recipe[STREAMED].plan.peak_bytes


PARTS = replace(
    LLAMA,
    parameter_state=(4 * GIB, *LLAMA.layer_state, 4 * GIB),
    front_state=4 * GIB,
    parameter_layer=(-1, *range(32), -2),
)
"""An embedding, layers of one parameter each, a head."""
LINK = offload.Link(50e9, 50e9, 100e9)
PROFILE = offload.Profile((offload.LayerProfile(0.05, 0.1, GIB),) * 32)


def _plan(device: int, host: int | None, left: offload.Link) -> offload.Plan:
    return offload.plan(PROFILE, device, left, max_host_bytes=host)


def test_the_least_that_the_host_cannot_hold_is_resident() -> None:
    layer = 52 * GIB // 32
    by_recipe = {one.recipe: one for one in without_activations(PARTS, 80 * GIB, 50 * GIB).recipes}
    consumed, all_consumed = by_recipe[CONSUMED], by_recipe[ALL_CONSUMED]
    assert consumed.state_bytes == (4 * GIB + 4 * layer, 56 * GIB - 4 * layer)
    assert consumed.host_bytes == consumed.state_bytes[1] <= 50 * GIB
    assert consumed.device_bytes == 15 * GIB + GIB + GIB + consumed.resident_bytes
    assert all_consumed.host_bytes == 13 * GIB + all_consumed.state_bytes[1] <= 50 * GIB
    assert not consumed.reason
    assert "device memory, or 60.00 GiB of host memory without" in (
        without_activations(PARTS, 26 * GIB, 50 * GIB, [CONSUMED]).recipes[0].reason
    )
    # With gaps between tensors, the host has a little less.
    assert without_activations(PARTS, 80 * GIB, 56 * GIB, [CONSUMED]).recipes[0].resident_bytes == 4 * GIB + layer
    # Weights alone are more than the host has.
    assert "of host memory without" in without_activations(PARTS, 80 * GIB, 10 * GIB, [ALL_CONSUMED]).recipes[0].reason


def test_state_is_resident_where_the_step_is_shorter_for_it() -> None:
    """In the step, nothing hides its copies; beside backward, only those of what backward comes to last."""

    def made(recipe: Recipe, training: TrainingBytes, budget_gib: int) -> offload.RecipePlan:
        return plan_recipes(
            Prediction(training, LINK, STREAMED), budget_gib * GIB, None, _plan, 17 * GIB, [recipe]
        ).recipes[0]

    part, none = (made(STREAMED, training, 100) for training in (PARTS, LLAMA))
    assert part.resident_bytes > 30 * GIB
    assert none.resident_bytes == 0
    assert none.step_s - part.step_s == pytest.approx(part.resident_bytes / 50e9, rel=1e-3)
    assert part.device_bytes <= 100 * GIB
    assert sum(part.state_bytes) == 60 * GIB
    # Little is kept beside backward where activations need the memory, and it is the embedding's.
    consumed = made(CONSUMED, PARTS, 100)
    assert consumed.resident_bytes >= PARTS.front_state
    assert made(CONSUMED, LLAMA, 100).step_s == pytest.approx(consumed.step_s, rel=0.01)  # it has none in front


@pytest.mark.parametrize("measured", [RESIDENT, STREAMED, CONSUMED])
def test_the_arithmetic_counts_once_whatever_was_measured(measured: Recipe) -> None:
    """It is in the measured steps already: in the layers' backward, or after it."""
    arithmetic_s = 0.32
    before = PARTS.seconds(measured, LINK, 0, arithmetic_s)
    layer = offload.LayerProfile(0.05, 0.1 + before.beside / 32, GIB)
    profile = offload.Profile((layer,) * 32, other_s=0.5 + before.step + before.tail)
    plan = offload.plan(profile, "40GiB", LINK)
    step_s = Prediction(PARTS, LINK, measured, 0, arithmetic_s).step_s
    compute_s = 32 * 0.15 + 0.5
    assert step_s(plan, RESIDENT, 0) == pytest.approx(compute_s + arithmetic_s)
    assert step_s(plan, CONSUMED, 0) == pytest.approx(compute_s + arithmetic_s + 4 * GIB / 50e9)
    assert step_s(plan, CONSUMED, 60 * GIB) == pytest.approx(compute_s + arithmetic_s)
    assert step_s(plan, STREAMED, 0) == pytest.approx(compute_s + 60 * GIB / 50e9)


def test_where_none_fits_the_recipe_in_place_is_the_chosen_one() -> None:
    """A run goes on with it, as the activations need no more than can be recomputed."""
    made = replace(_without(140), memory_budget=1)
    none = replace(made, recipes=tuple(replace(one, reason="needs 2 B of device memory") for one in made.recipes))
    followed = replace(none, in_place=STREAMED)
    assert followed.chosen.recipe == STREAMED
    assert str(followed).count("chosen, but needs 2 B of device memory") == 1
    assert "chosen" not in str(none)
    with pytest.raises(ValueError, match="memory_budget must fit one recipe, got 1 B, which fits none; print the plan"):
        _ = none.chosen


EVEN = TrainingBytes(
    weights=4 * GIB,
    gradients=4 * GIB,
    state=16 * GIB,
    layer_weights=(GIB,) * 4,
    layer_gradients=(GIB,) * 4,
    layer_state=(4 * GIB,) * 4,
    largest_gradient=GIB,
    slots=GIB,
    trained_elements=2 * GIB,
    parameter_state=(4 * GIB,) * 4,
    parameter_layer=(0, 1, 2, 3),
)
"""Four layers, and nothing else."""
SLOW = offload.Link(GIB, GIB, 2 * GIB)
"""A GiB a second, in both directions at once."""


def _seconds(recipe: Recipe, layer: offload.LayerProfile, resident: int = 0) -> float:
    profile = offload.Profile((layer,) * 4)
    plan = offload.plan(profile, "1TiB", SLOW)
    return Prediction(EVEN, SLOW, RESIDENT, 0, 0.0).step_s(plan, recipe, resident)


def test_compute_waits_for_state_at_the_end_of_backward() -> None:
    """The state of a layer is loaded from the beginning of its backward on, and all of it before backward ends."""
    assert _seconds(CONSUMED, offload.LayerProfile(1.0, 20.0, 0)) == pytest.approx(4 + 80)
    assert _seconds(CONSUMED, offload.LayerProfile(1.0, 3.0, 0)) == pytest.approx(4 + 16)  # bound by the link
    assert _seconds(CONSUMED, offload.LayerProfile(1.0, 3.0, 0), 16 * GIB) == pytest.approx(4 + 12)
    # That of every second layer remains on the device.
    assert _seconds(CONSUMED, offload.LayerProfile(1.0, 3.0, 0), 8 * GIB) == pytest.approx(4 + 12)


@pytest.mark.parametrize(
    ("forward_s", "expected"),
    [(6.0, 4 + 4 * (1 + 6) + 4), (1.0, 16 + 1 + 1 + 4)],  # compute steps for a second of each layer
    ids=["the first layer waits for its state", "the last one waits for the link"],
)
def test_a_step_beside_the_next_forward_takes_what_forward_does_not_hide(forward_s: float, expected: float) -> None:
    plan = offload.plan(offload.Profile((offload.LayerProfile(forward_s, 1.0, 0),) * 4), "1TiB", SLOW)
    behind, beside = (Prediction(EVEN, SLOW, RESIDENT, 0, 4.0, overlap_forward=one).step_s for one in (False, True))
    assert behind(plan, STREAMED, 0) == pytest.approx(4 * forward_s + 4 + 16)
    assert beside(plan, STREAMED, 0) == pytest.approx(expected)
    assert beside(plan, CONSUMED, 0) == behind(plan, CONSUMED, 0)


@pytest.mark.parametrize("backward_s", [20.0, 3.0], ids=["compute", "link"])
def test_backward_waits_for_the_copy_of_a_gradient_that_is_set_aside(backward_s: float) -> None:
    """Of a GiB, or for its load, which comes with the state, if the link is the limit."""
    training = replace(EVEN, state=20 * GIB, parameter_state=(4 * GIB,) * 5, parameter_layer=(0, 1, 2, 3, -2))
    plan = offload.plan(offload.Profile((offload.LayerProfile(1.0, backward_s, 0),) * 4), "1TiB", SLOW)
    consumed = training, replace(training, parameter_gradient=(GIB,) * 5)
    before, after = (Prediction(one, SLOW, RESIDENT, 0, 0.0).step_s(plan, CONSUMED, 0) for one in consumed)
    assert after == pytest.approx(before + 1)


def test_reloads_of_activations_stand_behind_loads_of_state() -> None:
    """On one link: a plan that offloads as much as the link carries alone is longer with state on it."""
    layer = offload.LayerProfile(2.0, 4.0, 2 * GIB)
    profile = offload.Profile((layer,) * 4)
    plan = offload.plan(profile, 5 * GIB, SLOW)
    assert plan.host_bytes
    prediction = Prediction(EVEN, SLOW, RESIDENT, 0, 0.0)
    alone, beside = (prediction.step_s(plan, CONSUMED, resident) for resident in (16 * GIB, 0))
    assert alone == pytest.approx(plan.step_s)
    assert beside > alone + 1


def test_the_last_two_layers_weights_are_there_when_backward_begins() -> None:
    host = Recipe("streamed", "host", "cpu")
    expected = 1 + 20 + 0.1 + 1 + 1 + 0.1 + 2 * GIB / 6e9
    assert _seconds(host, offload.LayerProfile(5.0, 0.1, 0)) == pytest.approx(expected, abs=0.11)


def test_state_that_backward_comes_to_last_is_copied_to_the_host_beside_the_next_forward() -> None:
    """Where it delays the copies of activations, which forward waits for."""
    training = replace(EVEN, state=24 * GIB, front_state=8 * GIB, parameter_state=(8 * GIB, *EVEN.layer_state))
    training = replace(training, parameter_layer=(-1, 0, 1, 2, 3))
    profile = offload.Profile((offload.LayerProfile(2.0, 6.0, 2 * GIB),) * 4)
    plan = offload.plan(profile, 5 * GIB, SLOW)
    step_s = Prediction(training, SLOW, RESIDENT, 0, 0.0).step_s
    assert step_s(plan, CONSUMED, 0) > step_s(plan, CONSUMED, 8 * GIB) + 8 + 1


def test_what_activations_leave_free_is_filled() -> None:
    [one] = plan_recipes(Prediction(PARTS, LINK, STREAMED), 140 * GIB, None, _plan, 17 * GIB, [CONSUMED]).recipes
    assert one.plan is not None
    assert not one.plan.host_bytes
    assert one.resident_bytes == 60 * GIB


def test_state_has_memory_that_activations_would_use() -> None:
    """Copies in the step are slow, and recomputing what is kept would be fast."""
    regions = (
        offload.RegionProfile("linear", GIB, 0.02, saved=True),
        offload.RegionProfile("gelu", 2 * GIB, 1e-4, reads=(0,), saved=True),
    )
    profile = offload.Profile((offload.LayerProfile(0.03, 0.06, 3 * GIB, regions=regions),) * 32)

    def plan(device: int, host: int | None, left: offload.Link) -> offload.Plan:
        return offload.plan(profile, device, left, max_host_bytes=host)

    [one] = plan_recipes(Prediction(PARTS, LINK, STREAMED), 100 * GIB, 60 * GIB, plan, 17 * GIB, [STREAMED]).recipes
    assert one.resident_bytes > 20 * GIB
    assert one.plan is not None
    assert one.plan.recompute_s > 0


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize(("seed", "host_gib"), [(0, None), (1, 14)])
def test_a_larger_budget_has_no_longer_step(seed: int, host_gib: int | None) -> None:
    """A plan for less memory fits as well; steps that differ by less than ``WORTH`` are as good as each other."""
    draw = random.Random(seed)
    link = offload.Link(rate := draw.uniform(20e9, 80e9), rate, 1.8 * rate)
    sizes = [draw.choice((1, 2, 4)) * GIB // 2 for _ in range(3)]
    regions = tuple(
        offload.RegionProfile(f"{number}", size, draw.uniform(0.01, 0.08), (number - 1,) if number else (), saved=True)
        for number, size in enumerate(sizes)
    )
    profile = offload.Profile((offload.LayerProfile.from_regions(regions, 0.15, 0.3),) * 4, loss_s=0.1)

    def plan(device: int, host: int | None, left: offload.Link) -> offload.Plan:
        return offload.plan(profile, device, left, max_host_bytes=host)

    prediction = Prediction(EVEN, link, RESIDENT, arithmetic_s=0.05)
    host = None if host_gib is None else host_gib * GIB
    shortest = dict.fromkeys(RECIPES, math.inf)
    for budget_gib in range(6, 40, 4):
        for one in plan_recipes(prediction, budget_gib * GIB, host, plan, 5 * GIB).recipes:
            if not one.reason:
                assert one.step_s <= shortest[one.recipe] * (1 + WORTH), (budget_gib, one.recipe)
                assert one.device_bytes <= budget_gib * GIB
                assert host is None or one.host_bytes <= host
                shortest[one.recipe] = min(shortest[one.recipe], one.step_s)
    assert min(shortest.values()) < math.inf


@pytest.mark.parametrize("among_layers", [True, False])
@pytest.mark.parametrize("recipe", [ALL_CONSUMED, STREAMED], ids=["consumed", "resident"])
def test_gradients_that_were_measured_in_the_layers_count_once(recipe: Recipe, among_layers: bool) -> None:
    """Else the recipe in place would not fit where the activations' own plan does."""
    profile = offload.Profile((offload.LayerProfile(0.1, 0.2, GIB, (GIB,), workspace_bytes=20 * GIB),) * 4)
    with pytest.raises(TooLittleMemoryError) as error:
        offload.plan(profile, 1, SLOW)
    missing_bytes = 0 if among_layers else EVEN.gradient_bytes(recipe)
    made = plan_recipes(
        Prediction(EVEN, SLOW, recipe, 0, 0.0),
        EVEN.held_bytes(recipe) + error.value.least_bytes + missing_bytes,
        None,
        lambda device, _, link: offload.plan(profile, device, link),
        missing_bytes,
    )
    [found] = [one for one in made.recipes if one.recipe == recipe]
    assert not found.reason
    assert found.plan is not None
    assert found.device_bytes == EVEN.held_bytes(recipe) + missing_bytes + found.plan.peak_bytes


def test_resident_gradients_are_whole_at_the_end_of_backward() -> None:
    """However little activations need, and whichever part of the gradients was measured in the layers."""
    profile = offload.Profile((offload.LayerProfile(0.1, 0.2, GIB, (GIB,)),) * 4)
    prediction = Prediction(EVEN, SLOW, STREAMED, 0, 0.0)
    made = plan_recipes(
        prediction, 200 * GIB, None, lambda device, _, link: offload.plan(profile, device, link), 0, [STREAMED]
    )
    [found] = made.recipes
    assert found.device_bytes == EVEN.held_bytes(STREAMED, found.resident_bytes) + EVEN.gradient_bytes(STREAMED)
    assert found.device_bytes <= 200 * GIB


def test_state_that_is_resident_is_spread_over_backward() -> None:
    """What backward comes to last is resident first, and then every n-th parameter."""
    layer = LLAMA.layer_state[0]
    front, layers, behind = PARTS.copied_state(PARTS.most_resident(4 * GIB + 8 * layer))
    assert (front, behind) == (0, 4 * GIB)
    resident = [number for number, nbytes in enumerate(layers) if not nbytes]
    assert len(resident) == 8
    assert {after - before for before, after in pairwise(resident)} <= {3, 4, 5}
    assert PARTS.copied_state(0) == (4 * GIB, list(LLAMA.layer_state), 4 * GIB)
    assert PARTS.copied_state(60 * GIB) == (0, [0] * 32, 0)
    assert evenly(5) == [0, 4, 2, 1, 3]
    assert all(sorted(evenly(count)) == [*range(count)] for count in range(40))


def test_of_recipes_that_are_as_good_as_each_other_the_one_with_the_least_traffic_is_followed() -> None:
    """A predicted second is not exact, and a change takes many steps to be worth it."""

    def of(step_s: float, device_bytes: int) -> offload.TrainingPlan:
        first, second = RecipePlan(RESIDENT, None, step_s, device_bytes, 0), RecipePlan(STREAMED, None, 1.0, 1000, 0)
        return offload.TrainingPlan((first, second), 2000, None)

    assert of(1.005, 1000).chosen.recipe == RESIDENT
    assert of(1.02, 1000).chosen.recipe == STREAMED
    assert of(1.0, 1010).least.recipe == RESIDENT
    assert of(1.0, 1030).least.recipe == STREAMED
