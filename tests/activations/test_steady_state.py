"""After the first steps on a GPU, the library neither allocates memory from the driver nor makes the host wait."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import through
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.instruments import BLOCKING_CALLS
from benchmarks.workloads import DecoderBlock, loss_of
from offload import offload_layers

LAYERS = 8
STEPS = 10

pytestmark = pytest.mark.gpu


def make(block: type[DecoderBlock]) -> tuple[nn.ModuleList, torch.Tensor]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.ModuleList(block(1024, 2752, 8) for _ in range(LAYERS)).to(torch.bfloat16)
        return model, torch.randn(2, 1024, 1024, dtype=torch.bfloat16, requires_grad=True)


def run(model: nn.ModuleList, x: torch.Tensor) -> None:
    y = through(model, x)
    loss_of(y).backward()


class Checkpointed(DecoderBlock):
    """Saves its input, and is computed again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def runtime_calls(step: Callable[[], None]) -> Counter[str]:
    """How often each function of CUDA's runtime was called in ten steps, after three others."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    profiling = torch.profiler.profile(activities=activities, acc_events=True)
    with profiling as profiler, torch.profiler.record_function("the steps"):
        for _ in range(STEPS):
            step()
    events: Any = profiler.events()
    # The profiler synchronises too, before and after.
    steps = next(event.time_range for event in events if event.name == "the steps")
    inside = (event for event in events if steps.start <= event.time_range.start <= steps.end)
    return Counter(event.name for event in inside if event.name.startswith("cu"))


def blocking(calls: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in calls.items() if name in BLOCKING_CALLS}


@pytest.mark.parametrize("block", [DecoderBlock, Checkpointed])
def test_no_allocation_and_no_wait(block: type[DecoderBlock]) -> None:
    model, x = make(block)
    with offload_layers(model, num_layers=5) as handle:
        calls = runtime_calls(lambda: run(model, x))
        assert blocking(calls) == {}
        stats = handle.stats()
    assert stats.offloaded_bytes == stats.reloaded_bytes > 0
    assert calls["cudaMemcpyAsync"] >= 2 * STEPS * 4  # the first layer's input is a leaf


def test_the_count_sees_what_blocks() -> None:
    model, x = make(DecoderBlock)

    def step() -> None:
        run(model, x)
        x.sum().item()

    assert blocking(runtime_calls(step))["cudaStreamSynchronize"] >= STEPS
