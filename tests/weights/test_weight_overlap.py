"""What streamed weights cost: memory for two layers, and copies beside compute; nothing blocks the host."""

from typing import Any

import pytest
import torch
from lab import Lab
from streaming import backward
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


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [2, 3])
def test_peak_of_device_memory(num_slots: int) -> None:
    layers, x = make(16, layers=4, side=2 * SIDE)  # large against cuBLAS's workspace, some of which comes and goes
    layer_bytes = 4 * LAYER_BYTES
    backward(layers, x)
    layers.zero_grad()
    workspace_bytes = torch.cuda.memory_allocated() - len(layers) * layer_bytes
    with stream_weights(layers, "cuda", num_slots=num_slots) as handle:
        assert handle.stats().slot_bytes == num_slots * layer_bytes
        torch.cuda.empty_cache()
        backward(layers, x)
        layers.zero_grad()
        with offload.memory_meter("cuda") as meter:
            backward(layers, x)
        # The gradients of the layer in backward, and those that are on their way.
        assert meter.peak_bytes < (num_slots + 0.5) * layer_bytes
        assert torch.cuda.memory_allocated() - workspace_bytes < (num_slots + 0.5) * layer_bytes


def moves_while_held(lab: Lab, stream: Any) -> bool:
    """Whether all that is queued on a copy stream now gets done while compute does not get on."""
    let_go = lab.hold(lab.backend.compute_stream(), 2.0)
    held = lab.backend.compute_stream().record_event()
    queued = stream.record_event()
    lab.settle(stream, patience_s=60 if stream is not lab.backend.compute_stream() else 0.1)
    moved = bool(queued.query()) and not held.query()
    let_go()
    held.synchronize()
    return moved


def test_copies_run_beside_compute(lab: Lab) -> None:
    """While a layer computes, the next one's weights come and the last one's gradients go."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Mlp(64) for _ in range(6)).to(lab.device)
    layer_bytes = 4 * 64 * 64 * 2
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=lab.device, requires_grad=True)
    seen = []

    def in_forward(*_: object) -> None:
        seen.append(handle.stats().loaded_bytes - loaded_bytes == 4 * layer_bytes)
        seen.append(moves_while_held(lab, lab.weight_stream))

    def in_backward(*_: object) -> None:
        seen.append(handle.stats().gradient_bytes - gradient_bytes == 3 * layer_bytes)
        seen.append(moves_while_held(lab, lab.d2h_stream))

    with stream_weights(layers, lab.device) as handle:
        backward(layers, x)
        layers.zero_grad()
        lab.drain()
        loaded_bytes, gradient_bytes = handle.stats().loaded_bytes, handle.stats().gradient_bytes
        layers[2].up.register_forward_pre_hook(in_forward)  # layers 0 to 3 have been asked for
        layers[2].up.register_forward_hook(lambda *args: args[-1].register_hook(in_backward) and None)
        backward(layers, x)
    assert seen == [True] * 4


def test_copies_on_the_compute_stream_would_not(lab: Lab) -> None:
    assert not moves_while_held(lab, lab.backend.compute_stream())


def calls_before_the_end_of_backward(layers: nn.ModuleList, x: torch.Tensor) -> list[str]:
    def mark(_: torch.Tensor) -> None:
        with torch.profiler.record_function("end of backward"):
            pass

    handle = x.register_hook(mark)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        backward(layers, x)
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
            backward(layers, x)
        layers.zero_grad()
        assert calls_before_the_end_of_backward(layers, x) == []


@pytest.mark.gpu
def test_parameters_and_gradients_are_pinned() -> None:
    layers, x = make(64)
    with stream_weights(layers, "cuda") as handle:
        backward(layers, x)
        assert all(parameter.is_pinned() for parameter in layers.parameters())
        assert all(parameter.grad.is_pinned() for parameter in layers.parameters())
        # As large as they are, not rounded up.
        stats = handle.stats()
        assert stats.weight_bytes == stats.gradient_host_bytes == LAYERS * LAYER_BYTES


def test_layers_of_different_sizes_share_slots(lab: Lab) -> None:
    sizes = [3, 40, 7, 11, 5]
    layers = nn.ModuleList(nn.Linear(64, size, bias=False) for size in sizes)
    with stream_weights(layers, lab.device) as handle:
        assert handle.stats().slot_bytes == 64 * 4 * (7 + 40)
