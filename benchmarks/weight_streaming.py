"""Weight streaming: a decoder that does not fit, against the limits of the device and of the link.

    python -m benchmarks.weight_streaming --out results/weight_streaming.json

First the step with all weights on the device, which gives the compute time of each phase. Then the device's memory is
limited to less than half of the weights, and the same step runs streamed, for a number of tokens where compute
binds and for one where the link binds. A step's limit is, for forward and backward by themselves, the larger of the
compute time and the time in which the link alone moves the same bytes in both directions; all three are measured in
this run. FSDP2 with ``CPUOffloadPolicy`` does the same work under the same memory limit.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from benchmarks.instruments import BLOCKING_CALLS, limit_memory, peak_bytes, reset_peak, synchronize, timed
from benchmarks.report import Record, asked, table
from benchmarks.workloads import DecoderBlock, loss_of
from offload.device.select import get_backend
from offload.host.page_locked import page_locked

GB = 1e9


@dataclass(frozen=True)
class Size:
    """What is measured: a stack of decoder blocks, and inputs for it."""

    hidden: int
    ffn: int
    heads: int
    layers: int
    dtype: torch.dtype
    few: tuple[int, int]
    """Batch and tokens where the link binds; each layer is recomputed."""
    many: tuple[int, int]
    """Batch and tokens where compute binds; each layer is recomputed and most of their inputs are offloaded."""
    offloaded: int
    """How many layers' inputs are offloaded with ``many`` tokens."""

    def build(self, device: torch.device) -> nn.ModuleList:
        """The layers."""
        torch.manual_seed(0)
        with torch.device(device):
            return nn.ModuleList(
                DecoderBlock(self.hidden, self.ffn, self.heads).to(self.dtype) for _ in range(self.layers)
            )

    def inputs(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        """One microbatch, which requires a gradient."""
        return torch.randn(*shape, self.hidden, device=device, dtype=self.dtype).requires_grad_()


LARGE = Size(4096, 11008, 32, 48, torch.bfloat16, (1, 2048), (4, 4096), 40)
SMALL = Size(64, 172, 4, 6, torch.float32, (1, 32), (2, 64), 3)


@dataclass
class Times:
    """Seconds of the parts of a step, a value for each repeat."""

    forward_s: list[float]
    backward_s: list[float]

    @property
    def step_s(self) -> float:
        """Median of the whole step."""
        return statistics.median(map(sum, zip(self.forward_s, self.backward_s, strict=True)))

    def medians(self) -> tuple[float, float]:
        """Of forward and of backward."""
        return statistics.median(self.forward_s), statistics.median(self.backward_s)


class Stack(nn.Module):
    """The layers one after the other, each recomputed, the inputs of the first ``offloaded`` offloaded."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.offload(0)

    def offload(self, offloaded: int, device: torch.device | None = None) -> None:
        """Offload so many layers' inputs from now on."""
        self.context, self.sync = offload.get_cpu_offload_context(
            offloaded > 0, max(offloaded, 1), len(self.layers), min_bytes=1, device=device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        for layer in self.layers:
            with self.context:
                y = checkpoint(layer, x, use_reentrant=False)
            x = self.sync(y)
        return loss_of(x)


class Step:
    """Forward and backward."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model = model
        self.x = x

    def __call__(self) -> None:
        self.model(self.x).backward()

    def zero_grad(self) -> None:
        """As an optimizer does it."""
        self.model.zero_grad()
        self.x.grad = None

    def measure(self, *, warmup: int, repeats: int) -> Times:
        """Both phases, from an idle device to an idle device; gradients are ``None`` at the start."""
        times = Times([], [])
        for number in range(warmup + repeats):
            self.zero_grad()
            synchronize(self.x.device)
            begin = time.perf_counter()
            loss = self.model(self.x)
            reached = _mark(self.x.device)
            loss.backward()
            synchronize(self.x.device)
            end = time.perf_counter()
            if number >= warmup:
                forward_s = reached(begin)
                times.forward_s.append(forward_s)
                times.backward_s.append(end - begin - forward_s)
        return times


def _mark(device: torch.device) -> Callable[[float], float]:
    """When compute reaches this point of the program: a function from a host time to the seconds since then."""
    if device.type == "cpu":
        now = time.perf_counter()
        return lambda begin: now - begin
    reached, idle = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    reached.record()

    def since(begin: float) -> float:
        idle.record()
        idle.synchronize()
        return time.perf_counter() - begin - reached.elapsed_time(idle) / 1e3

    return since


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


def blocking_calls(step: Step) -> dict[str, int]:
    """Calls that block host or device, from the step's begin until backward has reached the input, by name.

    Two other steps come first: what was allocated since the last one has moved PyTorch's blocks about.
    """

    def mark(_: torch.Tensor) -> None:
        with torch.profiler.record_function("end of backward"):
            pass

    for _ in range(2):
        step.zero_grad()
        step()
    handle = step.x.register_hook(mark)
    step.zero_grad()
    synchronize(step.x.device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        step()
    handle.remove()
    events = profiler.events()
    end = min(event.time_range.start for event in events if event.name == "end of backward")
    found: dict[str, int] = {}
    for event in events:
        if event.name in BLOCKING_CALLS and event.time_range.start < end:
            found[event.name] = found.get(event.name, 0) + 1
    return found


def streamed_rows(
    size: Size, model: Stack, alone: dict[str, Times], device: torch.device, arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The streamed steps with their limits, and what else was seen."""
    rows = []
    begin = time.perf_counter()
    with offload.stream_weights(model.layers, device, num_slots=arguments.slots) as handle:
        extra: dict[str, Any] = {"setup_s": time.perf_counter() - begin}
        limit_memory(device, arguments.memory * handle.stats().weight_bytes)
        layers = len(model.layers)
        layer_bytes = handle.stats().weight_bytes // layers
        for name, shape, offloaded in cases(size):
            model.offload(offloaded, device)
            step = Step(model, size.inputs(shape, device))
            first_s = timed(step, device)
            then, moved = handle.stats(), activation_bytes(model)
            reset_peak(device)
            times = step.measure(warmup=1, repeats=arguments.repeats)
            most_bytes = peak_bytes(device)
            now, count = handle.stats(), arguments.repeats + 1
            out, back = ((new - old) / count for new, old in zip(activation_bytes(model), moved, strict=True))
            loads = (now.loads - then.loads) / count
            back_pieces = round(loads - layers + back / layer_bytes)
            link_forward_s = copy_s(device, layer_bytes, layers, round(out / layer_bytes))
            link_backward_s = copy_s(device, layer_bytes, back_pieces, layers)
            compute_forward_s, compute_backward_s = alone[name].medians()
            limit_s = max(compute_forward_s, link_forward_s) + max(compute_backward_s, link_backward_s)
            forward_s, backward_s = times.medians()
            rows.append(
                {
                    "case": name,
                    "tokens": shape[0] * shape[1],
                    "step_s": times.step_s,
                    "forward_s": forward_s,
                    "backward_s": backward_s,
                    "compute_forward_s": compute_forward_s,
                    "compute_backward_s": compute_backward_s,
                    "link_forward_s": link_forward_s,
                    "link_backward_s": link_backward_s,
                    "limit_s": limit_s,
                    "ratio_to_limit": times.step_s / limit_s,
                    "loads_per_step": loads,
                    "late_loads_per_step": (now.late_loads - then.late_loads) / count,
                    "peak_device_bytes": most_bytes,
                    "first_s": first_s,
                    "times": vars(times),
                }
            )
            if device.type == "cuda":
                extra[f"blocking_calls_{name}"] = blocking_calls(step)
            if name == "few":
                # A microbatch whose gradients are added to those of an earlier one.
                extra["accumulating_s"] = statistics.median(timed(step, device) for _ in range(3))
            else:
                extra["stats"] = vars(handle.stats())  # steps in backward free the gradients on the host
                extra |= optimizer_steps(step, device)
            step.zero_grad()
    return rows, extra


def optimizer_steps(step: Step, device: torch.device) -> dict[str, float]:
    """Seconds of a step with an SGD step on the host after backward, and with one on the device in backward."""
    optimizer = torch.optim.SGD(step.model.parameters(), lr=2.0**-20)

    def run() -> float:
        step.zero_grad()
        return timed(lambda: (step(), optimizer.step()), device)

    after_s = min(run() for _ in range(2))
    with offload.stream_optimizer(optimizer, in_backward=True):
        return {"optimizer_after_s": after_s, "optimizer_in_backward_s": min(run() for _ in range(2))}


def activation_bytes(model: Stack) -> tuple[int, int]:
    """Bytes of activations that went out and came back so far."""
    if not isinstance(model.context, offload.OffloadContext):
        return 0, 0
    stats = model.context.stats()
    return stats.offloaded_bytes, stats.reloaded_bytes


def cases(size: Size) -> list[tuple[str, tuple[int, int], int]]:
    """Name, shape of the input, number of layers whose inputs are offloaded."""
    return [("few", size.few, 0), ("many", size.many, size.offloaded)]


def fsdp_rows(size: Size, model: Stack, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """The same steps with FSDP2's CPU offload, where they do not run out of memory."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, device_id=device)
    for layer in [*model.layers, model]:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=True))
    rows = []
    for name, shape, offloaded in cases(size):
        row: dict[str, Any] = {"case": name, "tokens": shape[0] * shape[1]}
        model.offload(offloaded, device)
        step = Step(model, size.inputs(shape, device))
        try:
            reset_peak(device)
            times = step.measure(warmup=1, repeats=repeats)
            row |= {"step_s": times.step_s, "peak_device_bytes": peak_bytes(device), "times": vars(times)}
        except torch.OutOfMemoryError as error:
            row["error"] = str(error).splitlines()[0]
        rows.append(row)
        step.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    return rows


def main() -> None:
    """Measure, print the tables, write the record."""
    parser = argparse.ArgumentParser(description="Measure weight streaming against compute and link.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.45, help="device memory, as a fraction of the weights")
    arguments, device = asked(parser, "results/weight_streaming.json")
    size = SMALL if arguments.small else LARGE
    link = offload.measure_link(device)
    print(link)

    model = Stack(size.build(device))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    alone = {}
    for name, shape, _ in cases(size):
        step = Step(model, size.inputs(shape, device))
        alone[name] = step.measure(warmup=2, repeats=arguments.repeats)
        step.zero_grad()
        del step
    rows, extra = streamed_rows(size, model, alone, device, arguments)
    gc.collect()
    fsdp: list[dict[str, Any]] = []
    if device.type == "cuda":
        torch.cuda.empty_cache()
        fsdp = fsdp_rows(size, model, device, min(arguments.repeats, 3))
    for row in rows:
        row["fsdp_s"] = next((other.get("step_s") for other in fsdp if other["case"] == row["case"]), None)
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
