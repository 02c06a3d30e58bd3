"""What the stages and schedules of ``torch.distributed.pipelining`` tell about themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from offload.base.layer_events import replace_attribute
from offload.base.torch_private import pipeline_microbatches, pipeline_stages, tensors_in
from offload.pipelining.order import Action, gpipe_order, one_f_one_b_order, read_actions, without_idle_inputs


def stages_of(schedule: PipelineScheduleSingle | PipelineScheduleMulti) -> list[Any]:
    """This rank's stages.

    Raises:
        TypeError: ``schedule`` is no pipeline schedule of PyTorch.
    """
    if isinstance(schedule, PipelineScheduleSingle | PipelineScheduleMulti):
        return pipeline_stages(schedule)
    raise TypeError(f"schedule must be one of torch.distributed.pipelining, got {type(schedule).__name__}")


def known_order(
    schedule: PipelineScheduleSingle | PipelineScheduleMulti, stages: list[Any]
) -> tuple[Action, ...] | None:
    """What this rank will run, if the schedule says so.

    GPipe and 1F1B are loops of their own, and the order that 1F1B lists is not the one it runs on the last rank.
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
    """Whether the stage's backward for the inputs does nothing, and that for the weights everything."""
    return bool(stage.is_first) and stage.dw_builder is None


def held_by(stage: Any, microbatch: int, args: object, kwargs: object) -> Iterator[torch.Tensor]:
    """What the stage keeps on the device until the chunk's backward anyway: its inputs."""
    yield from tensors_in((args, kwargs))
    for info in stage.args_recv_info.get(microbatch, ()):
        yield from tensors_in(getattr(info, "buffer", None))


class Wrapper:
    """Stands in for one method of one stage, on the instance."""

    def __init__(self, stage: Any, name: str, run: Callable[..., Any]) -> None:
        self._stage = stage
        self._name = name
        self._run = run
        self._method = getattr(stage, name)
        self._active = True
        self._put_back = replace_attribute(stage, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._active:
            return self._run(self._stage, self._method, *args, **kwargs)
        return self._method(*args, **kwargs)

    def remove(self) -> None:
        """Put back what was there; if something else was put over it since, only stop taking part."""
        self._active = False
        if vars(self._stage).get(self._name) is self:
            self._put_back()
