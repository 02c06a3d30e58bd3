"""Derived offloading in pipelines: step time and activation peak of each rank, with and without, beside the prediction.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.pipeline --out results/pipeline_4.json

Widths of three well-known model sizes show where the link allows to offload for nothing: compute per saved byte
grows with the width. Each is run by 1F1B and by a V-schedule, three ways: without offloading; with what the link can
carry while compute goes on; and so that the first rank needs half of its memory, whatever that costs. Without GPUs
(``--small``) it only shows that it runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV, ScheduleZBVZeroBubble

import offload.pipelining
from benchmarks.report import environment, table, write
from benchmarks.workloads import DecoderBlock, loss_of
from offload.link import Link
from offload.measure import measure_link
from offload.timeline import COPY_LANES, Timeline

GIB = 2**30
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
    "4096": Model(4096, 11008, 32, layers=8, batch=2, tokens=4096),
    "8192": Model(8192, 22016, 64, layers=4, batch=1, tokens=4096),
    "16384": Model(16384, 53248, 128, layers=2, batch=1, tokens=4096),
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
        self.parameters = [parameter for stage in self.stages for parameter in stage.submod.parameters()]

    def step(self) -> None:
        """One training step without its optimizer; the gradients stay allocated."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()
        self.schedule.step(*self._inputs, **self._targets, return_outputs=False)

    def checksum(self) -> float:
        """The same for the same gradients, and hardly for others."""
        return sum(float(parameter.grad.double().sum()) for parameter in self.parameters if parameter.grad is not None)


def _stage(model: Model, index: int, stages: int, layers: int, device: torch.device) -> PipelineStage:
    torch.manual_seed(index)
    with device:
        blocks = [DecoderBlock(model.hidden, model.ffn, model.heads).to(model.dtype) for _ in range(layers)]
    return PipelineStage(nn.Sequential(*blocks), index, stages, device)


def _loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return loss_of(output)


def measure(pipeline: Pipeline, device: torch.device, *, warmup: int, repeats: int) -> dict[str, Any]:
    """Median seconds of a step, the slowest rank's; this rank's activation peak in bytes; its gradients' checksum."""
    for _ in range(warmup):
        pipeline.step()
    with offload.memory_meter(device) as meter:
        pipeline.step()
    times_s = []
    for _ in range(repeats):
        _meet(device)
        begin = time.perf_counter()
        pipeline.step()
        _meet(device)
        times_s.append(time.perf_counter() - begin)
    # Backward of fused attention adds in any order unless it is told not to.
    torch.use_deterministic_algorithms(True, warn_only=True)
    pipeline.step()
    torch.use_deterministic_algorithms(False)
    return {"step_s": statistics.median(times_s), "peak_bytes": meter.peak_bytes, "checksum": pipeline.checksum()}


def run_case(
    name: str, width: str, model: Model, link: Link, device: torch.device, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """This rank's rows for one model under one schedule."""
    pipeline = Pipeline(name, model, args.microbatches, device)
    what = {"schedule": name, "width": width, "rank": dist.get_rank()}
    without = measure(pipeline, device, warmup=2, repeats=args.repeats)
    rows = [{**what, "offload": "nothing", **without}]
    profile = plan = None
    for how, share in (("what is free", None), ("half on rank 0", 0.5)):
        budget = None
        if share is not None and plan is not None and dist.get_rank() == 0:
            # Of the measured peak, so that workspace counts: what is left of half of it is for activation sets.
            others = max(0, without["peak_bytes"] - plan.peak_bytes_without)
            budget = max(0, round(share * without["peak_bytes"]) - others)
        with offload.pipelining.attach(
            pipeline.schedule, profile=profile, link=link, memory_budget=budget, device=device, min_bytes=args.min_bytes
        ) as handle:
            row = measure(pipeline, device, warmup=2, repeats=args.repeats)
            duplex = _duplex_bytes_per_s(pipeline, device) if device.type == "cuda" else 0.0
        profile, plan = handle.profile, handle.plan
        rows.append(
            {
                **what,
                "offload": how,
                **row,
                "bit_identical": row["checksum"] == without["checksum"],
                "predicted_slowdown": plan.slowdown,
                "predicted_peak_bytes": plan.peak_bytes,
                "predicted_peak_bytes_without": plan.peak_bytes_without,
                "offloaded_bytes": plan.offloaded_bytes,
                "saved_bytes": plan.saved_bytes,
                "steady_duplex_bytes_per_s": duplex,
                "late_reloads": handle.stats().late_reloads,
                "wasted_bytes": handle.stats().wasted_bytes,
                "pinned_bytes": handle.stats().pinned_bytes,
                "profile": {stage: asdict(costs) for stage, costs in profile.items()},
            }
        )
    again = measure(pipeline, device, warmup=1, repeats=args.repeats)
    rows[0]["step_s"] = (without["step_s"] + again["step_s"]) / 2
    for row in rows[1:]:
        row["slowdown"] = row["step_s"] / rows[0]["step_s"] - 1
        row["peak_saved"] = 1 - row["peak_bytes"] / without["peak_bytes"]
    return rows


def _duplex_bytes_per_s(pipeline: Pipeline, device: torch.device) -> float:
    """Both directions' bytes per second on the first rank, from its first backward to its last forward."""
    if dist.get_rank():
        pipeline.step()
        _meet(device)
        return 0.0
    timeline = offload.record_timeline(pipeline.step, device, warmup=0)
    _meet(device)
    return steady_bytes_per_s(timeline)


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


def measure_links(device: torch.device) -> tuple[Link, Link]:
    """This rank's link while no other rank copies, and while all do."""
    alone = None
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            alone = measure_link(device)
    if alone is None:
        raise RuntimeError("this rank is not in the group")
    return alone, offload.pipelining.measure_shared_link(device)


def gather(value: Any) -> list[Any]:
    """Every rank's ``value``."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def summary(rows: list[dict[str, Any]]) -> str:
    """The table to read: measured beside predicted."""
    shown = []
    for row in rows:
        line = {
            "schedule": row["schedule"],
            "width": row["width"],
            "rank": row["rank"],
            "offload": row["offload"],
            "step ms": row["step_s"] * 1e3,
            "peak GiB": row["peak_bytes"] / GIB,
        }
        if "slowdown" in row:
            line |= {
                "peak saved %": row["peak_saved"] * 100,
                "longer %": row["slowdown"] * 100,
                "predicted longer %": row["predicted_slowdown"] * 100,
                "predicted sets GiB": row["predicted_peak_bytes"] / GIB,
                "of sets GiB": row["predicted_peak_bytes_without"] / GIB,
                "moved %": 100 * row["offloaded_bytes"] / max(1, row["saved_bytes"]),
                "steady GB/s": row["steady_duplex_bytes_per_s"] / 1e9,
                "same gradients": row["bit_identical"],
            }
        shown.append(line)
    return table(shown)


def _meet(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    dist.barrier()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the record here as JSON")
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "ZBV"], choices=SCHEDULES)
    parser.add_argument("--widths", nargs="+", default=["4096", "16384"], choices=[*MODELS])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="a model for the CPU")
    return parser.parse_args()


def main() -> None:
    """Run all cases and print the table on the first rank."""
    args = _arguments()
    args.min_bytes = 1024 if args.small else 1 << 20
    cuda = torch.cuda.is_available() and not args.small
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    alone, shared = measure_links(device)
    links = gather({"alone": asdict(alone), "all at once": asdict(shared)})
    log: Callable[..., None] = print if dist.get_rank() == 0 else lambda *_, **__: None
    log(f"link of the first rank alone: {alone}\nwhile all {dist.get_world_size()} ranks copy: {shared}", flush=True)
    models = SMALL if args.small else {width: MODELS[width] for width in args.widths}
    rows = []
    for width, model in models.items():
        for name in args.schedules:
            begin = time.perf_counter()
            rows += [row for found in gather(run_case(name, width, model, shared, device, args)) for row in found]
            log(f"{name}, width {width}: {time.perf_counter() - begin:.0f} s", flush=True)
            if cuda:
                torch.cuda.empty_cache()
    log(summary(rows))
    if args.out is not None and dist.get_rank() == 0:
        options = {"microbatches": args.microbatches, "repeats": args.repeats, "ranks": dist.get_world_size()}
        described = {width: {**asdict(model), "dtype": str(model.dtype)} for width, model in models.items()}
        write(args.out, {**environment(device), "options": options, "models": described, "links": links, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
