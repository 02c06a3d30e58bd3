"""The bandwidths of the link between host and device, measured, and a plan for the link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from offload.device.backend import Backend, Stream
from offload.device.select import get_backend
from offload.host.page_locked import page_locked
from offload.planning.plan import Plan, make_plan
from offload.planning.profile import Link, Profile, check_profile

PIECE_BYTES = 64 << 20
"""Large enough that the cost of starting a copy does not show: 1 MiB pieces reach 90% on PCIe Gen5."""

RUN_S = 0.02  # each bandwidth is taken from as many pieces as take about this long

MAX_PIECES = 64
REPEATS = 5  # so often each of the three bandwidths is measured; the median counts


def measure_link(device: torch.device | str | int | None = None) -> Link:
    """Measure the link with copies like the library's own: pinned memory, the same streams.

    It takes well under a second, and 128 MiB on the device and on the host. Without an accelerator it measures how fast
    the CPU backend's threads copy memory.

    Args:
        device: ``None`` is the current accelerator, and the CPU where there is none.
    """
    backend = get_backend(device)
    d2h_stream, h2d_stream = backend.copy_streams
    # Written once, because memory that never was has no pages of its own on the CPU.
    on_device = [backend.empty(PIECE_BYTES).zero_() for _ in range(2)]
    on_host = [page_locked(PIECE_BYTES, backend) for _ in range(2)]
    d2h: _Copy = (d2h_stream, on_host[0], on_device[0])
    h2d: _Copy = (h2d_stream, on_device[1], on_host[1])
    for stream in (d2h_stream, h2d_stream):
        stream.wait_event(backend.compute_stream().record_event())
    _copy_s(backend, [d2h, h2d], 1)  # Warm up, and wait for what is queued already.
    pieces = min(MAX_PIECES, max(1, round(RUN_S / _copy_s(backend, [d2h, h2d], 1))))

    def bytes_per_s(*copies: _Copy) -> float:
        run_s = statistics.median(_copy_s(backend, copies, pieces) for _ in range(REPEATS))
        return len(copies) * pieces * PIECE_BYTES / run_s

    return Link(bytes_per_s(d2h), bytes_per_s(h2d), bytes_per_s(d2h, h2d), str(backend.device))


_Copy = tuple[Stream, torch.Tensor, torch.Tensor]  # stream, target, source


def _copy_s(backend: Backend, copies: Sequence[_Copy], pieces: int) -> float:
    """Seconds for ``pieces`` copies of each kind, all kinds at once, from an idle link to an idle link."""
    start = time.perf_counter()
    for _ in range(pieces):
        for stream, target, source in copies:
            backend.copy(stream, target, source)
    for event in [stream.record_event() for stream, _, _ in copies]:
        event.synchronize()
    return time.perf_counter() - start


def plan(
    profile: Profile, memory_budget: int | str, link: Link | None = None, *, max_host_bytes: int | str | None = None
) -> Plan:
    """What to keep, offload and recompute, so that the peak is within the budget and the step is the shortest.

    Where layers have regions, each region of each layer is kept, offloaded or recomputed. The step is never longer than
    with all kept, with whole layers offloaded, or with all recomputed and the layers' inputs kept or offloaded, as far
    as these fit. Where no layer has regions, whole layers are offloaded.

    Args:
        profile: What the layers cost, from :func:`~offload.profile_layers` or written by hand.
        memory_budget: Device memory for what a step adds to parameters and optimizer state: bytes, or a text such as
            ``"40GiB"``.
        link: Measured now if left out.
        max_host_bytes: The most host memory; bytes or a text.

    Raises:
        ValueError: Nothing meets the budget; the message names the least budget that can be met. Or a number of bytes
            is a text of another form.
        TypeError: A number of bytes is neither an int nor a str, or ``profile`` or ``link`` is something else.
    """
    check_profile(profile)
    return make_plan(profile, memory_budget, measure_link() if link is None else link, max_host_bytes=max_host_bytes)
