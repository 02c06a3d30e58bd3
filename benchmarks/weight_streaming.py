"""Weight streaming: a decoder that does not fit, against the limits of the device and of the link.

    python -m benchmarks.weight_streaming --out results/weight_streaming.json

First the step with all weights on the device, which gives the compute time of each phase. Then the device's memory is
limited to less than half of the weights, and the same step runs streamed, for a number of tokens where compute
binds and for one where the link binds. A step's limit is, for forward and backward by themselves, the larger of the
compute time and the time in which the link alone moves the same bytes in both directions; all three are measured in
this run. FSDP2 with ``CPUOffloadPolicy`` does the same work under the same memory limit.
"""

import argparse
import math
import os
import statistics
import time
from collections import Counter
from itertools import pairwise, zip_longest

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from benchmarks.instruments import (
    BLOCKING_CALLS,
    Row,
    attempt,
    device_peak,
    give_memory_back,
    limit_memory,
    synchronize,
    timed,
)
from benchmarks.report import Record, asked, table
from benchmarks.workloads import DecoderBlock, loss_of
from offload.device.select import get_backend
from offload.host.page_locked import page_locked

GB = 1e9

CASES = {"few": (1, 2048, 0), "many": (4, 4096, 40)}
"""Batch, tokens, and how many layers' inputs are offloaded, where the link binds and where compute binds."""
SMALL_CASES = {"few": (1, 32, 0), "many": (2, 64, 3)}


class Stack(nn.Module):
    """Decoder blocks one after the other, each recomputed in backward, and a step of them."""

    def __init__(self, device: torch.device, *, small: bool) -> None:
        super().__init__()
        self.device, self.cases = device, SMALL_CASES if small else CASES
        self.hidden, ffn, heads, layers = (64, 172, 4, 6) if small else (4096, 11008, 32, 48)
        self.dtype = torch.float32 if small else torch.bfloat16
        torch.manual_seed(0)
        with torch.device(device):
            blocks = [DecoderBlock(self.hidden, ffn, heads).to(self.dtype) for _ in range(layers)]
        self.layers = nn.ModuleList(blocks)

    def use(self, case: str) -> Row:
        """Train on this case from now on; what a row says of it."""
        batch, tokens, offloaded = self.cases[case]
        shape = batch, tokens, self.hidden
        self.x = torch.randn(shape, device=self.device, dtype=self.dtype).requires_grad_()
        self.context, self.sync = offload.get_cpu_offload_context(
            offloaded > 0, max(offloaded, 1), len(self.layers), min_bytes=1, device=self.device
        )
        return {"case": case, "tokens": batch * tokens}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        for layer in self.layers:
            with self.context:
                y = checkpoint(layer, x, use_reentrant=False)
            x = self.sync(y)
        return loss_of(x)

    def step(self) -> None:
        """Forward and backward."""
        self(self.x).backward()

    def clear(self) -> None:
        """Gradients are ``None`` then."""
        self.zero_grad()
        self.x.grad = None

    def moved_bytes(self) -> tuple[int, int]:
        """Bytes of activations that were offloaded and reloaded so far."""
        stats = self.context.stats()
        return stats.offloaded_bytes, stats.reloaded_bytes

    def measure(self, *, warmup: int, repeats: int) -> Row:
        """Seconds of both phases, from an idle device to an idle device, and those of the median step."""
        backend, steps = get_backend(self.device), list[list[float]]()
        for _ in range(warmup + repeats):
            self.clear()
            synchronize(self.device)
            marks = [backend.mark()]
            loss = self(self.x)
            marks.append(backend.mark())
            loss.backward()
            marks.append(backend.mark())
            steps.append(backend.seconds(pairwise(marks)))
        times = dict(zip(("forward_s", "backward_s"), map(list, zip(*steps[warmup:], strict=True)), strict=True))
        phases = {phase: statistics.median(some) for phase, some in times.items()}
        return phases | {"step_s": statistics.median(map(sum, steps[warmup:])), "times": times}


def copy_s(device: torch.device, nbytes: int, h2d: int, d2h: int) -> float:
    """Seconds in which the link alone moves so many pieces of ``nbytes`` bytes, both directions at once."""
    backend = get_backend(device)
    d2h_stream, h2d_stream = backend.copy_streams
    on_device = [backend.empty(nbytes).zero_() for _ in range(2)]
    on_host = [page_locked(nbytes, backend) for _ in range(2)]
    synchronize(device)

    def run() -> float:
        begin = time.perf_counter()
        for number in range(max(h2d, d2h)):
            if number < h2d:
                backend.copy(h2d_stream, on_device[0], on_host[0])
            if number < d2h:
                backend.copy(d2h_stream, on_host[1], on_device[1])
        for stream in (d2h_stream, h2d_stream):
            stream.record_event().synchronize()
        return time.perf_counter() - begin

    run()
    return statistics.median(run() for _ in range(3))


def blocking_calls(model: Stack) -> dict[str, int]:
    """Calls that block host or device, from the step's begin until backward has reached the input, by name.

    Two other steps come first: what was allocated since the last one has moved PyTorch's blocks about.
    """

    def mark(_: torch.Tensor) -> None:
        with torch.profiler.record_function("end of backward"):
            pass

    for _ in range(2):
        model.clear()
        model.step()
    handle = model.x.register_hook(mark)
    model.clear()
    synchronize(model.device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        model.step()
    handle.remove()
    events = profiler.events()
    end = min(event.time_range.start for event in events if event.name == "end of backward")
    return dict(Counter(e.name for e in events if e.name in BLOCKING_CALLS and e.time_range.start < end))


def streamed_rows(model: Stack, alone: dict[str, Row], arguments: argparse.Namespace) -> tuple[list[Row], Row]:
    """The streamed steps with their limits, and what else was seen."""
    rows, device, layers = [], model.device, len(model.layers)
    begin = time.perf_counter()
    with offload.stream_weights(model.layers, device, num_slots=arguments.slots) as handle:
        extra: Row = {"setup_s": time.perf_counter() - begin}
        weight_bytes = handle.stats().weight_bytes
        limit_memory(device, arguments.memory * weight_bytes)
        layer_bytes = weight_bytes // layers
        for name in model.cases:
            row = model.use(name) | {"first_s": timed(model.step, device)}
            then, moved = handle.stats(), model.moved_bytes()
            peak = device_peak(device)
            found = model.measure(warmup=1, repeats=arguments.repeats)
            row["peak_device_bytes"] = peak()
            now, count = handle.stats(), arguments.repeats + 1
            out, back = ((new - old) / count for new, old in zip(model.moved_bytes(), moved, strict=True))
            loads = (now.loads - then.loads) / count
            back_pieces = round(loads - layers + back / layer_bytes)
            link = {
                "forward_s": copy_s(device, layer_bytes, layers, round(out / layer_bytes)),
                "backward_s": copy_s(device, layer_bytes, back_pieces, layers),
            }
            for key, phases in (("", found), ("compute_", alone[name]), ("link_", link)):
                row |= {f"{key}{phase}": phases[phase] for phase in link}
            limit_s = math.fsum(max(alone[name][phase], link[phase]) for phase in link)
            row |= {"step_s": found["step_s"], "limit_s": limit_s, "ratio_to_limit": found["step_s"] / limit_s}
            row |= {"loads_per_step": loads, "late_loads_per_step": (now.late_loads - then.late_loads) / count}
            rows.append(row | {"times": found["times"]})
            if device.type == "cuda":
                extra[f"blocking_calls_{name}"] = blocking_calls(model)
            if name == "few":
                # A microbatch whose gradients are added to those of an earlier one.
                extra["accumulating_s"] = statistics.median(timed(model.step, device) for _ in range(3))
            else:
                extra["stats"] = vars(handle.stats())  # steps in backward free the gradients on the host
                extra |= optimizer_steps(model)
            model.clear()
    return rows, extra


def optimizer_steps(model: Stack) -> dict[str, float]:
    """Seconds of a step with an SGD step on the host after backward, and with one on the device in backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-20)

    def run() -> float:
        model.clear()
        return timed(lambda: (model.step(), optimizer.step()), model.device)

    after_s = min(run() for _ in range(2))
    with offload.stream_optimizer(optimizer, in_backward=True):
        return {"optimizer_after_s": after_s, "optimizer_in_backward_s": min(run() for _ in range(2))}


def fsdp_rows(model: Stack, device: torch.device, repeats: int) -> list[Row]:
    """The same steps with FSDP2's CPU offload, where they do not run out of memory."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, device_id=device)
    for layer in [*model.layers, model]:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=True))
    rows = []
    for name in model.cases:
        row = model.use(name)
        peak = device_peak(device)
        attempt(row, lambda row=row: row.update(model.measure(warmup=1, repeats=repeats)))
        rows.append(row | {"peak_device_bytes": peak()})
        model.clear()
        give_memory_back(device)
    dist.destroy_process_group()
    return rows


def main() -> None:
    """Measure, print the tables, write the record."""
    parser = argparse.ArgumentParser(description="Measure weight streaming against compute and link.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.45, help="device memory, as a fraction of the weights")
    arguments, device = asked(parser, "results/weight_streaming.json")
    link = offload.measure_link(device)
    print(link)
    model = Stack(device, small=arguments.small)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    alone = {}
    for name in model.cases:
        model.use(name)
        alone[name] = model.measure(warmup=2, repeats=arguments.repeats)
        model.clear()
    rows, extra = streamed_rows(model, alone, arguments)
    give_memory_back(device)
    fsdp = fsdp_rows(model, device, min(arguments.repeats, 3)) if device.type == "cuda" else []
    for row, other in zip_longest(rows, fsdp, fillvalue={}):
        row["fsdp_s"] = other.get("step_s")
    facts = {"link": vars(link), "parameters": parameters, "weight_bytes": weight_bytes}
    record = Record(arguments, device, **facts, memory_limit_bytes=arguments.memory * weight_bytes, fsdp=fsdp, **extra)
    record.add(*rows, instead_of=["case"])
    columns = {
        "tokens": "tokens",
        "step ms": ("step_s", 1e-3),
        "limit ms": ("limit_s", 1e-3),
        "to limit": "ratio_to_limit",
        "FSDP2 ms": ("fsdp_s", 1e-3),
        "device GB": ("peak_device_bytes", GB),
        "loads": "loads_per_step",
    }
    print(table(rows, columns), *(f"{key}: {value}" for key, value in extra.items()), sep="\n")


if __name__ == "__main__":
    main()
