"""Derived offloading in pipelines: step time and activation peak of each rank, with and without, beside the prediction.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.pipeline --out results/pipeline_4.json
    python -m benchmarks.pipeline --show results/pipeline_4.json    a record; what is predicted of other widths

Compute per saved byte grows with a model's width, so wide models offload for nothing where narrow ones do not. One of
each is run by 1F1B and by a V-schedule: without offloading, and so that the first rank needs half of its memory.
Where compute waits for that, also with what the link can carry meanwhile, and with more than it can carry.
The record is written after each case. Without GPUs (``--small``) it only shows that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV, ScheduleZBVZeroBubble

import offload.pipelining
from benchmarks.instruments import deterministic
from benchmarks.report import environment, table, write
from benchmarks.workloads import DecoderBlock, loss_of
from offload.link import Link
from offload.measure import measure_link
from offload.pipelining import PipelineOffload, PipelinePlan, StageProfile, plan_pipeline
from offload.timeline import COPY_LANES, Timeline

GIB = 2**30
SCHEDULES = {"1F1B": Schedule1F1B, "ZBV": ScheduleZBVZeroBubble, "DualPipeV": ScheduleDualPipeV}

NOTHING, HALF, FREE, BOUND = "nothing", "half on rank 0", "what is free", "bound by the link"

AIM = 0.43
"""What the first rank's peak is planned to be, of that without offloading: a bit less than the half asked for."""

FREE_SLOWDOWN = 0.03
"""A step that much longer still counts as free."""

BOUND_FRACTION = {"1F1B": 0.75, "ZBV": 0.5, "DualPipeV": 0.5}
"""Share of the first rank's bytes that has the time to travel, but not on this link if the model is narrow: in a
V-schedule, the chunks of the first rank's second stage are needed at once."""

BUSY = 0.8
"""From this share of the link on, in the predicted steady state, a step is recorded."""


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

    @property
    def operations(self) -> int:
        """Floating-point operations of one microbatch's forward on one rank: matrix products, causal attention."""
        per_token = 2 * (4 * self.hidden**2 + 3 * self.hidden * self.ffn) + 2 * self.tokens * self.hidden
        return self.layers * self.batch * self.tokens * per_token

    @property
    def saved(self) -> int:
        """Elements that it saves, but for small ones."""
        return self.layers * self.batch * self.tokens * (8 * self.hidden + 4 * self.ffn)


MODELS = {
    "4096": Model(4096, 11008, 32, layers=4, batch=2, tokens=4096),
    "8192": Model(8192, 22016, 64, layers=4, batch=1, tokens=4096),
    "12288": Model(12288, 36864, 96, layers=4, batch=1, tokens=4096),
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
            fraction=0.0,
            min_bytes=self._min_bytes,
            device=self._device,
        ) as handle:
            handle.plan = plan  # Made once, not for each turn.
            yield handle


def run_case(
    name: str, model: Model, links: Mapping[str, Link], device: torch.device, args: argparse.Namespace, clock: Clock
) -> list[dict[str, Any]]:
    """This rank's rows for one model under one schedule."""
    pipeline = Pipeline(name, model, args.microbatches, device)
    case = Case(pipeline, links["all at once"], device, args.min_bytes)
    clock.lap("model")
    free, nothing = case.first_steps(), Way(NOTHING)
    clock.lap("first two steps")
    case.check(nothing)
    free.bit_identical = nothing.bit_identical
    case.time(nothing)
    if free.plan is None:
        raise RuntimeError("nothing was planned")
    peak_bytes = from_first_rank(nothing.peak_bytes)
    half = Way(HALF, case.plan(free.plan, memory_budget=budget_bytes(round(AIM * peak_bytes), nothing, free.plan)))
    clock.lap("reference and plan")
    ways = [half]
    if args.every_way or from_first_rank(half.plan.slowdown > FREE_SLOWDOWN):
        more = case.plan(free.plan, fraction=BOUND_FRACTION[name]) if dist.get_rank() == 0 else free.plan
        ways += [free, Way(BOUND, more)]
    for way in ways:
        if way is not free:
            case.check(way)
        case.time(way)
    for _ in range(args.repeats - 1):
        for way in [nothing, *ways]:
            case.time(way)
    clock.lap("timed steps")
    for way in ways:
        predicted = steady_bytes_per_s(way.plan.timeline)
        if args.every_way or from_first_rank(predicted >= BUSY * links["all at once"].duplex_bytes_per_s):
            case.record(way)
    clock.lap("recorded steps")
    return [row(way, nothing, case.profile, links) for way in [nothing, *ways]]


def budget_bytes(peak_bytes: int, nothing: Way, free: PipelinePlan) -> int:
    """What is left for this rank's activation sets if its peak is to be ``peak_bytes``, workspace and all.

    Only the first rank's compute may wait for it: the others go as far as they can for nothing.
    """
    others = max(0, nothing.peak_bytes - free.peak_bytes_without)
    return max(0 if dist.get_rank() == 0 else free.peak_bytes, peak_bytes - others)


def row(way: Way, nothing: Way, profile: Mapping[int, StageProfile], links: Mapping[str, Link]) -> dict[str, Any]:
    """What is recorded of one way on this rank."""
    found: dict[str, Any] = {
        "rank": dist.get_rank(),
        "offload": way.name,
        "step_s": way.step_s,
        "times_s": way.times_s,
        "peak_bytes": way.peak_bytes,
        "bit_identical": way.bit_identical,
    }
    if way.plan is None:
        return found
    steady = way.steady_bytes_per_s
    return found | {
        "slowdown": way.step_s / nothing.step_s - 1,
        "peak_saved": 1 - way.peak_bytes / nothing.peak_bytes,
        "predicted_slowdown": predicted_slowdown(way.plan, nothing.step_s),
        "predicted_peak_saved": (way.plan.peak_bytes_without - way.plan.peak_bytes) / nothing.peak_bytes,
        "predicted_peak_bytes": way.plan.peak_bytes,
        "predicted_peak_bytes_without": way.plan.peak_bytes_without,
        "predicted_steady_bytes_per_s": steady_bytes_per_s(way.plan.timeline),
        "offloaded_bytes": way.plan.offloaded_bytes,
        "saved_bytes": way.plan.saved_bytes,
        "steady_bytes_per_s": steady,
        "steady_to_link": {what: steady and steady / link.duplex_bytes_per_s for what, link in links.items()},
        **way.stats,
        "actions": [repr(action) for action in way.plan.actions],
        "parts": way.plan.parts,
        "profile": {stage: asdict(costs) for stage, costs in profile.items()},
    }


def predicted_slowdown(plan: PipelinePlan, step_s: float) -> float:
    """How much longer than ``step_s`` the rank is busy, waits for copies and all; bubbles hide the rest."""
    return max(0.0, (plan.step_s_without + plan.stall_s) / step_s - 1)


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


def measure_links(device: torch.device) -> dict[str, Link]:
    """This rank's link while no other rank copies, and while all do."""
    links = {}
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            links["alone"] = measure_link(device)
    return links | {"all at once": offload.pipelining.measure_shared_link(device)}


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


def meet(device: torch.device) -> None:
    """All ranks have come here, and their devices are idle."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    dist.barrier()


def _stats_of(handle: PipelineOffload) -> dict[str, int]:
    stats = handle.stats()
    return {name: getattr(stats, name) for name in ("late_reloads", "wasted_bytes", "pinned_bytes")}


class Clock:
    """Seconds since the start, and of what was done since the last lap.

    Args:
        log: Where laps are printed.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._start = self._last = time.perf_counter()

    def lap(self, what: str) -> None:
        """Print how long ``what`` took."""
        now = time.perf_counter()
        self._log(f"[{now - self._start:6.1f} s] {what}: {now - self._last:.1f} s")
        self._last = now


def save(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record so that at any time the file is a whole one."""
    unfinished = path.with_name(path.name + ".unfinished")
    write(unfinished, record)
    unfinished.replace(path)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
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
            "same gradients": row["bit_identical"],
        }
        if "slowdown" in row:
            line |= {
                "peak saved %": row["peak_saved"] * 100,
                "predicted saved %": row["predicted_peak_saved"] * 100,
                "longer %": row["slowdown"] * 100,
                "predicted longer %": row["predicted_slowdown"] * 100,
                "moved %": 100 * row["offloaded_bytes"] / max(1, row["saved_bytes"]),
                "pinned GiB": row["pinned_bytes"] / GIB,
            }
            if row["steady_bytes_per_s"] is not None:
                line["steady GB/s"] = row["steady_bytes_per_s"] / 1e9
                line |= {f"of link, {what}": ratio for what, ratio in row["steady_to_link"].items()}
        shown.append(line)
    return table(shown)


def predictions(record: Mapping[str, Any]) -> str:
    """What the derivation says of all widths on the first rank's link, as a table."""
    shown = [
        {
            "schedule": row["schedule"],
            "width": row["width"],
            "sets GiB": row["sets_bytes"] / GIB,
            "free: less %": 100 * row["free_saved"],
            "half of the sets: longer %": 100 * row["half_slowdown"],
            "as in the measured step, sets %": 100 * row["aimed_share"],
            "longer %": 100 * row["aimed_slowdown"],
        }
        for row in prediction_rows(record)
    ]
    return table(shown)


def prediction_rows(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of each schedule and width, on the first rank: how much of the sets' peak is free, what more of it costs.

    A width's costs are scaled from those of the widest model measured, by operations and by saved elements; the
    share of bubbles in the step is taken to be the same. Asked for are half of the sets, and as few of them as in
    that model's measured step, which makes room for workspace as well.
    """
    link = Link(**record["links"][0]["all at once"])
    for name in dict.fromkeys(row["schedule"] for row in record["rows"]):
        first = [row for row in record["rows"] if (row["schedule"], row["rank"]) == (name, 0)]
        widest = max((row["width"] for row in first), key=lambda width: record["models"][width]["hidden"])
        nothing, measured = (
            next(row for row in first if (row["width"], row["offload"]) == (widest, way)) for way in (NOTHING, HALF)
        )
        base = record["models"][widest]
        busy_s = plan_pipeline(measured["actions"], scaled(measured["profile"], 1, 1), link).step_s_without
        aimed_share = measured["predicted_peak_bytes"] / measured["predicted_peak_bytes_without"]
        for width, model in MODELS.items():
            profile = scaled(measured["profile"], model.operations / base["operations"], model.saved / base["saved"])
            plan = partial(plan_pipeline, measured["actions"], profile, link, parts=measured["parts"])
            free = plan()
            sets_bytes = free.peak_bytes_without
            step_s = nothing["step_s"] / busy_s * free.step_s_without
            half, aimed = (
                predicted_slowdown(plan(memory_budget=round(share * sets_bytes)), step_s)
                for share in (0.5, aimed_share)
            )
            yield {
                "schedule": name,
                "width": width,
                "compute_s": sum(costs.forward_s + costs.backward_s + costs.weight_s for costs in profile.values()),
                "chunk_bytes": sum(costs.saved_bytes for costs in profile.values()),
                "sets_bytes": sets_bytes,
                "free_saved": 1 - free.peak_bytes / sets_bytes,
                "half_slowdown": half,
                "aimed_share": aimed_share,
                "aimed_slowdown": aimed,
            }


def scaled(profile: Mapping[str, Mapping[str, float]], operations: float, saved: float) -> dict[int, StageProfile]:
    """A recorded profile, for so many times the operations and the saved bytes."""
    return {
        int(stage): StageProfile(
            operations * costs["forward_s"],
            operations * costs["backward_s"],
            operations * costs["weight_s"],
            round(saved * costs["saved_bytes"]),
        )
        for stage, costs in profile.items()
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the record here as JSON, after each case")
    parser.add_argument("--show", type=Path, help="print this record and measure nothing")
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "ZBV"], choices=SCHEDULES)
    parser.add_argument("--widths", nargs="+", default=["12288", "4096"], choices=[*MODELS])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--every-way", action="store_true", help="all ways and a recorded step of each, whatever the model"
    )
    parser.add_argument("--small", action="store_true", help="a model for the CPU, every way")
    return parser.parse_args()


def main() -> None:
    """Run all cases; the first rank prints and writes."""
    args = _arguments()
    if args.show:
        record = json.loads(args.show.read_text("utf-8"))
        print(summary(record["rows"]), predictions(record), sep="\n\n")
        return
    args.every_way |= args.small
    args.min_bytes = 1024 if args.small else 1 << 20
    cuda = torch.cuda.is_available() and not args.small
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    is_first = dist.get_rank() == 0
    clock = Clock(lambda line: print(line, flush=True) if is_first else None)
    links = measure_links(device)
    clock.lap("links")
    models = SMALL if args.small else {width: MODELS[width] for width in args.widths}
    record = {
        **environment(device),
        "options": {
            "ranks": dist.get_world_size(),
            "microbatches": args.microbatches,
            "repeats": args.repeats,
            "aim": AIM,
        },
        "models": {width: described(model) for width, model in models.items()},
        "links": gather({what: asdict(link) for what, link in links.items()}),
        "rows": [],
    }
    if is_first:
        print(*(f"{what}: {link}" for what, link in links.items()), sep="\n", flush=True)
    for name in args.schedules:
        for width, model in models.items():
            if is_first:
                print(f"{name}, width {width}:", flush=True)
            mine = run_case(name, model, links, device, args, clock)
            rows = [{"schedule": name, "width": width, **row} for found in gather(mine) for row in found]
            record["rows"] += rows
            if is_first:
                print(summary(rows), flush=True)
            if is_first and args.out is not None:
                save(args.out, record)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    dist.destroy_process_group()


def described(model: Model) -> dict[str, Any]:
    """The model as it is recorded."""
    return {**asdict(model), "dtype": str(model.dtype), "operations": model.operations, "saved": model.saved}


if __name__ == "__main__":
    main()
