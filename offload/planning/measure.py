"""What this machine and this model do: the link's bandwidth and the layers' costs, measured.

The planner and the simulator work on the plain data that comes out of here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from offload.activations.context import DEFAULT_MIN_BYTES
from offload.activations.what_moves import Rules, travellers
from offload.base.autograd import before_backward, tensors_in
from offload.base.checks import check_int, parse_bytes, parse_min_bytes
from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn, compute_device
from offload.base.layers import check_layers
from offload.device.backend import Backend, Event, Stream
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
    modules = check_layers(layers, _MeasuredLayer, "measured", "cannot be measured")
    recorder = _Recorder(len(modules), resolve_device(device), parse_min_bytes(min_bytes))
    listeners = [_MeasuredLayer(recorder, number, module) for number, module in enumerate(modules)]
    with recorder.hooks, Attachment(modules, listeners):
        step()
        with recorder.counting():
            step()
        recorder.passes.clear()
        marks = [recorder.backend.mark()]
        for _ in range(steps):
            step()
            marks.append(recorder.backend.mark())
    return recorder.profile(marks)


@dataclass
class _Pass:
    """One microbatch's pass through one layer, with the marks at its four ends."""

    layer: int
    ends_with_input: bool
    forward_start: Any = None
    forward_end: Any = None
    backward_start: Any = None
    backward_end: Any = None


class _Recorder:
    """What the layers have told, and what they have saved."""

    def __init__(self, num_layers: int, device: torch.device, min_bytes: int) -> None:
        self.passes: list[_Pass] = []
        self.backend = get_backend(device)
        self.hooks = ExitStack()
        """Takes the hooks on inputs and parameters off."""
        self._device = device
        self._rules = Rules(device, min_bytes)
        self.running: int | None = None
        """The layer whose forward runs now."""
        self._counting = False
        self._counted: set[int] = set()
        self._sets: list[dict[int, int]] = [{} for _ in range(num_layers)]
        """Per layer the bytes of each storage that it saves, by the storage's address, in order."""
        self._start_bytes = 0
        self._peak_bytes = [0] * num_layers
        """Per layer the most device memory while it ran, above that at the step's start."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what each layer saves, and on an accelerator what it needs beside that."""
        self._counting = True
        if self._reads_memory:
            self._start_bytes = torch.accelerator.memory_allocated(self._device)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield
        self._counting = False

    def profile(self, step_marks: list[Event]) -> Profile:
        """What was recorded, as a profile."""
        layers = [self._layer_profile(layer) for layer in range(len(self._sets))]
        if not any(layer.saved_bytes for layer in layers):
            raise ValueError(
                f"no layer saved at least min_bytes = {self._rules.min_bytes} bytes at once on {self._device}; "
                "lower min_bytes, or profile the layers before they are offloaded."
            )
        last = self._passes_of(len(self._sets) - 1)
        loss_s = self._median_s((one.forward_end, one.backward_start) for one in last)
        step_s = self._median_s(pairwise(step_marks))
        microbatches = len(last) / (len(step_marks) - 1)
        in_layers_s = sum(layer.forward_s + layer.backward_s for layer in layers)
        return Profile(tuple(layers), loss_s, max(0.0, step_s / microbatches - in_layers_s - loss_s))

    def _layer_profile(self, layer: int) -> LayerProfile:
        passes = self._passes_of(layer)
        for what in ("forward", "backward"):
            if not passes or any(getattr(one, f"{what}_end") is None for one in passes):
                raise ValueError(
                    f"layer {layer} must run forward and backward in step(), but its {what} did not; pass "
                    "the modules that the model calls, and let step call backward()."
                )
        tensors = tuple(self._sets[layer].values())
        resident_bytes = sum(sum(tensors.values()) for tensors in self._sets[: layer + 1])
        return LayerProfile(
            self._median_s((one.forward_start, one.forward_end) for one in passes),
            self._median_s((one.backward_start, one.backward_end) for one in passes),
            sum(tensors),
            tensors,
            max(0, self._peak_bytes[layer] - resident_bytes),
        )

    @property
    def _reads_memory(self) -> bool:
        return self._counting and self._device.type != "cpu"

    def _passes_of(self, layer: int) -> list[_Pass]:
        return [one for one in self.passes if one.layer == layer]

    def _median_s(self, marks: Iterable[tuple[Event, Event]]) -> float:
        return statistics.median(self.backend.seconds(marks))

    def begin(self) -> Event:
        """The mark of something that begins, forward or backward of a layer."""
        if self._reads_memory:
            torch.accelerator.reset_peak_memory_stats(self._device)
        return self.backend.mark()

    def end(self, layer: int) -> Event:
        """The mark of its end."""
        mark = self.backend.mark()
        if self._reads_memory:
            above_bytes = torch.accelerator.max_memory_allocated(self._device) - self._start_bytes
            self._peak_bytes[layer] = max(self._peak_bytes[layer], above_bytes)
        return mark

    def end_forward(self, layer: int) -> Event:
        """The mark of the end of a layer's forward, whose activation set is complete."""
        self.running = None
        self._counted.update({layer} if self._counting else ())
        return self.end(layer)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.running is not None and self.running not in self._counted:
            self._count(tensor, self.running)
        # A result of the operation that saves it would own itself through the graph: give an alias.
        return tensor if tensor.is_leaf else tensor.detach()

    def _count(self, tensor: torch.Tensor, layer: int) -> None:
        for moving in travellers(tensor, self._rules):
            storage = moving.untyped_storage()
            for earlier in self._sets[:layer]:
                if earlier.pop(storage._cdata, None) is not None:
                    # As when it travels: with the later layer, which backward needs first, as its first tensor.
                    self._sets[layer] = {storage._cdata: storage.nbytes()} | self._sets[layer]
            self._sets[layer].setdefault(storage._cdata, storage.nbytes())


class _MeasuredLayer(LayerListener):
    """Tells the recorder when a layer's forward and backward begin and end, in training."""

    turn = Turn.MEASURING

    def __init__(self, recorder: _Recorder, number: int, module: torch.nn.Module) -> None:
        self._recorder = recorder
        self._number = number
        # A hook on a streamed parameter would make backward wait for its gradient.
        self._parameters = list(module.parameters()) if compute_device([module]) is None else []
        self._passing: _Pass | None = None

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        self._passing = None
        if call.recomputes or not torch.is_grad_enabled():
            return
        first = next((tensor for tensor in tensors_in(inputs) if tensor.requires_grad), None)
        self._passing = passing = _Pass(self._number, ends_with_input=first is not None)
        if first is not None:
            hook = first.register_hook(lambda _: self._end_backward(passing))
            self._recorder.hooks.callback(hook.remove)
        self._recorder.passes.append(passing)
        self._recorder.running = self._number
        passing.forward_start = self._recorder.begin()

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        if self._passing is not None:
            self._passing.forward_end = self._recorder.end_forward(self._number)

    def forward_returned(self, call: LayerCall, output: object) -> None:
        if self._passing is not None:
            before_backward(output, call.first_node, partial(self._begin_backward, self._passing))

    def _begin_backward(self, passing: _Pass, _: object) -> None:
        if passing.backward_start is not None:
            return  # another output had its gradient first
        passing.backward_start = self._recorder.begin()
        if passing.ends_with_input:
            return

        def one_more(_: object) -> None:
            passing.backward_end = self._recorder.end(self._number)

        hooks = [one.register_post_accumulate_grad_hook(one_more) for one in self._parameters if one.requires_grad]
        for hook in hooks:
            self._recorder.hooks.callback(hook.remove)  # of a backward that fails

        def finish() -> None:
            for hook in hooks:
                hook.remove()
            self._end_backward(passing)

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(finish)

    def _end_backward(self, passing: _Pass) -> None:
        # A leaf that is the input of several passes tells each of them of each gradient.
        if passing.backward_start is not None and passing.backward_end is None:
            passing.backward_end = self._recorder.end(self._number)
