"""What this machine and this model do: the link's bandwidth and the layers' costs, measured.

The planner and the simulator work on the plain data that comes out of here.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from offload.activations import selective
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.base.checks import check_callable, check_int, format_bytes, format_s, parse_bytes
from offload.base.given_layers import check_layers
from offload.base.layer_events import (
    LayerListener,
    Turn,
    listeners_on,
)
from offload.base.progress import progress_bar
from offload.device.backend import Backend, Stream
from offload.device.select import get_backend
from offload.host.page_locked import page_locked
from offload.measuring.layer_times import LayerTimes, MeasuredLayer, rest_s
from offload.measuring.measure_regions import measure_frugally, measure_regions, with_regions
from offload.planning.estimate import with_workspace
from offload.planning.link import Link
from offload.planning.profile import Profile

_logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Large enough that the cost of starting a copy does not show: 1 MiB pieces reach 90% on PCIe Gen5."""

RUN_S = 0.02
"""Each bandwidth is taken from as many pieces as take about this long."""

MAX_PIECES = 64


def measure_link(
    device: torch.device | str | int | None = None, *, piece_bytes: int | str = PIECE_BYTES, repeats: int = 5
) -> Link:
    """Measure the link with copies like the library's own: pinned memory, the same streams.

    It takes well under a second, and twice ``piece_bytes`` on the device and on the host.
    Without an accelerator it measures how fast the CPU backend's threads copy memory.

    Args:
        device: ``None`` is the current accelerator, and the CPU where there is none.
        piece_bytes: Bytes of one copy, or a text such as ``"32MiB"``.
        repeats: How often each of the three bandwidths is measured; the median counts.

    Raises:
        ValueError: ``piece_bytes`` or ``repeats`` is less than 1.
    """
    piece_bytes = parse_bytes(piece_bytes, "piece_bytes")
    check_int("piece_bytes", piece_bytes, least=1)
    check_int("repeats", repeats, least=1)
    backend = get_backend(device)
    d2h_stream, h2d_stream = backend.copy_streams
    # Written once, because memory that never was has no pages of its own on the CPU.
    on_device = [backend.empty(piece_bytes).zero_() for _ in range(2)]
    on_host = [page_locked(piece_bytes, backend) for _ in range(2)]
    d2h: _Copy = (d2h_stream, on_host[0], on_device[0])
    h2d: _Copy = (h2d_stream, on_device[1], on_host[1])
    for stream in (d2h_stream, h2d_stream):
        stream.wait_event(backend.compute_stream().record_event())
    _copy_s(backend, [d2h, h2d], 1)  # Warm up, and wait for what is queued already.
    pieces = min(MAX_PIECES, max(1, round(RUN_S / _copy_s(backend, [d2h, h2d], 1))))

    def bytes_per_s(*copies: _Copy) -> float:
        run_s = statistics.median(_copy_s(backend, copies, pieces) for _ in range(repeats))
        return len(copies) * pieces * piece_bytes / run_s

    return Link(bytes_per_s(d2h), bytes_per_s(h2d), bytes_per_s(d2h, h2d), str(backend.device))


_Copy = tuple[Stream, torch.Tensor, torch.Tensor]
"""Stream, target, source."""


def _copy_s(backend: Backend, copies: Sequence[_Copy], pieces: int) -> float:
    """Seconds for ``pieces`` copies of each kind, all kinds at once, from an idle link to an idle link."""
    start = time.perf_counter()
    for _ in range(pieces):
        for stream, target, source in copies:
            backend.copy(stream, target, source)
    for event in [stream.record_event() for stream, _, _ in copies]:
        event.synchronize()
    return time.perf_counter() - start


def profile_layers(
    layers: Iterable[torch.nn.Module],
    step: Callable[[], object],
    *,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
    device: torch.device | str | int | None = None,
    steps: int = 3,
    regions: bool = False,
) -> Profile:
    """Measure what each layer of a model costs.

    ``step`` is called ``steps + 2`` times: to count what is saved, to see what memory it takes, then to take times, of
    which the median counts. It changes parameters and gradients as it does in training. With ``regions``, it is
    called ``steps + 1`` times more, to take the regions apart and to time what recording adds; and if the model does
    not fit, it is measured with everything recomputed and inputs travelling.

    Args:
        layers: The modules to be offloaded, in call order. Nothing must offload them yet.
        step: Runs forward and backward of at least one microbatch.
        min_bytes: Storages below this size do not travel and are not counted; bytes, or a text such as
            ``"1MiB"``.
        device: Where the layers run; ``None`` is the current accelerator, and the CPU where there is none.
        steps: How many steps are timed.
        regions: Measure each region of the layers, too: each operation runs once more, is compared, and timed.

    Raises:
        ValueError: A layer's forward or backward did not run, no layer saved anything that can travel, or some layers
            are offloaded already.
        torch.OutOfMemoryError: The model does not fit, and ``regions`` was not asked for.

    Note:
        A layer's backward begins when the gradient of one of its outputs is complete, and ends when that
        of its first input is. Where no input needs one, it ends with that of its last parameter, or with the
        whole backward if its weights are streamed. A step may run several microbatches; the profile is that
        of one. On an accelerator, the allocator is asked to forget earlier peaks.
    """
    check_int("steps", steps, least=1)
    check_callable("step", step)
    modules = check_layers(layers, MeasuredLayer, "measured", "cannot be measured")
    _check_not_offloaded(modules)
    min_bytes = parse_bytes(min_bytes, "min_bytes")
    backend = get_backend(device)
    begin_s = time.perf_counter()
    with progress_bar("profiling", steps + 2 + (steps + 1) * regions, " steps") as advance:

        def counted() -> None:
            step()
            advance(1)

        try:
            found = _measure(modules, counted, min_bytes, backend, steps, regions=regions)
        except torch.OutOfMemoryError:
            if not regions:
                raise
            _logger.info("The model does not fit: it is measured with everything recomputed, and inputs that travel.")
            found = None
        if found is None:  # not where the error is held, whose frames hold tensors
            found = measure_frugally(modules, counted, min_bytes=min_bytes, device=backend.device, steps=steps)
    amounts = len(modules), format_s(time.perf_counter() - begin_s), format_bytes(found.saved_bytes)
    _logger.info("profiled %d layers in %s; they save %s", *amounts)
    return found


def _measure(
    modules: list[torch.nn.Module],
    step: Callable[[], object],
    min_bytes: int,
    backend: Backend,
    steps: int,
    *,
    regions: bool,
) -> Profile:
    """A profile of layers as they are."""
    with LayerTimes(modules, backend, min_bytes) as times:
        times.counts = True
        with torch.autograd.graph.saved_tensors_hooks(times.pack, lambda tensor: tensor), selective.sees(times):
            step()
        times.counts = False
        times.start(reads_memory=backend.device.type != "cpu")
        step()  # without hooks, under which some tensors live longer
        times.start()
        marks = [backend.mark()]
        for _ in range(steps):
            step()
            marks.append(backend.mark())
    profiles = tuple(layer.profile() for layer in times.layers)
    if not any(profile.saved_bytes for profile in profiles):
        raise ValueError(
            f"no layer saved at least min_bytes = {min_bytes} bytes at once on {backend.device}; lower min_bytes, or "
            "profile the layers before they are offloaded."
        )
    loss_s = times.loss_s()
    known_s = sum(profile.forward_s + profile.backward_s for profile in profiles) + loss_s
    other_s = rest_s(backend, marks, times.rounds, known_s)
    profile = with_workspace(Profile(profiles, loss_s, other_s), times.peaks())
    if not regions:
        return profile
    found = measure_regions(modules, step, min_bytes=min_bytes, device=backend.device, steps=steps)
    return replace(profile, layers=with_regions(profile.layers, found))


def _check_not_offloaded(layers: Iterable[torch.nn.Module]) -> None:
    for number, layer in enumerate(layers):
        if any(listener.turn is Turn.ACTIVATIONS for listener in listeners_on(layer, LayerListener)):
            raise ValueError(
                f"layers must not be offloaded while they are profiled, but layer {number} is, and saves less than it "
                "would; call remove() on its handle first."
            )
