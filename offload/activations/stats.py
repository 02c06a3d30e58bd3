"""What was offloaded, in a frozen snapshot: bytes, stalls of compute, and copies that freed nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from offload.base.checks import describe, format_s


@dataclass(frozen=True)
class Stats:
    """A frozen snapshot of counters, of which two can be subtracted."""

    _held: ClassVar[Collection[str]]  # the names of those that count what there is, not what was done

    def __sub__(self, before: Self) -> Self:
        """What was counted between two moments; what is held, is that of the later one."""
        if type(before) is not type(self):
            raise TypeError(f"stats can be subtracted from {type(self).__name__} only, got {describe(before)}")
        changes: dict[str, Any] = {}
        for item in fields(self):
            now, then = getattr(self, item.name), getattr(before, item.name)
            if isinstance(now, dict):
                changes[item.name] = {key: now[key] - then.get(key, 0) for key in now if now[key] != then.get(key, 0)}
            elif item.name not in self._held:
                changes[item.name] = now - then
        return replace(self, **changes)

    def __str__(self) -> str:
        width = max(map(len, vars(self)))
        return "\n".join(f"{name:<{width}}  {_shown(name, value)}" for name, value in vars(self).items())


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    if name == "wasted":
        return str({operation: _shown("wasted_bytes", nbytes) for operation, nbytes in value.items()})
    return format_s(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class OffloadStats(Stats):
    """What a context has moved since it was made. Bytes are those of whole storages.

    ``after - before`` is what has moved between two moments; ``pinned_bytes`` and ``peak_resident_bytes`` of it are
    those of ``after``, and the peak is the one since the beginning.
    """

    _held = ("pinned_bytes", "peak_resident_bytes")

    offloaded_bytes: int = 0  #: Copied from the device to the host.
    offloaded_tensors: int = 0  #: Saved tensors whose storage was copied; several can share one storage.
    offloaded_storages: int = 0  #: Storages copied from the device to the host.
    reloaded_bytes: int = 0  #: Copied from the host back to the device.
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason → number of saved tensors in offloaded layers that were kept on the device."""
    pinned_bytes: int = 0  #: Page-locked host memory of the device's pool, shared by all contexts.
    peak_resident_bytes: int = 0  #: The most device bytes that the activation sets of offloaded layers held at once.
    wasted_bytes: int = 0
    """Copied, but something else kept the device memory alive until the reload, so that nothing was freed."""
    wasted: dict[str, int] = field(default_factory=dict)
    """Operation → those of the wasted bytes that it had made; ``"leaf"`` for what no operation made, such as inputs."""
    late_reloads: int = 0  #: Activation sets that backward reached before their reload was started: a stall each.
    stall_s: float = 0.0
    """How long compute waited for copies, on the device, in all waits that it has passed; not inside CUDA graphs."""
