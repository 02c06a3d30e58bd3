"""Page-locked host memory of exactly the size that was asked for: mapped, touched, and locked by the backend.

``torch.empty(pin_memory=True)`` rounds up to a power of two: 1.1 GiB take 2 GiB. Touching pages is much of the time
that page-locking takes, so several threads do it; the pages come from the NUMA node that these run on.

Linux promises more memory than there is, and kills a process that then touches it. So the library asks before how much
there is: what the machine has, within what the control group may use.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from offload.base.checks import format_bytes
from offload.device.backend import Backend, PageLockError

TOUCH_BYTES = 64 << 20  # what one thread touches at a time; smaller mappings are not worth a second thread
TOUCH_THREADS = 8

SPARE = 1 / 32  # of what the system, or a control group, has: nobody pins that, as others and the process need some

# Advice of Linux, most of which Python's mmap does not name. Source: include/uapi/asm-generic/mman-common.h
_MADV_HUGEPAGE = 14
_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23

# A control group's limit, what it uses, and which of that is file cache: in the two versions of control groups.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))


class HostMemoryError(RuntimeError):
    """Page-locked host memory has run out: the system refused more, or a limit was reached."""


class _Mapping(mmap.mmap):
    """Pages of this process, unlocked before the system gets them back: weak references call back when that is over."""

    locked_by: tuple[Backend, int] | None = None  # the backend, and the process in which it did

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    # A default argument, as the names of modules may be gone when a process ends.
    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.locked_by is None or finalizing():  # a process that ends leaves all to the system
            return
        backend, process = self.locked_by
        if process == os.getpid():  # a forked child has locked nothing, and cannot use its parent's driver
            backend.page_unlock(self.address)


def check_room(nbytes: int) -> None:
    """Raise :class:`HostMemoryError` if the system, which keeps a part of it, has not that much memory left."""
    available = available_bytes()
    if available is not None and nbytes > available:
        raise HostMemoryError(
            f"{format_bytes(nbytes)} of host memory are missing, but the system has {format_bytes(available)} left, "
            f"beside a part of {SPARE:.0%} that remains free; free host memory, or offload fewer layers."
        )


def page_locked(nbytes: int, backend: Backend) -> torch.Tensor:
    """Host memory that is locked for the backend, uint8 of shape ``[nbytes]``; unlocked and freed with its storage."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if not backend.locks_any_memory:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    mapping = _touched(nbytes)
    mapping.locked_by = (backend, os.getpid())  # first, as an interrupt may come when the pages are locked already
    try:
        backend.page_lock(mapping.address, nbytes)
    except PageLockError as error:
        mapping.locked_by = None
        mapping.close()  # at once: the error's traceback holds it for as long as somebody looks at the error
        raise HostMemoryError(
            f"The CUDA driver could not page-lock {format_bytes(nbytes)} ({error}); free host memory, raise the limits "
            "on it, or offload fewer layers."
        ) from None
    return torch.frombuffer(mapping, dtype=torch.uint8)


def forget_on_fork(memory: torch.Tensor) -> torch.Tensor:
    """Let a forked child find zeros in ``memory``, a mapping of its own, and return it.

    Linux would copy pages that a device may write to for each child, such as a worker of a data loader.
    """
    _advise(memory.data_ptr(), len(memory), _MADV_WIPEONFORK)
    return memory


def _touched(nbytes: int) -> _Mapping:
    """A new mapping whose pages the system has provided, several parts at once."""
    check_room(nbytes)
    try:
        mapping = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryError(f"The system has no {format_bytes(nbytes)} of host memory left ({error}).") from None
    _advise(mapping.address, nbytes, _MADV_HUGEPAGE)

    def touch(start: int) -> None:  # holds the mapping: an interrupt may leave a thread behind that touches it
        address, part = mapping.address + start, min(TOUCH_BYTES, nbytes - start)
        if not _advise(address, part, _MADV_POPULATE_WRITE):  # Linux before 5.14
            ctypes.memset(address, 0, part)

    starts = range(0, nbytes, TOUCH_BYTES)
    with ThreadPoolExecutor(min(TOUCH_THREADS, len(starts), len(own_cores()))) as threads:
        list(threads.map(touch, starts))
    return mapping


def _advise(address: int, nbytes: int, advice: int) -> bool:
    """Whether the system took the advice about a part of a mapping."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    return not libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def own_cores() -> set[int]:
    """The cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still pin without being killed; ``None`` where the system does not say."""
    try:
        memory = _fields(root / "proc/meminfo")
        total, available = (1024 * memory[name] for name in ("MemTotal:", "MemAvailable:"))
    except (OSError, KeyError, ValueError):
        return None
    limits = [(total, total - available), *memory_groups(root)]
    return max(0, min(most - used - int(SPARE * most) for most, used in limits))


def memory_groups(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """The limit of each control group around this process that has one, and the bytes in use without file cache."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = line.split(":", 2)
        first_version = "memory" in controllers.split(",")
        if number != "0" and not first_version:
            continue
        limit, usage, cache = _V1 if first_version else _V2
        group = Path("memory" if first_version else "", path.lstrip("/"))
        for directory in (top / part for part in (group, *group.parents)):
            try:
                most, used = int((directory / limit).read_text()), int((directory / usage).read_text())
                fields = _fields(directory / "memory.stat")
            except (OSError, ValueError):  # not there, or "max"
                continue
            yield most, used - sum(fields.get(name, 0) for name in cache)


def _fields(path: Path) -> dict[str, int]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
