"""What backward needs beside the activation sets is measured, and with it the peaks of plans are those that come."""

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
from offload.observe.memory import CpuAllocations
from offload.pipelining import PipelineOffload, PipelinePlan
from offload.pipelining.probe import BackwardMemory, DeviceMemory
from offload.pipelining.stage_plan import plan_pipeline
from offload.planning.link import Link

MICROBATCHES = 4
MIN_BYTES = 16 * 1024
INSTANT = Link(1e14, 1e14, 2e14)


class CpuMemory(DeviceMemory):
    """The memory of the CPU's tensors, as far as operations show it while ``allocations`` is entered."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.allocations = CpuAllocations(self._change)
        self._bytes = self._most_bytes = 0

    def allocated_bytes(self) -> int:
        return self._bytes

    def peak_bytes(self) -> int:
        found, self._most_bytes = self._most_bytes, self._bytes
        return found

    def _change(self, nbytes: int) -> None:
        self._bytes = nbytes
        self._most_bytes = max(self._most_bytes, nbytes)


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
        return offload.pipelining.attach(self.schedule, link=INSTANT, min_bytes=MIN_BYTES, **options)  # type: ignore[arg-type]

    def measured(self) -> PipelineOffload:
        """What the first step shows."""
        with self.attach() as handle:
            memory = CpuMemory()
            if self.device.type == "cpu":
                assert handle._probe is not None
                assert handle._probe.memory is None
                handle._probe.memory = memory
            with memory.allocations:
                self.step()
            self.step()
        return handle


def as_derived(plan: PipelinePlan) -> int:
    return plan.peak_bytes_without - plan.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.3, 0.6, 1.0])
def test_the_peak_falls_as_derived(device: torch.device, fraction: float) -> None:
    job = Job(device)
    nothing_bytes = job.peak_bytes()
    handle = job.measured()
    profile = handle.profile
    assert profile is not None
    assert len(profile[0].workspace) == len(profile[0].tensors) == 15
    assert handle.plan is not None
    plan = plan_pipeline(handle.plan.actions, profile, INSTANT, fraction=fraction, parts=16)
    with job.attach(profile=profile) as offloading:
        offloading.plan = plan
        job.step()
        peak_bytes = job.peak_bytes()
    assert peak_bytes < nothing_bytes
    assert as_derived(plan) == pytest.approx(nothing_bytes - peak_bytes, abs=0.015 * nothing_bytes)


def test_without_offloading_all_is_known_but_what_stays_anyway(device: torch.device) -> None:
    job = Job(device)
    measured_bytes = job.peak_bytes()
    handle = job.measured()
    assert handle.plan is not None
    # The first stage's inputs were there before; its outputs, of which each microbatch keeps one, and the loss are not.
    outputs_bytes = job.inputs.nbytes
    assert handle.plan.peak_bytes_without == pytest.approx(measured_bytes - outputs_bytes, rel=0.01)
    bare = handle.plan.peak_bytes_without - max(handle.plan.profile[0].workspace_of(handle.plan.parts))
    assert bare < 0.95 * (measured_bytes - outputs_bytes)


def test_a_first_step_that_offloads_measures_no_workspace(device: torch.device) -> None:
    job = Job(device)
    with job.attach(fraction=0.5) as handle:
        if device.type == "cpu":
            assert handle._probe is not None
            handle._probe.memory = CpuMemory()
        job.step()
        job.step()
    assert handle.profile is not None
    assert handle.profile[0].workspace == (), "what comes back meanwhile would count as needed"


class Told(DeviceMemory):
    """Memory that is what the test says."""

    def __init__(self, *peaks: int) -> None:
        super().__init__(torch.device("cpu"))
        self.peaks = [*peaks]

    def allocated_bytes(self) -> int:
        return 100

    def peak_bytes(self) -> int:
        return self.peaks.pop(0)


def test_what_rises_between_two_tensors_is_the_later_one_s() -> None:
    backward = BackwardMemory(Told(999, 130, 70, 90), 4)
    for tensor in (
        4,
        3,
        3,
        1,
        2,
        1,
    ):  # 4 is a parameter that was saved after the last tensor; 2 is asked for out of turn
        backward.ask(tensor)
    assert backward.rises == [-float("inf")] * 3 + [30]
    backward.ask(0)
    backward.note()
    assert backward.rises == [-10, -30, -float("inf"), 30]
    empty = BackwardMemory(Told(5, 6), 0)
    empty.ask(0)
    empty.note()
    assert empty.rises == []


def test_ranks_are_alone() -> None:
    assert not dist.is_initialized(), "a test before has left its group"
