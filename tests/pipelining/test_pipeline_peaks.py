"""The measured peak of a rank falls as far as its plan predicts.

A prediction counts activation sets alone. It leaves out backward's workspace: gradients and temporary tensors of the
operation at work, and what is reloaded beside it. So the sets are a lower bound of a measured peak; and where the peaks
with and without offloading are at different operations, they fall by more or less than predicted, by the difference of
the two workspaces: at most two tensors of the MLP's inner width, its gradients before and after the activation.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import group
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import offload
import offload.pipelining
from benchmarks.workloads import NormMlpBlock, loss_of
from offload.pipelining import PipelineOffload
from offload.pipelining.plan import plan_pipeline
from offload.planning.profile import Link

MICROBATCHES = 4
MIN_BYTES = 16 * 1024
INSTANT = Link(1e14, 1e14, 2e14)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[torch.device]:
    with group(tmp_path):
        yield torch.device(request.param)


class Job:
    """One rank that trains under GPipe, its gradients allocated; no tensor is saved by two operations."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        wide = 128 if device.type == "cpu" else 1024
        self.device = device
        self.blocks = nn.Sequential(*(NormMlpBlock(wide) for _ in range(4))).to(device)
        for parameter in self.blocks.parameters():
            parameter.grad = torch.zeros_like(parameter)
        stage = PipelineStage(self.blocks, 0, 1, device)
        self.schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=lambda output, _: loss_of(output))
        self.inputs = torch.randn(2 * MICROBATCHES, wide, wide, device=device)
        self.step()  # cuBLAS allocates its own workspace, which stays

    def step(self) -> None:
        self.schedule.step(self.inputs, target=self.inputs, return_outputs=False)

    def peak_bytes(self) -> int:
        with offload.memory_meter(self.device) as meter:
            self.step()
        return meter.peak_bytes

    def attach(self, **options: object) -> PipelineOffload:
        return offload.pipelining.attach(self.schedule, link=INSTANT, min_bytes=MIN_BYTES, **options)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.7, 0.5, 0.4])
def test_the_peak_falls_as_derived(device: torch.device, share: float) -> None:
    job = Job(device)
    nothing_bytes = job.peak_bytes()
    with job.attach() as handle:
        job.step()
        job.step()
    profile = handle.profile
    assert profile is not None
    assert len(profile[0].tensors) == 15
    assert handle.plan is not None
    budget = round(share * handle.plan.peak_bytes_without)
    plan = plan_pipeline(handle.plan.actions, profile, INSTANT, memory_budget=budget, parts=16)
    with job.attach(profile=profile) as offloading:
        offloading.plan = plan
        job.step()
        peak_bytes = job.peak_bytes()
    assert plan.peak_bytes_without <= nothing_bytes
    assert plan.peak_bytes <= peak_bytes < nothing_bytes
    inner_bytes = 4 * job.inputs.nbytes // MICROBATCHES  # 2.4% of the peak without offloading
    predicted_bytes = plan.peak_bytes_without - plan.peak_bytes
    left_out_bytes = (0.6 if device.type == "cpu" else 2.0) * inner_bytes  # the CPU's meter sees no kernel's memory
    assert nothing_bytes - peak_bytes == pytest.approx(predicted_bytes, abs=left_out_bytes)


def test_ranks_are_alone() -> None:
    assert not dist.is_initialized(), "a test before has left its group"
