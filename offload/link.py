"""What connects device and host, and how fast it is.

How many layers can be offloaded for free depends on nothing else as much as on this. The link
is full duplex: both directions at once move almost twice the bytes of one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 64 << 20
"""Large enough that the cost of starting a copy does not show: 1 MiB pieces reach 90% on PCIe Gen5."""

RUN_S = 0.02
"""Each measurement copies as many pieces as take about this long."""

MAX_PIECES = 64


@dataclass(frozen=True)
class Link:
    """Bandwidth between device and host memory.

    Args:
        d2h_bytes_per_s: Device to host, alone.
        h2d_bytes_per_s: Host to device, alone.
        duplex_bytes_per_s: Sum of both directions while both are busy.
        device: What was measured, for people.

    Raises:
        ValueError: A bandwidth is not a positive, finite number.
    """

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    duplex_bytes_per_s: float
    device: str = ""

    def __post_init__(self) -> None:
        for name in ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_bytes_per_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive, finite number of bytes per second, got {value!r}")

    def rates(self, *, d2h: bool, h2d: bool) -> tuple[float, float]:
        """Bytes per second of the d2h and the h2d stream, of which the given ones are busy.

        Both at once share the duplex bandwidth in the proportion of what each reaches alone, and
        neither is faster than alone.
        """
        if not (d2h and h2d):
            return (self.d2h_bytes_per_s * d2h, self.h2d_bytes_per_s * h2d)
        share = min(1.0, self.duplex_bytes_per_s / (self.d2h_bytes_per_s + self.h2d_bytes_per_s))
        return (self.d2h_bytes_per_s * share, self.h2d_bytes_per_s * share)

    def __str__(self) -> str:
        d2h, h2d, duplex = (
            f"{rate / 1e9:.1f}" for rate in (self.d2h_bytes_per_s, self.h2d_bytes_per_s, self.duplex_bytes_per_s)
        )
        return f"{self.device or 'link'}: d2h {d2h}, h2d {h2d}, both {duplex} GB/s"


def measure_link(
    device: torch.device | str | int | None = None, *, piece_bytes: int = PIECE_BYTES, repeats: int = 5
) -> Link:
    """Measure the link with copies like the library's own: pinned memory, the same streams.

    It takes well under a second, and twice ``piece_bytes`` on the device and on the host.
    Without an accelerator it measures how fast the CPU backend's threads copy memory.

    Args:
        device: ``None`` is the current accelerator, and the CPU where there is none.
        piece_bytes: Bytes of one copy.
        repeats: How often each of the three is measured; the median counts.

    Raises:
        ValueError: ``piece_bytes`` or ``repeats`` is less than 1.
    """
    from offload.backend import get_backend

    for name, value in (("piece_bytes", piece_bytes), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    backend = get_backend(device)
    d2h_stream, h2d_stream = backend.copy_streams
    # Zeroed, because memory that was never written has no pages of its own on the CPU.
    on_device = [backend.empty(piece_bytes).zero_() for _ in range(2)]
    on_host = [backend.pinned(piece_bytes) for _ in range(2)]
    d2h = (d2h_stream, on_host[0], on_device[0])
    h2d = (h2d_stream, on_device[1], on_host[1])
    for stream in (d2h_stream, h2d_stream):
        stream.wait_event(backend.compute_stream().record_event())
    _run_s(backend, [d2h, h2d], 1)  # Warm up, and wait for what is queued already.
    warm_s = _run_s(backend, [d2h, h2d], 1)
    pieces = min(MAX_PIECES, max(1, round(RUN_S / warm_s)))

    def bytes_per_s(*copies: tuple[Any, torch.Tensor, torch.Tensor]) -> float:
        runs = [_run_s(backend, copies, pieces) for _ in range(repeats)]
        return len(copies) * pieces * piece_bytes / statistics.median(runs)

    return Link(bytes_per_s(d2h), bytes_per_s(h2d), bytes_per_s(d2h, h2d), str(backend.device))


def _run_s(backend: Any, copies: Sequence[tuple[Any, torch.Tensor, torch.Tensor]], pieces: int) -> float:
    """Seconds for ``pieces`` copies of each kind, all kinds at once, from an idle link to an idle link."""
    start = time.perf_counter()
    for _ in range(pieces):
        for stream, target, source in copies:
            backend.copy(stream, target, source)
    for event in [stream.record_event() for stream, _, _ in copies]:
        event.synchronize()
    return time.perf_counter() - start
