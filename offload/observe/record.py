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
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
    with CpuAllocations(lambda nbytes: memory.append((perf_counter(), nbytes))), _recording(recorder):
        begin_s = perf_counter()
        step()
        end_s = perf_counter()
    marks = _Marks([(begin_s, Mark("other", None)), *recorder.marks])
    copies = [
        (_Work(start_s, copied_s, start_s, cast("Lane", what.what), nbytes), what.layer)
        for start_s, copied_s, what, nbytes in recorder.copies
    ]
    stalls = [_stall(start_s, waited_s, marks, start_s) for start_s, waited_s in recorder.waits]
    stalls = [stall for stall in stalls if stall.duration_s > STALL_S]
    busy = _between(begin_s, end_s, stalls, marks)
    return [*busy, *stalls, *_copy_spans(copies)], memory


@contextmanager
def _recording(recorder: trace.Recorder) -> Iterator[None]:
    trace.recorder = recorder
    try:
        yield
    finally:
        trace.recorder = None


def _between(begin_s: float, end_s: float, stalls: list[Span], marks: _Marks) -> Iterator[Span]:
    """Compute, as the time between marks that is not spent in stalls."""
    cuts = [time_s for time_s in marks.phases.times_s if begin_s < time_s < end_s]
    edges = sorted({begin_s, end_s, *cuts, *(edge for stall in stalls for edge in (stall.start_s, stall.end_s))})
    for start_s, stop_s in itertools.pairwise(edges):
        if not any(stall.start_s <= start_s < stall.end_s for stall in stalls):
            phase = marks.phases.at(start_s)
            yield Span("compute", _kind(phase), start_s, stop_s, layer=phase.layer)


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
    copies = [(piece, marks.copies.at(piece.launched_s).layer) for piece in work if piece.lane != "compute"]
    compute = list(_compute_spans(kernels, marks))
    return [*compute, *_copy_spans(copies)], _memory(events, kernels, device)


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


def _compute_spans(kernels: list[_Work], marks: _Marks) -> Iterator[Span]:
    """Kernels of one phase as one span, cut where the stream stalled."""
    begin = previous = None
    for kernel in kernels:
        if begin is not None and previous is not None:
            stalled = kernel.start_s - previous.end_s > STALL_S and kernel.launched_s < previous.end_s
            if stalled or marks.phases.at(kernel.launched_s) != marks.phases.at(begin.launched_s):
                yield _compute_span(begin, previous, marks)
                begin = None
            if stalled:
                yield _stall(previous.end_s, kernel.start_s, marks, kernel.launched_s)
        begin = begin or kernel
        previous = kernel
    if begin is not None and previous is not None:
        yield _compute_span(begin, previous, marks)


def _compute_span(first: _Work, last: _Work, marks: _Marks) -> Span:
    phase = marks.phases.at(first.launched_s)
    return Span("compute", _kind(phase), first.start_s, last.end_s, layer=phase.layer)


def _kind(phase: Mark) -> Kind:
    return cast("Kind", phase.what)


def _stall(start_s: float, end_s: float, marks: _Marks, launched_s: float) -> Span:
    layer = marks.waits.at(launched_s).layer
    label = "wait" if layer is None else f"wait for {layer}"
    return Span("compute", "stall", start_s, end_s, label, layer)


def _copy_spans(copies: list[tuple[_Work, int | None]]) -> Iterator[Span]:
    """Copies of one layer that follow each other closely as one span."""
    for lane, kind in COPY_KINDS.items():
        here = (copy for copy in sorted(copies) if copy[0].lane == lane)
        spans = (Span(lane, kind, work.start_s, work.end_s, layer=layer, nbytes=work.nbytes) for work, layer in here)
        yield from merged(spans, lambda span: STALL_S if span.layer is None else MERGE_S)


def _memory(events: list[dict[str, Any]], kernels: list[_Work], device: torch.device) -> list[tuple[float, int]]:
    """Device bytes above those before the step, at the device time of the work launched next."""
    changes = sorted(
        (event["ts"] * 1e-6, event["args"]["Total Allocated"])
        for event in events
        if event.get("name") == "[memory]"
        and event["args"].get("Device Id") == (device.index or 0)
        and event["args"].get("Device Type") == 1
    )
    by_launch = sorted((kernel.launched_s, kernel.start_s) for kernel in kernels)
    launched = [launched_s for launched_s, _ in by_launch]
    if not changes or not by_launch:
        return []
    first = next(event["args"] for event in events if event.get("ts", -1) * 1e-6 == changes[0][0] and "args" in event)
    before = changes[0][1] - first.get("Bytes", 0)
    samples = []
    for time_s, nbytes in changes:
        index = min(bisect_right(launched, time_s), len(by_launch) - 1)
        samples.append((by_launch[index][1], nbytes - before))
    return samples


class _Marks:
    """Marks by time, apart for phases, waits and copies."""

    def __init__(self, marks: list[tuple[float, Mark]]) -> None:
        self.phases = _MarksOfOneKind(marks, "forward", "backward", "other")
        """What was computed."""
        self.waits = _MarksOfOneKind(marks, "wait")
        """Whose copies were waited for."""
        self.copies = _MarksOfOneKind(marks, *COPY_KINDS)
        """Whose bytes were copied."""


class _MarksOfOneKind:
    def __init__(self, marks: list[tuple[float, Mark]], *kinds: str) -> None:
        self._marks = [mark for _, mark in marks if mark.what in kinds]
        self.times_s = [time_s for time_s, mark in marks if mark.what in kinds]

    def at(self, time_s: float) -> Mark:
        index = bisect_right(self.times_s, time_s)
        return self._marks[index - 1] if index else Mark("other", None)
