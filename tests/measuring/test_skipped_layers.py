"""A memory budget for layers that the program skips, as LayerDrop does, or runs several times, and for larger steps."""

import re
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from lab import late_copies
from models import WIDTH, assert_same, build, through
from torch import nn

import offload
from offload.device.select import get_backend
from offload.measuring import follow_plan
from offload.measuring.compare_plans import ComparePlans
from offload.planning.profile import Link

LAYERS = 8
ALL: set[int] = set()


def step(
    layers: Sequence[nn.Module], x: torch.Tensor, skipped: set[int], outside_bytes: int = 0, *, to_none: bool = True
) -> tuple[list[torch.Tensor], int]:
    """Gradients of a step that skips some layers and needs so much memory outside of them, and its peak."""
    for layer in layers:
        layer.zero_grad(set_to_none=to_none)
    with offload.memory_meter("cpu") as meter:
        y = x
        for number, layer in enumerate(layers):
            y = y if number in skipped else layer(y)
        temporary = torch.empty(outside_bytes, dtype=torch.uint8)
        y.square().sum().backward()
        del temporary
    ran = [layer for number, layer in enumerate(layers) if number not in skipped]
    return [parameter.grad for layer in ran for parameter in layer.parameters()], meter.peak_bytes


def test_a_plan_is_followed_although_each_step_skips_a_layer() -> None:
    """A layer that was skipped while layers were timed costs what another one does, and its gradients' memory."""
    layers, _ = build("mlp", LAYERS, torch.device("cpu"))
    x = torch.rand(4, 64, WIDTH)
    budget = round(0.55 * step(layers, x, ALL)[1])
    with offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu") as handle:
        for skipped in ({1, 5}, {2}, {3, 4, 5}):
            step(layers, x, skipped)
            assert handle.state == "measuring"
        for skipped in ({3}, ALL, {6, 7}, ALL):
            found, peak_bytes = step(layers, x, skipped)
            assert handle.state == "following"
            assert peak_bytes <= budget
        assert handle.stats().offloaded_bytes > 0
        handle.remove()
        assert_same(step(layers, x, ALL)[0], found)
        estimated = [layer.workspace_bytes for layer in handle.plan.profile.layers]
    with offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu") as handle:
        for _ in range(3):
            step(layers, x, ALL)
        measured = [layer.workspace_bytes for layer in handle.plan.profile.layers]
        assert all(abs(one - other) <= x.nbytes for one, other in zip(estimated, measured, strict=True))


def test_a_plan_keeps_to_its_budget_where_the_last_layers_are_skipped_and_copies_come_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was to be released in a layer that does not run is released before backward, and reloaded no later."""
    monkeypatch.setattr(follow_plan, "measure_link", lambda _: Link(1e9, 1e9, 2e9))
    layers, _ = build("mlp", LAYERS, torch.device("cpu"))
    x = torch.rand(4, 64, WIDTH)
    budget = round(0.55 * step(layers, x, ALL)[1])
    with offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu") as handle:
        for _ in range(3):
            step(layers, x, ALL)
        before = handle.stats()
        with late_copies(0.002):
            peaks = []
            for skipped in ({7}, {6, 7}, {5, 6, 7}, {4, 5, 6, 7}):
                found, peak_bytes = step(layers, x, skipped)
                peaks.append(peak_bytes)
        assert max(peaks) <= budget
        assert handle.state == "following"
        stats = handle.stats() - before
        assert stats.late_reloads == 0 < stats.reloaded_bytes
        handle.remove()
        assert_same(step(layers, x, skipped)[0], found)


def test_the_gradients_of_skipped_layers_take_no_memory_where_they_are_there_already() -> None:
    layers, _ = build("mlp", LAYERS, torch.device("cpu"))
    x = torch.rand(4, 64, WIDTH)
    step(layers, x, ALL)
    estimated, measured = [], []
    for found, steps in ((estimated, ({1, 5}, {2}, {3, 4, 5}, ALL)), (measured, (ALL,) * 4)):
        with offload.offload_layers(layers, memory_budget="1GiB", min_bytes=1, device="cpu") as handle:
            for skipped in steps:
                step(layers, x, skipped, to_none=False)
            found += [layer.workspace_bytes for layer in handle.plan.profile.layers]
    assert all(abs(one - other) <= x.nbytes for one, other in zip(estimated, measured, strict=True))


@pytest.mark.parametrize("removed", [2, LAYERS - 1])
def test_a_layer_that_the_program_removes_counts_as_skipped(removed: int) -> None:
    """Nobody holds it, and the others keep their numbers."""
    layers, _ = build("mlp", LAYERS, torch.device("cpu"))
    x = torch.rand(4, 64, WIDTH)
    budget = round(0.55 * step(layers, x, ALL)[1])
    with offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu") as handle:
        step(layers, x, ALL)
        del layers[removed]
        for _ in range(2):
            found, peak_bytes = step(layers, x, ALL)
        assert handle.state == "following"
        assert peak_bytes <= budget
        handle.remove()
        assert_same(step(layers, x, ALL)[0], found)


def test_a_layer_unlike_all_others_is_timed_before_a_plan_is_made() -> None:
    layers, _ = build("mlp", 4, torch.device("cpu"))
    layers[2] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    x = torch.rand(4, 64, WIDTH)
    expected = step(layers, x, ALL)[0]
    with offload.offload_layers(layers, memory_budget="1GiB", min_bytes=1, device="cpu") as handle:
        for skipped in (ALL, {2}, {2}, ALL):
            step(layers, x, skipped)
            assert handle.state == "measuring"
        assert_same(expected, step(layers, x, ALL)[0])
        assert handle.state == "following"


def test_a_step_without_its_first_or_last_layer_is_measured_and_follows_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins with the first layer that runs, and ends although the last one has none."""
    compared: list[bool] = []
    monkeypatch.setattr(ComparePlans, "end_backward", lambda _, *, ran_all: compared.append(ran_all))
    layers, _ = build("mlp", LAYERS, torch.device("cpu"))
    x = torch.rand(4, 64, WIDTH)
    budget = round(0.55 * step(layers, x, ALL)[1])
    with offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu") as handle:
        for skipped in ({LAYERS - 1}, {0}, {0, LAYERS - 1}):
            step(layers, x, skipped, outside_bytes=1000)
            assert handle.state == "measuring"
        for skipped in ({0, 1}, {LAYERS - 1}, {0, LAYERS - 1}, ALL, ALL):
            found, peak_bytes = step(layers, x, skipped)
            assert handle.state == "following"
        assert handle.plan is not None
        assert peak_bytes <= budget
        handle.remove()
        assert_same(step(layers, x, ALL)[0], found)
        assert handle.plan.profile.loss_bytes >= 1000
    assert compared == [False] * 6 + [True] * 2  # only these may tell how long a plan takes


def test_a_budget_that_is_broken_once_no_layer_is_skipped_is_said() -> None:
    """Fewer layers than there are prove no plan, also where peaks are counted for the first microbatches alone."""
    layers, _ = build("mlp", LAYERS, torch.device("cpu"))
    x = torch.rand(4, 64, WIDTH)
    budget = round(0.8 * step(layers, x, ALL)[1])
    with offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu") as handle:
        for skipped in (ALL, ALL, {1}, {1}, {2, 3}):
            step(layers, x, skipped)
        assert handle.state == "following"
        assert handle.plan is not None
        for _ in range(3):
            step(layers, x, ALL, outside_bytes=2 * budget)
        assert handle.plan.recompute_s > 0  # everything is recomputed
        with pytest.warns(UserWarning, match="was not met although everything is recomputed"):
            step(layers, x, ALL)


def test_a_given_plan_whose_budget_is_broken_once_no_layer_is_skipped_is_said() -> None:
    layers, _ = build("mlp", LAYERS, torch.device("cpu"))
    x = torch.rand(4, 64, WIDTH)
    run = partial(step, layers, x, ALL)
    profile = offload.profile_layers(layers, run, min_bytes=1, device="cpu", regions=True, steps=1)
    plan = offload.plan(profile, round(0.8 * run()[1]), Link(1e9, 1e9, 2e9))
    with offload.offload_layers(layers, plan=plan, min_bytes=1, device="cpu"):
        for skipped in ({1}, {1, 2}, {2}):
            step(layers, x, skipped)
        run(outside_bytes=plan.memory_budget)
        with pytest.warns(UserWarning, match="was not met by the plan"):
            run()


def test_the_budget_that_is_named_where_none_can_be_met_is_enough() -> None:
    """Also where no measured step ran all layers: with what a plan leaves free."""
    layers, _ = build("mlp", LAYERS, torch.device("cpu"))
    x = torch.rand(4, 64, WIDTH)

    def train(budget: str) -> None:
        with offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu"):
            for skipped in ({1}, {2}, {3}, {4}):
                step(layers, x, skipped)

    with pytest.warns(UserWarning, match="cannot be met") as told:
        train("1KiB")
    [needed] = re.findall(r"a step needs ([\d.]+) KiB", str(told[0].message))
    train(f"{float(needed) + 0.1}KiB")  # it was rounded


def test_everything_is_recomputed_if_the_plans_break_a_budget_that_the_measured_steps_have_met(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of that is timed any more."""
    caplog.set_level("INFO", "offload.measuring.follow_plan")
    backend, marks, counts = get_backend("cpu"), list[None](), list[int]()
    mark = backend.mark
    monkeypatch.setattr(backend, "mark", lambda: (marks.append(None), mark())[1])
    layers, _ = build("mlp", LAYERS, torch.device("cpu"))
    x = torch.rand(4, 64, WIDTH)
    budget = round(0.8 * step(layers, x, ALL)[1])
    with offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu") as handle:
        for _ in range(3):
            step(layers, x, ALL)
        step(layers, x, ALL, outside_bytes=2 * budget)
        with pytest.warns(UserWarning, match="was broken"):
            peaks = [(step(layers, x, ALL)[1], counts.append(len(marks)))[0] for _ in range(4)]
        assert counts == counts[:1] * 4
        assert "is met by no plan" in caplog.text
        assert handle.state == "following"
        assert handle.plan.recompute_s > 0
    assert max(peaks) <= budget


ORDERS = {
    "the list twice": [*range(LAYERS), *range(LAYERS)],
    "each layer twice": [number for number in range(LAYERS) for _ in range(2)],
    "in another order": [1, 0, *range(2, LAYERS)],
    "one layer": [0] * LAYERS,
    "those in the middle": [0, *[1, 2, 3, 4, 5] * 3, 6, 7],
    "there and back": [*range(LAYERS), *reversed(range(LAYERS))],
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("share", [0.4, pytest.param(0.8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_layers_that_run_again_before_backward_count_to_the_same_microbatch(order: list[int], share: float) -> None:
    """The first plan knows when each layer runs, which of its calls are on the device at once, and what is released."""
    layers, _ = build("mlp", len({*order}), torch.device("cpu"))
    x = torch.rand(4, 64, WIDTH)

    def run() -> tuple[list[torch.Tensor], int]:
        return step([layers[number] for number in order], x, ALL)

    expected, most_bytes = run()
    budget = round(share * most_bytes)
    handle = offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu")
    for _ in range(8):
        found, peak_bytes = run()
        assert_same(expected, found)
        assert peak_bytes <= budget
    assert handle.state == "following"
    # The input is there before the step; copies that are never released were measured.
    assert peak_bytes <= handle.plan.peak_bytes <= 1.01 * peak_bytes + 2 * x.nbytes
    handle.remove()


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "steps",
    [[(2, 4)] * 6, [(4, 2)] * 6, [(2, 2)] * 4 + [(2, 4)] * 4],
    ids=["the shorter one first", "the longer one first", "a longer one later"],
)
@pytest.mark.parametrize("share", [0.4, 0.7])
def test_two_forwards_of_different_lengths_before_one_backward_keep_to_the_budget(
    steps: list[tuple[int, int]], share: float
) -> None:
    """The longer one would begin another count of the peak, without what the shorter one has saved."""
    layers, _ = build("mlp", LAYERS, torch.device("cpu"))

    def run(rows: tuple[int, int]) -> int:
        inputs = [torch.rand(each, 64, WIDTH) for each in rows]
        with offload.memory_meter("cpu") as meter:
            torch.stack([through(layers, x).square().mean() for x in inputs]).sum().backward()
        layers.zero_grad()
        return meter.peak_bytes

    budget = round(share * run(steps[-1]))
    handle = offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu")
    peaks, states = zip(*((run(rows), handle.state) for rows in steps), strict=True)
    assert max(peaks) <= budget
    assert states[2] == states[-1] == "following"  # both lengths were timed in the second step
    handle.remove()


class Injected(nn.Module):
    """Computes the next state from a state and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(state + self.down(torch.tanh(self.up(state + x))))
        return found


@pytest.mark.parametrize(("order", "share"), [([0] * 12, 0.97), ([0] * 12, 1.2), ([0, 1] * 5, 0.85)])
def test_calls_that_share_an_input_keep_to_the_budget(order: list[int], share: float) -> None:
    """It counts for each call if it is kept, but was measured once. The first state is another kind of input."""
    layers, _ = build(Injected, len({*order}), torch.device("cpu"))
    stem, x = nn.Linear(WIDTH, WIDTH), torch.rand(16, 64, WIDTH)

    def run() -> int:
        for one in (layers, stem):
            one.zero_grad()
        with offload.memory_meter("cpu") as meter:
            given = stem(x)
            state = torch.zeros_like(given)
            for number in order:
                state = layers[number](state, given)
            state.square().mean().backward()
        return meter.peak_bytes

    budget = round(share * run())
    handle = offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu")
    peaks = [run() for _ in range(8)]
    assert max(peaks) <= budget
    assert peaks[-1] <= handle.plan.peak_bytes
    handle.remove()
