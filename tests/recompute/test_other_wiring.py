"""A layer runs the operations that were learned, in their order, and some read what others have made than before.

An attribute, or what Python has read of a tensor, decides which. What a second run skips must not be read then.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lab import Lab
from models import assert_same, gradients
from torch import nn

import offload

pytestmark = pytest.mark.filterwarnings("ignore:memory_budget = ")  # which is as small as can be

WIDTH, LAYERS, STEPS = 16, 4, 12
WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {"num_layers": 0, "policies": {"*": "recompute"}},
    "products are kept": {"num_layers": 0, "policies": {"*mm": "keep", "*": "recompute"}},
    "what is behind is kept": {"num_layers": 0, "policies": {"gelu": "keep", "*": "recompute"}},
    "a budget": {"memory_budget": 1 << 14},
}


@torch.library.custom_op("offload_tests::is_positive", mutates_args=())
def is_positive(x: torch.Tensor) -> bool:
    return bool(x.mean() > 0)


@torch.library.custom_op("offload_tests::factor", mutates_args=())
def factor(x: torch.Tensor) -> float:
    return 2.0 if x.mean() > 0 else 3.0


class Chooses(nn.Module):
    """Computes two results, of which ``choose`` says which one is used."""

    active = 0

    def __init__(self, choose: Callable[[Any, torch.Tensor], int]) -> None:
        super().__init__()
        self.choose = choose
        self.first, self.second, self.out = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.gate, self.norm = nn.Linear(WIDTH, 4, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = [self.first(x), self.second(x)]
        result: torch.Tensor = self.norm(x + self.out(F.gelu(results[self.choose(self, x)])))
        return result


def of_a_list(layer: Any, x: torch.Tensor) -> int:
    return int(sum(layer.gate(x).detach()[:, 0].tolist()) > 0)


def of_an_array(layer: Any, x: torch.Tensor) -> int:
    return int(layer.gate(x).detach().cpu()[:, 0].numpy().sum() > 0)


def of_a_list_or_not(layer: Any, x: torch.Tensor) -> int:
    try:
        return of_a_list(layer, x)
    except Exception:  # noqa: BLE001  # whatever it is
        return 0


CHOICES: dict[str, Callable[[Any, torch.Tensor], int]] = {
    "an attribute": lambda layer, _: layer.active,
    "a list": of_a_list,
    "an array": of_an_array,
    "a list, or nothing if that fails": of_a_list_or_not,
    "a random list": lambda *_: int(torch.randint(2, (1,)).tolist()[0]),
    "an operation that returns a bool": lambda layer, x: int(is_positive(layer.gate(x).detach())),
    "an operation that returns a float": lambda layer, x: int(factor(layer.gate(x).detach()) > 2.5),
}


def trained(
    layers: nn.Sequential, lab: Lab, options: dict[str, Any] | None, change: Callable[[Any, int], object]
) -> list[torch.Tensor]:
    """The gradients of each step, and the buffers after the last one."""
    found: list[Any] = []
    x = torch.linspace(-1, 1, 8 * WIDTH, device=lab.device).view(8, WIDTH)
    handle = None if options is None else offload.offload_layers(layers, min_bytes=0, device=lab.device, **options)
    for step in range(STEPS):
        for layer in layers:
            change(layer, step)
        given = (x if step < STEPS // 2 else -x).detach().requires_grad_()
        leaves = [given, *layers.parameters()]
        found += gradients(leaves, lambda given=given: layers(given * 1).square().mean().backward())
    if handle is not None:
        handle.remove()
    return [*found, *(buffer.clone() for buffer in layers.buffers())]


def same_in_each_way(
    lab: Lab, way: str, choose: Callable[[Any, torch.Tensor], int], change: Callable[[Any, int], object]
) -> None:
    def run(options: dict[str, Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(*(Chooses(choose) for _ in range(LAYERS))).to(lab.device)
        return trained(layers, lab, options, change)

    lab.adverse()
    assert_same(run(None), run(WAYS[way]))


@pytest.mark.drawn(14)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("choice", CHOICES)
def test_what_decides_which_result_is_used(
    choice: str, way: str, lab: Lab, unplanned: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    def change(layer: Any, step: int) -> None:
        layer.active = int(step >= STEPS // 2)

    same_in_each_way(lab, way, CHOICES[choice], change)
    # The proof sees at once that Python reads what a second run would skip, if it would.
    line = "handing over gave other bits"
    unplanned |= {line} if line in caplog.text else set()


def _another_norm(layer: Any, step: int) -> None:
    if step == STEPS // 2:
        layer.norm = nn.BatchNorm1d(WIDTH).to(layer.out.weight.device)


def _no_statistics(layer: Any, step: int) -> None:
    if step == STEPS // 2:
        layer.norm.running_mean = layer.norm.running_var = layer.norm.num_batches_tracked = None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [_another_norm, _no_statistics])
def test_a_part_that_is_replaced_in_training(change: Callable[[Any, int], None], way: str, lab: Lab) -> None:
    same_in_each_way(lab, way, lambda *_: 0, change)


class Crosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + self.out(F.gelu(self.first(x) * self.second(other)))


@pytest.mark.parametrize("way", WAYS)
def test_one_tensor_in_two_places_and_then_two_tensors(way: str, lab: Lab) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Crosses() for _ in range(LAYERS)).to(lab.device)
    x = torch.linspace(-1, 1, 8 * WIDTH, device=lab.device).view(8, WIDTH).requires_grad_()

    def step(number: int) -> list[torch.Tensor]:
        def run() -> None:
            y = x * 1
            for layer in layers:
                y = layer(y, y if number < 3 else y * 2)
            y.square().mean().backward()

        return gradients([x, *layers.parameters()], run)

    expected = [step(number) for number in range(6)]
    with offload.offload_layers(layers, min_bytes=0, device=lab.device, **WAYS[way]):
        for number, one in enumerate(expected):
            assert_same(one, step(number))
