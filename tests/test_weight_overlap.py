"""What streamed weights cost on a GPU: memory, and time only where the link binds; nothing blocks the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab import Lab
from models import loss_of
from torch import nn

import offload
from benchmarks.instruments import BLOCKING_CALLS
from offload import stream_weights

SIDE = 2048
LAYER_BYTES = 4 * SIDE * SIDE * 2
LAYERS = 12


class Mlp(nn.Module):
    """Two matrices of 16 MiB each, for ``SIDE``."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.up = nn.Linear(side, 2 * side, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * side, side, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make(tokens: int, *, layers: int = LAYERS, side: int = SIDE) -> tuple[nn.ModuleList, torch.Tensor]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.ModuleList(Mlp(side) for _ in range(layers))
        return model, torch.randn(tokens, side, dtype=torch.bfloat16, requires_grad=True)


def run(layers: nn.ModuleList, x: torch.Tensor) -> None:
    y = x
    for layer in layers:
        y = layer(y)
    loss_of(y).backward()


def seconds(step: Callable[[], object]) -> float:
    found = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[2:])


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [2, 3])
def test_peak_of_device_memory(num_slots: int) -> None:
    layers, x = make(16, layers=4, side=2 * SIDE)  # large against cuBLAS's workspace, some of which comes and goes
    layer_bytes = 4 * LAYER_BYTES
    run(layers, x)
    layers.zero_grad()
    workspace_bytes = torch.cuda.memory_allocated() - len(layers) * layer_bytes
    with stream_weights(layers, "cuda", num_slots=num_slots) as handle:
        assert handle.stats().slot_bytes == num_slots * layer_bytes
        torch.cuda.empty_cache()
        run(layers, x)
        layers.zero_grad()
        with offload.memory_meter("cuda") as meter:
            run(layers, x)
        # The gradients of the layer in backward, and those that are on their way.
        assert meter.peak_bytes < (num_slots + 0.5) * layer_bytes
        assert torch.cuda.memory_allocated() - workspace_bytes < (num_slots + 0.5) * layer_bytes


@pytest.mark.gpu
def test_copies_run_beside_compute() -> None:
    layers, x = make(16384)

    def step() -> None:
        layers.zero_grad()
        run(layers, x)

    compute_s = seconds(step)
    with stream_weights(layers, "cuda") as handle:
        both_s = seconds(step)
        before = handle.stats()
        step()
        moved = handle.stats()
    link = offload.measure_link("cuda")
    link_s = (moved.loaded_bytes - before.loaded_bytes) / link.h2d_bytes_per_s
    link_s += (moved.gradient_bytes - before.gradient_bytes) / link.d2h_bytes_per_s
    assert both_s < 0.8 * (compute_s + link_s)


def calls_before_the_end_of_backward(layers: nn.ModuleList, x: torch.Tensor) -> list[str]:
    def mark(_: torch.Tensor) -> None:
        with torch.profiler.record_function("end of backward"):
            pass

    handle = x.register_hook(mark)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        run(layers, x)
    handle.remove()
    events: Any = profiler.events()
    end = min(event.time_range.start for event in events if event.name == "end of backward")
    return [event.name for event in events if event.name in BLOCKING_CALLS and event.time_range.start < end]


@pytest.mark.gpu
def test_nothing_blocks_before_the_end_of_backward() -> None:
    layers, x = make(64)
    with stream_weights(layers, "cuda"):
        for _ in range(2):
            layers.zero_grad()
            run(layers, x)
        layers.zero_grad()
        assert calls_before_the_end_of_backward(layers, x) == []


@pytest.mark.gpu
def test_parameters_and_gradients_are_pinned() -> None:
    layers, x = make(64)
    with stream_weights(layers, "cuda") as handle:
        run(layers, x)
        assert all(parameter.is_pinned() for parameter in layers.parameters())
        assert all(parameter.grad.is_pinned() for parameter in layers.parameters())
        # As large as they are, not rounded up.
        stats = handle.stats()
        assert stats.weight_bytes == stats.gradient_host_bytes == LAYERS * LAYER_BYTES


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
def test_backward_on_a_stream_of_the_users() -> None:
    layers, x = make(64)
    run(layers, x)
    expected = [parameter.grad.cpu() for parameter in layers.parameters()]
    layers.zero_grad()
    with stream_weights(layers, "cuda"):
        for _ in range(3):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            layers.zero_grad()
            with torch.cuda.stream(stream):
                run(layers, x)
            torch.cuda.current_stream().wait_stream(stream)
            assert all(map(torch.equal, expected, [parameter.grad for parameter in layers.parameters()]))


def test_layers_of_different_sizes_share_slots(lab: Lab) -> None:
    sizes = [3, 40, 7, 11, 5]
    layers = nn.ModuleList(nn.Linear(64, size, bias=False) for size in sizes)
    with stream_weights(layers, lab.device) as handle:
        assert handle.stats().slot_bytes == 64 * 4 * (7 + 40)
