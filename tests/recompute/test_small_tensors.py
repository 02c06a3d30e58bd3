"""Saved tensors below ``min_bytes``: dropped where all else of a layer is recomputed, and kept beside what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from lab import Lab
from models import through
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload

SMALL = 12


class ManySmall(nn.Module):
    """Saves four tensors of 256 KiB, and twelve of 64 KiB."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(4):
            y = y.sin().exp().sin()
        few = y[::4].clone()
        for _ in range(SMALL):
            few = few.tanh()
        return y + few.repeat(4, 1)


def one_step(layers: Iterable[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> None:
    x.grad = None
    through(layers, x).sum().backward()


def peak_bytes(layers: Iterable[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> int:
    for _ in range(3):
        one_step(layers, x)
    with offload.memory_meter(x.device) as meter:
        one_step(layers, x)
    return meter.peak_bytes


@pytest.fixture
def x(lab: Lab) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(256, 256, device=lab.device, requires_grad=True)


def test_a_layer_that_is_recomputed_needs_no_more_than_under_pytorchs_checkpoints(x: torch.Tensor) -> None:
    layers = nn.ModuleList(ManySmall() for _ in range(8))
    expected = peak_bytes([partial(checkpoint, layer, use_reentrant=False) for layer in layers], x)
    gradient = x.grad
    with offload.offload_layers(layers, 0, policies={"*": "recompute"}, min_bytes="256KiB"):
        found = peak_bytes(layers, x)
    assert torch.equal(gradient, x.grad)
    assert found <= expected


@pytest.mark.filterwarnings("ignore:memory_budget")  # said of the first steps
@pytest.mark.parametrize("kept", ["nothing", "one", "all"])
def test_plans_count_them(x: torch.Tensor, kept: str) -> None:
    layers = nn.ModuleList(ManySmall() for _ in range(8))
    profile = offload.profile_layers(
        layers, partial(one_step, layers, x), regions=True, min_bytes="256KiB", device=x.device
    )
    assert all(one.small_bytes == SMALL << 16 for one in profile.layers)
    policies = []
    for layer in profile.layers:
        saved = [number for number, one in enumerate(layer.regions) if one.saved]
        numbers = {"nothing": [], "one": saved[2:3], "all": saved}[kept]
        given = [number for number, one in enumerate(layer.regions) if one.name == "input"]
        policies.append(offload.LayerPolicy(frozenset([*given, *numbers])))
    plan = offload.Plan(offload.Schedule(8), profile, offload.Link(1e9, 1e9, 2e9), 0, tuple(policies))
    with offload.offload_layers(layers, plan=plan, min_bytes="256KiB"):
        found = peak_bytes(layers, x)
    # Of a layer that keeps something, they are counted as held, and once more as what its second run takes.
    assert (0.9 if kept == "one" else 0.98) * plan.peak_bytes <= found <= 1.02 * plan.peak_bytes


ROWS = [0]


@torch.library.custom_op("offload_tests::row_that_differs", mutates_args=())
def row_that_differs(x: torch.Tensor) -> torch.Tensor:
    """The first row, with other bits each time, as kernels give them that add in any order."""
    ROWS[0] += 1
    return x[0] * (1 + ROWS[0] / 1024)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().tanh() * row_that_differs(x.detach())


def test_one_that_comes_out_with_other_bits_is_kept(x: torch.Tensor) -> None:
    """Nothing else that the layer saves depends on it, so all else is recomputed."""
    layer = Scaled()

    def run(start: int) -> torch.Tensor:
        ROWS[0] = start
        one_step([layer], x)
        return x.grad

    starts = range(0, 50, 10)
    expected = [run(start) for start in starts]
    with offload.offload_layers([layer], 0, policies={"*": "recompute"}, min_bytes="256KiB") as handle:
        assert all(torch.equal(one, run(start)) for one, start in zip(expected, starts, strict=True))
        regions = handle.regions(0)
    assert {policy for name, policy in regions.items() if "row" not in name} == {"recompute"}


def _allocates(x: torch.Tensor) -> None:
    x.new_empty(0)  # as a tiled MLP has it


def _computes_what_nobody_reads(x: torch.Tensor) -> None:
    x.detach().cos()


@pytest.mark.parametrize("beside", [_allocates, _computes_what_nobody_reads])
def test_a_layer_of_which_all_is_recomputed_runs_again_as_in_a_checkpoint(
    beside: Callable[[torch.Tensor], None], x: torch.Tensor
) -> None:
    """Under no mode, which would take the host longer than what nobody needs, and compared with nothing in forward."""
    modes: list[int] = []

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            modes.append(torch._C._len_torch_dispatch_stack())
            beside(x)
            return x.sin().tanh()

    layer = Layer()
    one_step([layer], x)
    expected = x.grad
    with offload.offload_layers([layer], 0, policies={"*": "recompute"}, min_bytes="256KiB"):
        one_step([layer], x)
        modes.clear()
        one_step([layer], x)
    assert torch.equal(expected, x.grad)
    assert modes == [0, 0]
