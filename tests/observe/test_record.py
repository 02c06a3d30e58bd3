"""Timelines read from a profiler's trace, where the trace is written by hand."""

from typing import Any

import torch

from offload.observe import record
from offload.observe.timeline import Span

DEVICE = torch.device("cuda", 0)
US = 1e-6


def device_event(category: str, name: str, start_us: float, end_us: float, **arguments: int) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start_us, "dur": end_us - start_us, "args": arguments}


def kernel(start_us: float, end_us: float, correlation: int) -> dict[str, Any]:
    return device_event("kernel", "gemm", start_us, end_us, correlation=correlation)


def copy(direction: str, start_us: float, end_us: float, nbytes: int, correlation: int) -> dict[str, Any]:
    name = {"d2h": "Memcpy DtoH (Device -> Pinned)", "h2d": "Memcpy HtoD (Pinned -> Device)"}[direction]
    return device_event("gpu_memcpy", name, start_us, end_us, bytes=nbytes, correlation=correlation)


def launch(name: str, start_us: float, correlation: int) -> dict[str, Any]:
    return device_event("cuda_runtime", name, start_us, start_us + 1, correlation=correlation)


def mark(name: str, start_us: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"offload::{name}", "ts": start_us, "dur": 1}


def rounded(spans: list[Span]) -> list[tuple[str, str, int, int, int | None, int]]:
    """Lane, kind, start and end in µs, layer and bytes."""
    return [
        (span.lane, span.kind, round(span.start_s / US), round(span.end_s / US), span.layer, span.nbytes)
        for span in spans
    ]


def test_of_a_replay_has_streams_and_stalls_but_no_layers() -> None:
    """One launch stands for all that a graph holds, and Python marks nothing."""
    spans, memory = record._read(
        [
            launch("cudaGraphLaunch", 0, 7),
            kernel(10, 20, 7),
            kernel(22, 30, 7),
            kernel(100, 110, 7),  # waited for a copy
            copy("d2h", 20, 60, 400, 7),
            copy("d2h", 61, 90, 300, 7),  # straight behind the one before
            copy("d2h", 200, 230, 300, 7),  # maybe of another layer
            copy("h2d", 240, 250, 1000, 7),
        ],
        DEVICE,
    )
    assert rounded(spans) == [
        ("compute", "other", 10, 30, None, 0),
        ("compute", "stall", 30, 100, None, 0),
        ("compute", "other", 100, 110, None, 0),
        ("d2h", "offload", 20, 90, None, 700),
        ("d2h", "offload", 200, 230, None, 300),
        ("h2d", "reload", 240, 250, None, 1000),
    ]
    assert [span.label for span in spans if span.kind == "stall"] == ["wait"]
    assert memory == []


def test_of_an_eager_step_belongs_to_the_layers_that_were_marked() -> None:
    spans, _ = record._read(
        [
            mark("forward 0", 0),
            launch("cudaLaunchKernel", 1, 1),
            mark("d2h 0", 3),
            launch("cudaMemcpyAsync", 4, 2),
            launch("cudaMemcpyAsync", 5, 3),
            mark("forward 1", 6),
            launch("cudaLaunchKernel", 7, 4),
            mark("wait 0", 9),
            mark("backward 1", 10),
            launch("cudaLaunchKernel", 11, 5),
            kernel(20, 30, 1),
            copy("d2h", 30, 60, 400, 2),
            copy("d2h", 160, 170, 300, 3),  # of the same layer, not far behind
            kernel(31, 40, 4),
            kernel(170, 180, 5),
        ],
        DEVICE,
    )
    assert rounded(spans) == [
        ("compute", "forward", 20, 30, 0, 0),
        ("compute", "forward", 31, 40, 1, 0),
        ("compute", "stall", 40, 170, 0, 0),
        ("compute", "backward", 170, 180, 1, 0),
        ("d2h", "offload", 30, 170, 0, 700),
    ]


def test_a_pause_before_the_launch_is_no_stall() -> None:
    spans, _ = record._read(
        [launch("cudaLaunchKernel", 0, 1), kernel(10, 20, 1), launch("cudaLaunchKernel", 90, 2), kernel(100, 110, 2)],
        DEVICE,
    )
    assert rounded(spans) == [("compute", "other", 10, 110, None, 0)]


def test_memory_is_that_of_the_device_above_what_was_there_at_the_time_of_the_work_launched_next() -> None:
    def allocated(start_us: float, nbytes: int, total: int, index: int = 0, kind: int = 1) -> dict[str, Any]:
        arguments = {"Device Id": index, "Device Type": kind, "Bytes": nbytes, "Total Allocated": total}
        return {"name": "[memory]", "ts": start_us, "args": arguments}

    _, memory = record._read(
        [
            allocated(9, -400, 1000),  # after the last launch: with that
            allocated(0, 300, 1300),
            allocated(1, 10, 10, kind=0),  # of the host
            allocated(2, 10, 10, index=1),
            launch("cudaLaunchKernel", 3, 1),
            allocated(4, 100, 1400),
            launch("cudaLaunchKernel", 5, 2),
            kernel(20, 30, 1),
            kernel(31, 40, 2),
        ],
        DEVICE,
    )
    assert [(round(time_s / US), nbytes) for time_s, nbytes in memory] == [(20, 300), (31, 400), (31, 0)]
