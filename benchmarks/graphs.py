"""Offloading inside CUDA graphs: a step as a graph and launched eagerly, with layers kept and offloaded.

    python -m benchmarks.graphs --out results/graphs.json

Two models: the reference decoder, and a launch-bound one, whose kernels run for less time than their launch takes.
"""

import argparse
import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import offload
from benchmarks.comparison import Attached, Comparison
from benchmarks.instruments import GIB, Row, give_memory_back
from benchmarks.models import Model
from benchmarks.report import Record, asked, table
from benchmarks.workloads import DecoderBlock, Workload, reference_decoder
from offload.activations.context import DEFAULT_MIN_BYTES

WARMUP = 3
TURNS = 4
SMALL_MIN_BYTES = 1 << 10
"""Of a small run: more than the state of random numbers, which attention saves on the device in a capture alone."""


def launch_bound(*, small: bool = False) -> Workload:
    """24 narrow decoder blocks and 512 tokens, bf16: kernels shorter than their launch. ``small`` fits a CPU test."""
    if small:
        return Workload(lambda: DecoderBlock(64, 172, 4), 24, (1, 32, 64), torch.float32)
    return Workload(lambda: DecoderBlock(1024, 2752, 16), 24, (1, 512, 1024))


def captured(model: Model, around: Any, device: torch.device) -> Attached:
    """A captured step, and its peak.

    The warm-up runs on the stream of the capture, so that cuBLAS has its workspace there and the graph needs none.
    """
    stream = torch.cuda.Stream()
    with around():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                model.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with offload.memory_meter(device) as meter, torch.cuda.graph(graph, stream=stream):
            model.step()
    return Attached(graph.replay, meter.peak_bytes)


def compare(name: str, workload: Workload, k: int, steps: int, device: torch.device, *, min_bytes: int) -> list[Row]:
    """All rows of a model of which ``k`` layers are offloaded, as many as the copies of hide behind compute."""
    model = workload.build(device)
    comparison = Comparison(model, device, settle=WARMUP, steps=steps, times=1, gradients=False)
    for mode in ("eager",) if device.type == "cpu" else ("eager", "graph"):
        for offloaded in (0, k):
            around: Any = partial(offload.offload_layers, model.layers, offloaded, min_bytes=min_bytes)
            around = around if offloaded else nullcontext
            if mode == "graph":
                around = partial(nullcontext, captured(model, around, device))
            comparison.add({"workload": name, "mode": mode, "k": offloaded}, around)
    return comparison.finished(TURNS)


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Measure offloading inside CUDA graphs.")
    arguments, device = asked(parser, "results/graphs.json")
    small = arguments.small
    link = offload.measure_link(device)
    print(link)
    record = Record(arguments, device, link=vars(link))
    least = SMALL_MIN_BYTES if small else None
    for name, workload, k, steps, min_bytes in (
        ("decoder", reference_decoder(small=small), 5, 5, least or DEFAULT_MIN_BYTES),
        ("launch-bound", launch_bound(small=small), 1, 25, least or 64 << 10),
    ):
        rows = compare(name, workload, k, 1 if small else steps, device, min_bytes=min_bytes)
        record.add(*rows, instead_of=["workload"])
        give_memory_back(device)  # of the graphs, too
    columns = {"model": "workload", "mode": "mode", "k": "k", "ms": ("step_s", 1e-3), "GiB": ("peak_bytes", GIB)}
    print(table(record.rows(), columns))


if __name__ == "__main__":
    main()
