"""Derived offloading in pipelines: step time and activation peak of each rank, with and without, beside the prediction.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.pipeline --out results/pipeline_4.json

Compute per saved byte grows with a model's width, so wide models offload for nothing where narrow ones do not. One of
each is run by 1F1B and by a V-schedule: without offloading, and so that the first rank needs half of its memory, while
the others go as far as they can for nothing. The record is written after each case. Without GPUs (``--small``) the
program only shows that it runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV, ScheduleZBVZeroBubble

import offload.pipelining
from benchmarks.instruments import GIB, Row, deterministic, give_memory_back, synchronize
from benchmarks.pipeline_prediction import HALF, NOTHING, with_predictions, written_moves
from benchmarks.report import Record, asked, table
from benchmarks.workloads import DecoderBlock, loss_of
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.measuring.measure_link import measure_link
from offload.pipelining import PipelineOffload, PipelinePlan, plan_pipeline
from offload.planning.profile import Link

SCHEDULES = {"1F1B": Schedule1F1B, "ZBV": ScheduleZBVZeroBubble, "DualPipeV": ScheduleDualPipeV}
AIM = 0.43
"""What the first rank's peak is planned to be, of that without offloading: a bit less than the half asked for."""


class Model(NamedTuple):
    """Decoder blocks of one width, and the microbatch they get."""

    hidden: int
    ffn: int
    heads: int
    layers: int  # per rank
    batch: int
    tokens: int
    dtype: torch.dtype = torch.bfloat16


MODELS = {"4096": Model(4096, 11008, 32, 4, 2, 4096), "12288": Model(12288, 36864, 96, 4, 1, 4096)}
SMALL = {"small": Model(64, 172, 4, 2, 2, 64, torch.float32)}


class Pipeline:
    """One rank's stages of one model under one schedule."""

    def __init__(self, name: str, model: Model, microbatches: int, device: torch.device) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        stages, mine = (world, [rank]) if name == "1F1B" else (2 * world, [rank, 2 * world - 1 - rank])
        self.stages = [_stage(model, index, stages, model.layers // len(mine), device) for index in mine]
        kind: Any = SCHEDULES[name]
        self.schedule = kind(
            self.stages[0] if name == "1F1B" else self.stages, microbatches, loss_fn=lambda output, _: loss_of(output)
        )
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


class Case:
    """One model under one schedule on this rank.

    A GPU at its power limit changes its clocks from step to step, so the ways take turns.
    """

    def __init__(self, pipeline: Pipeline, link: Link, device: torch.device, min_bytes: int) -> None:
        self._pipeline, self._device = pipeline, device
        self._options: dict[str, Any] = {"link": link, "min_bytes": min_bytes, "device": device}
        self._plan: PipelinePlan | None = None

    def measure(self, repeats: int) -> list[Row]:
        """This rank's rows."""
        with offload.pipelining.attach(self._pipeline.schedule, **self._options) as handle:
            self._pipeline.step()  # which is measured, and warms up
            with deterministic():
                self._pipeline.step()  # which plans, and offloads what is free
        free, profile = handle.plan, handle.profile
        if free is None or profile is None:
            raise RuntimeError("the second step did not plan; was the first one cut off?")
        link = self._options["link"]
        self._options |= {"profile": profile, "parts": 1}
        rank = {"rank": dist.get_rank()}
        nothing: Row = rank | {"offload": NOTHING, "bit_identical": True, "peak_bytes": 0, "times_s": []}
        half: Row = rank | {"offload": HALF, "peak_bytes": 0, "times_s": []}
        expected = [gradient.clone() for gradient in self._gradients(nothing)]
        self.time(nothing)
        # What is left for activation sets. Only the first rank's compute may wait for copies.
        peak_bytes = round(AIM * from_first_rank(nothing["peak_bytes"])) - max(
            0, nothing["peak_bytes"] - free.peak_bytes_without
        )
        budget = max(0 if dist.get_rank() == 0 else free.peak_bytes, peak_bytes)
        plan = self._plan = plan_pipeline(free.actions, profile, link, parts=free.parts, memory_budget=budget)
        offload.reserve_host_memory(plan.host_bytes, self._device)
        half["bit_identical"] = all(map(torch.equal, expected, self._gradients(half)))
        self.time(half)
        for _ in range(repeats - 1):
            self.time(nothing)
            self.time(half)
        for row in (nothing, half):
            row["step_s"] = statistics.median(row["times_s"])
        return [
            nothing,
            half
            | {
                "slowdown": half["step_s"] / nothing["step_s"] - 1,
                "peak_saved": 1 - half["peak_bytes"] / nothing["peak_bytes"],
                "offloaded_bytes": plan.offloaded_bytes,
                "saved_bytes": plan.saved_bytes,
                "actions": [repr(action) for action in plan.actions],
                "parts": plan.parts,
                "moves": written_moves(plan.schedule),
                "profile": {stage: asdict(costs) for stage, costs in profile.items()},
            },
        ]

    def _gradients(self, row: Row) -> list[torch.Tensor]:
        with self._offloading(row) as handle, deterministic():
            self._pipeline.step()
        if handle is not None:
            stats = handle.stats()
            row |= {name: getattr(stats, name) for name in ("late_reloads", "wasted_bytes", "pinned_bytes")}
        return self._pipeline.gradients()

    def time(self, row: Row) -> None:
        """One step, from idle ranks to idle ranks: its seconds, and this rank's activation peak."""
        with self._offloading(row), offload.memory_meter(self._device) as meter:
            meet(self._device)
            begin = time.perf_counter()
            self._pipeline.step()
            meet(self._device)
            row["times_s"].append(time.perf_counter() - begin)
        row["peak_bytes"] = max(row["peak_bytes"], meter.peak_bytes)

    @contextmanager
    def _offloading(self, row: Row) -> Iterator[PipelineOffload | None]:
        if row["offload"] == NOTHING:
            yield None
            return
        with offload.pipelining.attach(self._pipeline.schedule, **self._options) as handle:
            handle.plan = self._plan  # Made once, not for each turn.
            yield handle


def meet(device: torch.device) -> None:
    """All ranks have come here, and their devices are idle."""
    synchronize(device)
    dist.barrier()


def measure_links(device: torch.device) -> dict[str, Link]:
    """This rank's link while no other rank copies, and while all do."""
    links = {}
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            links["alone"] = measure_link(device)
    dist.barrier()
    links["all at once"] = measure_link(device)
    dist.barrier()
    return links


def gather(value: Any) -> list[Any]:
    """Every rank's ``value``."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_first_rank(value: Any) -> Any:
    """The first rank's ``value``, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


COLUMNS = {
    "schedule": "schedule",
    "width": "width",
    "rank": "rank",
    "offload": "offload",
    "ms": ("step_s", 1e-3),
    "longer %": ("slowdown", 0.01),
    "predicted": ("predicted_slowdown", 0.01),
    "GiB": ("peak_bytes", GIB),
    "saved %": ("peak_saved", 0.01),
    "predicted saved": ("predicted_peak_saved", 0.01),
    "same bits": "bit_identical",
}


def main() -> None:
    """Run all cases; the first rank prints and writes."""
    parser = argparse.ArgumentParser(description="Measure offloading in a pipeline.")
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "ZBV"], choices=SCHEDULES)
    parser.add_argument("--widths", nargs="+", default=["12288", "4096"], choices=[*MODELS])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments, device = asked(parser, "results/pipeline.json")
    small, min_bytes = arguments.small, 1024 if arguments.small else DEFAULT_MIN_BYTES
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
    )
    models = SMALL if small else {width: MODELS[width] for width in arguments.widths}
    options = {"microbatches": arguments.microbatches, "repeats": arguments.repeats, "aim": AIM}
    links = measure_links(device)
    record = Record(
        arguments,
        device,
        options={"ranks": dist.get_world_size(), **options},
        models={width: model._asdict() | {"dtype": str(model.dtype)} for width, model in models.items()},
        links=gather({what: asdict(link) for what, link in links.items()}),
    )
    for name in arguments.schedules:
        for width, model in models.items():
            pipeline = Pipeline(name, model, arguments.microbatches, device)
            mine = Case(pipeline, links["all at once"], device, min_bytes).measure(arguments.repeats)
            rows = [{"schedule": name, "width": width, **row} for found in gather(mine) for row in found]
            if dist.get_rank() == 0:
                rows = with_predictions({**record.found, "rows": rows})["rows"]
                print(table(rows, COLUMNS), flush=True)
                record.add(*rows, instead_of=["schedule", "width"])
            del pipeline
            give_memory_back(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
