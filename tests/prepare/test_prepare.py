"""A whole training within a memory budget: the same parameters whatever recipe is in place, and when it changes."""

import gc
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lab import Lab
from models import WIDTH, assert_same, build, through
from torch import nn

import offload
from offload.planning.recipes import plan_recipes
from offload.planning.training_bytes import RECIPES, Recipe

STEPS = 6
WORDS = 16384
"""So many that weights, gradients and optimizer state are larger than activations."""
KIB = 1 << 10
PREPARE = sys.modules["offload.prepare"]  # the function has its name
PREPARED = sys.modules["offload.prepared"]
RESIDENT, STREAMED, CONSUMED, ALL_CONSUMED, ALL_STREAMED, ON_HOST = RECIPES


def chosen(recipe: Recipe) -> Callable[[offload.TrainingPlan], Any]:
    """Chooses a recipe of a plan, in place of the first one that leaves room for activations."""
    return lambda plan: next(one for one in plan.recipes if one.recipe == recipe)


class Model(nn.Module):
    """An embedding, decoder layers, and a head."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers, _ = build("decoder", layers, torch.device("cpu"))
        torch.manual_seed(1)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = through(self.layers, self.embed(tokens))
        return nn.functional.cross_entropy(self.head(y).flatten(0, -2), tokens.flatten())


Made = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


TRAINED: dict[Any, tuple[list[torch.Tensor], list[Recipe]]] = {}
"""What trainings without a budget gave, which many tests compare with."""


def train(lab: Lab, budget: int | None, make: Made = adamw, **options: Any) -> tuple[list[torch.Tensor], list[Recipe]]:
    """The parameters after some steps, and the recipe of each step."""
    if budget is not None:
        return run(lab, budget, make, **options)
    key = (lab.device, make, *sorted(options.items()))
    TRAINED[key] = TRAINED.get(key) or run(lab, None, make, **options)
    return TRAINED[key]


def run(
    lab: Lab,
    budget: int | None,
    make: Made,
    *,
    clip: bool = False,
    accumulate: int = 1,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    after_step: Callable[[], object] = lambda: None,
    plans: list[offload.TrainingPlan] | None = None,
    again: int | None = None,
    **options: Any,
) -> tuple[list[torch.Tensor], list[Recipe]]:
    model = Model().to(dtype)
    if budget is None:
        model.to(lab.device)
    optimizer = make(model)
    if budget is None and options:
        offload.stream_optimizer(optimizer, resident_bytes=1 << 40, **options)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    prepared = None
    generator = torch.Generator().manual_seed(2)
    recipes = []
    for step in range(steps):
        if budget is not None and step in (0, again):
            if prepared is not None:
                prepared.remove()
            prepared = offload.prepare(model, optimizer, budget, device=lab.device, min_bytes=0, **options)
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
        if plans is not None:
            plans.append(prepared.plan)
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


def weight_bytes(model: nn.Module | None = None) -> int:
    return sum(parameter.nbytes for parameter in (model or Model()).parameters())


def test_all_fits(lab: Lab) -> None:
    found, recipes = train(lab, 1 << 30)
    assert_same(train(lab, None)[0], found)
    assert recipes == [RESIDENT] * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("clip", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_state_on_the_host(clip: bool, lab: Lab) -> None:
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


@pytest.mark.drawn(1)
@pytest.mark.parametrize("again", [None, pytest.param(4, marks=pytest.mark.slow)], ids=["", "prepared again"])
@pytest.mark.parametrize("last", [RESIDENT, STREAMED], ids=["resident", "streamed"])
def test_master_weights(last: Recipe, again: int | None, lab: Lab) -> None:
    """On the device and on the host; the table counts the 16 bits that bfloat16 lacks. No remove() rounds them."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "state_dtype": torch.float32, "master_weights": True}
    options |= {"steps": 8} if again else {}
    plans: list[offload.TrainingPlan] = []
    budget = 1 << 30 if last == RESIDENT else 2 * weight_bytes()
    found, recipes = train(lab, budget, plans=plans, again=again, **options)
    assert_same(train(lab, None, **options)[0], found)
    assert recipes[-1] == last
    assert {sum(one.state_bytes) for one in plans[0].recipes} == {5 * weight_bytes() // 2}  # in float32, and a half


def test_auto_is_what_is_left_and_what_the_model_has(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.measuring.memory_left.left_bytes", lambda _: 1 << 30)
    model = Model().to(lab.device)
    model(torch.ones(1, 4, dtype=torch.long, device=lab.device)).backward()
    with offload.prepare(model, adamw(model), "auto", device=lab.device, min_bytes=0) as prepared:
        assert prepared.plan.memory_budget == (1 << 30) + 2 * weight_bytes()  # and gradients


def test_it_begins_with_little_and_changes_to_what_fits(lab: Lab) -> None:
    """The first recipe leaves room for activations that nobody knows yet; all parameters are the same after."""
    budget = 6 * weight_bytes()  # a GPU steps all parameters at once
    found, recipes = train(lab, budget)
    assert_same(train(lab, None)[0], found)
    assert recipes[0] != RESIDENT
    assert recipes[-1] == RESIDENT


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (STREAMED, CONSUMED),
        (CONSUMED, STREAMED),
        (STREAMED, RESIDENT),
        (RESIDENT, CONSUMED),
        (ALL_CONSUMED, RESIDENT),
        (ALL_CONSUMED, CONSUMED),
        (ALL_STREAMED, ALL_CONSUMED),
    ],
    ids=str,
)
def test_a_change_of_recipes_rounds_no_state(
    before: Recipe, after: Recipe, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments in float32 of parameters in bfloat16, whose next step shows what they have lost. Pinned state remains."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "state_dtype": torch.float32}
    expected = train(lab, None, **options)[0]
    monkeypatch.setattr(PREPARE, "RECIPES", (after, before))
    monkeypatch.setattr(PREPARED, "_first_of", chosen(before))
    monkeypatch.setattr(PREPARED.TrainingPlan, "chosen", property(lambda plan: plan.recipes[0]))
    pinned: list[int] = []
    options |= {"step_in_backward": True, "after_step": lambda: pinned.append(lab.pool.pinned_bytes)}
    found, recipes = train(lab, 1 << 30, **options)
    assert (recipes[0], recipes[-1]) == (before, after)
    assert_same(expected, found)
    assert before == RESIDENT or pinned[-1] <= pinned[0] + weight_bytes()  # the state has twice as many


def test_a_change_of_recipes_needs_no_memory_for_the_state(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the device nor, pinned, a second time on the host."""
    monkeypatch.setattr(PREPARE, "RECIPES", (STREAMED, CONSUMED))
    monkeypatch.setattr(PREPARED, "_first_of", chosen(STREAMED))
    monkeypatch.setattr(PREPARED.TrainingPlan, "chosen", property(lambda plan: plan.recipes[1]))
    model = Model().to(lab.device)
    optimizer = adamw(model)
    state = 2 * weight_bytes()
    options: dict[str, Any] = {"device": lab.device, "min_bytes": 0, "step_in_backward": True}
    with offload.prepare(model, optimizer, 7 * weight_bytes() // 2, state + (4 << 20), **options) as prepared:
        peaks = []
        while prepared.recipe != CONSUMED:
            model(torch.ones(1, 4, dtype=torch.long, device=lab.device)).backward()
            with offload.memory_meter(lab.device) as meter:
                optimizer.step()
            peaks.append(meter.peak_bytes)
            optimizer.zero_grad()
            assert len(peaks) < STEPS
    assert max(peaks[1:]) < 3 * state // 4  # slots and what a chunk's step allocates


def test_a_recipe_that_no_change_leads_to_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps, the host would have the weights and all of the state, of which that recipe has a part."""
    monkeypatch.setattr(PREPARE, "RECIPES", (ALL_STREAMED, STREAMED))
    monkeypatch.setattr(PREPARED, "_first_of", chosen(STREAMED))
    first = property(lambda plan: next(one for one in plan.recipes if not one.reason))
    monkeypatch.setattr(PREPARED.TrainingPlan, "chosen", first)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    budget, most = (share * weight_bytes(model) // 2 for share in (8, 5))
    with offload.prepare(model, adamw(model), budget, most, layers=[*model], device="cpu", min_bytes=0) as prepared:
        for _ in range(4):
            model(torch.ones(4, 256)).square().mean().backward()
            prepared._optimizers[0].step()
        assert prepared.recipe == STREAMED
        assert prepared.plan.recipes[0].reason == "a change to it, between two steps, needs more memory"


def test_weights_that_move_to_the_host_take_the_place_of_idle_memory(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What activations had pinned before counts to ``max_host_bytes``, as the weights do."""
    monkeypatch.setattr(PREPARE, "RECIPES", (CONSUMED, ALL_CONSUMED))
    monkeypatch.setattr(PREPARED, "_first_of", chosen(CONSUMED))
    monkeypatch.setattr(PREPARED.TrainingPlan, "chosen", property(lambda plan: plan.recipes[1]))
    model = Model()
    optimizer = adamw(model)
    most = 2 * weight_bytes() + (8 << 20)
    lab.pool.reserve(most)
    options: dict[str, Any] = {"device": lab.device, "min_bytes": 0, "step_in_backward": True}
    pinned = []
    with offload.prepare(model, optimizer, 1 << 30, most, **options) as prepared:
        for _ in range(STEPS):
            model(torch.ones(1, 4, dtype=torch.long, device=lab.device)).backward()
            optimizer.step()
            weights = prepared.stats().get("weights")
            pinned.append(lab.pool.pinned_bytes + (weights.weight_bytes if weights else 0))
        assert prepared.recipe == ALL_CONSUMED
    assert max(pinned) <= most


@pytest.mark.parametrize("zero_late", [False, True])
def test_a_step_runs_beside_the_next_forward(zero_late: bool, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer waits for its own parameters, but in the steps that are measured."""
    monkeypatch.setattr(PREPARE, "RECIPES", (STREAMED,))
    model = Model()
    optimizer = adamw(model)
    unread: list[int] = []
    tokens = torch.arange(8, device=lab.device).view(2, 4)
    with offload.prepare(model, optimizer, 1 << 30, device=lab.device, min_bytes=0, overlap_forward=True) as prepared:
        model.layers[0].register_forward_hook(
            lambda *_: unread.append(sum(type(one) is not nn.Parameter for one in model.parameters()))
        )
        for _ in range(STEPS):
            loss = model(tokens)
            if zero_late:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not zero_late:
                optimizer.zero_grad()
            assert prepared.state == "following" or not unread[-1]
        assert unread[-1] == sum(1 for layer in model.layers[1:] for _ in layer.parameters()) + 1
        assert not all(type(one) is nn.Parameter for one in model.parameters())
        prepared.synchronize()
        assert all(type(one) is nn.Parameter for one in model.parameters())


@pytest.mark.parametrize(("recipe", "overlaps"), [(STREAMED, True), (CONSUMED, False), (ALL_STREAMED, False)], ids=str)
def test_the_next_forward_is_overlapped_where_a_step_is_left(
    recipe: Recipe, overlaps: bool, lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PREPARE, "RECIPES", (recipe,))
    caplog.set_level("INFO", "offload")
    options = {"step_in_backward": True, "overlap_forward": True}
    assert_same(train(lab, None)[0], train(lab, 1 << 30, **options)[0])
    line = f"overlap_forward: no step is left to run beside the next forward with {recipe}"
    assert (line in caplog.messages) is not overlaps


def test_parameters_that_cannot_be_overlapped_are_refused(lab: Lab) -> None:
    model = Model()
    model.head.weight = type("Own", (nn.Parameter,), {})(model.head.weight.detach())
    with pytest.raises(
        ValueError, match=r"overlap_forward must be False unless each parameter is an nn.Parameter .*Own"
    ):
        offload.prepare(model, adamw(model), 1 << 30, device=lab.device, overlap_forward=True)


IN_PLACE = [
    ((ON_HOST,), {}),
    ((ALL_CONSUMED,), {"accumulate": 2, "step_in_backward": True}),
    ((ALL_STREAMED,), {"accumulate": 2, "clip": True}),
    ((CONSUMED, ON_HOST), {"accumulate": 2, "step_in_backward": True}),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("recipes", "options"), IN_PLACE, ids=str)
def test_each_recipe(
    recipes: tuple[Recipe, ...], options: dict[str, Any], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PREPARE, "RECIPES", recipes)
    found, followed = train(lab, 1 << 30, **options)
    plain = {name: value for name, value in options.items() if name != "step_in_backward"}
    if recipes[0].gradients == "consumed":
        assert_same(train(lab, None, **plain)[0], found)
    else:
        assert_trained(train(lab, None, **plain)[0], found, lab)  # a GPU sums norms otherwise
    assert followed[-1] == recipes[0]
    assert len(recipes) > 1 or set(followed) == {recipes[0]}


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


def test_what_is_left_for_activations(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of host memory what the recipe does not hold; and gradients of streamed weights are on no device."""
    monkeypatch.setattr(PREPARE, "RECIPES", (ALL_STREAMED,))
    model, most = Model(), 1 << 28
    with offload.prepare(model, adamw(model), 1 << 30, device=lab.device, min_bytes=0, max_host_bytes=most) as prepared:
        model(torch.ones(2, 4, dtype=torch.long, device=lab.device)).backward()
        assert prepared.host_bytes() == most - prepared.plan.recipes[0].host_bytes
        assert prepared.gradient_bytes() == model.embed.weight.nbytes + model.head.weight.nbytes


def followed(model: Model, budget: int, most: int | None = None) -> offload.PreparedTraining:
    """A training of equal microbatches that follows its plan."""
    optimizer = adamw(model)
    prepared = offload.prepare(model, optimizer, budget, most, device="cpu", min_bytes=0)
    for _ in range(5):
        model(torch.ones(1, 4, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert prepared.state == "following"
    return prepared


def test_activations_are_left_no_memory_of_state_that_the_host_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREPARE, "RECIPES", (STREAMED,))
    model = Model()
    weights = weight_bytes(model)
    with followed(model, 5 * weights, weights) as prepared:
        assert prepared.activations is not None
        on_device = prepared.plan.chosen.state_bytes[0]
        assert on_device > weights // 2
        assert prepared.activations.memory_budget <= 5 * weights - weights - on_device


def test_activations_are_planned_for_the_link_that_the_recipe_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREPARE, "RECIPES", (STREAMED,))
    left = offload.Link(1e9, 1e9, 1.5e9)

    def leaves_less(*given: Any) -> offload.TrainingPlan:
        made = plan_recipes(*given)
        return replace(made, recipes=tuple(replace(one, plan=replace(one.plan, link=left)) for one in made.recipes))

    monkeypatch.setattr(PREPARED, "plan_recipes", leaves_less)
    with followed(Model(), 1 << 30) as prepared:
        assert prepared.activations is not None
        assert prepared.activations.link == left


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    ],
    ids=["SGD", "Adafactor"],
)
def test_other_optimizers(make: Made, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(lab, None, make)[0]
    assert_same(expected, train(lab, 1 << 30, make)[0])
    monkeypatch.setattr(PREPARED, "FIRST_SHARE", 0.0)  # from the host to the device
    assert_trained(expected, train(lab, 1 << 30, make)[0], lab)


@pytest.mark.slow
def test_state_that_is_there_already(lab: Lab) -> None:
    def resumed(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    expected = train(lab, None, resumed)[0]
    assert_trained(expected, train(lab, 1 << 30, resumed)[0], lab)  # its first step is made on the CPU


def test_once_removed_and_deleted_nothing_waits_for_the_collector(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next model of the program has the memory at once. The link is measured once, although weights moved."""
    measured: list[torch.device] = []
    link = offload.measure_link(lab.device)
    monkeypatch.setattr("offload.measuring.follow_plan.measure_link", lambda device: measured.append(device) or link)
    monkeypatch.setattr(PREPARED, "_first_of", chosen(ALL_STREAMED))
    model = Model()
    optimizer = adamw(model)
    with offload.prepare(model, optimizer, 1 << 30, device=lab.device, min_bytes=0) as prepared:
        assert "chosen" not in str(prepared.plan)
        for _ in range(STEPS):
            model(torch.ones(1, 4, dtype=torch.long, device=lab.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert "chosen" in str(prepared.plan)
        assert re.fullmatch(r"<TrainingPlan: \d of \d recipes fit into 1\.00 GiB>", repr(prepared.plan))
        assert prepared.recipe.weights == "resident"
        assert prepared.activations is not None
    assert len(measured) == 1
    lives = [weakref.ref(one) for one in (model, model.layers[0], model.head.weight, optimizer, prepared)]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer, prepared
        assert [one() for one in lives] == [None] * len(lives)
    finally:
        gc.enable()


def test_a_change_of_recipes_does_not_hold_what_was_needed_before_against_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step's last microbatch has the memory of state on the host, which is on the device after the step."""
    monkeypatch.setattr(PREPARE, "RECIPES", (RESIDENT, STREAMED))
    monkeypatch.setattr(PREPARED, "_first_of", chosen(STREAMED))
    model = Model(6)
    optimizer = adamw(model)
    tokens = torch.ones(1, 256, dtype=torch.long)
    with offload.memory_meter("cpu") as meter:
        for _ in range(2):
            model(tokens).backward()
    optimizer.zero_grad()
    budget = 3 * weight_bytes(model) + meter.peak_bytes - (2 << 20)  # less than a step needs that keeps everything
    with offload.prepare(model, optimizer, budget, device="cpu", min_bytes=0) as prepared:  # a warning is an error
        for _ in range(4):
            for _ in range(3):  # two are measured, and the third keeps everything
                model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert prepared.recipe == RESIDENT


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"memory_budget must hold weights, .*got 64.00 KiB and .* GiB of host memory"):
        offload.prepare(model, adamw(model), 64 * KIB, device="cpu")
    with monkeypatch.context() as patch:  # where the system does not say what it has left
        patch.setattr("offload.host.pool.available_bytes", lambda: None)
        with pytest.raises(ValueError, match=r"got 64\.00 KiB and no limit of host memory"):
            offload.prepare(model, adamw(model), 64 * KIB, device="cpu")
    with pytest.raises(ValueError, match=r"optimizer streamed: needs .* of host memory without activations; weights"):
        offload.prepare(model, adamw(model), 3 * weight_bytes(), 64 * KIB, device="cpu")
    assert before == [parameter.data_ptr() for parameter in model.parameters()]
    assert not any("forward" in vars(layer) for layer in model.layers)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("streams", [False, True], ids=["weights resident", "weights streamed by the program"])
def test_state_that_is_on_the_host_needs_no_more_there(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second handle adopts it, on a system that has nothing left."""
    monkeypatch.setattr("offload.host.pool._pools", {})
    monkeypatch.setattr(PREPARE, "RECIPES", (ALL_STREAMED if streams else STREAMED,))
    model = Model()
    optimizer = adamw(model)
    if streams:
        offload.stream_weights(model.layers, "cpu")
    tokens = torch.ones(1, 4, dtype=torch.long)
    for again in (False, True):
        if again:
            monkeypatch.setattr("offload.host.pool.available_bytes", lambda: 0)
        with offload.prepare(model, optimizer, 3 * weight_bytes(), device="cpu", min_bytes=0) as prepared:
            for _ in range(2):
                model(tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert prepared.plan.recipes[0].state_bytes[1]


class Packed(torch.Tensor):
    """As libraries hold quantized weights."""


def test_weights_that_cannot_be_streamed_remain_on_the_device() -> None:
    model = Model()
    model.layers[1].codes = nn.Parameter(torch.ones(3).as_subclass(Packed), requires_grad=False)
    optimizer = torch.optim.AdamW(one for one in model.parameters() if one.requires_grad)
    with offload.prepare(model, optimizer, "1GiB", device="cpu") as prepared:
        assert {one.recipe.weights for one in prepared.plan.recipes} == {"resident"}
    why = r"Weights cannot be streamed: layer 1's codes must be a plain nn\.Parameter, got a Packed\. Give more, or"
    with pytest.raises(ValueError, match=why):
        offload.prepare(model, optimizer, 64 * KIB, device="cpu")


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
    with pytest.raises(ValueError, match=r"memory_budget must be .* less than 1024\.0 TiB, got 1180591620717411303424"):
        offload.prepare(model, adamw(model), 1 << 70)
    with pytest.raises(ValueError, match="master_weights must be False without state_dtype"):
        offload.prepare(model, adamw(model), "1GiB", master_weights=True)
    for flag in ("step_in_backward", "overlap_forward", "in_pieces"):
        with pytest.raises(TypeError, match=f"{flag} must be True or False, got "):
            offload.prepare(model, adamw(model), "1GiB", **{flag: "never"})
    with pytest.raises(TypeError, match=r"got LBFGS, .*; leave the optimizer as it is, and call offload_layers\("):
        offload.prepare(model, torch.optim.LBFGS(model.parameters()), "1GiB")
    differentiable = torch.optim.AdamW(model.parameters(), differentiable=True)
    with pytest.raises(ValueError, match="optimizer must not be differentiable, but this AdamW is"):
        offload.prepare(model, differentiable, "1GiB")
    error = pytest.raises(ValueError, match="optimizer must not be streamed yet, but this AdamW is; remove")
    with offload.stream_optimizer(adam := adamw(model)), error:
        offload.prepare(model, adam, "1GiB")
    with pytest.raises(ValueError, match=r"layers must be parts of the model, but layer 0 \(Linear\) has parameters"):
        offload.prepare(model, adamw(model), "1GiB", layers=[other])
    with pytest.raises(ValueError, match="layers must be the name of one list of modules"):
        offload.prepare(model, adamw(model), "1GiB", layers="blocks")
    empty = Model().to("meta")
    with pytest.raises(ValueError, match=r"\.weight must have values, got .* meta tensor; .* materialise the model"):
        offload.prepare(empty, adamw(empty), "1GiB")
    with pytest.raises(ValueError, match="each parameter of the optimizer must have values"):
        offload.stream_optimizer(adamw(empty))


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


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("copies", "set_aside"),
    [(1, 0), (2, 2 << 20)],  # the gradient of the largest parameter but the first, if its state is on the host
    ids=["half", "all but what is between tensors"],
)
def test_the_device_has_the_state_that_the_host_cannot_hold(
    copies: int, set_aside: int, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PREPARE, "RECIPES", (CONSUMED,))
    most = copies * weight_bytes()
    tables: list[str] = []
    prepared = offload.prepare

    def prepare(*given: Any, **options: Any) -> offload.PreparedTraining:
        made = prepared(*given, max_host_bytes=most, **options)
        tables.append(str(made.plan))
        assert made.resident_bytes == made.plan.recipes[0].state_bytes[0] > 0
        stats = made.stats()["optimizer"]
        assert isinstance(stats, offload.OptimizerStats)
        assert (stats.resident_bytes, stats.host_bytes - set_aside) == made.plan.recipes[0].state_bytes
        return made

    monkeypatch.setattr(offload, "prepare", prepare)
    pinned: list[int] = []
    found, _ = train(
        lab, 5 * weight_bytes(), steps=4, step_in_backward=True, after_step=lambda: pinned.append(lab.pool.pinned_bytes)
    )
    assert_same(train(lab, None, steps=4)[0], found)
    assert max(pinned) <= most
    assert "state on device     on host" in tables[0]


def test_what_neither_side_can_hold_is_refused() -> None:
    model = Model()
    nbytes = weight_bytes()
    with pytest.raises(ValueError, match=r"needs .* of device memory, or .* of host memory without activations"):
        offload.prepare(model, adamw(model), 2 * nbytes, nbytes, device="cpu", step_in_backward=True)


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "before", "after"),
    [
        (STREAMED, 0, 1),
        (STREAMED, 2, 1),
        (CONSUMED, 1, 0),
        (CONSUMED, 1, 2),
        (ALL_CONSUMED, 0, 1),
        (ALL_CONSUMED, 1, 0),
    ],
    ids=str,
)
def test_another_part_of_the_state_is_resident(
    recipe: Recipe, before: int, after: int, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (0, 2 * (weight_bytes() - 2 * WORDS * WIDTH * 4), 2 * weight_bytes())

    def with_part(*given: Any) -> offload.TrainingPlan:
        made = plan_recipes(*given)
        [one] = made.recipes
        return replace(made, recipes=(replace(one, state_bytes=(parts[after], parts[2] - parts[after])),))

    monkeypatch.setattr(PREPARE, "RECIPES", (recipe,))
    monkeypatch.setattr(PREPARED, "plan_recipes", with_part)
    monkeypatch.setattr("offload.planning.recipes.TrainingBytes.least_resident", lambda *_: parts[before])
    held: list[tuple[int, int]] = []
    prepare = offload.prepare

    def watched(*given: Any, **options: Any) -> offload.PreparedTraining:
        made.append(prepare(*given, **options))
        return made[-1]

    made: list[offload.PreparedTraining] = []
    monkeypatch.setattr(offload, "prepare", watched)

    def look() -> None:
        stats = made[-1].stats()["optimizer"]
        assert isinstance(stats, offload.OptimizerStats)
        held.append((stats.resident_bytes, stats.host_bytes))

    found, recipes = train(lab, 1 << 30, steps=5, step_in_backward=True, after_step=look)
    assert_same(train(lab, None, steps=5)[0], found)
    assert recipes == [recipe] * 5
    assert held[0] == (parts[before], parts[2] - parts[before])
    assert held[-1] == (parts[after], parts[2] - parts[after])
    assert lab.pool.pinned_bytes <= parts[2] + (8 << 20)  # what was pinned for the state is not pinned twice


@pytest.mark.drawn(1)
@pytest.mark.parametrize("foreach", [False, True])
def test_what_the_step_itself_allocates_counts(foreach: bool) -> None:
    """PyTorch's ``foreach`` AdamW allocates as much as all weights have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 64), *(nn.Linear(64, 64) for _ in range(16)), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    weights = sum(one.nbytes for one in model.parameters())
    options: dict[str, Any] = {"layers": [*model][1:-1], "device": "cpu", "min_bytes": 0}
    prepared = offload.prepare(model, optimizer, round(4.7 * weights), **options)
    peaks = []
    for _ in range(5):
        model(torch.zeros(1, 2, dtype=torch.int64)).square().mean().backward()
        gradients = sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)
        held = prepared._training.held_bytes(prepared.recipe, prepared.resident_bytes)
        with offload.memory_meter("cpu") as meter:
            optimizer.step()
        peaks.append(held + gradients + meter.peak_bytes)
        optimizer.zero_grad()
    assert prepared.recipe == (STREAMED if foreach else RESIDENT)
    assert ("optimizer.step() needs" in str(prepared.plan)) == foreach
    assert max(peaks) <= 4.7 * weights
    prepared.remove()
