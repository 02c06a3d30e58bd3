"""Several optimizers, each with parameters of its own: every state counts, and recipes change between whole steps."""

import sys
import warnings
from typing import Any

import pytest
import torch
from lab import Lab
from models import assert_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import offload
from offload.planning.training_bytes import RECIPES, Recipe

RESIDENT, STREAMED, CONSUMED, ALL_CONSUMED, ALL_STREAMED, _ = RECIPES
WIDTH = 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def optimizers_of(model: Model) -> list[torch.optim.Optimizer]:
    """Of matrices and of vectors: each layer has parameters of both."""
    matrices, vectors = ([one for one in model.parameters() if (one.ndim > 1) is large] for large in (True, False))
    return [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.SGD(vectors, lr=1e-1, momentum=0.9)]


def train(
    lab: Lab, budget: int | None, order: tuple[int, ...] = (0, 1), steps: int = 6, **options: Any
) -> tuple[list[torch.Tensor], list[Recipe]]:
    """Parameters and state after some steps, and the recipe of each step."""
    model = Model() if budget else Model().to(lab.device)
    optimizers = optimizers_of(model)
    prepared, recipes = None, []
    if budget is not None:
        prepared = offload.prepare(model, optimizers, budget, device=lab.device, min_bytes=0, **options)
    for number in range(steps):
        if prepared is not None:
            recipes.append(prepared.recipe)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to(lab.device)
        model(x).backward()
        for one in order:
            assert prepared is None or prepared.recipe == recipes[-1], "not all optimizers have stepped"
            optimizers[one].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    entries = [entry for state in states for _, entry in sorted(state.items())]
    state = [torch.as_tensor(one) for entry in entries for _, one in sorted(entry.items())]
    if prepared is not None:
        stats = prepared.stats()
        assert stats.get("optimizer", offload.OptimizerStats()).steps % 2 == 0
        assert ("weights" in stats) == (prepared.recipe.weights == "streamed")
        prepared.remove()
    found = [one.detach().cpu().clone() for one in [*model.parameters(), *state]]
    model.double()  # is refused where weights are streamed
    return found, recipes


def test_one_has_a_number_alone(lab: Lab) -> None:
    """As CLIP's scale of logits: what a step allocates is measured with larger parameters."""
    model = Model().to(lab.device)
    model.scale = nn.Parameter(torch.ones((), device=lab.device))
    optimizers = [torch.optim.AdamW(model.layers.parameters()), torch.optim.AdamW([model.scale])]
    with offload.prepare(model, optimizers, 1 << 30, device=lab.device, min_bytes=0) as prepared:
        (model(torch.ones(4, WIDTH, device=lab.device)) * model.scale).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert prepared.recipe == RESIDENT
    assert model.scale != 1


@pytest.mark.drawn(3)
@pytest.mark.parametrize("order", [(0, 1), pytest.param((1, 0), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(RESIDENT, CONSUMED), (STREAMED, RESIDENT)]),
        (CONSUMED, ALL_STREAMED),
        (ALL_STREAMED, STREAMED),
    ],
    ids=str,
)
def test_a_change_of_recipes_waits_for_all_optimizers(
    before: Recipe, after: Recipe, order: tuple[int, ...], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["offload.prepare"], "RECIPES", (after, before))
    prepared = sys.modules["offload.prepared"]
    monkeypatch.setattr(prepared, "_first_of", lambda plan: plan.recipes[1])
    monkeypatch.setattr(prepared.TrainingPlan, "chosen", property(lambda plan: plan.recipes[0]))
    found, recipes = train(lab, 1 << 30, order, step_in_backward=True)
    assert (recipes[0], recipes[-1]) == (before, after)
    assert_same(train(lab, None, order)[0], found)


@pytest.mark.parametrize("later", [False, True], ids=["at first", "in training"])
def test_a_recipe_for_which_the_host_has_no_memory_leaves_nothing_in_place(
    later: bool, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses more when the state of one optimizer has been moved."""
    prepared, made = sys.modules["offload.prepared"], list[object]()
    if later:
        monkeypatch.setattr(sys.modules["offload.prepare"], "RECIPES", (STREAMED, RESIDENT))
        monkeypatch.setattr(prepared, "_first_of", lambda plan: plan.recipes[1])
        monkeypatch.setattr(prepared.TrainingPlan, "chosen", property(lambda plan: plan.recipes[0]))
    else:
        monkeypatch.setattr(sys.modules["offload.prepare"], "RECIPES", (STREAMED,))

    def refused(*given: Any, **options: Any) -> Any:
        made.append(given)
        if len(made) > 1:
            raise offload.HostMemoryError("no more")
        return offload.stream_optimizer(*given, **options)

    monkeypatch.setattr(prepared, "stream_optimizer", refused)
    with pytest.raises(offload.HostMemoryError, match="no more"):
        train(lab, 1 << 30)
    assert len(made) == 2
    monkeypatch.undo()
    model = Model().to(lab.device)
    optimizers = optimizers_of(model)
    made.clear()
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["offload.prepare"], "RECIPES", (STREAMED,))
        patch.setattr(prepared, "stream_optimizer", refused)
        with pytest.raises(offload.HostMemoryError):
            offload.prepare(model, optimizers, 1 << 30, device=lab.device, min_bytes=0)
    offload.prepare(model, optimizers, 1 << 30, device=lab.device, min_bytes=0).remove()


def test_a_warning_that_is_an_error_leaves_nothing_in_place(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both optimizers warn that a backward was cut off when some of their parameters had made their step."""
    monkeypatch.setattr(sys.modules["offload.prepare"], "RECIPES", (CONSUMED,))
    model, x = Model().to(lab.device), torch.ones(4, WIDTH, device=lab.device)
    optimizers = optimizers_of(model)
    prepared = offload.prepare(model, optimizers, 1 << 30, device=lab.device, min_bytes=0, step_in_backward=True)

    def step() -> None:
        model(x).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()

    def stop(_: torch.Tensor) -> None:
        raise ValueError("stop")

    for _ in range(2):
        step()
    with (
        model.layers[0].register_forward_hook(lambda *given: given[-1].register_hook(stop) and None),
        pytest.raises(ValueError, match="stop"),
    ):
        model(x).backward()
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="must belong to one step"):
        prepared.remove()
    prepared.remove()
    model.zero_grad()
    for one in optimizers:
        one.load_state_dict(one.state_dict())  # to the device: remove() leaves state on the host
    step()


def test_the_state_of_all_optimizers_counts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights, gradients and the state of one, the budget would hold everything."""
    # No change of recipes, in which trials of the optimizers take more than this model has.
    monkeypatch.setattr("offload.prepared.FIRST_SHARE", 0.6)
    if lab.device.type != "cpu":
        return
    model = Model()
    halves = [[one for layer in model.layers[part] for one in layer.parameters()] for part in (slice(3), slice(3, 6))]
    optimizers = [torch.optim.AdamW(half, lr=1e-2) for half in halves]
    weights = sum(one.nbytes for one in model.parameters())
    budget = int(3.8 * weights)  # weights, gradients and both states are 4 times the weights
    with (
        offload.prepare(model, optimizers, budget, device=lab.device, min_bytes=0) as prepared,
        offload.memory_meter(lab.device) as meter,
    ):
        for _ in range(6):
            model(torch.ones(4, WIDTH)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert prepared.recipe.optimizer == "streamed"
    assert weights + meter.peak_bytes <= budget


def test_streamed_weights_are_stepped_in_backward_by_one_optimizer_alone(lab: Lab) -> None:
    model = Model()
    with offload.prepare(
        model, optimizers_of(model), 1 << 30, device=lab.device, min_bytes=0, step_in_backward=True
    ) as prepared:
        planned = [one.recipe for one in prepared.plan.recipes]
    assert CONSUMED in planned
    assert ALL_CONSUMED not in planned


def test_weights_remain_on_the_device_where_each_rank_chooses_for_itself(lab: Lab) -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = Model()
    try:
        with offload.prepare(model, torch.optim.AdamW(model.parameters()), 1 << 30, device=lab.device) as prepared:
            assert {one.recipe.weights for one in prepared.plan.recipes} == {"resident"}
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("state_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("in_backward", [False, True])
def test_recipes_are_those_that_the_arguments_allow(
    state_dtype: torch.dtype | None, in_backward: bool, lab: Lab
) -> None:
    """In backward parameters are stepped if that is asked for, and the CPU steps in the parameters' own dtype."""
    options: dict[str, Any] = {"state_dtype": state_dtype, "step_in_backward": in_backward}
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with offload.prepare(model, optimizer, 1 << 30, device=lab.device, min_bytes=0, **options) as prepared:
        planned = [one.recipe for one in prepared.plan.recipes]
    assert any(one.gradients == "consumed" for one in planned) == in_backward
    assert any(one.optimizer == "cpu" for one in planned) == (state_dtype is None)


def test_refused(lab: Lab) -> None:
    model = Model()
    twice = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.layers[:1].parameters(), lr=0.1)]
    said = r"optimizers must hold different parameters, got 2 that two of them hold, the first of shape \(64, 64\)"
    with pytest.raises(ValueError, match=said):
        offload.prepare(model, twice, 1 << 30, device=lab.device)
    with pytest.raises(ValueError, match=r"or several in a list, got an empty one"):
        offload.prepare(model, [], 1 << 30, device=lab.device)


class TwoHeads(Model):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4096, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return sum(head(x).square().mean() for head in self.heads)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_the_gradient_of_a_sharded_head_is_not_planned_on_the_host(
    optimizers: int, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step sets it aside: PyTorch reduces it where it is."""
    monkeypatch.setattr(sys.modules["offload.prepare"], "RECIPES", (CONSUMED,))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = TwoHeads().to(lab.device)
        fully_shard(model.heads[1], mesh=init_device_mesh(lab.device.type, (2,)))
        layers, heads = [*model.layers.parameters()], [*model.heads.parameters()]
        parts = [[*layers, *heads]] if optimizers == 1 else [layers, heads]
        made = [torch.optim.AdamW(one) for one in parts]
        with offload.prepare(model, made, 16 << 20, device=lab.device, min_bytes=0, step_in_backward=True) as prepared:
            planned = prepared.plan.recipes[0]
            assert planned.host_bytes == planned.state_bytes[1]
            assert lab.pool.used_bytes == pytest.approx(planned.host_bytes, rel=0.01)
    finally:
        torch.distributed.destroy_process_group()


def test_each_optimizer_may_set_a_gradient_aside(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan counts the host memory for that."""
    monkeypatch.setattr(sys.modules["offload.prepare"], "RECIPES", (CONSUMED,))
    model = TwoHeads()
    parts = [
        [*layers.parameters(), *head.parameters()]
        for layers, head in zip((model.layers[:3], model.layers[3:]), model.heads, strict=True)
    ]
    optimizers = [torch.optim.AdamW(one) for one in parts]
    state_bytes = sum(2 * one.nbytes for one in model.parameters())
    with offload.prepare(
        model, optimizers, 32 << 20, device=lab.device, min_bytes=0, step_in_backward=True
    ) as prepared:
        planned = prepared.plan.recipes[0].host_bytes
        heads_bytes = sum(one.weight.nbytes for one in model.heads)
        assert state_bytes + heads_bytes <= lab.pool.used_bytes <= planned
        model(torch.randn(4, WIDTH, device=lab.device)).backward()
        for one in optimizers:
            one.step()
