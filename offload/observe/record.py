"""A timeline of what the device did during a step.

On CUDA the source is ``torch.profiler``: kernels and copies with their device times. Each is matched to a layer by the
last of the library's marks before the call that launched it. The compute stream is stalled where the next kernel had
been launched already, yet started late. On the CPU the source is the backend's own record.

Note:
    The host allocates memory ahead of the device: each change is drawn at the device time of the work launched next.

    A replay of a CUDA graph is one launch without Python and allocations: its kernels are of kind ``"other"``, its
    copies belong to no layer, and there is no memory curve.
"""

from __future__ import annotations

import json
import math
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch

from offload.base import trace
from offload.base.checks import check_callable, check_int
from offload.base.trace import Mark
from offload.device.select import resolve_device
from offload.observe.memory import CpuAllocations
from offload.observe.timeline import LANES, Kind, Lane, Span, Timeline, merged

STALL_S = 20e-6  # shorter pauses between two kernels are not drawn: a launch takes as long
MERGE_S = 200e-6  # copies of one layer with a shorter pause are drawn as one; of no known layer, `STALL_S`

PHASES = ("forward", "backward", "other")  # marks of compute
COPY_KINDS: dict[str, Kind] = {"d2h": "offload", "h2d": "reload"}

_Memory = list[tuple[float, int]]  # (seconds, bytes from then on)


def record_timeline(
    step: Callable[[], object],
    device: torch.device | str | int | None = None,
    *,
    warmup: int = 1,
    title: str = "",
) -> Timeline:
    """Run ``step`` under observation and return what the device did.

    Layers are known where ``offload_layers`` or a context is used, also with ``num_layers=0``. The replay of a CUDA
    graph shows streams, stalls and bytes, but neither layers nor memory.

    Args:
        step: One training step, forward and backward, without arguments; or the ``replay`` of a graph of one.
        device: The device to watch; the current accelerator by default, and the CPU where there is none.
        warmup: How often ``step`` runs before it is recorded.
        title: The timeline's title.

    Raises:
        RuntimeError: Nothing was recorded, for example because another profiler runs.
    """
    check_callable("step", step)
    check_int("warmup", warmup, least=0)
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


def _record_cpu(step: Callable[[], object]) -> tuple[list[Span], _Memory]:
    memory: _Memory = []
    with trace.recording() as recorder, CpuAllocations(lambda nbytes: memory.append((perf_counter(), nbytes))):
        begin_s = perf_counter()
        step()
        end_s = perf_counter()
    phases, waits = _Marks(recorder.marks, PHASES), _Marks(recorder.marks, ("wait",))
    copies = [
        Span(cast("Lane", what.what), COPY_KINDS[what.what], start_s, copied_s, layer=what.layer, nbytes=nbytes)
        for start_s, copied_s, what, nbytes in recorder.copies
    ]
    stalls = [
        _stall(start_s, stop_s, waits.last(start_s)) for start_s, stop_s in recorder.waits if stop_s - start_s > STALL_S
    ]
    # Compute is the time between marks that is not spent in stalls.
    cuts = [time_s for time_s in phases.times_s if begin_s < time_s < end_s]
    edges = sorted({begin_s, end_s, *cuts, *(edge for stall in stalls for edge in (stall.start_s, stall.end_s))})
    compute = [
        _compute(start_s, stop_s, phases.last(start_s))
        for start_s, stop_s in pairwise(edges)
        if not any(stall.start_s <= start_s < stall.end_s for stall in stalls)
    ]
    return _tidied([*compute, *stalls, *copies]), memory


def _record_accelerator(step: Callable[[], object], device: torch.device) -> tuple[list[Span], _Memory]:
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


def _read(events: list[dict[str, Any]], device: torch.device) -> tuple[list[Span], _Memory]:
    """Spans and memory from a profiler's trace events; times there are in microseconds."""
    launches = {
        event["args"]["correlation"]: event["ts"] * 1e-6
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    marks = [
        (event["ts"] * 1e-6, Mark.parse(event["name"]))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(trace.PREFIX)
    ]
    phases, waits, copies = (_Marks(marks, whats) for whats in (PHASES, ("wait",), tuple(COPY_KINDS)))
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    spans: list[Span] = []
    kernels: list[tuple[float, float]] = []  # (launched, started)
    last_end_s = math.inf
    for event in sorted(work, key=itemgetter("ts")):
        start_s, end_s = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
        launched_s = launches.get(event["args"].get("correlation"), start_s)
        if event["cat"] == "gpu_memcpy" and ("DtoH" in event["name"] or "HtoD" in event["name"]):
            lane: Lane = "d2h" if "DtoH" in event["name"] else "h2d"
            layer, nbytes = copies.last(launched_s).layer, event["args"].get("bytes", 0)
            spans.append(Span(lane, COPY_KINDS[lane], start_s, end_s, layer=layer, nbytes=nbytes))
            continue
        if start_s - last_end_s > STALL_S and launched_s < last_end_s:
            spans.append(_stall(last_end_s, start_s, waits.last(launched_s)))
        spans.append(_compute(start_s, end_s, phases.last(launched_s)))
        kernels.append((launched_s, start_s))
        last_end_s = end_s
    return _tidied(spans), _memory(events, sorted(kernels), device)


def _memory(events: list[dict[str, Any]], kernels: list[tuple[float, float]], device: torch.device) -> _Memory:
    """Device bytes above those before the step, each at the device time of the work launched next."""
    place = {"Device Id": device.index or 0, "Device Type": 1}
    changes = [event for event in events if event.get("name") == "[memory]" and place.items() <= event["args"].items()]
    changes.sort(key=itemgetter("ts"))
    if not changes or not kernels:
        return []
    first = changes[0]["args"]
    before = first["Total Allocated"] - first.get("Bytes", 0)
    samples = []
    for change in changes:
        index = bisect_right(kernels, (change["ts"] * 1e-6, math.inf))
        start_s = kernels[min(index, len(kernels) - 1)][1]
        samples.append((start_s, change["args"]["Total Allocated"] - before))
    return samples


class _Marks:
    """The marks of some kinds, by time."""

    def __init__(self, marks: Iterable[tuple[float, Mark]], kinds: tuple[str, ...]) -> None:
        self._marks = sorted((entry for entry in marks if entry[1].what in kinds), key=itemgetter(0))
        self.times_s = [time_s for time_s, _ in self._marks]

    def last(self, time_s: float) -> Mark:
        index = bisect_right(self.times_s, time_s)
        return self._marks[index - 1][1] if index else Mark("other", None)


def _compute(start_s: float, end_s: float, phase: Mark) -> Span:
    return Span("compute", cast("Kind", phase.what), start_s, end_s, layer=phase.layer)


def _stall(start_s: float, end_s: float, wait: Mark) -> Span:
    label = "wait" if wait.layer is None else f"wait for {wait.layer}"
    return Span("compute", "stall", start_s, end_s, label, wait.layer)


def _tidied(spans: list[Span]) -> list[Span]:
    """Sorted by stream, with the kernels of a layer merged, and copies with short pauses between them."""

    def gap_s(span: Span) -> float:
        if span.lane == "compute":
            return math.inf
        return STALL_S if span.layer is None else MERGE_S

    return list(merged(sorted(spans, key=lambda span: (LANES.index(span.lane), span.start_s)), gap_s))
