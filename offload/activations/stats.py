"""Counters of what travelled, and their frozen snapshot: bytes, stalls of compute, and copies that freed nothing.

Compute stalls from the moment when it reaches a wait until the copies that it waits for are done. So each wait
needs one event more, on the compute stream; the copies' own event is there already. Nobody waits for these events:
their times are read when both have passed.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from offload.base.checks import describe, format_bytes, format_s, warn_caller
from offload.device.backend import Backend, Event, Stream

Stats = TypeVar("Stats", bound=Any)
"""One of the frozen snapshots."""

WORTH_A_WARNING = 0.5
"""The warning comes when this part of the copied bytes has freed nothing: the first layer's input is often less."""
NAMED = 3
"""Operations in the warning."""
MOST_PENDING = 4096
"""Stalls whose times are not known yet. What comes beyond is not counted, so that memory is bounded."""


@dataclass(frozen=True)
class OffloadStats:
    """What a context has moved since it was made. Bytes are those of whole storages.

    ``after - before`` is what has moved between two moments. What is held now, and a peak, are not differences: there,
    ``pinned_bytes`` and ``peak_resident_bytes`` are those of ``after``, and the peak is the one since the beginning.
    """

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

    def __sub__(self, before: OffloadStats) -> OffloadStats:
        return since(before, self, held=("pinned_bytes", "peak_resident_bytes"))

    def __str__(self) -> str:
        return as_table(self)


def since(before: Stats, after: Stats, held: Collection[str]) -> Stats:
    """What was counted between two moments; what is ``held``, by its name, is that of the later one."""
    if type(before) is not type(after):
        raise TypeError(f"stats can be subtracted from {type(after).__name__} only, got {describe(before)}")
    changes: dict[str, object] = {}
    for item in fields(after):
        now, then = getattr(after, item.name), getattr(before, item.name)
        if isinstance(now, dict):
            changes[item.name] = {key: now[key] - then.get(key, 0) for key in now if now[key] != then.get(key, 0)}
        elif item.name not in held:
            changes[item.name] = now - then
    return replace(after, **changes)


def as_table(stats: object) -> str:
    """A line for each count of a frozen snapshot."""

    def show(name: str, value: Any) -> str:
        if name.endswith("_bytes"):
            return f"{value / 2**20:,.1f} MiB"
        if name == "wasted":
            return str({operation: show("wasted_bytes", nbytes) for operation, nbytes in value.items()})
        return format_s(value) if isinstance(value, float) else str(value)

    width = max(map(len, vars(stats)))
    return "\n".join(f"{name:<{width}}  {show(name, value)}" for name, value in vars(stats).items())


class Counters:
    """The running counts behind :class:`OffloadStats`, under the same names."""

    def __init__(self) -> None:
        self.offloaded_bytes = self.offloaded_tensors = self.offloaded_storages = self.reloaded_bytes = 0
        self.resident_bytes = self.peak_resident_bytes = self.late_reloads = 0
        self.skipped: Counter[str] = Counter()
        self.wasted: Counter[str] = Counter()
        self.stall_s = 0.0
        self._stalls: deque[tuple[Backend, Event, Event]] = deque()
        """Of each stall whose time is not known yet, the events at which it begins and ends."""
        self._last_copied: Event | None = None
        self._collecting = threading.Lock()
        self._warned = False

    def hold(self, nbytes: int) -> None:
        """So much more device memory is held by activation sets of offloaded layers."""
        self.resident_bytes += nbytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)

    def waste(self, nbytes: int, maker: type) -> None:
        """Bytes were copied, and freed no device memory; ``maker`` is the type of the node that made the tensor."""
        self.wasted[operation_name(maker)] += nbytes

    def begin_round(self) -> None:
        """A round of layers begins: look back at the earlier ones."""
        self.collect_stalls()
        if not self._warned and self.wasted.total() > WORTH_A_WARNING * self.offloaded_bytes:
            self._warned = True
            self._warn_of_waste()

    def expect_stall(self, backend: Backend, compute_stream: Stream, copied: Event) -> None:
        """Compute is about to wait for ``copied``, a timed event. Inside a CUDA graph nothing is measured."""
        if copied is self._last_copied or backend.capturing:
            return  # the first wait for an event is the one that stalls
        self._last_copied = copied
        if len(self._stalls) < MOST_PENDING and not copied.query():
            self._stalls.append((backend, backend.record_timed(compute_stream), copied))

    def collect_stalls(self) -> None:
        """Read the times of the waits that compute has passed by now. Does not wait."""
        with self._collecting:
            while self._stalls:
                backend, reached, copied = self._stalls[0]
                stall_s = backend.elapsed_s(reached, copied)
                if stall_s is None:
                    break
                self._stalls.popleft()
                self.stall_s += max(0.0, stall_s)

    def snapshot(self, pinned_bytes: int) -> OffloadStats:
        """The counts now."""
        self.collect_stalls()
        counts = {item.name: getattr(self, item.name) for item in fields(OffloadStats) if item.name in vars(self)}
        counts |= {"skipped": dict(self.skipped), "wasted": dict(self.wasted)}
        return OffloadStats(**counts, pinned_bytes=pinned_bytes, wasted_bytes=self.wasted.total())

    def _warn_of_waste(self) -> None:
        named = [f"{name} ({format_bytes(nbytes)})" for name, nbytes in self.wasted.most_common(NAMED)]
        more = ", ..." if len(self.wasted) > NAMED else ""
        warn_caller(
            f"{format_bytes(self.wasted.total())} of the {format_bytes(self.offloaded_bytes)} that were copied to the "
            "host so far freed no device memory, because something else holds the tensors, by the operation that made "
            f"them: {', '.join(named)}{more}. Drop them before the layer is released (outputs collected in a list or "
            "by a hook, tensors stored on a module, a variable that wants `del`), or pass what must stay to "
            "mark_not_offload; see stats().wasted."
        )


def operation_name(maker: type) -> str:
    """``"Addmm"`` for ``AddmmBackward0``; ``"leaf"`` for what autograd has seen no operation make, such as inputs."""
    return "leaf" if maker is type(None) else maker.__name__.rstrip("0123456789").removesuffix("Backward")
