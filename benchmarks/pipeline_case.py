"""One model under one schedule on one rank: its profile, and each way to run its step, checked and timed."""

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import offload.pipelining
from benchmarks.instruments import deterministic, synchronize
from benchmarks.pipeline_models import Pipeline
from benchmarks.pipeline_report import FREE
from offload.observe.spans import COPY_LANES
from offload.observe.timeline import Timeline
from offload.pipelining import PipelineOffload, PipelinePlan, StageProfile, plan_pipeline
from offload.planning.profile import Link


@dataclass
class Way:
    """One way to run a step, and what this rank measured."""

    name: str
    plan: PipelinePlan | None = None
    times_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    bit_identical: bool = True
    steady_bytes_per_s: float | None = None
    stats: dict[str, int] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return statistics.median(self.times_s)


class Case:
    """One model under one schedule on this rank.

    A GPU at its power limit changes its clocks from step to step, so the ways take turns.
    """

    def __init__(self, pipeline: Pipeline, link: Link, device: torch.device, min_bytes: int) -> None:
        self._pipeline = pipeline
        self._link = link
        self._device = device
        self._min_bytes = min_bytes
        self._expected: list[torch.Tensor] = []
        self.profile: Mapping[int, StageProfile] = {}
        """What a chunk of each stage costs, as the first step showed."""

    def first_steps(self) -> Way:
        """A step that is measured, which also warms up; then one that offloads what is free, its gradients kept."""
        with offload.pipelining.attach(
            self._pipeline.schedule, link=self._link, min_bytes=self._min_bytes, device=self._device
        ) as handle:
            self._pipeline.step()
            with deterministic():
                self._pipeline.step()
        if handle.plan is None or handle.profile is None:
            raise RuntimeError("the second step did not plan; was the first one cut off?")
        self.profile = handle.profile
        self._expected = [gradient.clone() for gradient in self._pipeline.gradients()]
        return Way(FREE, handle.plan, stats=_stats_of(handle))

    def plan(self, free: PipelinePlan, **options: Any) -> PipelinePlan:
        """A plan for the same step with other options."""
        return plan_pipeline(free.actions, self.profile, self._link, parts=free.parts, **options)

    def plan_share(self, free: PipelinePlan, share: float) -> PipelinePlan:
        """The plan for a budget that offloads nearly this share of the saved bytes."""
        budgets = (free.peak_bytes_without * part // 64 for part in range(64))
        plans = (self.plan(free, memory_budget=budget) for budget in budgets)
        return min(plans, key=lambda plan: abs(plan.offloaded_bytes - share * free.saved_bytes))

    def check(self, way: Way) -> None:
        """Compare the gradients of one step with those that are kept; without offloading, they are kept instead."""
        if way.plan is not None:
            offload.reserve_host_memory(way.plan.host_bytes, self._device)
        with self._offloading(way.plan) as handle, deterministic():
            self._pipeline.step()
        found = self._pipeline.gradients()
        way.bit_identical = all(map(torch.equal, self._expected, found))
        if handle is not None:
            way.stats = _stats_of(handle)
            return
        for expected, gradient in zip(self._expected, found, strict=True):
            expected.copy_(gradient)

    def time(self, way: Way) -> None:
        """One step, from idle ranks to idle ranks: its seconds, and this rank's activation peak."""
        with self._offloading(way.plan), offload.memory_meter(self._device) as meter:
            meet(self._device)
            begin = time.perf_counter()
            self._pipeline.step()
            meet(self._device)
            way.times_s.append(time.perf_counter() - begin)
        way.peak_bytes = max(way.peak_bytes, meter.peak_bytes)

    def record(self, way: Way) -> None:
        """Both directions' bytes per second on the first rank in the steady state of one step."""
        with self._offloading(way.plan):
            meet(self._device)
            if dist.get_rank() == 0:
                timeline = offload.record_timeline(self._pipeline.step, self._device, warmup=0)
                way.steady_bytes_per_s = steady_bytes_per_s(timeline)
            else:
                self._pipeline.step()
            meet(self._device)

    @contextmanager
    def _offloading(self, plan: PipelinePlan | None) -> Iterator[PipelineOffload | None]:
        if plan is None:
            yield None
            return
        with offload.pipelining.attach(
            self._pipeline.schedule,
            profile=self.profile,
            link=self._link,
            parts=1,
            min_bytes=self._min_bytes,
            device=self._device,
        ) as handle:
            handle.plan = plan  # Made once, not for each turn.
            yield handle


def steady_bytes_per_s(timeline: Timeline) -> float:
    """Bytes per second of both copy directions between the first backward and the last forward."""
    start_s = min((span.start_s for span in timeline.spans if span.kind == "backward"), default=0.0)
    end_s = max((span.end_s for span in timeline.spans if span.kind == "forward"), default=0.0)
    if end_s <= start_s:
        return 0.0
    copied = 0.0
    for lane in COPY_LANES:
        for span in timeline.lane(lane):
            inside_s = min(span.end_s, end_s) - max(span.start_s, start_s)
            if inside_s > 0 and span.duration_s:
                copied += span.nbytes * inside_s / span.duration_s
    return copied / (end_s - start_s)


def meet(device: torch.device) -> None:
    """All ranks have come here, and their devices are idle."""
    synchronize(device)
    dist.barrier()


def _stats_of(handle: PipelineOffload) -> dict[str, int]:
    stats = handle.stats()
    return {name: getattr(stats, name) for name in ("late_reloads", "wasted_bytes", "pinned_bytes")}
