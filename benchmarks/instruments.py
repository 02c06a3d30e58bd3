"""What the benchmarks measure with: time, bytes copied and pinned, determinism, and an even start for everyone."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offload


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Seconds from an idle device to an idle device."""
    _synchronize(device)
    begin = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - begin


def metered(step: Callable[[], object], device: torch.device) -> tuple[int, float]:
    """The peak of device memory in a step, in bytes above what was there before, and its seconds.

    On the CPU the meter sees only what runs in eager mode, and takes time itself.
    """
    stance = "force_eager" if device.type == "cpu" else "default"
    with torch.compiler.set_stance(stance), offload.memory_meter(device) as meter:
        step_s = timed(step, device)
    return meter.peak_bytes, step_s


def give_memory_back(device: torch.device) -> None:
    """Return what caches hold of device memory and of pinned memory."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch._C._host_emptyCache()
        torch.cuda.empty_cache()
    offload.empty_host_cache(device)


def pinned_by_torch(device: torch.device) -> int:
    """What PyTorch's own allocator of pinned memory holds, in bytes."""
    if device.type != "cuda":
        return 0
    stats = torch.cuda.host_memory_stats()
    # Older releases count the bytes in use as allocated, and those of all blocks as reserved.
    return int(stats.get("reserved_bytes.current", stats.get("allocated_bytes.current", 0)))


@contextmanager
def deterministic() -> Iterator[None]:
    """Backward of fused attention adds in any order unless it is told not to, and ``warn_only`` does not tell it."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class SavedTensors:
    """Adds up what autograd saves in the block, as PyTorch's allocator would pin it: a power of two per tensor."""

    def __init__(self) -> None:
        self.pinned_bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned_bytes += 1 << max(0, tensor.nbytes - 1).bit_length()
        # A result of the operation that saves it would own itself through the graph: give an alias.
        return tensor if tensor.is_leaf else tensor.detach()


BLOCKING_CALLS = frozenset(
    {
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaStreamSynchronize",
        "cudaMalloc",
        "cudaFree",
        "cudaHostAlloc",
        "cudaHostRegister",
        "cudaMemcpy",
    }
)
"""Calls of CUDA's runtime that block the host, or the device."""

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class HostCopies(TorchDispatchMode):
    """Counts the bytes that operations copy from an accelerator to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _COPIES and isinstance(result, torch.Tensor) and result.device.type == "cpu":
            sources = (value for value in tree_leaves(args) if isinstance(value, torch.Tensor))
            if any(source.device.type != "cpu" for source in sources):
                self.nbytes += result.nbytes
        return result


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
