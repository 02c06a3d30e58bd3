"""What each saved tensor costs: the host's time for it, and the bandwidth that copies of its size reach."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import offload
from offload.backend import get_backend
from offload.link import Link

LAYERS = 3
OPERATIONS = 400
"""Of the layer that has any; every one saves a tensor."""
ELEMENTS = 256

SIZES = tuple(1 << power for power in range(16, 27))
"""Bytes of one tensor: 64 KiB to 64 MiB."""
RUN_BYTES = 1 << 30
"""A bandwidth is that of as many tensors as this is, but at least ``FEWEST`` and at most ``MOST``."""
FEWEST, MOST = 8, 256


Layer = Callable[[torch.Tensor], torch.Tensor]
Step = Callable[[list[Layer], torch.Tensor], torch.Tensor]


def many_operations(x: torch.Tensor) -> torch.Tensor:
    """Operations so small that the host's work for them is all there is. Any shape; the result has the same."""
    for _ in range(OPERATIONS):
        x = torch.sin(x)
    return x


def host_cost(device: torch.device, *, repeats: int = 15) -> dict[str, Any]:
    """Host seconds per saved tensor, pack, unpack and all else included, by where it is and whether it travels.

    One of three layers has operations that save tensors. Its steps take turns: without anything, under hooks that do
    nothing, which is the least that PyTorch asks for, and in contexts. A step's time is the host's, until backward has
    returned; what it takes longer than without anything is divided by the number of tensors. The median of the repeats
    counts.
    """
    x = torch.randn(ELEMENTS, device=device, requires_grad=True)
    layers: dict[str, tuple[int, Step]] = {
        "operation": (0, _plain),
        "hooks": (0, _hooked),
        "stays": (0, _offloaded(device, 1 << 40)),
        "stays_later": (LAYERS - 1, _offloaded(device, 1)),
        "travels": (0, _offloaded(device, 1)),
    }
    found: dict[str, list[float]] = {name: [] for name in layers}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a whole round")  # some contexts are to move nothing
        for repeat in range(repeats + 2):
            plain_s = 0.0
            for name, (place, step) in layers.items():
                model = [many_operations if number == place else torch.neg for number in range(LAYERS)]
                step(model, x).backward()  # what ran before leaves the processor's caches cold
                _wait(device)
                begin = time.perf_counter()
                step(model, x).backward()
                step_s = time.perf_counter() - begin
                if repeat >= 2:
                    found[name].append((step_s - plain_s) / OPERATIONS)
                if step is _plain:
                    plain_s = step_s
    _wait(device)
    medians = {f"{name}_s": statistics.median(costs) for name, costs in found.items()}
    spreads = {f"{name}_spread_s": max(costs) - min(costs) for name, costs in found.items()}
    return {**medians, **spreads, "repeats": repeats}


def _plain(layers: list[Layer], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x.sum()


def _hooked(layers: list[Layer], x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return _plain(layers, x)


def _offloaded(device: torch.device, min_bytes: int) -> Step:
    context, sync = offload.get_cpu_offload_context(True, 1, LAYERS, min_bytes=min_bytes, device=device)

    def step(layers: list[Layer], x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)
        return x.sum()

    return step


class SaveThese(torch.autograd.Function):
    """Saves the given tensors and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (grads[0], *(None for _ in ctx.saved_tensors))


def small_copies(
    device: torch.device, link: Link, *, sizes: tuple[int, ...] = SIZES, repeats: int = 5
) -> list[dict[str, Any]]:
    """Bandwidth out and back of tensors of one size after the other, each of which has a storage of its own.

    A layer saves the tensors, and there is nothing to compute: the time is from the layer's begin until the last copy
    has ended, the library's own work included. Beside it stands the share of the link's bandwidth for large copies.
    """
    rows = []
    for nbytes in sizes:
        count = min(MOST, max(FEWEST, RUN_BYTES // nbytes))
        times = [_there_and_back_s(device, nbytes, count) for _ in range(repeats + 1)][1:]
        out, back = (count * nbytes / statistics.median(run_s) for run_s in zip(*times, strict=True))
        rows.append(
            {
                "size_bytes": nbytes,
                "count": count,
                "out_bytes_per_s": out,
                "back_bytes_per_s": back,
                "out_of_link": out / link.d2h_bytes_per_s,
                "back_of_link": back / link.h2d_bytes_per_s,
            }
        )
    return rows


def _there_and_back_s(device: torch.device, nbytes: int, count: int) -> tuple[float, float]:
    context, sync = offload.get_cpu_offload_context(True, 1, LAYERS, min_bytes=1, device=device)
    x = torch.ones((), device=device, requires_grad=True)
    _wait(device)
    begin = time.perf_counter()
    with context:
        y = SaveThese.apply(x, *(torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)))
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
