"""Offloading inside CUDA graphs: a step as a graph and launched eagerly, with layers kept and offloaded.

    python -m benchmarks.graphs --out results/graphs.json

Two models: the reference decoder, and a launch-bound one, whose kernels run for less time than their launch takes.
"""

import argparse
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

import offload
from benchmarks.instruments import Contender, Row, Step, give_memory_back, take_turns, with_median
from benchmarks.report import asked, environment, table, write
from benchmarks.workloads import DecoderBlock, Workload, reference_decoder, run_step
from offload.activations.context import DEFAULT_MIN_BYTES

GIB = 2**30
WARMUP = 3
ROUNDS = 4
LAYERS = {"decoder": 5, "launch-bound": 1}
"""How many layers are offloaded: as many as the copies of hide behind compute."""


def launch_bound(*, small: bool = False) -> Workload:
    """24 narrow decoder blocks and 512 tokens, bf16: kernels shorter than their launch. ``small`` fits a CPU test."""
    if small:
        return Workload("launch-bound", lambda: DecoderBlock(64, 172, 4), 24, (1, 32, 64), torch.float32)
    return Workload("launch-bound", lambda: DecoderBlock(1024, 2752, 16), 24, (1, 512, 1024), torch.bfloat16)


class Model:
    """A workload on the device.

    Args:
        workload: The layers and their input.
        device: Where they are; graphs need a GPU.
        min_bytes: Smaller storages stay on the device, in bytes.
        steps: How many are timed in a row.
    """

    def __init__(self, workload: Workload, device: torch.device, *, min_bytes: int, steps: int) -> None:
        self._name, self._device, self._min_bytes, self._steps = workload.name, device, min_bytes, steps
        self._layers, self._x = workload.build(device)

    def eager(self, k: int) -> Contender:
        """Steps launched one kernel after the other, k layers offloaded."""
        with self._offloaded(k):
            for _ in range(WARMUP):
                self._step()
            gc.collect()
            with offload.memory_meter(self._device) as meter:
                self._step()
        return self._contender("eager", k, meter.peak_bytes, partial(self._attached, k))

    def graph(self, k: int) -> Contender:
        """Replays of a captured step, k layers offloaded.

        The warm-up runs on the stream of the capture, so that cuBLAS has its workspace there and the graph needs none.
        """
        stream = torch.cuda.Stream()
        with self._offloaded(k):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMUP):
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            with offload.memory_meter(self._device) as meter, torch.cuda.graph(graph, stream=stream):
                self._step()
        return self._contender("graph", k, meter.peak_bytes, lambda: nullcontext(graph.replay))

    def _contender(self, mode: str, k: int, peak_bytes: int, attach: Any) -> Contender:
        row: Row = {"workload": self._name, "mode": mode, "k": k, "peak_bytes": peak_bytes, "times_s": []}
        return Contender(row, attach, self._steps)

    def _step(self) -> None:
        run_step(self._layers, self._x)

    @contextmanager
    def _attached(self, k: int) -> Iterator[Step]:
        with self._offloaded(k):
            yield self._step

    def _offloaded(self, k: int) -> AbstractContextManager[Any]:
        return offload.offload_layers(self._layers, k, min_bytes=self._min_bytes) if k else nullcontext()


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Measure offloading inside CUDA graphs.")
    arguments, device = asked(parser, "results/graphs.json")
    small = arguments.small
    link = offload.measure_link(device)
    models = {
        "decoder": (reference_decoder(small=small), DEFAULT_MIN_BYTES, 5),
        "launch-bound": (launch_bound(small=small), 64 << 10, 25),
    }
    rows: list[Row] = []
    for name, (workload, min_bytes, steps) in models.items():
        model = Model(workload, device, min_bytes=1 if small else min_bytes, steps=1 if small else steps)
        modes = (model.eager,) if device.type == "cpu" else (model.eager, model.graph)
        contenders = [mode(k) for mode in modes for k in (0, LAYERS[name])]
        take_turns(contenders, device, rounds=ROUNDS)
        rows += [with_median(one.row) for one in contenders]
        del model, modes, contenders  # with their graphs
        give_memory_back(device)
    print(link)
    print(table([_shown(row) for row in rows]))
    write(arguments.out, {**environment(device), "small": small, "link": vars(link), "rows": rows})


def _shown(row: Row) -> Row:
    if "error" in row:
        return {key: row[key] for key in ("workload", "mode", "k", "error")}
    shown = {"step ms": row["step_s"] * 1e3, "spread ms": row["spread_s"] * 1e3}
    return {key: row[key] for key in ("workload", "mode", "k")} | shown | {"peak GiB": row["peak_bytes"] / GIB}


if __name__ == "__main__":
    main()
