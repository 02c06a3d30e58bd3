"""Activation offload on the reference workloads: time, memory, and the ratio to the link's limit.

    python -m benchmarks.activations --out results/activations.json

Each row is a median over timed steps after warm-up. The link is measured in the same run, and a row's
limit is the larger of the step without offloading and the time in which the link moves the row's bytes,
out and back.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from benchmarks.report import environment, table, write
from benchmarks.workloads import Workload, loss_of, norm_mlp, reference_decoder
from offload.backend import resolve_device
from offload.context import DEFAULT_MIN_BYTES

GIB = 2**30


def run_step(layers: nn.ModuleList, x: torch.Tensor) -> None:
    """One forward and backward."""
    y = x
    for layer in layers:
        y = layer(y)
    loss_of(y).backward()


def measure(
    workload: Workload,
    offloaded: list[int],
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    steps: int,
    min_bytes: int,
) -> list[dict[str, Any]]:
    """One row for the step without offloading, and one per number of offloaded layers, gradients compared.

    A GPU at its power limit changes its clocks from step to step. So the contenders take turns in each repeat, and
    a time is that of several steps in a row, divided by their number.
    """
    layers, x = workload.build(device)
    leaves = [x, *layers.parameters()]

    def step() -> None:
        run_step(layers, x)

    rows: list[dict[str, Any]] = []
    expected: list[torch.Tensor] = []
    for k in [0, *offloaded]:
        with offload.offload_layers(layers, k, min_bytes=min_bytes) as handle:
            first_s = timed(step, device)
            for _ in range(warmup - 1):
                step()
            with offload.memory_meter(device) as meter:
                step()
            before = handle.stats().offloaded_bytes
            found = _gradients(leaves, step)
            stats = handle.stats()
        expected = expected or found
        rows.append(
            {
                "workload": workload.name,
                "k": k,
                "first_s": first_s,
                "peak_bytes": meter.peak_bytes,
                "copied_bytes": stats.offloaded_bytes - before,
                "pinned_bytes": stats.pinned_bytes if k else 0,
                "wasted_bytes": stats.wasted_bytes,
                "late_reloads": stats.late_reloads,
                "bit_identical": all(map(torch.equal, expected, found)),
                "times_s": [],
            }
        )
    for _ in range(repeats):
        for row in rows:
            with offload.offload_layers(layers, row["k"], min_bytes=min_bytes):
                timed(step, device)
                row["times_s"].append(timed(lambda: [step() for _ in range(steps)], device) / steps)
    for row in rows:
        row["step_s"] = statistics.median(row["times_s"])
        row["spread_s"] = max(row["times_s"]) - min(row["times_s"])
    return rows


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Seconds from an idle device to an idle device."""
    _synchronize(device)
    begin = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - begin


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Measure activation offload on the reference workloads.")
    parser.add_argument("--out", type=Path, default=Path("results/activations.json"))
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 5, 7, 10, 14, 18], help="values of k")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="steps in a row per repeat")
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    arguments = parser.parse_args()
    device = resolve_device(None)
    link = offload.measure_link(device)
    rows: list[dict[str, Any]] = []
    for workload in (reference_decoder(small=arguments.small), norm_mlp(small=arguments.small)):
        measured = measure(
            workload,
            arguments.layers,
            device,
            warmup=arguments.warmup,
            repeats=arguments.repeats,
            steps=arguments.steps,
            min_bytes=1 if arguments.small else DEFAULT_MIN_BYTES,
        )
        for row in measured:
            kept = row if row["k"] == 0 else next(r for r in rows if r["workload"] == workload.name)
            link_s = row["copied_bytes"] * (1 / link.d2h_bytes_per_s + 1 / link.h2d_bytes_per_s)
            limit_s = max(kept["step_s"], link_s)
            ratio = row["step_s"] / limit_s
            rows.append({**row, "link_s": link_s, "limit_s": limit_s, "ratio_to_limit": ratio})
    print(link)
    print(table([_shown(row, rows) for row in rows]))
    write(arguments.out, {**environment(device), "link": vars(link), "rows": rows})


def _shown(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    kept = next(r for r in rows if r["workload"] == row["workload"])
    return {
        "workload": row["workload"],
        "k": row["k"],
        "step ms": row["step_s"] * 1e3,
        "spread ms": row["spread_s"] * 1e3,
        "vs k=0": row["step_s"] / kept["step_s"],
        "link ms": row["link_s"] * 1e3,
        "vs limit": row["ratio_to_limit"],
        "peak GiB": row["peak_bytes"] / GIB,
        "saved": f"{1 - row['peak_bytes'] / kept['peak_bytes']:.1%}",
        "copied GiB": row["copied_bytes"] / GIB,
        "pinned GiB": row["pinned_bytes"] / GIB,
        "first s": row["first_s"],
        "identical": row["bit_identical"],
    }


def _gradients(leaves: list[torch.Tensor], step: Callable[[], None]) -> list[torch.Tensor]:
    for leaf in leaves:
        assert leaf.grad is not None
        leaf.grad.zero_()
    # Backward of fused attention adds in any order unless it is told not to.
    torch.use_deterministic_algorithms(True)
    try:
        step()
    finally:
        torch.use_deterministic_algorithms(False)
    return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


if __name__ == "__main__":
    main()
