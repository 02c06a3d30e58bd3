"""Offloading inside CUDA graphs: time and memory of {eager, graph} × {kept, offloaded}, on two models.

    python -m benchmarks.graphs --out results/graphs.json

The reference decoder keeps a GPU busy, so a graph changes nothing there, and offloading inside one must not either. A
small model's step is bound by what the host does to launch it; there a graph also hides what offloading adds to that.

A replay allocates nothing: a graph's memory is laid out while it is captured, and its peak is the allocator's then.
Beside it stands what the graph's own pool took from the device for good. Without a GPU (``--small``) only eager steps
run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import offload
from benchmarks.instruments import timed
from benchmarks.report import environment, table, write
from benchmarks.workloads import DecoderBlock, Workload, reference_decoder, run_step
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.device.select import resolve_device

GIB = 2**30
WARMUP = 3


def launch_bound(*, small: bool = False) -> Workload:
    """24 narrow decoder blocks and 512 tokens, bf16: kernels shorter than their launch. ``small`` fits a CPU test."""
    if small:
        return Workload("launch-bound (small)", lambda: DecoderBlock(64, 172, 4), 24, (1, 32, 64), torch.float32)
    return Workload("launch-bound", lambda: DecoderBlock(1024, 2752, 16), 24, (1, 512, 1024), torch.bfloat16)


@dataclass
class Contender:
    """One way to run a step, and what is known of it."""

    row: dict[str, Any]
    run: Callable[[], object]
    around: Callable[[], AbstractContextManager[Any]]

    def take_turn(self, steps: int, device: torch.device) -> float:
        """Seconds of a step, from several in a row; noted in the row."""
        with self.around():
            timed(self.run, device)
            step_s = timed(partial(_repeat, self.run, steps), device) / steps
        self.row["times_s"].append(step_s)
        return step_s


class Model:
    """A workload on the device."""

    def __init__(self, workload: Workload, min_bytes: int, device: torch.device) -> None:
        self.workload = workload
        self.device = device
        self._min_bytes = min_bytes
        self._layers, self._x = workload.build(device)
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None

    def eager(self, k: int) -> Contender:
        """Steps launched one kernel after the other, k layers offloaded."""
        with self._offloaded(k) as handle:
            _repeat(self._step, WARMUP)
            before = _copied_bytes(handle)
            gc.collect()
            with offload.memory_meter(self.device) as meter:
                self._step()
            copied = _copied_bytes(handle) - before
        return Contender(
            self._row("eager", k, peak_bytes=meter.peak_bytes, copied_bytes=copied),
            self._step,
            partial(self._offloaded, k),
        )

    def graph(self, k: int) -> Contender:
        """Replays of a captured step, k layers offloaded.

        The warm-up runs on the stream of the capture, so that cuBLAS has its workspace there and the graph needs none.
        """
        assert self._stream is not None, "graphs need a GPU"
        with self._offloaded(k) as handle:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                _repeat(self._step, WARMUP)
            torch.cuda.current_stream().wait_stream(self._stream)
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            before, reserved = _copied_bytes(handle), torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            with offload.memory_meter(self.device) as meter, torch.cuda.graph(graph, stream=self._stream):
                self._step()
            row = self._row(
                "graph",
                k,
                peak_bytes=meter.peak_bytes,
                copied_bytes=_copied_bytes(handle) - before,
                pool_bytes=torch.cuda.memory_reserved() - reserved,
            )
        return Contender(row, graph.replay, nullcontext)

    def contenders(self, k: int) -> list[Contender]:
        """All four combinations, or the two eager ones where there is no GPU."""
        modes = [self.eager] if self._stream is None else [self.eager, self.graph]
        return [mode(layers) for mode in modes for layers in (0, k)]

    def _step(self) -> None:
        run_step(self._layers, self._x)

    def _offloaded(self, k: int) -> AbstractContextManager[Any]:
        return offload.offload_layers(self._layers, k, min_bytes=self._min_bytes) if k else nullcontext()

    def _row(self, mode: str, k: int, **measured: int) -> dict[str, Any]:
        return {"workload": self.workload.name, "mode": mode, "k": k, **measured, "times_s": []}


def compare(contenders: list[Contender], device: torch.device, *, repeats: int, steps: int) -> list[dict[str, Any]]:
    """The contenders' rows, with their times.

    A GPU at its power limit changes its clocks from step to step. So the contenders take turns in each repeat, and
    a time is that of several steps in a row, divided by their number.
    """
    for _ in range(repeats):
        for contender in contenders:
            contender.take_turn(steps, device)
    for contender in contenders:
        times_s = contender.row["times_s"]
        contender.row["step_s"] = statistics.median(times_s)
        contender.row["spread_s"] = max(times_s) - min(times_s)
    return [contender.row for contender in contenders]


def hidden_layers(
    model: Model, slower: float, *, repeats: int, steps: int, most: int
) -> tuple[int, list[dict[str, Any]]]:
    """The largest k whose replay takes at most ``slower`` times as long as one with everything kept, and all tried."""
    kept = model.graph(0)
    tried: list[dict[str, Any]] = []
    for k in range(1, most + 1):
        moved = model.graph(k)
        ratios = [moved.take_turn(steps, model.device) / kept.take_turn(steps, model.device) for _ in range(repeats)]
        tried.append({"k": k, "copied_bytes": moved.row["copied_bytes"], "ratio": statistics.median(ratios)})
        if tried[-1]["ratio"] > slower:
            break
    hidden = [row["k"] for row in tried if row["ratio"] <= slower]
    return max(hidden, default=1), tried


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the four rows of one workload say."""
    step_s = {(row["mode"], bool(row["k"])): row["step_s"] for row in rows}
    peak_bytes = {(row["mode"], bool(row["k"])): row["peak_bytes"] for row in rows}
    saved = {mode: peak_bytes[mode, False] - peak_bytes[mode, True] for mode, kept in peak_bytes if kept}
    said = {
        "k": max(row["k"] for row in rows),
        "eager_offload_to_eager": step_s["eager", True] / step_s["eager", False],
        "eager_saved_bytes": saved["eager"],
    }
    if "graph" in saved:
        said |= {
            "graph_offload_to_graph": step_s["graph", True] / step_s["graph", False],
            "graph_saved_bytes": saved["graph"],
            "graph_saved_to_eager_saved": saved["graph"] / saved["eager"],
            "graph_speedup_kept": step_s["eager", False] / step_s["graph", False],
            "graph_speedup_offloaded": step_s["eager", True] / step_s["graph", True],
        }
    return said


def main() -> None:
    """Measure, print the tables, write the record."""
    parser = argparse.ArgumentParser(description="Measure offloading inside CUDA graphs.")
    parser.add_argument("--out", type=Path, default=Path("results/graphs.json"))
    parser.add_argument("--layers", type=int, default=5, help="k of the reference decoder")
    parser.add_argument(
        "--launch-layers", type=int, help="k of the launch-bound model; the largest hidden one if left out"
    )
    parser.add_argument("--min-bytes", type=int, default=64 << 10, help="of the launch-bound model")
    parser.add_argument(
        "--slower", type=float, default=1.03, help="a replay that takes so much of the kept one is hidden"
    )
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument(
        "--steps", type=int, default=5, help="steps in a row per repeat; five times as many where short"
    )
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    arguments = parser.parse_args()
    device = resolve_device(None)
    link = offload.measure_link(device)
    turns = {"repeats": arguments.repeats, "steps": arguments.steps}
    short_turns = {"repeats": arguments.repeats + 1, "steps": 5 * arguments.steps}

    model = Model(reference_decoder(small=arguments.small), 1 if arguments.small else DEFAULT_MIN_BYTES, device)
    decoder = compare(model.contenders(arguments.layers), device, **turns)
    del model
    _free(device)

    model = Model(launch_bound(small=arguments.small), 1 if arguments.small else arguments.min_bytes, device)
    k, tried = arguments.launch_layers or 4, []
    if device.type == "cuda" and not arguments.launch_layers:
        k, tried = hidden_layers(model, arguments.slower, **short_turns, most=model.workload.layers - 2)
        _free(device)
    launches = compare(model.contenders(k), device, **short_turns)

    said = {"decoder": summary(decoder), "launch_bound": summary(launches)}
    print(link)
    print(table(list(map(_shown, [*decoder, *launches]))))
    if tried:
        print(table([{"launch-bound k": row["k"], "graph, against kept": f"{row['ratio']:.3f}"} for row in tried]))
    titles = said["decoder"]
    print(table([{"": title, **{name: _figure(title, of[title]) for name, of in said.items()}} for title in titles]))
    write(
        arguments.out,
        {
            **environment(device),
            "link": vars(link),
            "summary": said,
            "rows": decoder + launches,
            "launch_bound_by_k": tried,
        },
    )


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "workload": row["workload"],
        "mode": row["mode"],
        "k": row["k"],
        "step ms": row["step_s"] * 1e3,
        "spread ms": row["spread_s"] * 1e3,
        "peak GiB": f"{row['peak_bytes'] / GIB:.3f}",
        "pool GiB": f"{row['pool_bytes'] / GIB:.3f}" if "pool_bytes" in row else None,
        "copied GiB": f"{row['copied_bytes'] / GIB:.3f}",
    }


def _figure(title: str, value: float) -> str:
    return f"{value / GIB:.3f} GiB" if title.endswith("_bytes") else f"{value:.4g}"


def _copied_bytes(handle: offload.OffloadedLayers | None) -> int:
    return 0 if handle is None else handle.stats().offloaded_bytes


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def _free(device: torch.device) -> None:
    """Let go of graphs and of memory that the allocator keeps."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
