"""What offloading and recomputing cost the host, per operation and per saved tensor, and how fast small copies are."""

import math
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import offload
from benchmarks.instruments import timed
from offload.device.select import get_backend
from offload.planning.profile import Link

LAYERS = 3
SIZES = tuple(1 << power for power in range(16, 27))
"""Bytes of one tensor: 64 KiB to 64 MiB."""
TENSORS_PER_OPERATION = 4

Forward = Callable[[torch.Tensor], torch.Tensor]


def host_cost_per_operation(device: torch.device, *, small: bool = False) -> dict[str, dict[str, float]]:
    """Host seconds per operation of a layer of tiny tensors, forward and backward; the least of many runs."""
    operations = 100
    x = torch.rand(64, device=device, requires_grad=True)

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(operations // 2):
                x = torch.tanh(x) * x
            return x

    def policy(_context: object, _operation: object, *_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    layer = Layer()
    selective = partial(create_selective_checkpoint_contexts, policy)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "nothing": lambda: layer(x),
        "checkpoint": lambda: checkpoint(layer, x, use_reentrant=False),
        "selective checkpoint": lambda: checkpoint(layer, x, use_reentrant=False, context_fn=selective),
        "regions": lambda: layer(x),
    }
    found = {}
    for name, forward in ways.items():
        with ExitStack() as stack:
            if name == "regions":
                layers, everything = [layer, torch.nn.Identity()], {"*": "recompute"}
                stack.enter_context(offload.offload_layers(layers, 0, policies=everything, min_bytes=1, device=device))
            least = [math.inf, math.inf]
            for _ in range(5 if small else 50):
                timed(lambda: None, device)
                begin = time.perf_counter()
                y = forward()
                least[0] = min(least[0], time.perf_counter() - begin)
                loss = y.sum()
                timed(lambda: None, device)
                begin = time.perf_counter()
                loss.backward()
                least[1] = min(least[1], time.perf_counter() - begin)
        found[name] = {"forward_s": least[0] / operations, "backward_s": least[1] / operations}
        print(f"{name:22s} {1e6 * least[0] / operations:6.1f} {1e6 * least[1] / operations:6.1f} µs per operation")
    return found


def host_cost_per_tensor(device: torch.device, *, small: bool = False) -> dict[str, Any]:
    """Host seconds per saved tensor, pack, unpack and all else included.

    One of three layers has operations so small that the host's work is all there is, and each saves a tensor. Steps
    take turns: without anything, under hooks that do nothing, and in contexts. What a step takes longer than without
    anything is divided by the number of tensors. The median of the repeats counts.
    """
    repeats = 5 if small else 30
    few, large = 100, 1 << (14 if small else 20)
    plain = partial(_run, None)
    ways: dict[str, tuple[Callable[[list[Forward], torch.Tensor], torch.Tensor], int, int, int]] = {
        # The way, the layer that saves, the elements of each tensor, and the number of tensors.
        "operation": (plain, 0, 256, 400),
        "hooks": (_under_hooks, 0, 256, 400),
        "stays_later": (partial(_run, _context(device, 1)), LAYERS - 1, 256, 400),
        "stays": (partial(_run, _context(device, 1 << 40)), 0, 256, 400),
        "large_operation": (plain, 0, large, few),
        "alone": (partial(_run, _context(device, 1)), 0, large, few),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a whole round")  # some contexts are to move nothing
        for repeat in range(repeats + 2):
            plain_s = 0.0
            for name, (run, place, elements, operations) in ways.items():
                x = torch.randn(elements, device=device, requires_grad=True)
                layers = [partial(_many, operations) if number == place else torch.neg for number in range(LAYERS)]
                run(layers, x).backward()  # what ran before leaves the processor's caches cold
                _wait(device)
                begin = time.perf_counter()
                run(layers, x).backward()
                step_s = time.perf_counter() - begin
                _wait(device)
                if repeat >= 2:
                    found[name].append((step_s - (0.0 if run is plain else plain_s)) / operations)
                if run is plain:
                    plain_s = step_s
    medians = {f"{name}_s": statistics.median(costs) for name, costs in found.items()}
    spreads = {f"{name}_spread_s": max(costs) - min(costs) for name, costs in found.items()}
    return {**medians, **spreads, "repeats": repeats}


def _many(operations: int, x: torch.Tensor) -> torch.Tensor:
    for _ in range(operations):
        x = torch.sin(x)
    return x


def _context(device: torch.device, min_bytes: int) -> tuple[Any, Any]:
    return offload.get_cpu_offload_context(True, 1, LAYERS, min_bytes=min_bytes, device=device)


def _run(offloading: tuple[Any, Any] | None, layers: list[Forward], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        if offloading is None:
            x = layer(x)
            continue
        context, sync = offloading
        with context:
            x = layer(x)
        x = sync(x)
    return x.sum()


def _under_hooks(layers: list[Forward], x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return _run(None, layers, x)


class SaveThese(torch.autograd.Function):
    """Saves the given tensors and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (grads[0], *(None for _ in ctx.saved_tensors))


def small_copies(device: torch.device, link: Link, *, small: bool = False) -> list[dict[str, Any]]:
    """Bandwidth out and back of tensors of one size after the other, each of which has a storage of its own.

    A layer's operations save the tensors, four each, and there is nothing to compute: the time is from the layer's
    begin, or backward's, until the last copy has ended, the library's own work included. Beside it stands the share of
    the link's bandwidth for large copies.
    """
    rows = []
    for nbytes in SIZES[:2] if small else SIZES:
        count = min(4096, (1 << (22 if small else 30)) // nbytes)
        times = [_there_and_back_s(device, nbytes, count) for _ in range(6)][1:]
        out, back = (count * nbytes / statistics.median(run_s) for run_s in zip(*times, strict=True))
        row = {"size_bytes": nbytes, "count": count, "out_bytes_per_s": out, "back_bytes_per_s": back}
        rows.append(row | {"out_of_link": out / link.d2h_bytes_per_s, "back_of_link": back / link.h2d_bytes_per_s})
    return rows


def _there_and_back_s(device: torch.device, nbytes: int, count: int) -> tuple[float, float]:
    context, sync = _context(device, 1)
    x = torch.ones((), device=device, requires_grad=True)
    tensors = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
    _wait(device)
    begin = time.perf_counter()
    with context:
        y = x * 1
        while tensors:
            y = SaveThese.apply(y, *(tensors.pop() for _ in range(TENSORS_PER_OPERATION)))
    y = sync(y)
    _wait(device)
    out_s = time.perf_counter() - begin
    for _ in range(1, LAYERS):
        with context:
            y = y * 1
        y = sync(y)
    _wait(device)
    begin = time.perf_counter()
    y.backward()
    _wait(device)
    return out_s, time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    """Until compute and both copy streams are idle."""
    backend = get_backend(device)
    for stream in (backend.compute_stream(), *backend.copy_streams):
        stream.record_event().synchronize()
