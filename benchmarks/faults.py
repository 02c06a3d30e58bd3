"""What a fault looks like: each is provoked on purpose, and its step counted, metered, timed and recorded.

    python -m benchmarks.faults --out results/faults.json

The record says what the library's counters and the clocks show of each fault, beside the same step without
offloading. Beside the record, a folder of its name gets each fault's timeline as a trace that Perfetto opens.
"""

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import offload
from benchmarks.instruments import give_memory_back, metered, timed
from benchmarks.report import asked, environment, table, write
from benchmarks.workloads import DecoderBlock, loss_of
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.observe.timeline import LANES

GIB = 1 << 30
TIMED_STEPS = 3
MOST_SAMPLES = 300
"""Of the memory curve, in a trace."""

Stats = Callable[[], offload.OffloadStats]


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    hidden: int
    ffn: int
    heads: int
    tokens: int
    vocabulary: int
    dtype: torch.dtype
    min_bytes: int
    operations: int
    """In a layer of many small tensors,"""
    elements: int
    """each with so many elements."""
    layers: int = 10
    k: int = 2


LARGE = Size(4096, 11008, 32, 8192, 128256, torch.bfloat16, DEFAULT_MIN_BYTES, 200, 1 << 18)
SMALL = Size(64, 172, 4, 128, 8192, torch.float32, 1, 20, 1 << 10)


@dataclass
class Subject:
    """Layers that are called one after the other, their input, and the loss of the last one's output."""

    layers: nn.ModuleList
    x: torch.Tensor
    loss: Callable[[torch.Tensor], torch.Tensor] = loss_of

    def step(self) -> None:
        """One forward and backward."""
        y = self.x
        for layer in self.layers:
            y = layer(y)
        self.loss(y).backward()


def decoder(size: Size, device: torch.device) -> Subject:
    """Blocks of a 7B model."""
    torch.manual_seed(0)
    with torch.device(device):
        blocks = [DecoderBlock(size.hidden, size.ffn, size.heads) for _ in range(size.layers)]
        x = torch.randn(1, size.tokens, size.hidden, dtype=size.dtype)
    return Subject(nn.ModuleList(blocks).to(size.dtype), x)


def with_logits(size: Size, device: torch.device) -> Subject:
    """The same with a head over a large vocabulary."""
    subject = decoder(size, device)
    head = nn.Linear(size.hidden, size.vocabulary, bias=False, device=device, dtype=size.dtype)
    labels = torch.randint(size.vocabulary, (size.tokens,), device=device)
    subject.loss = lambda y: F.cross_entropy(head(y).view(-1, size.vocabulary).float(), labels)
    return subject


class Chain(nn.Module):
    """Many operations, each of which saves a small tensor."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.operations = operations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: any shape; the result has the same."""
        x = x * self.scale
        for _ in range(self.operations):
            x = x.sin()
        return x


def chains(size: Size, device: torch.device) -> Subject:
    """Layers of many small tensors."""
    layers = nn.ModuleList(Chain(size.operations) for _ in range(size.layers)).to(device)
    return Subject(layers, torch.randn(size.elements, device=device))


Run = Iterator[tuple[Callable[[], object], Stats]]
"""What a fault's context yields: the step, and its counters."""


@contextmanager
def offloaded(subject: Subject, size: Size, k: int = 2, **options: Any) -> Run:
    """The first k layers offloaded."""
    with offload.offload_layers(subject.layers, k, **{"min_bytes": size.min_bytes, **options}) as handle:
        yield subject.step, handle.stats


@contextmanager
def held(subject: Subject, size: Size) -> Run:
    """Hooks collect what the linear layers return, and drop it after backward."""
    outputs: list[torch.Tensor] = []
    modules = [module for module in subject.layers.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_hook(lambda _m, _a, output: outputs.append(output.detach())) for module in modules]

    def step() -> None:
        subject.step()
        outputs.clear()

    with offloaded(subject, size) as (_, stats):
        yield step, stats
    for hook in hooks:
        hook.remove()


@contextmanager
def without_sync(subject: Subject, size: Size) -> Run:
    """A context around each layer, whose output is not passed to the sync function."""
    context, _ = offload.get_cpu_offload_context(
        enabled=True, num_layers=size.k, model_layers=size.layers, min_bytes=size.min_bytes, device=subject.x.device
    )

    def step() -> None:
        y = subject.x
        for layer in subject.layers:
            with context:
                y = layer(y)
        subject.loss(y).backward()

    yield step, context.stats


@contextmanager
def half_of_the_host_memory(subject: Subject, size: Size) -> Run:
    """Half of the host memory that is needed."""
    with offloaded(subject, size) as (step, stats):
        step()
        needed = stats().offloaded_bytes
    with offloaded(subject, size, max_host_bytes=needed // 2) as given:
        yield given


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, and how."""

    name: str
    sees: str
    """What one sees of it."""
    provoke: Callable[[Subject, Size], AbstractContextManager[tuple[Callable[[], object], Stats]]]
    build: Callable[[Size, torch.device], Subject] = decoder
    first: bool = False
    """Whether the first step is recorded."""


FAULTS = (
    Fault("healthy", "no fault: 2 of 10 layers are offloaded for free", offloaded),
    Fault("all_small", "no memory saved: everything is smaller than min_bytes", partial(offloaded, min_bytes=1 << 50)),
    Fault("held", "copied, but not freed: a hook collects outputs", held),
    Fault("no_room", "less saved than planned: the host has half of the memory", half_of_the_host_memory),
    Fault("elsewhere", "copied and freed, but the peak is elsewhere: logits", partial(offloaded, k=6), with_logits),
    Fault("too_many", "slow: 6 of 10 layers are offloaded, more than the link can carry", partial(offloaded, k=6)),
    Fault("late_reloads", "slow: no sync function, so that reloads start late", without_sync),
    Fault("many_small", "slow: hundreds of tensors, each small", partial(offloaded, min_bytes=1), chains),
    Fault("first_step", "slow once: the first step pins host memory", partial(offloaded, k=6), first=True),
)


def examine(fault: Fault, size: Size, device: torch.device) -> tuple[dict[str, Any], offload.Timeline]:
    """One fault: what is counted, metered and timed of it beside the step without offloading, and its timeline."""
    give_memory_back(device)
    subject = fault.build(size, device)
    kept = _measured(subject.step, device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fault.provoke(subject, size) as (step, stats):
            give_memory_back(device)
            timeline = offload.record_timeline(step, device, warmup=0 if fault.first else 2, title=fault.sees)
            before = stats()
            found = _measured(step, device)
            counted = stats() - before
    row = {
        "name": fault.name,
        "sees": fault.sees,
        "kept": kept,
        "found": found,
        "stats": asdict(counted),
        "steps": TIMED_STEPS + 2,
        "recorded": {"duration_s": timeline.duration_s, "stall_s": timeline.stall_s},
        "warnings": list(dict.fromkeys(str(warning.message) for warning in caught)),
    }
    return row, thinned(timeline)


def _measured(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    step()
    peak_bytes, _ = metered(step, device)
    times_s = [timed(step, device) for _ in range(TIMED_STEPS)]
    return {"step_s": statistics.median(times_s), "times_s": times_s, "peak_bytes": peak_bytes}


def thinned(timeline: offload.Timeline) -> offload.Timeline:
    """The timeline with at most ``MOST_SAMPLES`` samples of memory, the highest of each piece of time."""
    if len(timeline.memory) <= MOST_SAMPLES:
        return timeline
    piece_s = max(time_s for time_s, _ in timeline.memory) / (MOST_SAMPLES - 1)
    pieces = groupby(timeline.memory, key=lambda sample: int(sample[0] / piece_s))
    kept = tuple(max(samples, key=lambda sample: sample[1]) for _, samples in pieces)
    return offload.Timeline(timeline.spans, kept, timeline.title)


def chrome_trace(timeline: offload.Timeline) -> dict[str, Any]:
    """A timeline in Chrome's trace event format, for ``ui.perfetto.dev``: one thread per stream."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": "offload"}}]
    for thread, lane in enumerate(LANES):
        events.append({"ph": "M", "tid": thread, "name": "thread_name", "args": {"name": lane}})
        events.append({"ph": "M", "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}})
    for span in timeline.spans:
        what = {"name": span.label or span.kind, "cat": span.kind, "tid": LANES.index(span.lane)}
        when = {"ts": span.start_s * 1e6, "dur": span.duration_s * 1e6}
        events.append({"ph": "X", **what, **when, "args": {"layer": span.layer, "bytes": span.nbytes}})
    for time_s, nbytes in timeline.memory:
        events.append({"ph": "C", "name": "device memory", "ts": time_s * 1e6, "args": {"bytes": nbytes}})
    events = [{"pid": 0} | event for event in events]
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"title": timeline.title}}


def main() -> None:
    """Provoke each fault, print what was found, write the record and the traces."""
    parser = argparse.ArgumentParser(description="Provoke faults and record what they look like.")
    arguments, device = asked(parser, "results/faults.json")
    link = offload.measure_link(device)
    record = {**environment(device), "link": vars(link), "small": arguments.small, "faults": []}
    traces = arguments.out.with_suffix("")
    traces.mkdir(parents=True, exist_ok=True)
    for fault in FAULTS:
        row, timeline = examine(fault, SMALL if arguments.small else LARGE, device)
        record["faults"].append(row)
        trace = json.dumps(chrome_trace(timeline), separators=(",", ":"))
        (traces / f"{fault.name}.json").write_text(trace + "\n", "utf-8")
        write(arguments.out, record)
        print(table([_shown(row)]), *row["warnings"], sep="\n", flush=True)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"fault": row["name"]}
    for name in ("kept", "found"):
        shown |= {f"{name} ms": row[name]["step_s"] * 1e3, f"{name} GiB": row[name]["peak_bytes"] / GIB}
    return shown | {name: row["stats"][name] for name in ("late_reloads", "wasted", "skipped")}


if __name__ == "__main__":
    main()
