"""Layers on several devices, as ``device_map="auto"`` leaves them: each device is served by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import assert_same, build, gradients, leaves_of, loss_of, step_gradients
from torch import nn

import offload
from offload import Schedule
from offload.activations import layers as under_test

LAYERS = 8
CPU = torch.device("cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, places: dict[Any, list[int]]) -> None:
    """As if the layers were on these devices, all of which are the CPU."""
    monkeypatch.setattr(under_test, "_places", lambda modules: places if len(modules) == LAYERS else {CPU: [0]})


TWO = {torch.device("cpu", 0): [0, 1, 2, 3], torch.device("cpu", 1): [4, 5, 6, 7]}
UNEVEN = {torch.device("cpu", 0): [0, 3, 5, 6, 7], torch.device("cpu", 1): [1, 2, 4]}


@pytest.mark.parametrize(("places", "shares"), [(TWO, [2, 2]), (UNEVEN, [3, 1])])
def test_each_device_offloads_its_first_layers(
    places: dict[Any, list[int]], shares: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, x = build("decoder", LAYERS, CPU)
    expected = step_gradients(layers, x)
    with offload.offload_layers(layers, 1, min_bytes=0, device="cpu") as one:
        step_gradients(layers, x)
    pretend(monkeypatch, places)
    with offload.offload_layers(layers, 4, min_bytes=0) as handle:
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
        assert [part.schedule.offloaded_layers for part in handle._parts] == [tuple(range(share)) for share in shares]
        each = [part.stats() for part in handle._parts]
        assert all(
            stats.offloaded_bytes >= share * one.stats().offloaded_bytes
            for stats, share in zip(each, shares, strict=True)
        )
        stats = handle.stats()
        assert stats.offloaded_bytes == sum(one.offloaded_bytes for one in each) == stats.reloaded_bytes
        assert stats.skipped == {
            reason: sum(one.skipped.get(reason, 0) for one in each) for one in each for reason in one.skipped
        }
        assert stats.late_reloads == 0
        assert handle.schedule is None
        assert repr(handle).count("OffloadedLayers(DecoderBlock in") == 2
    assert not any(layer._forward_hooks for layer in layers)
    assert handle.stats() == stats
    with pytest.raises(RuntimeError, match="the handle must be in use, but it was removed"), handle:
        pass


def test_regions_are_those_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = build("decoder", LAYERS, CPU)
    expected = step_gradients(layers, x)
    pretend(monkeypatch, UNEVEN)
    with offload.offload_layers(layers, 4, treatments={"*": "recompute"}, min_bytes=0) as handle:
        assert_same(expected, step_gradients(layers, x))
        assert handle.regions(2) == handle.regions(7) != {}


def test_without_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, _ = build("decoder", LAYERS, CPU)
    pretend(monkeypatch, TWO)
    offload.offload_layers(layers, 4)
    offload.remove(layers)
    assert not any(layer._forward_hooks for layer in layers)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_layers": 7}, "num_layers must be at most 6, all but one on each of 2 devices, got 7"),
        ({"num_layers": -1}, "num_layers must be at least 0, got -1"),
        ({"schedule": Schedule(LAYERS)}, "for layers on one device, got layers on cpu:0, cpu:1; call offload_layers"),
        (
            {"memory_budget": "1GiB"},
            "for layers on one device, got layers on cpu:0, cpu:1; call offload_layers once for",
        ),
    ],
)
def test_errors(options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, _ = build("decoder", LAYERS, CPU)
    pretend(monkeypatch, TWO)
    with pytest.raises(ValueError, match=text):
        offload.offload_layers(layers, **options)
    assert not any(layer._forward_hooks for layer in layers)


def test_an_error_for_one_device_leaves_none_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, _ = build("decoder", LAYERS, CPU)
    pretend(monkeypatch, {CPU: [0, 1, 2, 3], torch.device("cuda", 99): [4, 5, 6, 7]})
    with pytest.raises(Exception, match="device"):
        offload.offload_layers(layers, 4)
    assert not any(layer._forward_hooks for layer in layers)


class Placed(nn.Module):
    """Claims to have its parameters somewhere."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.devices = devices

    def parameters(self, recurse: bool = True) -> Any:
        class Parameter:
            def __init__(self, device: str) -> None:
                self.device = torch.device(device)

        return iter([Parameter(device) for device in self.devices])


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        (["cpu", "cpu"], {"cpu": [0, 1]}),
        (["cuda:0", "cuda:0", "cuda:1"], {"cuda:0": [0, 1], "cuda:1": [2]}),
        (["cpu", "cuda:0", "meta", "cuda:1", "cpu"], {"cuda:0": [0, 1, 2], "cuda:1": [3, 4]}),
        (["cuda:1", "cuda:0", "cuda:1"], {"cuda:1": [0, 2], "cuda:0": [1]}),
        (["", "cuda:1"], {"cuda:1": [0, 1]}),
        ([""], {None: [0]}),
    ],
)
def test_where_layers_are(devices: Sequence[str], found: dict[Any, list[int]]) -> None:
    layers = [Placed(*filter(None, [device])) for device in devices]
    wanted = {device and torch.device(device): numbers for device, numbers in found.items()}
    assert under_test._places(layers) == wanted


class OnDevice(nn.Module):
    """A layer that takes its input to where it is, as Accelerate's hooks do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x.to(next(self.layer.parameters()).device))
        return output


@pytest.mark.multigpu(n=2)
def test_two_gpus() -> None:
    layers, x = build("decoder", LAYERS, torch.device("cuda", 0))
    layers = nn.ModuleList(OnDevice(layer.to(f"cuda:{number // 4}")) for number, layer in enumerate(layers))
    leaves = leaves_of(layers, x)

    def step() -> None:
        y = x
        for layer in layers:
            y = layer(y)
        loss_of(y).backward()

    expected = gradients(leaves, step)
    with offload.offload_layers(layers, 4, min_bytes=0) as handle:
        for _ in range(3):
            assert_same(expected, gradients(leaves, step))
        for part, place in zip(handle._parts, ("cuda:0", "cuda:1"), strict=True):
            assert part._context.backend.device == torch.device(place)
            assert part.stats().offloaded_bytes == part.stats().reloaded_bytes > 0
            assert part.stats().late_reloads == 0
