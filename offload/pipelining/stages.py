"""The stages of a schedule of ``torch.distributed.pipelining``: order, inputs, and wrappers of their methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from offload.base.layer_events import replace_attribute
from offload.base.tensors import tensors_in
from offload.base.torch_private import pipeline_microbatches, pipeline_stages
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


class Wrapper:
    """Replaces one method of one stage, on the instance."""

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
        """Restore the method. If it was replaced again since, only pass calls on from now on."""
        self._active = False
        if vars(self._stage).get(self._name) is self:
            self._put_back()
