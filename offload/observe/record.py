"""What a device really did during a step, as a timeline.

On CUDA the source is ``torch.profiler``: kernels and copies with their device times. Each is matched
to a layer through the library's marks: the last mark before the call that launched it. The compute stream
counts as stalled where the next kernel had been launched already, yet started late. On the CPU
backend the source is the backend's own record.

Note:
    Memory is allocated in host time, while the host runs ahead of the device. A stream-ordered allocator hands out
    memory for the work launched next, so each change is drawn at the device time of that work.

    A replay of a CUDA graph is one launch, runs no Python and allocates nothing. So it has no marks and no memory
    curve: its kernels are of kind ``"other"``, and its copies belong to no layer. Stalls are seen as ever.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch

from offload.base import trace
from offload.base.trace import Mark
from offload.device.select import resolve_device
from offload.observe.memory import CpuAllocations
from offload.observe.spans import Kind, Lane, Span, merged
from offload.observe.timeline import Timeline

STALL_S = 20e-6
"""Shorter pauses between two kernels are not drawn: launching takes as long."""
MERGE_S = 200e-6
"""Copies of one layer that follow each other more closely are drawn as one; those of no known layer, at ``STALL_S``."""

COPY_KINDS: dict[Lane, Kind] = {"d2h": "offload", "h2d": "reload"}


class _Work(NamedTuple):
    start_s: float
    end_s: float
    launched_s: float
    lane: Lane
    nbytes: int


def record_timeline(
    step: Callable[[], object],
    device: torch.device | str | int | None = None,
    *,
    warmup: int = 1,
    title: str = "",
) -> Timeline:
    """Run ``step`` under observation and return what the device did.

    Layers are known by the offload context that the step runs in, with none offloaded too: ``num_layers=0``. In a
    replay of a CUDA graph nothing is known of layers and memory; streams, stalls and bytes are.

    Args:
        step: One training step, forward and backward, without arguments; or the ``replay`` of a graph that holds one.
        device: The device to watch; the current accelerator by default, and the CPU where there is none.
        warmup: How often ``step`` runs before it is recorded.
        title: The timeline's title.

    Returns:
        Streams, stalls and the device memory above what was allocated before the step.

    Raises:
        RuntimeError: Nothing was recorded, for example because another profiler runs.
    """
    resolved = resolve_device(device)
    for _ in range(warmup):
        step()
    spans, memory = _record_cpu(step) if resolved.type == "cpu" else _record_accelerator(step, resolved)
    if not spans:
        raise RuntimeError("nothing was recorded: is another profiler running, or did the step run on another device?")
    start_s = min(span.start_s for span in spans)
    return Timeline(
        tuple(replace(span, start_s=span.start_s - start_s, end_s=span.end_s - start_s) for span in spans),
        tuple((max(0.0, time_s - start_s), nbytes) for time_s, nbytes in memory),
        title,
    )


def _record_cpu(step: Callable[[], object]) -> tuple[list[Span], list[tuple[float, int]]]:
    recorder = trace.Recorder()
    memory: list[tuple[float, int]] = []
    trace.recorder = recorder
    try:
        with CpuAllocations(lambda nbytes: memory.append((perf_counter(), nbytes))):
            begin_s = perf_counter()
            step()
            end_s = perf_counter()
    finally:
        trace.recorder = None
    marks = _Marks([(begin_s, Mark("other", None)), *recorder.marks])
    copies = [
        _copy_span(cast("Lane", what.what), start_s, copied_s, what.layer, nbytes)
        for start_s, copied_s, what, nbytes in recorder.copies
    ]
    stalls = [_stall(start_s, waited_s, marks, start_s) for start_s, waited_s in recorder.waits]
    stalls = [stall for stall in stalls if stall.duration_s > STALL_S]
    busy = _between(begin_s, end_s, stalls, marks)
    return [*busy, *stalls, *_merged_copies(copies)], memory


def _between(begin_s: float, end_s: float, stalls: list[Span], marks: _Marks) -> Iterator[Span]:
    """Compute, as the time between marks that is not spent in stalls."""
    cuts = [time_s for time_s, _ in marks.phases if begin_s < time_s < end_s]
    edges = sorted({begin_s, end_s, *cuts, *(edge for stall in stalls for edge in (stall.start_s, stall.end_s))})
    for start_s, stop_s in itertools.pairwise(edges):
        if not any(stall.start_s <= start_s < stall.end_s for stall in stalls):
            yield _compute_span(start_s, stop_s, marks, start_s)


def _record_accelerator(step: Callable[[], object], device: torch.device) -> tuple[list[Span], list[tuple[float, int]]]:
    activities = [getattr(torch.profiler.ProfilerActivity, name) for name in ("CPU", device.type.upper())]
    torch.accelerator.synchronize(device)
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        step()
        torch.accelerator.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return _read(events, device)


def _read(events: list[dict[str, Any]], device: torch.device) -> tuple[list[Span], list[tuple[float, int]]]:
    """Spans and memory from a profiler's trace events; times there are in microseconds."""
    launches = {
        event["args"]["correlation"]: event["ts"] * 1e-6
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    marks = _Marks(
        sorted(
            (event["ts"] * 1e-6, Mark.parse(event["name"]))
            for event in events
            if event.get("cat") == "user_annotation" and event["name"].startswith(trace.PREFIX)
        )
    )
    work = sorted(_device_work(events, launches))
    kernels = [piece for piece in work if piece.lane == "compute"]
    copies = [
        _copy_span(piece.lane, piece.start_s, piece.end_s, _at(marks.copies, piece.launched_s).layer, piece.nbytes)
        for piece in work
        if piece.lane != "compute"
    ]
    compute = merged(_kernels_and_stalls(kernels, marks), lambda _: math.inf)
    return [*compute, *_merged_copies(copies)], _memory(events, kernels, device)


def _device_work(events: list[dict[str, Any]], launches: dict[int, float]) -> Iterator[_Work]:
    for event in events:
        lane = _lane(event)
        if lane is not None:
            start_s, arguments = event["ts"] * 1e-6, event["args"]
            launched_s = launches.get(arguments.get("correlation"), start_s)
            yield _Work(start_s, start_s + event["dur"] * 1e-6, launched_s, lane, arguments.get("bytes", 0))


def _lane(event: dict[str, Any]) -> Lane | None:
    if event.get("cat") == "gpu_memcpy":
        return "d2h" if "DtoH" in event["name"] else "h2d" if "HtoD" in event["name"] else "compute"
    return "compute" if event.get("cat") in ("kernel", "gpu_memset") else None


def _kernels_and_stalls(kernels: list[_Work], marks: _Marks) -> Iterator[Span]:
    """A span per kernel, and one where a kernel that had been launched in time still started late."""
    last_end_s = math.inf
    for kernel in kernels:
        if kernel.start_s - last_end_s > STALL_S and kernel.launched_s < last_end_s:
            yield _stall(last_end_s, kernel.start_s, marks, kernel.launched_s)
        yield _compute_span(kernel.start_s, kernel.end_s, marks, kernel.launched_s)
        last_end_s = kernel.end_s


def _compute_span(start_s: float, end_s: float, marks: _Marks, launched_s: float) -> Span:
    phase = _at(marks.phases, launched_s)
    return Span("compute", cast("Kind", phase.what), start_s, end_s, layer=phase.layer)


def _stall(start_s: float, end_s: float, marks: _Marks, launched_s: float) -> Span:
    layer = _at(marks.waits, launched_s).layer
    label = "wait" if layer is None else f"wait for {layer}"
    return Span("compute", "stall", start_s, end_s, label, layer)


def _copy_span(lane: Lane, start_s: float, end_s: float, layer: int | None, nbytes: int) -> Span:
    return Span(lane, COPY_KINDS[lane], start_s, end_s, layer=layer, nbytes=nbytes)


def _merged_copies(copies: list[Span]) -> Iterator[Span]:
    """Copies of one layer that follow each other closely as one span."""
    for lane in COPY_KINDS:
        spans = sorted((span for span in copies if span.lane == lane), key=lambda span: span.start_s)
        yield from merged(spans, lambda span: STALL_S if span.layer is None else MERGE_S)


def _memory(events: list[dict[str, Any]], kernels: list[_Work], device: torch.device) -> list[tuple[float, int]]:
    """Device bytes above those before the step, at the device time of the work launched next."""
    changes = [event for event in events if event.get("name") == "[memory]" and _is_on(device, event["args"])]
    changes.sort(key=lambda event: event["ts"])
    by_launch = sorted((kernel.launched_s, kernel.start_s) for kernel in kernels)
    if not changes or not by_launch:
        return []
    first = changes[0]["args"]
    before = first["Total Allocated"] - first.get("Bytes", 0)
    samples = []
    for change in changes:
        index = bisect_right(by_launch, (change["ts"] * 1e-6, math.inf))
        start_s = by_launch[min(index, len(by_launch) - 1)][1]
        samples.append((start_s, change["args"]["Total Allocated"] - before))
    return samples


def _is_on(device: torch.device, arguments: dict[str, Any]) -> bool:
    return arguments.get("Device Id") == (device.index or 0) and arguments.get("Device Type") == 1


class _Marks:
    """Marks by time, apart for phases, waits and copies."""

    def __init__(self, marks: list[tuple[float, Mark]]) -> None:
        def of(*kinds: str) -> list[tuple[float, Mark]]:
            return [(time_s, mark) for time_s, mark in marks if mark.what in kinds]

        self.phases = of("forward", "backward", "other")
        """What was computed."""
        self.waits = of("wait")
        """Whose copies were waited for."""
        self.copies = of(*COPY_KINDS)
        """Whose bytes were copied."""


def _at(marks: list[tuple[float, Mark]], time_s: float) -> Mark:
    """The last mark made until then."""
    index = bisect_right(marks, time_s, key=itemgetter(0))
    return marks[index - 1][1] if index else Mark("other", None)
