"""How much device memory a step needs above what was there before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from offload.base.torch_private import TorchDispatchMode, tree_leaves
from offload.device.select import resolve_device


@dataclass
class MemoryMeter:
    """The reading of :func:`memory_meter`."""

    peak_bytes: int = 0
    """The most bytes allocated at once, above what was allocated when the meter was entered."""


@contextmanager
def memory_meter(device: torch.device | str | int | None = None) -> Iterator[MemoryMeter]:
    """Measure the peak of device memory inside the block.

    On an accelerator the reading is its caching allocator's, whose earlier peaks are reset. On the CPU, the memory of
    tensors that PyTorch operations return inside the block is counted until it is freed; memory that a kernel allocates
    for itself is not counted, nor is the host memory that stands for pinned memory.

    Args:
        device: The device to measure; the current accelerator by default, and the CPU where there is none.

    Yields:
        A meter; its ``peak_bytes`` is final when the block is left.
    """
    resolved = resolve_device(device)
    meter = MemoryMeter()
    if resolved.type == "cpu":
        with CpuAllocations() as allocations:
            try:
                yield meter
            finally:
                meter.peak_bytes = allocations.peak_bytes
        return
    torch.accelerator.synchronize(resolved)
    torch.accelerator.reset_peak_memory_stats(resolved)
    start_bytes = torch.accelerator.memory_allocated(resolved)
    try:
        yield meter
    finally:
        torch.accelerator.synchronize(resolved)
        meter.peak_bytes = torch.accelerator.max_memory_allocated(resolved) - start_bytes


class CpuAllocations(TorchDispatchMode):
    """Counts each storage that an operation returns until the storage is freed, in whatever thread.

    Args:
        on_change: Called with the bytes alive after each change.
    """

    supports_higher_order_operators = True  # compiled layers with dropout run some

    def __init__(self, on_change: Callable[[int], None] = lambda _: None) -> None:
        super().__init__()
        self._on_change = on_change
        self.peak_bytes = 0
        self._live_bytes = 0
        # Weak references: the meter must not keep the storages alive that it measures.
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tree_leaves((args, kwargs))
        inputs = {id(t.untyped_storage()) for t in given if _counts(t)}
        inputs |= {id(storage) for storage in given if isinstance(storage, torch.UntypedStorage)}  # as set_ takes it
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _counts(tensor) and id(tensor.untyped_storage()) not in inputs:
                self.count(tensor.untyped_storage())
        return result

    def forget_peak(self) -> None:
        self.peak_bytes = self._live_bytes

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        if storage not in self._seen:
            nbytes = storage.nbytes()
            self._seen.add(storage)
            self._change(nbytes)
            weakref.finalize(storage, self._change, -nbytes).atexit = False  # at exit, nobody reads the meter

    def _change(self, nbytes: int) -> None:
        self._live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        self._on_change(self._live_bytes)


def _counts(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu"
