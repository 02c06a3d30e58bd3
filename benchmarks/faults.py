"""What a fault looks like: each is provoked on purpose, and its step counted, metered, timed and recorded.

    python -m benchmarks.faults --out results/faults.json

The record says what the library's counters and the clocks show of each fault, beside the same step without
offloading. Beside the record, a folder of its name gets each fault's timeline as a trace that Perfetto opens.
"""

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

import offload
from benchmarks.comparison import Comparison
from benchmarks.instruments import GIB, Row, give_memory_back
from benchmarks.models import Model
from benchmarks.report import Record, asked, table
from benchmarks.workloads import Workload, reference_decoder
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.observe.timeline import LANES

LAYERS = 10
TIMES = 3
MOST_SAMPLES = 300  # of the memory curve, in a trace


def decoder(*, small: bool) -> Workload:
    """Blocks of a 7B model."""
    base = reference_decoder(small=small)
    return replace(base, layers=LAYERS, shape=(1, 128 if small else 8192, base.shape[2]))


class Logits(nn.Module):
    """A head over a large vocabulary, and the loss of its logits."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[batch, tokens, hidden]``; the result is a scalar."""
        logits = self.head(x).flatten(0, 1).float()
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=x.device))


def with_logits(*, small: bool) -> Workload:
    """The same with a head."""
    base = decoder(small=small)
    return replace(base, make_loss=partial(Logits, base.shape[2], 8192 if small else 128256))


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


def chains(*, small: bool) -> Workload:
    """Layers of many small tensors."""
    operations, elements = (20, 1 << 10) if small else (200, 1 << 18)
    return Workload(partial(Chain, operations), LAYERS, (1, 1, elements), torch.float32)


def offloaded(model: Model, k: int = 2, **options: Any) -> offload.OffloadedLayers:
    """The first k layers offloaded."""
    return offload.offload_layers(model.layers, k, **options)


@contextmanager
def held(model: Model, **options: Any) -> Iterator[offload.OffloadedLayers]:
    """Hooks collect what the linear layers return, and drop it when backward has come to the input."""
    outputs: list[torch.Tensor] = []
    with offloaded(model, **options) as handle, ExitStack() as hooks:
        for module in model.module.modules():
            if isinstance(module, nn.Linear):
                collect = module.register_forward_hook(lambda _m, _a, output: outputs.append(output.detach()))
                hooks.callback(collect.remove)
        hooks.callback(model.leaves[0].register_post_accumulate_grad_hook(lambda _: outputs.clear()).remove)
        yield handle


@contextmanager
def without_sync(model: Model, **options: Any) -> Iterator[Any]:
    """A context around each layer, whose output is not passed to the sync function."""
    context, _ = offload.get_cpu_offload_context(True, 2, LAYERS, device=model.leaves[0].device, **options)

    def run(forward: Callable[..., Any], x: torch.Tensor) -> Any:
        with context:
            return forward(x)

    with ExitStack() as stack:
        for layer in model.layers:
            stack.enter_context(patch.object(layer, "forward", partial(run, layer.forward)))
        yield context


@contextmanager
def half_of_the_host_memory(model: Model, **options: Any) -> Iterator[offload.OffloadedLayers]:
    """Half of the host memory that is needed."""
    with offloaded(model, **options) as handle:
        model.step()
        needed = handle.stats().offloaded_bytes
    with offloaded(model, max_host_bytes=needed // 2, **options) as handle:
        yield handle


class Fault(NamedTuple):
    """Something that goes wrong, and how."""

    sees: str  # what one sees of it
    provoke: Callable[..., AbstractContextManager[Any]] = offloaded
    workload: Callable[..., Workload] = decoder
    first: bool = False  # whether the first step is recorded


too_many = partial(offloaded, k=6)
FAULTS = {
    "healthy": Fault("no fault: 2 of 10 layers are offloaded for free"),
    "all_small": Fault(
        "no memory saved: everything is smaller than min_bytes", lambda model, **_: offloaded(model, min_bytes=1 << 50)
    ),
    "held": Fault("copied, but not freed: a hook collects outputs", held),
    "no_room": Fault("less saved than planned: the host has half of the memory", half_of_the_host_memory),
    "elsewhere": Fault("copied and freed, but the peak is elsewhere: logits", too_many, with_logits),
    "too_many": Fault("slow: 6 of 10 layers are offloaded, more than the link can carry", too_many),
    "late_reloads": Fault("slow: no sync function, so that reloads start late", without_sync),
    "many_small": Fault(
        "slow: hundreds of tensors, each small", lambda model, **_: offloaded(model, min_bytes=1), chains
    ),
    "first_step": Fault("slow once: the first step pins host memory", too_many, first=True),
}


def examine(fault: Fault, device: torch.device, *, small: bool) -> tuple[Row, offload.Timeline]:
    """One fault: what is counted, metered and timed of it beside the step without offloading, and its timeline."""
    model = fault.workload(small=small).build(device)
    row: Row = {"steps": TIMES + 2}
    timelines: list[offload.Timeline] = []

    @contextmanager
    def recorded() -> Iterator[Any]:
        with (
            warnings.catch_warnings(record=True, action="always") as caught,
            fault.provoke(model, min_bytes=1 if small else DEFAULT_MIN_BYTES) as handle,
        ):
            give_memory_back(device)
            warmup = 0 if fault.first else 2
            timelines.append(offload.record_timeline(model.step, device, warmup=warmup, title=fault.sees))
            before = handle.stats()
            yield handle
            row["stats"] = asdict(handle.stats() - before)
        row["warnings"] = list(dict.fromkeys(str(one.message) for one in caught))

    comparison = Comparison(model, device, times=TIMES, gradients=False)
    row |= {"kept": comparison.add({}), "found": comparison.add({}, recorded)}
    [timeline] = timelines
    return row | {"recorded": {"duration_s": timeline.duration_s, "stall_s": timeline.stall_s}}, timeline


def chrome_trace(timeline: offload.Timeline) -> Row:
    """A timeline in Chrome's trace event format, for ``ui.perfetto.dev``: one thread per stream.

    Of neighbouring samples of memory, it has the highest.
    """
    events: list[Row] = [{"ph": "M", "name": "process_name", "args": {"name": "offload"}}]
    for thread, lane in enumerate(LANES):
        events.append({"ph": "M", "tid": thread, "name": "thread_name", "args": {"name": lane}})
        events.append({"ph": "M", "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}})
    for span in timeline.spans:
        what = {"name": span.label or span.kind, "cat": span.kind, "tid": LANES.index(span.lane)}
        when = {"ts": span.start_s * 1e6, "dur": span.duration_s * 1e6}
        events.append({"ph": "X", **what, **when, "args": {"layer": span.layer, "bytes": span.nbytes}})
    some = -(-len(timeline.memory) // MOST_SAMPLES) or 1
    for begin in range(0, len(timeline.memory), some):
        time_s, nbytes = max(timeline.memory[begin : begin + some], key=itemgetter(1))
        events.append({"ph": "C", "name": "device memory", "ts": time_s * 1e6, "args": {"bytes": nbytes}})
    events = [{"pid": 0} | event for event in events]
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"title": timeline.title}}


def main() -> None:
    """Provoke each fault, print what was found, write the record and the traces."""
    parser = argparse.ArgumentParser(description="Provoke faults and record what they look like.")
    arguments, device = asked(parser, "results/faults.json")
    record = Record(arguments, device, link=vars(offload.measure_link(device)))
    traces = arguments.out.with_suffix("")
    traces.mkdir(parents=True, exist_ok=True)
    for name, fault in FAULTS.items():
        row, timeline = examine(fault, device, small=arguments.small)
        trace = json.dumps(chrome_trace(timeline), separators=(",", ":"))
        (traces / f"{name}.json").write_text(trace + "\n", "utf-8")
        record.add({"name": name, "sees": fault.sees, **row}, part="faults", instead_of=["name"])
        shown: Row = {"fault": name}
        for which in ("kept", "found"):
            shown |= {f"{which} ms": row[which]["step_s"] * 1e3, f"{which} GiB": row[which]["peak_bytes"] / GIB}
        shown |= {key: row["stats"][key] for key in ("late_reloads", "wasted", "skipped")}
        print(table([shown]), *row["warnings"], sep="\n", flush=True)


if __name__ == "__main__":
    main()
