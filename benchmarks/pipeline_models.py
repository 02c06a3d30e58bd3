"""What pipelines are measured with: decoder blocks of several widths, cut into stages, under each schedule."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV, ScheduleZBVZeroBubble

from benchmarks.workloads import DecoderBlock, loss_of

SCHEDULES = {"1F1B": Schedule1F1B, "ZBV": ScheduleZBVZeroBubble, "DualPipeV": ScheduleDualPipeV}


@dataclass(frozen=True)
class Model:
    """Decoder blocks of one width, and the microbatch they get."""

    hidden: int
    ffn: int
    heads: int
    layers: int
    """Per rank."""
    batch: int
    tokens: int
    dtype: torch.dtype = torch.bfloat16


MODELS = {
    "4096": Model(4096, 11008, 32, layers=4, batch=2, tokens=4096),
    "12288": Model(12288, 36864, 96, layers=4, batch=1, tokens=4096),
}
SMALL = {"small": Model(64, 172, 4, layers=2, batch=2, tokens=64, dtype=torch.float32)}


class Pipeline:
    """One rank's stages of one model under one schedule."""

    def __init__(self, name: str, model: Model, microbatches: int, device: torch.device) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        stages, mine = (world, [rank]) if name == "1F1B" else (2 * world, [rank, 2 * world - 1 - rank])
        self.stages = [_stage(model, index, stages, model.layers // len(mine), device) for index in mine]
        kind: Any = SCHEDULES[name]
        self.schedule = kind(self.stages[0] if name == "1F1B" else self.stages, microbatches, loss_fn=_loss)
        shape = (microbatches * model.batch, model.tokens, model.hidden)
        self._inputs = []
        if any(stage.is_first for stage in self.stages):
            self._inputs = [torch.randn(shape, dtype=model.dtype, device=device)]
        self._targets = {}
        if any(stage.is_last for stage in self.stages):
            self._targets = {"target": torch.zeros(shape[0], device=device)}
        self._parameters = [parameter for stage in self.stages for parameter in stage.submod.parameters()]
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> None:
        """One training step without its optimizer; the gradients stay allocated."""
        for gradient in self.gradients():
            gradient.zero_()
        self.schedule.step(*self._inputs, **self._targets, return_outputs=False)

    def gradients(self) -> list[torch.Tensor]:
        """Those of the last step."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


def _stage(model: Model, index: int, stages: int, layers: int, device: torch.device) -> PipelineStage:
    torch.manual_seed(index)
    with device:
        blocks = [DecoderBlock(model.hidden, model.ffn, model.heads).to(model.dtype) for _ in range(layers)]
    return PipelineStage(nn.Sequential(*blocks), index, stages, device)


def _loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return loss_of(output)


def described(model: Model) -> dict[str, Any]:
    """The model as it is recorded."""
    return {**asdict(model), "dtype": str(model.dtype)}
