"""Derived offloading in pipelines: step time and activation peak of each rank, with and without, beside the prediction.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.pipeline --out results/pipeline_4.json
    python -m benchmarks.pipeline --show results/pipeline_4.json    print a record

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
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline_case import Case, Way, steady_bytes_per_s
from benchmarks.pipeline_models import MODELS, SCHEDULES, SMALL, Model, Pipeline, described
from benchmarks.pipeline_prediction import with_predictions, written_moves
from benchmarks.pipeline_report import BOUND, HALF, NOTHING, summary
from benchmarks.report import environment, write
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.measuring.measure_link import measure_link
from offload.pipelining import PipelinePlan, StageProfile
from offload.planning.profile import Link

AIM = 0.43
"""What the first rank's peak is planned to be, of that without offloading: a bit less than the half asked for."""

FREE_SLOWDOWN = 0.03
"""A step that much longer still counts as free."""

BOUND_SHARE = {"1F1B": 0.75, "ZBV": 0.5, "DualPipeV": 0.5}
"""Share of the first rank's bytes that has the time for both copies, but not on this link if the model is narrow: in a
V-schedule, the chunks of the first rank's second stage are needed at once."""

BUSY = 0.8
"""From this share of the link on, in the predicted steady state, a step is recorded."""


def run_case(
    name: str, model: Model, links: Mapping[str, Link], device: torch.device, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """This rank's rows for one model under one schedule."""
    pipeline = Pipeline(name, model, args.microbatches, device)
    case = Case(pipeline, links["all at once"], device, args.min_bytes)
    free, nothing = case.first_steps(), Way(NOTHING)
    case.check(nothing)
    free.bit_identical = nothing.bit_identical
    case.time(nothing)
    if free.plan is None:
        raise RuntimeError("nothing was planned")
    peak_bytes = from_first_rank(nothing.peak_bytes)
    half = Way(HALF, case.plan(free.plan, memory_budget=budget_bytes(round(AIM * peak_bytes), nothing, free.plan)))
    ways = [half]
    if args.every_way or from_first_rank(half.plan.slowdown > FREE_SLOWDOWN):
        more = case.plan_share(free.plan, BOUND_SHARE[name]) if dist.get_rank() == 0 else free.plan
        ways += [free, Way(BOUND, more)]
    for way in ways:
        if way is not free:
            case.check(way)
        case.time(way)
    for _ in range(args.repeats - 1):
        for way in [nothing, *ways]:
            case.time(way)
    for way in ways:
        predicted = steady_bytes_per_s(way.plan.timeline)
        if args.every_way or from_first_rank(predicted >= BUSY * links["all at once"].duplex_bytes_per_s):
            case.record(way)
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
        "moves": written_moves(way.plan.schedule),
        "profile": {stage: asdict(costs) for stage, costs in profile.items()},
    }


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
        print(summary(json.loads(args.show.read_text("utf-8"))["rows"]))
        return
    args.every_way |= args.small
    args.min_bytes = 1024 if args.small else DEFAULT_MIN_BYTES
    cuda = torch.cuda.is_available() and not args.small
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    is_first = dist.get_rank() == 0
    begin = time.perf_counter()
    links = measure_links(device)
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
                print(f"[{time.perf_counter() - begin:6.1f} s] {name}, width {width}:", flush=True)
            mine = run_case(name, model, links, device, args)
            rows = [{"schedule": name, "width": width, **row} for found in gather(mine) for row in found]
            rows = with_predictions({**record, "rows": rows})["rows"]
            record["rows"] += rows
            if is_first:
                print(summary(rows), flush=True)
            if is_first and args.out is not None:
                write(args.out, record)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
