"""How much device memory a step needs above what was there before, as an accelerator's allocator says or as counted."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from offload.base.layer_events import in_compiled_call
from offload.base.torch_private import TorchDispatchMode, dispatch_modes, leave_to_interpreter, set_modes
from offload.device.select import resolve_device
from offload.recompute.learn import LayerMode

_logger = logging.getLogger(__name__)


@dataclass
class MemoryMeter:
    """The reading of :func:`memory_meter`."""

    peak_bytes: int = 0
    """The most bytes allocated at once, above what was allocated when the meter was entered."""


@contextmanager
def memory_meter(device: torch.device | str | int | None = None) -> Iterator[MemoryMeter]:
    """Measure the peak of device memory inside the block; the meter's ``peak_bytes`` is final when the block is left.

    On an accelerator the reading is its caching allocator's, whose earlier peaks are reset. On the CPU, the memory of
    tensors that PyTorch operations return inside the block is counted until it is freed; memory that a kernel allocates
    for itself is not counted, nor is the host memory that stands for pinned memory.

    Args:
        device: The device to measure; the current accelerator by default, and the CPU where there is none.
    """
    resolved, meter = resolve_device(device), MemoryMeter()
    if resolved.type == "cpu":
        with CpuAllocations() as allocations:
            try:
                yield meter
            finally:
                meter.peak_bytes = allocations.peak_bytes
        return
    torch.accelerator.synchronize(resolved)
    peak = MemoryPeak(resolved)
    peak.start()
    try:
        yield meter
    finally:
        torch.accelerator.synchronize(resolved)
        meter.peak_bytes = peak.most_bytes()


class CpuAllocations(TorchDispatchMode):
    """Counts each storage that an operation returns until the storage is freed, in whatever thread.

    ``on_change`` is called with the bytes alive after each change.
    """

    supports_higher_order_operators = True  # compiled layers with dropout run some

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the compiler leaves this package alone, so that each operation needs no wrapper for that

    def __init__(self, on_change: Callable[[int], None] | None = None) -> None:
        super().__init__()
        leave_to_interpreter()
        self._on_change = on_change
        self.peak_bytes = 0
        self.live_bytes = 0
        # By their addresses. Weak references: the meter must not keep the storages alive that it measures.
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        alive = self._alive
        if new := [storage for storage in _storages((result,)) if id(storage) not in alive]:
            given = _storages((*args, *(kwargs or {}).values()))
            for storage in new:
                if not any(storage is one for one in given):
                    self.count(storage)
        return result

    def note_peak(self, nbytes: int) -> None:
        """So many bytes were alive at once, since, beside what is alive now, some were allocated for a while."""
        self.peak_bytes = max(self.peak_bytes, nbytes)
        if self._on_change is not None:
            self._on_change(nbytes)
            self._on_change(self.live_bytes)

    def forget_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        if (address := id(storage)) not in self._alive:
            nbytes = storage.nbytes()

            def freed(_: object) -> None:
                del self._alive[address]
                self._change(-nbytes)

            self._alive[address] = weakref.ref(storage, freed)
            self._change(nbytes)

    def _change(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self._on_change is not None:
            self._on_change(self.live_bytes)


def _storages(values: Iterable[object]) -> list[torch.UntypedStorage]:
    """The storages on the CPU among an operation's arguments or results; ``set_`` takes one itself."""
    found: list[torch.UntypedStorage] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and value.is_cpu:
                found.append(value.untyped_storage())
        elif isinstance(value, (list, tuple)):
            found += _storages(value)
        elif isinstance(value, dict):
            found += _storages(value.values())
        elif isinstance(value, torch.UntypedStorage):
            found.append(value)
    return found


def _allocated(device: torch.device, *, most: bool = False) -> int:
    """What an accelerator's allocator has given out, now or at its peak."""
    if device.type == "cuda":  # for one number, torch.accelerator sorts a hundred, which takes 80 instead of 14 us
        found = torch.cuda.memory_stats_as_nested_dict(device)
        return int(found["allocated_bytes"]["all"]["peak" if most else "current"]) if found else 0
    return torch.accelerator.max_memory_allocated(device) if most else torch.accelerator.memory_allocated(device)


class MemoryPeak:
    """The peak of a device whose allocator tells it."""

    costs_time = False  # the program is no slower while this counts
    counts = True  # whether this knows of everything that is allocated now, and freed later

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_bytes = self._before_bytes = 0  # the second: the most before what ran apart
        # What was allocated before the start, and counts.
        self._earlier: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []

    def start(self) -> None:
        """Count from now on, above what is allocated now."""
        self.begin_part()  # what was before may have needed more
        self._start_bytes, self._earlier = self._allocated_bytes(), []

    def count(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Count storages that were allocated before the start, too, until they are freed."""
        self._earlier = [(weakref.ref(storage), storage.nbytes()) for storage in storages]
        self._start_bytes -= sum(nbytes for _, nbytes in self._earlier)

    def most_bytes(self) -> int:
        """The most since the start, or since :meth:`begin_part`."""
        return max(self._before_bytes, self._most_allocated_bytes() - self._start_bytes)

    def other_bytes(self) -> int:
        """What is allocated now beside the storages of :meth:`count`, above what was at the start."""
        return self.now_bytes() - sum(nbytes for reference, nbytes in self._earlier if reference() is not None)

    def now_bytes(self) -> int:
        """What is allocated now, above what was at the start."""
        return self._allocated_bytes() - self._start_bytes

    def begin_part(self) -> None:
        """Forget the peak so far; bytes still count above what was allocated at the start."""
        self._before_bytes = 0
        self._forget_most()

    @contextmanager
    def apart(self) -> Iterator[MemoryMeter]:
        """Measure a part of its own, above what was allocated at the start as all others, which are not forgotten."""
        before_bytes, meter = self.most_bytes(), MemoryMeter()
        self.begin_part()
        try:
            yield meter
        finally:
            meter.peak_bytes = self.most_bytes()
            self._before_bytes = max(before_bytes, meter.peak_bytes)

    def stop(self) -> None:
        """Count no more; the allocator always counts."""

    def _allocated_bytes(self) -> int:
        return _allocated(self._device)

    def _most_allocated_bytes(self) -> int:
        return _allocated(self._device, most=True)

    def _forget_most(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)


class CpuMemoryPeak(MemoryPeak):
    """The same on the CPU: what operations of this thread return is counted, from the first start to the stop.

    Nothing is counted while a model runs that is compiled as a whole: when such a call ends, PyTorch puts the dispatch
    keys back that it began with, whatever modes were entered or left inside.
    """

    costs_time = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.counts, self._counted = False, _Counted(self)
        self._said = False  # whether the log has what is not counted

    def start(self) -> None:
        if in_compiled_call():
            if not self._said:
                _logger.warning(
                    "a model that is compiled as a whole may break its budget: nothing is counted on the CPU; compile "
                    "its layers instead, by compile=True beside memory_budget"
                )
            self._said = True
            return
        self.counts = True
        # Outside of all others, which the program may leave while this one counts on.
        set_modes([self._counted, *self._other_modes()])
        super().start()

    def count(self, storages: Iterable[torch.UntypedStorage]) -> None:
        found = list(storages) if self.counts else []
        before_bytes = self._counted.live_bytes
        for storage in found:
            self._counted.count(storage)
        self._start_bytes += self._counted.live_bytes - before_bytes
        super().count(found)

    def stop(self) -> None:
        self.counts, self._counted, self._start_bytes, self._before_bytes = False, _Counted(self), 0, 0
        others = self._other_modes()
        if len(others) < len(dispatch_modes()) and not in_compiled_call():
            set_modes(others)

    def _other_modes(self) -> list[TorchDispatchMode]:
        """The modes without this one, and without those that nobody reads any more.

        After backward, autograd enters the modes again that were entered before it.
        """
        return [
            mode
            for mode in dispatch_modes()
            if not (isinstance(mode, _Counted) and ((reader := mode.reader()) is self or reader is None))
        ]

    def _allocated_bytes(self) -> int:
        return self._counted.live_bytes

    def _most_allocated_bytes(self) -> int:
        return self._counted.peak_bytes

    def _forget_most(self) -> None:
        self._counted.forget_peak()


class _Counted(CpuAllocations, LayerMode):
    """Next to compiled code, which remains compiled."""

    def __init__(self, reader: CpuMemoryPeak) -> None:
        super().__init__()
        self.reader = weakref.ref(reader)


def memory_peak(device: torch.device) -> MemoryPeak:
    """What tells the peak of a device."""
    return CpuMemoryPeak() if device.type == "cpu" else MemoryPeak(device)
