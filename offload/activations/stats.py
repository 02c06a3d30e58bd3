"""Counters of what travelled, and their frozen snapshot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from offload.activations.stalls import Stalls
from offload.activations.waste import operation_name, warn_of_waste
from offload.base.units import format_s

WORTH_A_WARNING = 0.5
"""Of the bytes copied so far, as many that freed nothing. The input of the first layer often is a smaller share."""


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
    """Copied, but something else kept the device memory alive until the reload, so that nothing was freed."""
    wasted: dict[str, int] = field(default_factory=dict)
    """Operation → those of the wasted bytes that it had made; ``"leaf"`` for what no operation made, such as inputs."""
    late_reloads: int = 0
    """Activation sets that backward reached before their reload was started: a stall each."""
    stall_s: float = 0.0
    """How long compute waited for copies, on the device, in all waits that it has passed; not inside CUDA graphs."""

    def __str__(self) -> str:
        def show(name: str, value: object) -> str:
            if name.endswith("_bytes") and isinstance(value, int):
                return _mib(value)
            if isinstance(value, float):
                return format_s(value)
            return str({key: _mib(nbytes) for key, nbytes in self.wasted.items()} if name == "wasted" else value)

        width = max(len(item.name) for item in fields(self))
        return "\n".join(f"{item.name:<{width}}  {show(item.name, getattr(self, item.name))}" for item in fields(self))


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


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
        self.stalls = Stalls()
        self.wasted: Counter[str] = Counter()
        self._warned = False

    def hold(self, nbytes: int) -> None:
        """Device memory of an offloaded layer's activation set came into being."""
        self.resident_bytes += nbytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)

    def drop(self, nbytes: int) -> None:
        """Device memory of an offloaded layer's activation set was let go."""
        self.resident_bytes -= nbytes

    def begin_round(self) -> None:
        """A round of layers begins: look back at the earlier ones."""
        self.stalls.collect()
        if not self._warned and self.wasted_bytes > WORTH_A_WARNING * self.offloaded_bytes:
            self._warned = True
            warn_of_waste(self.wasted, self.offloaded_bytes)

    def waste(self, nbytes: int, kind: type | None) -> None:
        """Bytes were copied, and freed no device memory; ``kind`` is of the node whose operation made the tensor."""
        self.wasted_bytes += nbytes
        self.wasted[operation_name(kind)] += nbytes

    def snapshot(self, pinned_bytes: int) -> OffloadStats:
        """The counts now."""
        self.stalls.collect()
        counts = {item.name: getattr(self, item.name) for item in fields(OffloadStats) if item.name in vars(self)}
        return OffloadStats(
            **{
                **counts,
                "skipped": dict(self.skipped),
                "pinned_bytes": pinned_bytes,
                "wasted": dict(self.wasted),
                "stall_s": self.stalls.seconds,
            }
        )
