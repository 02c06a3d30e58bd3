"""A rank's stages of ``torch.distributed.pipelining``: their order, their inputs, and what a step of them costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from offload.base.tensors import tensors_in
from offload.base.torch_private import pipeline_microbatches
from offload.device.backend import Backend, Event
from offload.measuring.memory_left import allocated_bytes
from offload.pipelining.order import Action, gpipe_order, one_f_one_b_order, read_actions, without_idle_inputs
from offload.pipelining.rank_step import StageProfile


def known_order(
    schedule: PipelineScheduleSingle | PipelineScheduleMulti, stages: list[Any]
) -> tuple[Action, ...] | None:
    """The order that this rank will run; ``None`` if the schedule does not say.

    GPipe and 1F1B list no order, or, on the last rank of 1F1B, another order than they run.
    """
    if isinstance(schedule, PipelineScheduleMulti):
        order = read_actions(schedule.pipeline_order[schedule.rank])
        for stage in stages:
            if skips_inputs(stage):
                order = without_idle_inputs(order, stage.stage_index)
        return order
    microbatches = pipeline_microbatches(schedule)
    if isinstance(schedule, ScheduleGPipe):
        return gpipe_order(stages[0].stage_index, microbatches)
    if isinstance(schedule, Schedule1F1B):
        return one_f_one_b_order(stages[0].stage_index, stages[0].num_stages, microbatches)
    return None


def skips_inputs(stage: Any) -> bool:
    """Whether the stage does nothing in its backward for the inputs, and everything in that for the weights."""
    return bool(stage.is_first) and stage.dw_builder is None


def held_by(stage: Any, microbatch: int, args: object, kwargs: object) -> Iterator[torch.Tensor]:
    """The inputs of a chunk, which the stage keeps on the device until the chunk's backward."""
    yield from tensors_in((args, kwargs))
    for info in stage.args_recv_info.get(microbatch, ()):
        yield from tensors_in(getattr(info, "buffer", None))


class Probe:
    """Measures one step of a rank: the seconds of its actions and the bytes that its chunks save."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._saved: dict[int, tuple[tuple[int, ...], int]] = {}
        self._weight_bytes: defaultdict[int, int] = defaultdict(int)
        self._marks: defaultdict[tuple[int, str], list[tuple[Event, Event]]] = defaultdict(list)

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        before_bytes = allocated_bytes(self._backend.device)
        start = self._backend.mark()
        yield
        self._marks[action.stage, action.kind].append((start, self._backend.mark()))
        if action.kind == "I":
            more_bytes = allocated_bytes(self._backend.device) - before_bytes
            self._weight_bytes[action.stage] = max(more_bytes, self._weight_bytes[action.stage])

    def count(self, stage: int, tensors: tuple[int, ...], kept_bytes: int) -> None:
        """Note what one of the stage's chunks has saved; the largest counts."""
        if stage not in self._saved or sum(tensors) >= sum(self._saved[stage][0]):
            self._saved[stage] = tensors, kept_bytes

    def profile(self) -> dict[int, StageProfile]:
        """The profile of each stage. Of several chunks the fastest counts, as the first ones also load kernels."""
        return {
            stage: StageProfile(
                forward_s=self._fastest_s(stage, "F"),
                backward_s=self._fastest_s(stage, "B") or self._fastest_s(stage, "I"),
                weight_s=self._fastest_s(stage, "W"),
                saved_bytes=sum(tensors),
                tensors=tensors,
                weight_bytes=self._weight_bytes[stage],
                kept_bytes=kept_bytes,
            )
            for stage, (tensors, kept_bytes) in self._saved.items()
        }

    def _fastest_s(self, stage: int, kind: str) -> float:
        return min(self._backend.seconds(self._marks[stage, kind]), default=0.0)
