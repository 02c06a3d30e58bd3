"""What each saved tensor costs: the host's time for it, and the bandwidth that copies of its size reach."""

from __future__ import annotations

import operator
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import offload
from offload.device.select import get_backend
from offload.host.buffers import HostBuffer
from offload.host.pool import get_host_pool
from offload.planning.link import Link

LAYERS = 3
SMALL_ELEMENTS, SMALL_OPERATIONS = 256, 400
"""Tensors that stay, and how many operations of one layer save one each."""
LARGE_ELEMENTS, LARGE_OPERATIONS = 1 << 20, 100
"""Tensors that travel."""

SIZES = tuple(1 << power for power in range(16, 27))
"""Bytes of one tensor: 64 KiB to 64 MiB."""
RUN_BYTES = 1 << 30
"""A bandwidth is that of as many tensors as this is, but at most ``MOST``."""
MOST = 4096
TENSORS_PER_OPERATION = 4


Layer = Callable[[torch.Tensor], torch.Tensor]
Step = Callable[[list[Layer], torch.Tensor], torch.Tensor]


class Variant(NamedTuple):
    """One way to run three layers of which one saves tensors.

    Attributes:
        step: Runs them.
        place: The layer that saves.
        elements: Of each saved tensor, float32.
        operations: How many save one each.
    """

    step: Step
    place: int = 0
    elements: int = SMALL_ELEMENTS
    operations: int = SMALL_OPERATIONS

    def layers(self) -> list[Layer]:
        """The layers: one of operations so small that the host's work is all there is, and two that save nothing."""

        def many(x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.operations):
                x = torch.sin(x)
            return x

        return [many if number == self.place else torch.neg for number in range(LAYERS)]


def host_cost(device: torch.device, *, large_elements: int = LARGE_ELEMENTS, repeats: int = 30) -> dict[str, Any]:
    """Host seconds per saved tensor, pack, unpack and all else included, by where it is and whether it travels.

    Steps take turns: without anything, under hooks that do nothing or only what any hooks have to, which is the least
    that PyTorch asks for, and in contexts. A step's time is the host's, until backward has returned; what it takes
    longer than the same operations without anything is divided by the number of tensors. The median of the repeats
    counts.
    """
    large = {"elements": large_elements, "operations": LARGE_OPERATIONS}
    variants = {
        "operation": Variant(_plain),
        "hooks": Variant(_under(lambda tensor: tensor, lambda tensor: tensor)),
        "alias": Variant(_under(_Alias, operator.methodcaller("unpack"))),
        "stays_later": Variant(_offloaded(device, 1), place=LAYERS - 1),
        "stays": Variant(_offloaded(device, 1 << 40)),
        "large_operation": Variant(_plain, **large),
        "bare_calls": Variant(_under(*_bare_calls(device)), **large),
        "alone": Variant(_offloaded(device, 1), **large),
    }
    found: dict[str, list[float]] = {name: [] for name in variants}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a whole round")  # some contexts are to move nothing
        for repeat in range(repeats + 2):
            plain_s = 0.0
            for name, variant in variants.items():
                x = torch.randn(variant.elements, device=device, requires_grad=True)
                model = variant.layers()
                variant.step(model, x).backward()  # what ran before leaves the processor's caches cold
                _wait(device)
                begin = time.perf_counter()
                variant.step(model, x).backward()
                step_s = time.perf_counter() - begin
                _wait(device)
                plain = variant.step is _plain
                if repeat >= 2:
                    found[name].append((step_s - (0.0 if plain else plain_s)) / variant.operations)
                if plain:
                    plain_s = step_s
    medians = {f"{name}_s": statistics.median(costs) for name, costs in found.items()}
    spreads = {f"{name}_spread_s": max(costs) - min(costs) for name, costs in found.items()}
    return {**medians, **spreads, "repeats": repeats}


def _plain(layers: list[Layer], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x.sum()


class _Alias:
    """The least that hooks can hold: an alias, as a result would own itself through the graph, and its version."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def unpack(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("a saved tensor was changed in place")
        return self.tensor


def _under(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Step:
    def step(layers: list[Layer], x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return _plain(layers, x)

    return step


def _bare_calls(device: torch.device) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Hooks that do nothing but call what one trip cannot do without: host memory, device memory, copies and waits.

    Nothing is freed and nothing checked: this is no way to offload, but what each way costs at least.
    """
    backend = get_backend(device)
    pool = get_host_pool(backend)
    compute, (to_host, to_device) = backend.compute_stream(), backend.copy_streams

    def pack(tensor: torch.Tensor) -> tuple[HostBuffer, torch.Tensor]:
        to_host.wait_event(compute.record_event())
        host = pool.take(tensor.nbytes)
        backend.to_host(to_host, host.pieces, tensor.untyped_storage())
        return host, tensor.detach()

    def unpack(packed: tuple[HostBuffer, torch.Tensor]) -> torch.Tensor:
        host, tensor = packed
        landing = torch.empty_like(tensor)
        backend.to_device(to_device, landing.untyped_storage(), host.pieces)
        arrived = to_device.record_event()
        pool.give(host, arrived)
        compute.wait_event(arrived)
        return landing

    return pack, unpack


def _offloaded(device: torch.device, min_bytes: int) -> Step:
    context, sync = offload.get_cpu_offload_context(True, 1, LAYERS, min_bytes=min_bytes, device=device)

    def step(layers: list[Layer], x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)
        return x.sum()

    return step


class SaveThese(torch.autograd.Function):
    """Saves the given tensors and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (grads[0], *(None for _ in ctx.saved_tensors))


def small_copies(
    device: torch.device,
    link: Link,
    *,
    sizes: tuple[int, ...] = SIZES,
    run_bytes: int = RUN_BYTES,
    repeats: int = 5,
) -> list[dict[str, Any]]:
    """Bandwidth out and back of tensors of one size after the other, each of which has a storage of its own.

    A layer's operations save the tensors, four each, and there is nothing to compute: the time is from the layer's
    begin, or backward's, until the last copy has ended, the library's own work included. Beside it stands the share of
    the link's bandwidth for large copies.
    """
    rows = []
    for nbytes in sizes:
        count = min(MOST, run_bytes // nbytes)
        times = [_there_and_back_s(device, nbytes, count) for _ in range(repeats + 1)][1:]
        out, back = (count * nbytes / statistics.median(run_s) for run_s in zip(*times, strict=True))
        rows.append(
            {
                "size_bytes": nbytes,
                "count": count,
                "out_bytes_per_s": out,
                "back_bytes_per_s": back,
                "out_of_link": out / link.d2h_bytes_per_s,
                "back_of_link": back / link.h2d_bytes_per_s,
            }
        )
    return rows


def _there_and_back_s(device: torch.device, nbytes: int, count: int) -> tuple[float, float]:
    context, sync = offload.get_cpu_offload_context(True, 1, LAYERS, min_bytes=1, device=device)
    x = torch.ones((), device=device, requires_grad=True)
    tensors = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
    _wait(device)
    begin = time.perf_counter()
    with context:
        y = x * 1
        while tensors:
            y = SaveThese.apply(y, *(tensors.pop() for _ in range(TENSORS_PER_OPERATION)))
    y = sync(y)
    _wait(device)
    out_s = time.perf_counter() - begin
    for _ in range(1, LAYERS):
        with context:
            y = y * 1
        y = sync(y)
    _wait(device)
    begin = time.perf_counter()
    y.backward()
    _wait(device)
    return out_s, time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    """Until compute and both copy streams are idle."""
    backend = get_backend(device)
    for stream in (backend.compute_stream(), *backend.copy_streams):
        stream.record_event().synchronize()
