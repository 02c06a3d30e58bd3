"""What the benchmarks measure with: time, memory, bytes copied and pinned, and determinism."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offload
from offload.device.select import get_backend

GIB = 1 << 30
Row = dict[str, Any]
Step = Callable[[], object]


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def limit_memory(device: torch.device, nbytes: float) -> None:
    """Let PyTorch have no more of the device's memory than this."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), device)


def device_peak(device: torch.device) -> Callable[[], int]:
    """Tells the most bytes of device memory from now on, all in all; 0 on the CPU."""
    if device.type == "cpu":
        return lambda: 0
    torch.accelerator.reset_peak_memory_stats(device)
    return partial(torch.accelerator.max_memory_allocated, device)


def timed(step: Step, device: torch.device, steps: int = 1) -> float:
    """Seconds of a step from an idle device to an idle one; of several in a row, behind one that fills its queue.

    In training, the host queues the next forward while the device runs backward. A plan is chosen by such steps.
    """
    if steps > 1:
        backend = get_backend(device)
        step()
        begin_mark = backend.mark()
        for _ in range(steps):
            step()
        [seconds] = backend.seconds([(begin_mark, backend.mark())])
        return seconds / steps
    synchronize(device)
    begin = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - begin


def attempt(row: Row, run: Step) -> None:
    """Run it, unless the row has an error already. An error becomes the row's, and the others go on."""
    if "error" in row:
        return
    try:
        run()
    except Exception as error:  # noqa: BLE001  # whatever a contender raises
        row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def metered(step: Step, device: torch.device) -> tuple[int, float]:
    """The peak of device memory in a step, in bytes above what was there before, and its seconds.

    On the CPU the meter sees only what runs in eager mode, and takes time itself.
    """
    stance = "force_eager" if device.type == "cpu" else "default"
    with torch.compiler.set_stance(stance), offload.memory_meter(device) as meter:
        step_s = timed(step, device)
    return meter.peak_bytes, step_s


def give_memory_back(device: torch.device, *, pinned: bool = True) -> None:
    """Return what caches hold of device memory, and of pinned memory, which takes long to get again."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        if pinned:
            torch._C._host_emptyCache()
    if pinned:
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


WAITS = ("cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize", "cudaMemcpy")
BLOCKING_CALLS = {*WAITS, "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister"}
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
