"""Weight streaming: a decoder that does not fit, against the limits of the device and of the link.

    python -m benchmarks.weight_streaming --out results/weight_streaming.json

First the step with all weights on the device, which gives the compute time of each phase. Then the device's memory is
limited to less than half of the weights, and the same step runs streamed, for a number of tokens where compute
binds and for one where the link binds. A step's limit is, for forward and backward by themselves, the larger of the
compute time and the time in which the link alone moves the same bytes in both directions; all three are measured in
this run. FSDP2 with ``CPUOffloadPolicy`` does the same work under the same memory limit. At the end, the same model
and a small one are trained for 20 steps both ways, without a limit, and the losses are compared. The optimizer's step
is computed by the host in one and by the device in the other, so there is a third way: weights on the device, step on
the host.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import offload
from benchmarks.instruments import BLOCKING_CALLS, give_memory_back
from benchmarks.report import environment, table, write
from benchmarks.workloads import DecoderBlock, loss_of
from offload.backend import get_backend, resolve_device

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
            layers = nn.ModuleList()
            for _ in range(self.layers):
                layers.append(DecoderBlock(self.hidden, self.ffn, self.heads).to(self.dtype))
        return layers

    def inputs(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        """One microbatch, which requires a gradient."""
        return torch.randn(*shape, self.hidden, device=device, dtype=self.dtype).requires_grad_()


LARGE = Size(4096, 11008, 32, 48, torch.bfloat16, (1, 2048), (4, 4096), 40)
SMALL = Size(64, 172, 4, 6, torch.float32, (1, 32), (2, 64), 3)
TRAINED = Size(512, 1376, 8, 6, torch.bfloat16, (2, 128), (2, 128), 0)
"""What most loss curves are of."""
TRAINED_TOKENS = (1, 256)
"""Batch and tokens of the loss curve of the model that the times are of."""


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


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def copy_s(device: torch.device, nbytes: int, h2d: int, d2h: int) -> float:
    """Seconds in which the link alone moves so many pieces of ``nbytes`` bytes, both directions at once."""
    backend = get_backend(device)
    d2h_stream, h2d_stream = backend.copy_streams
    on_device = [backend.empty(nbytes).zero_() for _ in range(2)]
    on_host = [backend.pinned(nbytes) for _ in range(2)]
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


def resident_bytes() -> int:
    """Host memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


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
    before = resident_bytes()
    begin = time.perf_counter()
    with offload.stream_weights(model.layers, device, num_slots=arguments.slots) as handle:
        extra: dict[str, Any] = {"setup_s": time.perf_counter() - begin}
        limit_memory(device, arguments.memory * handle.stats().weight_bytes)
        layers = len(model.layers)
        layer_bytes = handle.stats().weight_bytes // layers
        for name, shape, offloaded in cases(size):
            model.offload(offloaded, device)
            step = Step(model, size.inputs(shape, device))
            begin = time.perf_counter()
            step()
            synchronize(device)
            first_s = time.perf_counter() - begin
            then, moved = handle.stats(), activation_bytes(model)
            _reset_peak(device)
            times = step.measure(warmup=1, repeats=arguments.repeats)
            peak_bytes = _peak(device)
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
                    "peak_device_bytes": peak_bytes,
                    "first_s": first_s,
                    "times": vars(times),
                }
            )
            if device.type == "cuda":
                extra[f"blocking_calls_{name}"] = blocking_calls(step)
            if name == "few":
                extra["accumulating_s"] = accumulating_s(step, device)
                stats = handle.stats()
                extra["host_bytes"] = resident_bytes() - before
                accounted = stats.weight_bytes + stats.gradient_host_bytes + stats.staging_bytes
                extra["host_ratio"] = extra["host_bytes"] / accounted
                extra["staging_waits"] = stats.staging_waits
            else:
                extra |= optimizer_steps(handle, step, device)
            step.zero_grad()
        extra["stats"] = vars(handle.stats())
    return rows, extra


def limit_memory(device: torch.device, nbytes: float) -> None:
    """Let PyTorch have no more of the device's memory than this."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), device)


def accumulating_s(step: Step, device: torch.device) -> float:
    """Seconds of a microbatch whose gradients are added to those of an earlier one."""
    found = []
    for _ in range(3):
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def optimizer_steps(handle: offload.StreamedWeights, step: Step, device: torch.device) -> dict[str, float]:
    """Seconds of a step with an SGD step after backward, and beside it."""
    optimizer = torch.optim.SGD(step.model.parameters(), lr=2.0**-20)

    def run() -> float:
        step.zero_grad()
        synchronize(device)
        begin = time.perf_counter()
        step()
        optimizer.step()
        synchronize(device)
        return time.perf_counter() - begin

    after_s = min(run() for _ in range(2))
    handle.step_in_backward(optimizer)
    return {"optimizer_after_s": after_s, "optimizer_beside_s": min(run() for _ in range(2))}


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
            _reset_peak(device)
            times = step.measure(warmup=1, repeats=repeats)
            row |= {"step_s": times.step_s, "peak_device_bytes": _peak(device), "times": vars(times)}
        except torch.OutOfMemoryError as error:
            row["error"] = str(error).splitlines()[0]
        rows.append(row)
        step.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    return rows


@dataclass(frozen=True)
class Curve:
    """Training on the device that streamed training is compared with."""

    name: str
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    size: Size = TRAINED
    host_step: bool = False
    """Whether the weights are on the device and the host computes the optimizer's step, as it does when streaming."""


def sgd(parameters: Sequence[nn.Parameter], lr: float = 2.0**-1, momentum: float = 0.0) -> torch.optim.Optimizer:
    """With a power of two as its learning rate the product is exact, so it makes no difference where it is computed."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Its arithmetic is the host's or the device's, which round in different places."""
    return torch.optim.AdamW(parameters, lr=1e-3)


CURVES = (
    Curve("SGD", sgd),
    Curve("SGD with momentum", partial(sgd, lr=2.0**-4, momentum=0.9)),
    Curve("AdamW", adamw),
    Curve("AdamW, float32", adamw, replace(TRAINED, dtype=torch.float32)),
    Curve("AdamW, both stepped on the host", adamw, host_step=True),
    Curve("AdamW, float32, both stepped on the host", adamw, replace(TRAINED, dtype=torch.float32), host_step=True),
)


def loss_curves(size: Size, device: torch.device, steps: int) -> list[dict[str, Any]]:
    """Losses over optimizer steps, on the device and streamed, with the same input each step."""
    limit_memory(device, math.inf)
    rows = []
    large = Curve("SGD, the large model", partial(sgd, lr=2.0**-10), replace(size, few=TRAINED_TOKENS))
    for curve in (*CURVES, large):
        give_memory_back(device)
        on_device = losses_of(curve, device, steps, streamed=False)
        streamed = losses_of(curve, device, steps, streamed=True)
        rows.append(
            {
                "optimizer": curve.name,
                "steps": steps,
                "first": on_device[0],
                "last": on_device[-1],
                "last_streamed": streamed[-1],
                "identical": on_device == streamed,
                "largest_difference": max(
                    abs(one - other) / abs(one) for one, other in zip(on_device, streamed, strict=True)
                ),
                "losses": [on_device, streamed],
            }
        )
    return rows


def losses_of(curve: Curve, device: torch.device, steps: int, *, streamed: bool) -> list[float]:
    """The loss before each step."""
    layers = curve.size.build(device)
    x = curve.size.inputs(curve.size.few, device)
    with ExitStack() as stack:
        if streamed:
            stack.enter_context(offload.stream_weights(layers, device))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # deterministic
        parameters = list(layers.parameters())
        stepped = [p.detach().cpu() for p in parameters] if curve.host_step and not streamed else parameters
        optimizer = curve.make(stepped)
        losses = []
        for _ in range(steps):
            y = x
            for layer in layers:
                y = layer(y)
            loss = loss_of(y)
            loss.backward()
            losses.append(loss.item())
            for parameter, host in zip(parameters, stepped, strict=True):
                if host is not parameter:
                    host.grad = parameter.grad.cpu()
            optimizer.step()
            for parameter, host in zip(parameters, stepped, strict=True):
                if host is not parameter:
                    parameter.data.copy_(host)
                parameter.grad = None
    return losses


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    return 0 if device.type == "cpu" else int(torch.accelerator.max_memory_allocated(device))


def main() -> None:
    """Measure, print the tables, write the record."""
    parser = argparse.ArgumentParser(description="Measure weight streaming against compute and link.")
    parser.add_argument("--out", type=Path, default=Path("results/weight_streaming.json"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.45, help="device memory, as a fraction of the weights")
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--no-fsdp", action="store_true")
    arguments = parser.parse_args()
    device = resolve_device(None)
    size = SMALL if arguments.small else LARGE
    link = offload.measure_link(device)
    print(link)

    model = Stack(size.build(device))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    print(f"{parameters / 1e9:.2f} billion parameters, {weight_bytes / GB:.2f} GB")
    alone = {}
    for name, shape, _ in cases(size):
        step = Step(model, size.inputs(shape, device))
        alone[name] = step.measure(warmup=2, repeats=arguments.repeats)
        step.zero_grad()
        del step
    rows, extra = streamed_rows(size, model, alone, device, arguments)
    gc.collect()
    fsdp: list[dict[str, Any]] = []
    if device.type == "cuda" and not arguments.no_fsdp:
        torch.cuda.empty_cache()
        fsdp = fsdp_rows(size, model, device, min(arguments.repeats, 3))
    for row in rows:
        other = next((r for r in fsdp if r["case"] == row["case"]), {})
        row["fsdp_s"] = other.get("step_s")
        row["faster_than_fsdp"] = row["fsdp_s"] / row["step_s"] if row["fsdp_s"] else None
    del model
    curves = loss_curves(size, device, 20)
    print(table([_shown(row) for row in rows]))
    for row in fsdp:
        if "error" in row:
            print(f"FSDP2, {row['case']}: {row['error']}")
    print(table([{key: value for key, value in row.items() if key != "losses"} for row in curves]))
    for key, value in extra.items():
        print(f"{key}: {value}")
    write(
        arguments.out,
        {
            **environment(device),
            "link": vars(link),
            "parameters": parameters,
            "weight_bytes": weight_bytes,
            "memory_limit_bytes": arguments.memory * weight_bytes,
            "rows": rows,
            "fsdp": fsdp,
            "loss_curves": curves,
            **extra,
        },
    )


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokens": row["tokens"],
        "step ms": row["step_s"] * 1e3,
        "compute fwd+bwd ms": f"{row['compute_forward_s'] * 1e3:.1f} + {row['compute_backward_s'] * 1e3:.1f}",
        "link fwd+bwd ms": f"{row['link_forward_s'] * 1e3:.1f} + {row['link_backward_s'] * 1e3:.1f}",
        "fwd+bwd ms": f"{row['forward_s'] * 1e3:.1f} + {row['backward_s'] * 1e3:.1f}",
        "limit ms": row["limit_s"] * 1e3,
        "vs limit": row["ratio_to_limit"],
        "FSDP2 ms": row["fsdp_s"] * 1e3 if row["fsdp_s"] else None,
        "peak GB": row["peak_device_bytes"] / GB,
        "loads": row["loads_per_step"],
    }


if __name__ == "__main__":
    main()
