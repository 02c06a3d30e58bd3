"""Counters of what travelled, and their frozen snapshot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class OffloadStats:
    """What a context has moved since it was made. Bytes are those of whole storages."""

    offloaded_bytes: int = 0
    """Copied from the device to the host."""
    offloaded_tensors: int = 0
    """Saved tensors whose storage was copied; several can share one storage."""
    offloaded_storages: int = 0
    """Storages copied from the device to the host."""
    reloaded_bytes: int = 0
    """Copied from the host back to the device."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason → number of saved tensors in offloaded layers that stayed on the device."""
    pinned_bytes: int = 0
    """Page-locked host memory of the device's pool, shared by all contexts."""
    peak_resident_bytes: int = 0
    """The most device bytes that the activation sets of offloaded layers held at once."""
    wasted_bytes: int = 0
    """Copied, but something else kept the device memory alive, so that nothing was freed."""
    late_reloads: int = 0
    """Activation sets that backward reached before their reload was started: a stall each."""

    def __str__(self) -> str:
        def show(name: str, value: object) -> str:
            return f"{value / 2**20:,.1f} MiB" if name.endswith("_bytes") and isinstance(value, int) else str(value)

        width = max(len(item.name) for item in fields(self))
        return "\n".join(f"{item.name:<{width}}  {show(item.name, getattr(self, item.name))}" for item in fields(self))


class Counters:
    """The running counts behind :class:`OffloadStats`."""

    def __init__(self) -> None:
        self.offloaded_bytes = 0
        self.offloaded_tensors = 0
        self.offloaded_storages = 0
        self.reloaded_bytes = 0
        self.skipped: Counter[str] = Counter()
        self.resident_bytes = 0
        self.peak_resident_bytes = 0
        self.wasted_bytes = 0
        self.late_reloads = 0

    def hold(self, nbytes: int) -> None:
        """Device memory of an offloaded layer's activation set came into being."""
        self.resident_bytes += nbytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)

    def drop(self, nbytes: int) -> None:
        """Device memory of an offloaded layer's activation set was let go."""
        self.resident_bytes -= nbytes

    def snapshot(self, pinned_bytes: int) -> OffloadStats:
        """The counts now."""
        counts = {item.name: getattr(self, item.name) for item in fields(OffloadStats) if item.name in vars(self)}
        return OffloadStats(**{**counts, "skipped": dict(self.skipped), "pinned_bytes": pinned_bytes})
