"""Page-locked host memory of exactly the size that was asked for.

``torch.empty(pin_memory=True)`` rounds up to a power of two: 1.1 GiB take 2 GiB. Here the
pages come from an anonymous mapping, are touched by several threads at once (which is much of the time that
pinning takes) and are then registered with the CUDA driver as they are. The system takes them from the NUMA node
that the touching threads run on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from offload.base.units import format_bytes
from offload.device import cuda_driver
from offload.host.capacity import available_bytes

TOUCH_BYTES = 64 << 20
"""What one thread touches at a time; smaller mappings are not worth a second thread."""
TOUCH_THREADS = 8

SPARE = 1 / 32
"""What many mappings, some of them made at once, leave of the memory that each by itself finds."""

# Advice of Linux that Python's mmap does not name. Source: include/uapi/asm-generic/mman-common.h
_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23


class HostMemoryError(RuntimeError):
    """There is no more page-locked host memory: the system refused, or a limit was set."""


class _Mapping(mmap.mmap):
    """Pages of this process; the driver unlocks them before the system gets them back."""

    _registered_by: int | None = None
    """The process that did."""

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def register(self, device: int) -> None:
        cuda_driver.register(self.address, len(self), device)
        self._unregister = functools.partial(cuda_driver.unregister, self.address, device)
        self._registered_by = os.getpid()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A forked child has no driver, and a process that ends leaves all to the system.
        if self._registered_by is None or finalizing() or self._registered_by != os.getpid():
            return
        with contextlib.suppress(cuda_driver.CudaDriverError):
            self._unregister()


def check_room(nbytes: int, *, spare: float = SPARE) -> None:
    """Raise if the system has not that much host memory left; nothing has been taken then.

    Args:
        nbytes: How much is needed.
        spare: The part of what is left that it should keep.

    Raises:
        HostMemoryError: It has less.
    """
    available = available_bytes()
    if available is not None and nbytes > available * (1 - spare):
        raise HostMemoryError(
            f"{format_bytes(nbytes)} of host memory are missing, but the system has {format_bytes(available)} left; "
            "free host memory, or offload fewer layers."
        )


def pageable(nbytes: int) -> torch.Tensor:
    """Host memory of its own mapping, uint8 of shape ``[nbytes]``, all pages touched.

    Raises:
        HostMemoryError: The system has not that much.
    """
    mapping = _map(nbytes)
    _touch(mapping)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def register_pinned(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Page-locked host memory for CUDA, uint8 of shape ``[nbytes]``; unlocked and freed with its storage.

    Args:
        nbytes: Its size.
        device: The GPU that will copy from and to it; the current one by default.

    Raises:
        HostMemoryError: The system has not that much, or the driver refused to lock it.
    """
    if torch.version.cuda is None:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    mapping = _map(nbytes)
    _touch(mapping)
    try:
        mapping.register(index)
    except cuda_driver.CudaDriverError as error:
        mapping.close()
        raise HostMemoryError(
            f"The CUDA driver could not page-lock {format_bytes(nbytes)} ({error}); free host memory, raise the limits "
            "on it, or offload fewer layers."
        ) from None
    return torch.frombuffer(mapping, dtype=torch.uint8)


def forget_on_fork(memory: torch.Tensor) -> torch.Tensor:
    """Let a forked child find zeros in ``memory``, a mapping of its own, and return it.

    Linux copies pages that a device may write to when the process forks, so each worker of a data loader would
    cost as much memory again.
    """
    _advise(memory.data_ptr(), len(memory), _MADV_WIPEONFORK)
    return memory


def _map(nbytes: int) -> _Mapping:
    check_room(nbytes, spare=0.0)
    try:
        mapping = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryError(f"The system has no {format_bytes(nbytes)} of host memory left ({error}).") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _touch(mapping: _Mapping) -> None:
    """Have the system provide all pages now, for several parts at once."""
    address, nbytes = mapping.address, len(mapping)
    starts = range(0, nbytes, TOUCH_BYTES)
    threads = min(TOUCH_THREADS, len(starts), _cores())

    def touch(start: int) -> None:
        part = min(TOUCH_BYTES, nbytes - start)
        if not _advise(address + start, part, _MADV_POPULATE_WRITE):
            ctypes.memset(address + start, 0, part)

    if threads == 1:
        for start in starts:
            touch(start)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(touch, starts))


def _advise(address: int, nbytes: int, advice: int) -> bool:
    """Whether the system took the advice about a part of a mapping."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    return not libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
