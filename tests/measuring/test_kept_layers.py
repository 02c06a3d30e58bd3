"""Layers that are kept cost nothing: no hooks, unless something is to be learned of them."""

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from lab import Lab
from models import WIDTH, assert_same, build, loss_of, step_gradients, through
from torch import nn

import offload
from offload.measuring import follow_plan
from offload.observe.memory import CpuMemoryPeak
from offload.planning.profile import Link

LAYERS = 5


def hooked(layers: Iterable[nn.Module]) -> list[int]:
    """The layers whose forward has hooks."""
    return [number for number, layer in enumerate(layers) if layer._forward_hooks or layer._forward_pre_hooks]


def test_layers_that_a_budget_keeps_have_no_hooks_but_the_first(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    expected = step_gradients(layers, x)
    with offload.offload_layers(layers, memory_budget="1GiB", min_bytes=0, device=lab.device) as handle:
        for _ in range(2):
            step_gradients(layers, x)
            assert hooked(layers) == [*range(LAYERS)]  # they are measured
        for _ in range(4):
            assert_same(expected, step_gradients(layers, x))
        assert handle.state == "following"
        assert hooked(layers) == [0]  # which tells of each microbatch
        offload.record_timeline(lambda: step_gradients(layers, x), lab.device, warmup=0)
        assert hooked(layers) == [*range(LAYERS)]  # their beginnings are recorded
        step_gradients(layers, x)
        assert hooked(layers) == [0]
        saved = {name: value.clone() for name, value in layers.state_dict().items()}
        layers.load_state_dict(saved)
        assert_same(expected, step_gradients(layers, x))
    assert hooked(layers) == []


def test_layers_that_another_plan_recomputes_have_hooks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer input is planned before it runs: what was kept is recomputed in the same forward."""
    monkeypatch.setattr(follow_plan, "measure_link", lambda _: Link(1e3, 1e3, 2e3))  # nothing is offloaded
    layers, _ = build("mlp", LAYERS, torch.device("cpu"))
    short, long = torch.rand(4, 16, WIDTH), torch.rand(4, 64, WIDTH)

    def peak_bytes(x: torch.Tensor) -> int:
        layers.zero_grad()
        with offload.memory_meter("cpu") as meter:
            through(layers, x).square().sum().backward()
        return meter.peak_bytes

    budget = round(0.6 * peak_bytes(long))
    expected = step_gradients(layers, long)
    with offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu") as handle:
        for _ in range(5):
            assert peak_bytes(short) <= budget
        assert handle.plan is not None
        assert handle.plan.recompute_s == 0
        assert hooked(layers) == [0]
        for _ in range(5):
            assert peak_bytes(long) <= budget
        assert handle.plan.recompute_s > 0
        recomputed = [number for number, policy in enumerate(handle.plan.policies) if policy is not None]
        assert {*hooked(layers)} == {0, *recomputed} < {*range(LAYERS)}
        assert_same(expected, step_gradients(layers, long))


@pytest.mark.filterwarnings("ignore:memory_budget")  # two microbatches at once need more than it
def test_what_awaits_its_backward_is_recomputed_although_its_layers_are_kept_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No hook that the program has put there meanwhile is called for that."""
    monkeypatch.setattr(follow_plan, "measure_link", lambda _: Link(1e3, 1e3, 2e3))  # nothing is offloaded
    monkeypatch.setattr(CpuMemoryPeak, "costs_time", False)  # as on a GPU, where peaks are measured all the time
    layers, _ = build("mlp", LAYERS, torch.device("cpu"))
    short, long = torch.rand(4, 16, WIDTH), torch.rand(4, 64, WIDTH)
    expected = step_gradients(layers, long)
    with offload.memory_meter("cpu") as meter:
        step_gradients(layers, long)
    budget = round(0.8 * meter.peak_bytes)
    with offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device="cpu") as handle:
        for x in [long] * 6 + [short] * 6:
            step_gradients(layers, x)
        layers.zero_grad()
        loss = loss_of(through(layers, long))
        assert handle.plan is not None
        recomputed = [number for number, policy in enumerate(handle.plan.policies) if policy is not None]
        through(layers, short)
        kept = {*recomputed} - {*hooked(layers)}
        calls: list[int] = []
        for number in kept:
            layers[number].register_forward_hook(lambda *_, number=number: calls.append(number))
        loss.backward()
        assert kept
        assert calls == []
        assert_same(expected[1:], [parameter.grad for parameter in layers.parameters()])


def test_a_first_layer_that_the_program_freezes_leaves_the_end_to_the_next(lab: Lab) -> None:
    """Backward comes to an end at the first layer that is trained, which has to tell."""
    layers, x = build("decoder", LAYERS, lab.device)
    x = x.detach()
    with offload.offload_layers(layers, memory_budget="1GiB", min_bytes=0, device=lab.device):
        for _ in range(5):
            through(layers, x).square().sum().backward()
        assert hooked(layers) == [0]
        layers[0].requires_grad_(False)
        for _ in range(3):
            through(layers, x).square().sum().backward()
        assert hooked(layers) == [0, 1]


def test_where_the_program_removes_the_first_layer_the_next_one_tells(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    with offload.offload_layers(layers, memory_budget="1GiB", min_bytes=0, device=lab.device):
        for _ in range(5):
            step_gradients(layers, x)
        assert hooked(layers) == [0]
        del layers[0]
        assert hooked(layers) == [*range(LAYERS - 1)]
        for _ in range(2):
            step_gradients(layers, x)
            assert hooked(layers)[0] == 0


def test_where_layers_are_skipped_all_have_hooks(lab: Lab) -> None:
    """Else nobody would know that a microbatch without some of them tells little of a plan."""
    layers, x = build("decoder", LAYERS, lab.device)
    with offload.offload_layers(layers, memory_budget="1GiB", min_bytes=0, device=lab.device) as handle:
        step_gradients(layers, x)
        for _ in range(4):
            step_gradients(nn.ModuleList([layers[0], *layers[2:]]), x)
        assert handle.state == "following"
        assert hooked(layers) == [*range(LAYERS)]


def test_without_a_budget_as_well(lab: Lab) -> None:
    """Nothing is offloaded: layers are there to be recorded, or for their weights."""
    layers, x = build("decoder", LAYERS, lab.device)
    expected = step_gradients(layers, x)
    with offload.offload_layers(layers, num_layers=0, device=lab.device):
        assert_same(expected, step_gradients(layers, x))
        assert hooked(layers) == [0]


SCRIPT = """
import torch, offload
from torch import nn
from offload.base import layer_events

layers = nn.ModuleList(nn.Tanh() for _ in range(2))
handle = offload.offload_layers(layers, num_layers=0, device="cpu")
layers[1](layers[0](torch.ones(3, requires_grad=True))).sum().backward()
layer_events.held = lambda: layers  # so the layers go after the names of this module
"""


def test_the_interpreter_ends_in_silence_with_layers_that_outlive_the_library() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    "options", [{"num_layers": 0}, {"memory_budget": "1GiB", "min_bytes": 1}], ids=["none", "budget"]
)
def test_a_model_that_is_compiled_as_a_whole_keeps_its_hooks(options: dict[str, Any]) -> None:
    """Also one that ran as it is before: code that is compiled without hooks would never call them."""
    layers, x = build("mlp", LAYERS, torch.device("cpu"))
    model = nn.Sequential(*layers)
    compiled = torch.compile(model, backend="eager")
    with offload.offload_layers(layers, device="cpu", **options):
        for run, expected in ((model, [0]), (compiled, [*range(LAYERS)]), (model, [*range(LAYERS)])):
            for _ in range(6):
                model.zero_grad()
                run(x).square().sum().backward()
            assert hooked(layers) == expected
