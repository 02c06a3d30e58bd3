"""The most device memory that was allocated since a moment: as an accelerator's allocator says it, or counted."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.base.torch_private import dispatch_modes, set_modes
from offload.observe.memory import CpuAllocations
from offload.recompute.learn import LayerMode


class MemoryPeak:
    """The peak of a device whose allocator tells it."""

    costs_time = False
    """Whether the program is slower while this counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_bytes = 0

    def start(self) -> None:
        """Count from now on, above what is allocated now."""
        torch.accelerator.reset_peak_memory_stats(self._device)  # what was before may have needed more
        self._start_bytes = torch.accelerator.memory_allocated(self._device)

    def count(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Count storages that were allocated before the start, too, until they are freed."""
        self._start_bytes -= sum(storage.nbytes() for storage in storages)

    def most_bytes(self) -> int:
        """The most since the start, or since :meth:`begin_part`."""
        return torch.accelerator.max_memory_allocated(self._device) - self._start_bytes

    def begin_part(self) -> None:
        """Forget the peak so far; bytes still count above what was allocated at the start."""
        torch.accelerator.reset_peak_memory_stats(self._device)

    def stop(self) -> None:
        """Count no more; the allocator always counts."""


class CpuMemoryPeak(MemoryPeak):
    """The same on the CPU: what operations of this thread return is counted, from the start to the stop."""

    costs_time = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._counted: _Counted | None = None

    def start(self) -> None:
        self.stop()
        self._counted = _Counted()
        # Outside of all others, which the program may leave while this one counts on.
        set_modes([self._counted, *dispatch_modes()])

    def count(self, storages: Iterable[torch.UntypedStorage]) -> None:
        if self._counted is not None:
            for storage in storages:
                self._counted.count(storage)

    def most_bytes(self) -> int:
        return 0 if self._counted is None else self._counted.peak_bytes

    def begin_part(self) -> None:
        if self._counted is not None:
            self._counted.forget_peak()

    def stop(self) -> None:
        counted, self._counted = self._counted, None
        # After backward, autograd enters the modes again that were entered before it.
        if counted is not None or any(isinstance(mode, _Counted) for mode in dispatch_modes()):
            set_modes([mode for mode in dispatch_modes() if not isinstance(mode, _Counted)])


class _Counted(CpuAllocations, LayerMode):
    """Next to compiled code, which remains compiled."""


def memory_peak(device: torch.device) -> MemoryPeak:
    """What tells the peak of a device."""
    return CpuMemoryPeak() if device.type == "cpu" else MemoryPeak(device)
