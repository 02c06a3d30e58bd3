"""Layers that are compiled, wholly or in part, with policies: the same bits as compiled layers without."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lab import Lab
from models import (
    WIDTH,
    GptBlock,
    Seen,
    assert_same,
    build,
    compiled_in_place,
    compiled_wrapped,
    gradients,
    leaves_of,
    loss_of,
    step_gradients,
    through,
)
from test_policies import assert_bits
from torch import nn

import offload

# The compiler's own imports, its advice on float32, and what it does to inputs that are no leaves.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]

LAYERS = 3
POLICIES: dict[str, dict[str, str]] = {
    "keep": {"*": "keep"},
    "offload": {"*": "offload"},
    "recompute": {"*": "recompute"},
    "recompute, the input offloaded": {"input": "offload", "*": "recompute"},
}


def offloaded(layers: Any, lab: Lab, policies: dict[str, str], **options: Any) -> Any:
    return offload.offload_layers(layers, 1, policies=policies, min_bytes=1, device=lab.device, **options)


class PartCompiled(nn.Module):
    """A layer of which a submodule is compiled."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.block = GptBlock()
        self.mlp = torch.compile(self.block.mlp, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(self.block(x))
        return y.sin() * x


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_submodules(backend: str, lab: Lab) -> None:
    layers, x = build(lambda: PartCompiled(backend), LAYERS, lab.device)
    lab.adverse()
    for policies in (POLICIES["offload"], POLICIES["recompute"]):
        assert "block.qkv: addmm" in assert_bits(partial(step_gradients, layers, x), layers, lab, policies, 1)


def inductor(layer: nn.Module) -> nn.Module:
    return torch.compile(layer)


COMPILED = {"in place": compiled_in_place, "wrapped": compiled_wrapped, "inductor": inductor}


def compiled(
    block: Any, how: Callable[[nn.Module], nn.Module], lab: Lab, number: int = LAYERS
) -> tuple[nn.ModuleList, torch.Tensor]:
    layers, x = build(block, number, lab.device)
    return nn.ModuleList(how(layer) for layer in layers), x


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("block", "how"),
    [("mlp", "in place"), ("gpt", "wrapped"), pytest.param("gpt", "inductor", marks=pytest.mark.nightly)],
)
def test_a_compiled_layer_is_one_region(block: str, how: str, lab: Lab) -> None:
    layers, x = compiled(block, COMPILED[how], lab)
    expected = step_gradients(layers, x)
    lab.adverse()
    moved = {}
    for name, policies in POLICIES.items():
        with offloaded(layers, lab, policies) as handle:
            for _ in range(3):
                assert_same(expected, step_gradients(layers, x))
            assert handle.regions(0) == {"compiled forward": policies["*"]}
            moved[name] = handle.stats().offloaded_bytes
    assert moved["keep"] == 0
    # Of the only layer that is offloaded: its input is a leaf, and its output's last use is the next layer's.
    assert moved["offload"] > moved["recompute"] == moved["recompute, the input offloaded"]


RUNS: Counter[int] = Counter()
"""How often each module has run. Not an attribute: that would be as before after a recomputation."""


class Counts(nn.Module):
    """Counts how often it runs."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.function = function

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        self._count()
        return self.function(x @ self.weight, *others, **named)

    @torch.compiler.disable
    def _count(self) -> None:
        RUNS[id(self)] += 1


def test_memory_is_let_go_and_each_layer_runs_once_more(lab: Lab) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = x.tanh() * 2
        return x

    layers, _ = compiled(lambda: Counts(function), compiled_wrapped, lab)
    x = torch.rand(4096, WIDTH, device=lab.device, requires_grad=True)
    one = 4 * x.numel()

    def peak_bytes() -> int:
        with offload.memory_meter(lab.device) as meter:
            y = through(layers, x)
            runs = [RUNS[id(layer._orig_mod)] for layer in layers]
            y.sum().backward()
        after.extend(RUNS[id(layer._orig_mod)] - before for layer, before in zip(layers, runs, strict=True))
        return meter.peak_bytes

    after: list[int] = []
    peak_bytes()
    assert peak_bytes() > LAYERS * 7 * one
    with offloaded(layers, lab, POLICIES["recompute"]):
        peak_bytes()  # it compares
        after.clear()
        assert peak_bytes() < (LAYERS + 12) * one
        assert after == [1] * LAYERS


@pytest.mark.parametrize("seen", ["forward", "backward", "both"])
def test_a_mode_that_lets_no_compiled_code_run(seen: str, lab: Lab) -> None:
    """As a memory meter is one."""
    layers, x = compiled("decoder", compiled_wrapped, lab)
    expected = step_gradients(layers, x)

    def step() -> None:
        with Seen() if seen != "backward" else nullcontext():
            loss = loss_of(through(layers, x))
        with Seen() if seen != "forward" else nullcontext():
            loss.backward()

    with offloaded(layers, lab, POLICIES["recompute"]) as handle:
        for _ in range(3):
            with (
                nullcontext() if seen == "both" else pytest.raises(RuntimeError, match="PyTorch runs no compiled code")
            ):
                assert_same(expected, gradients(leaves_of(layers, x), step))
        assert handle.regions(0) == {"compiled forward": "recompute"}


def test_layers_that_must_not_run_twice_are_kept(lab: Lab, unplanned: set[str]) -> None:
    """Batch norm would count the batch twice; one that does something else each time has other bits."""
    unplanned |= {"is never recomputed", "comes out with other bits"}
    layers, x = compiled("conv", compiled_in_place, lab)
    expected = step_gradients(layers, x)
    layers, x = compiled("conv", compiled_in_place, lab)
    with offloaded(layers, lab, POLICIES["recompute"]) as handle:
        assert_same(expected, step_gradients(layers, x))
        assert handle.regions(0) == {"compiled forward": "offload"}
        assert [int(layer.norm.num_batches_tracked) for layer in layers] == [1] * LAYERS

    class Drifts(Counts):
        def _count(self) -> None:
            self.weight.data.mul_(1.5)

    Drifts._count = torch.compiler.disable(Drifts._count)
    layers, x = compiled(lambda: Drifts(torch.tanh), compiled_wrapped, lab)
    with offloaded(layers, lab, POLICIES["recompute"]) as handle:
        step_gradients(layers, x)
        assert handle.regions(0) == {"compiled forward": "offload"}


def test_saving_something_else_the_second_time_is_an_error(lab: Lab) -> None:
    way = [False]
    layers, x = compiled(
        lambda: Counts(lambda x: x.tanh().sigmoid() * x if way[0] else x.tanh()), compiled_wrapped, lab
    )
    with offloaded(layers, lab, POLICIES["recompute"]):
        for _ in range(2):
            step_gradients(layers, x)
        y = through(layers, x)
        way[0] = True
        with pytest.raises(RuntimeError, match="cannot be recomputed: run again in backward"):
            loss_of(y).backward()


def test_profiles_and_plans(lab: Lab) -> None:
    layers, x = compiled("mlp", compiled_in_place, lab, 12)  # layers enough for what computing again needs
    expected = step_gradients(layers, x)
    profile = offload.profile_layers(
        layers, lambda: step_gradients(layers, x), min_bytes=1, device=lab.device, regions=True
    )
    for layer in profile.layers[1:]:
        assert [region.name for region in layer.regions] == ["input", "compiled forward"]
        given, forward = layer.regions
        assert given.nbytes == 4 * x.numel()
        assert forward.nbytes > 4 * given.nbytes
        assert forward.seconds > 0
        assert forward.recomputable
        assert forward.reads == (0,)
    link = offload.Link(1e9, 1e9, 1e9)
    # The gradients, which each step allocates anew, are more than what such small layers save.
    profile = replace(profile, layers=tuple(replace(layer, workspace_bytes=0) for layer in profile.layers))
    whole = offload.plan(profile, "1TiB", link).peak_bytes
    made = offload.plan(profile, memory_budget=whole - profile.layers[0].saved_bytes * 2, link=link, max_host_bytes=0)
    assert made.recompute_s > 0
    with offload.offload_layers(layers, plan=made, min_bytes=1, device=lab.device) as handle:
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
        found = [handle.regions(number).get("compiled forward") for number in range(12)]
    assert "recompute" in found  # where a layer is to be left alone, nothing is recorded
