"""What each saved tensor costs: the host's time for it, and the bandwidth that copies of its size reach."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import offload
from offload.backend import get_backend
from offload.link import Link

LAYERS = 3
OPERATIONS = 200
"""Of each layer; every one saves a tensor."""
ELEMENTS = 256

SIZES = tuple(1 << power for power in range(16, 27))
"""Bytes of one tensor: 64 KiB to 64 MiB."""
RUN_BYTES = 1 << 30
"""A bandwidth is that of as many tensors as this is, but at least ``FEWEST`` and at most ``MOST``."""
FEWEST, MOST = 8, 256


class ManyOperations(nn.Module):
    """Operations so small that the host's work for them is all there is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: any shape; the result has the same."""
        for _ in range(OPERATIONS):
            x = torch.sin(x)
        return x


def host_cost(device: torch.device, *, repeats: int = 15) -> dict[str, Any]:
    """Host seconds per saved tensor that travels and per one that stays, pack, unpack and all else included.

    Three steps take turns: without a context, with one that moves nothing, and with one that moves what the first
    layer saves. A step's time is the host's, until backward has returned. The differences are divided by the number of
    tensors; the median of the repeats counts.
    """
    x = torch.randn(ELEMENTS, device=device, requires_grad=True)
    layers = [ManyOperations() for _ in range(LAYERS)]
    stays = offload.get_cpu_offload_context(True, 1, LAYERS, min_bytes=1 << 40, device=device)
    travels = offload.get_cpu_offload_context(True, 1, LAYERS, min_bytes=1, device=device)

    def plain() -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer(y)
        return y

    def within(context: offload.OffloadContext, sync: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        y = x
        for layer in layers:
            with context:
                y = layer(y)
            y = sync(y)
        return y

    def host_s(forward: Callable[[], torch.Tensor]) -> float:
        _wait(device)
        begin = time.perf_counter()
        forward().sum().backward()
        return time.perf_counter() - begin

    saved = LAYERS * OPERATIONS
    per_operation, per_kept, per_moved = [], [], []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a whole round")  # one context is to move nothing
        for repeat in range(repeats + 2):
            before = travels[0].stats().offloaded_tensors
            plain_s, kept_s, moved_s = host_s(plain), host_s(lambda: within(*stays)), host_s(lambda: within(*travels))
            moved = travels[0].stats().offloaded_tensors - before
            if repeat < 2:
                continue
            per_operation.append(plain_s / saved)
            per_kept.append((kept_s - plain_s) / saved)
            per_moved.append((moved_s - plain_s - (saved - moved) * per_kept[-1]) / moved)
    _wait(device)
    return {
        "operation_s": statistics.median(per_operation),
        "stays_s": statistics.median(per_kept),
        "travels_s": statistics.median(per_moved),
        "stays_spread_s": max(per_kept) - min(per_kept),
        "travels_spread_s": max(per_moved) - min(per_moved),
        "repeats": repeats,
    }


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
