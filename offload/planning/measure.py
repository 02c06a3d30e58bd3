"""What this machine and this model do: the link's bandwidth and the layers' costs, measured.

The planner and the simulator work on the plain data that comes out of here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from offload.activations.context import DEFAULT_MIN_BYTES
from offload.activations.what_moves import Rules, travellers
from offload.base.autograd import in_backward, tensors_in
from offload.base.checks import check_int, parse_bytes, parse_min_bytes
from offload.device.backend import Backend, Event, Stream
from offload.device.clock import Clock
from offload.device.select import get_backend, resolve_device
from offload.host.page_locked import page_locked
from offload.planning.link import Link
from offload.planning.profile import LayerProfile, Profile

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
) -> Profile:
    """Measure what each layer of a model costs.

    ``step`` is called ``steps + 2`` times: to warm up, to count what is saved, then to take times, of which
    the median counts. It changes parameters and gradients as it does in training.

    Args:
        layers: The modules to be offloaded, in call order. Nothing must offload them yet.
        step: Runs forward and backward of at least one microbatch.
        min_bytes: Storages below this size do not travel and are not counted; bytes, or a text such as
            ``"1MiB"``.
        device: Where the layers run; ``None`` is the current accelerator, and the CPU where there is none.
        steps: How many steps are timed.

    Raises:
        ValueError: A layer's forward or backward did not run, or no layer saved anything that can travel.

    Note:
        A layer's backward begins when the gradient of one of its outputs is complete, and ends when that
        of its first input is. Where no input needs one, it ends with that of its last parameter, or with the
        whole backward if its weights are streamed. A step may run several microbatches; the profile is that
        of one. On an accelerator, the allocator is asked to forget earlier peaks.
    """
    check_int("steps", steps, least=1)
    recorder = _Recorder(list(layers), resolve_device(device), parse_min_bytes(min_bytes))
    if not recorder.layers:
        raise ValueError("layers must hold at least one module, got none")
    with recorder.attached():
        step()
        with recorder.counting():
            step()
        recorder.calls.clear()
        marks = [recorder.clock.mark()]
        for _ in range(steps):
            step()
            marks.append(recorder.clock.mark())
    return recorder.profile(marks)


@dataclass
class _Call:
    """One microbatch's pass through one layer, with the marks at its four ends."""

    layer: int
    forward_start: Any = None
    forward_end: Any = None
    backward_start: Any = None
    backward_end: Any = None
    input_needs_grad: bool = False


class _Recorder:
    """Hooks on the layers, and what they have seen."""

    def __init__(self, layers: list[torch.nn.Module], device: torch.device, min_bytes: int) -> None:
        self.layers = layers
        self.calls: list[_Call] = []
        self.clock = Clock(device)
        self._device = device
        self._rules = Rules(device, min_bytes)
        self._open: list[_Call] = []
        """Calls whose forward runs now."""
        self._ended_by_parameters: dict[int, _Call] = {}
        """Per layer the call whose backward runs, if its input needs no gradient."""
        self._counting = False
        self._counted: set[int] = set()
        self._sets: list[dict[int, int]] = [{} for _ in layers]
        """Per layer the bytes of each storage that it saves, by the storage's address, in order."""
        self._start_bytes = 0
        self._peak_bytes = [0] * len(layers)
        """Per layer the most device memory while it ran, above that at the step's start."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Record each layer's calls."""
        with ExitStack() as hooks:
            self._hooks = hooks
            for layer, module in enumerate(self.layers):
                begins, accumulated = self._forward_begins(layer), self._accumulated(layer)
                for handle in (
                    module.register_forward_pre_hook(begins, with_kwargs=True, prepend=True),
                    module.register_forward_hook(self._forward_ends),
                    *(
                        parameter.register_post_accumulate_grad_hook(accumulated)
                        for parameter in module.parameters()
                        if parameter.requires_grad
                    ),
                ):
                    hooks.callback(handle.remove)
            yield

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what each layer saves, and on an accelerator what it needs beside that."""
        self._counting = True
        if self._device.type != "cpu":
            self._start_bytes = torch.accelerator.memory_allocated(self._device)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield
        self._counting = False

    def profile(self, step_marks: list[Event]) -> Profile:
        """What was recorded, as a profile."""
        layers = [self._layer_profile(layer) for layer in range(len(self.layers))]
        if not any(layer.saved_bytes for layer in layers):
            raise ValueError(
                f"no layer saved at least min_bytes = {self._rules.min_bytes} bytes at once on {self._device}; "
                "lower min_bytes, or profile the layers before they are offloaded."
            )
        last = self._calls_of(len(self.layers) - 1)
        loss_s = self._median_s((call.forward_end, call.backward_start) for call in last)
        step_s = self._median_s(pairwise(step_marks))
        microbatches = len(last) / (len(step_marks) - 1)
        in_layers_s = sum(layer.forward_s + layer.backward_s for layer in layers)
        return Profile(tuple(layers), loss_s, max(0.0, step_s / microbatches - in_layers_s - loss_s))

    def _layer_profile(self, layer: int) -> LayerProfile:
        calls = self._calls_of(layer)
        for what in ("forward", "backward"):
            if not calls or any(getattr(call, f"{what}_end") is None for call in calls):
                raise ValueError(
                    f"layer {layer} must run forward and backward in step(), but its {what} did not; pass "
                    "the modules that the model calls, and let step call backward()."
                )
        tensors = tuple(self._sets[layer].values())
        resident_bytes = sum(sum(tensors.values()) for tensors in self._sets[: layer + 1])
        return LayerProfile(
            self._median_s((call.forward_start, call.forward_end) for call in calls),
            self._median_s((call.backward_start, call.backward_end) for call in calls),
            sum(tensors),
            tensors,
            max(0, self._peak_bytes[layer] - resident_bytes),
        )

    def _calls_of(self, layer: int) -> list[_Call]:
        return [call for call in self.calls if call.layer == layer]

    def _median_s(self, marks: Iterable[tuple[Event, Event]]) -> float:
        return statistics.median(self.clock.seconds(marks))

    def _forward_begins(self, layer: int) -> Callable[..., None]:
        def hook(_: torch.nn.Module, args: object, kwargs: object) -> None:
            if not _is_training_pass():
                return
            call = _Call(layer)
            self.calls.append(call)
            self._open.append(call)
            self._watch_input(call, (args, kwargs))
            self._forget_peak()
            call.forward_start = self.clock.mark()

        return hook

    def _forward_ends(self, _module: torch.nn.Module, _args: object, output: object) -> None:
        if not _is_training_pass():
            return
        call = self._open.pop()
        call.forward_end = self.clock.mark()
        self._read_peak(call.layer)
        self._counted.update({call.layer} if self._counting else ())
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: self._backward_begins(call))

    def _backward_begins(self, call: _Call) -> None:
        if call.backward_start is None:
            self._forget_peak()
            call.backward_start = self.clock.mark()
            if not call.input_needs_grad:
                self._ended_by_parameters[call.layer] = call
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(lambda: self._ends_at_last(call))

    def _ends_at_last(self, call: _Call) -> None:
        if call.backward_end is None:
            self._backward_ends(call)

    def _backward_ends(self, call: _Call) -> None:
        call.backward_end = self.clock.mark()
        self._read_peak(call.layer)

    def _watch_input(self, call: _Call, inputs: object) -> None:
        def complete(_: object) -> None:
            self._ends_at_last(call)

        tensor = next((tensor for tensor in tensors_in(inputs) if tensor.requires_grad), None)
        call.input_needs_grad = tensor is not None
        if tensor is not None and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(complete)
        elif tensor is not None:
            self._hooks.callback(tensor.register_hook(complete).remove)

    def _accumulated(self, layer: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            call = self._ended_by_parameters.get(layer)
            if call is not None:
                self._backward_ends(call)

        return hook

    def _forget_peak(self) -> None:
        if self._counting and self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)

    def _read_peak(self, layer: int) -> None:
        if self._counting and self._device.type != "cpu":
            above_bytes = torch.accelerator.max_memory_allocated(self._device) - self._start_bytes
            self._peak_bytes[layer] = max(self._peak_bytes[layer], above_bytes)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._open and self._open[-1].layer not in self._counted:
            self._count(tensor, self._open[-1].layer)
        # A result of the operation that saves it would own itself through the graph: give an alias.
        return tensor if tensor.is_leaf else tensor.detach()

    def _count(self, tensor: torch.Tensor, layer: int) -> None:
        for moving, _ in travellers(tensor, self._rules):
            storage = moving.untyped_storage()
            for earlier in self._sets[:layer]:
                if earlier.pop(storage._cdata, None) is not None:
                    # As when it travels: with the later layer, which backward needs first, as its first tensor.
                    self._sets[layer] = {storage._cdata: storage.nbytes()} | self._sets[layer]
            self._sets[layer].setdefault(storage._cdata, storage.nbytes())


def _is_training_pass() -> bool:
    """Whether a layer's forward counts: not in evaluation, and not when backward recomputes it."""
    return torch.is_grad_enabled() and not in_backward()
