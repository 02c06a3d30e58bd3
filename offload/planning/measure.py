"""What this machine and this model do: the link's bandwidth and the layers' costs, measured.

The planner and the simulator work on the plain data that comes out of here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from offload.activations.context import DEFAULT_MIN_BYTES
from offload.activations.what_moves import Rules, travellers
from offload.base.autograd import before_backward, tensors_in
from offload.base.checks import check_int, parse_bytes, parse_min_bytes
from offload.base.layer_events import (
    Attachment,
    LayerCall,
    LayerListener,
    Turn,
    check_layers,
    compute_device,
    listeners_on,
)
from offload.device.backend import Backend, Event, Stream
from offload.device.select import get_backend
from offload.host.page_locked import page_locked
from offload.planning.link import Link
from offload.planning.measure_regions import measure_regions
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
    regions: bool = False,
) -> Profile:
    """Measure what each layer of a model costs.

    ``step`` is called ``steps + 2`` times: to warm up, to count what is saved, then to take times, of which
    the median counts. It changes parameters and gradients as it does in training. With ``regions``, it is called once
    more.

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

    Note:
        A layer's backward begins when the gradient of one of its outputs is complete, and ends when that
        of its first input is. Where no input needs one, it ends with that of its last parameter, or with the
        whole backward if its weights are streamed. A step may run several microbatches; the profile is that
        of one. On an accelerator, the allocator is asked to forget earlier peaks.
    """
    check_int("steps", steps, least=1)
    modules = check_layers(layers, _MeasuredLayer, "measured", "cannot be measured")
    _check_not_offloaded(modules)
    recorder = _Recorder(get_backend(device), parse_min_bytes(min_bytes))
    measured = recorder.layers = [_MeasuredLayer(recorder, number, module) for number, module in enumerate(modules)]
    mark, seconds = recorder.backend.mark, recorder.backend.seconds
    with recorder.hooks, Attachment(modules, measured):
        step()
        recorder.start_counting()
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
            step()
        recorder.counts = recorder.reads_memory = False
        for layer in measured:
            layer.passes.clear()
        marks = [mark()]
        for _ in range(steps):
            step()
            marks.append(mark())
    profiles = tuple(layer.profile() for layer in measured)
    if not any(profile.saved_bytes for profile in profiles):
        raise ValueError(
            f"no layer saved at least min_bytes = {recorder.rules.min_bytes} bytes at once on "
            f"{recorder.backend.device}; lower min_bytes, or profile the layers before they are offloaded."
        )
    if regions:
        costs = measure_regions(modules, step, min_bytes=min_bytes, device=recorder.backend.device)
        profiles = tuple(
            LayerProfile.from_regions(found, one.forward_s, one.backward_s, workspace_bytes=one.workspace_bytes)
            for one, found in zip(profiles, costs, strict=True)
        )
    last = measured[-1].passes
    loss_s = statistics.median(seconds((one.forward_end, one.backward_start) for one in last))
    microbatch_s = statistics.median(seconds(pairwise(marks))) * steps / len(last)
    in_layers_s = sum(profile.forward_s + profile.backward_s for profile in profiles)
    return Profile(profiles, loss_s, max(0.0, microbatch_s - in_layers_s - loss_s))


def _check_not_offloaded(layers: Iterable[torch.nn.Module]) -> None:
    for number, layer in enumerate(layers):
        if any(listener.turn is Turn.ACTIVATIONS for listener in listeners_on(layer, LayerListener)):
            raise ValueError(
                f"layers must not be offloaded while they are profiled, but layer {number} is, and saves less than it "
                "would; call remove() on its handle first."
            )


@dataclass
class _Pass:
    """One microbatch's pass through one layer, with the marks at its four ends."""

    ends_with_input: bool
    forward_start: Any = None
    forward_end: Any = None
    backward_start: Any = None
    backward_end: Any = None


class _Recorder:
    """What the measured layers share."""

    layers: list[_MeasuredLayer]

    def __init__(self, backend: Backend, min_bytes: int) -> None:
        self.backend = backend
        self.rules = Rules(backend.device, min_bytes)
        self.hooks = ExitStack()
        """Takes the hooks on inputs and parameters off."""
        self.running: _MeasuredLayer | None = None
        """Whose forward runs now."""
        self.counts = False
        """Whether this is the step in which bytes are counted."""
        self.reads_memory = False
        """Whether it is and there is an allocator to ask, which the CPU has not."""
        self.start_bytes = 0
        """What the allocator said when the step began."""

    def start_counting(self) -> None:
        """Count what each layer saves from now on, and on an accelerator what it needs beside that."""
        self.counts = True
        self.reads_memory = self.backend.device.type != "cpu"
        if self.reads_memory:
            self.start_bytes = torch.accelerator.memory_allocated(self.backend.device)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The pack hook of that step."""
        layer = self.running
        if layer is not None and not layer.counted:
            for storage in (moving.untyped_storage() for moving in travellers(tensor, self.rules)):
                for earlier in self.layers[: layer.number]:
                    if earlier.tensors.pop(storage._cdata, None) is not None:
                        # As when it travels: with the later layer, which backward needs first, as its first tensor.
                        layer.tensors = {storage._cdata: storage.nbytes()} | layer.tensors
                layer.tensors.setdefault(storage._cdata, storage.nbytes())
        # A result of the operation that saves it would own itself through the graph: give an alias.
        return tensor if tensor.is_leaf else tensor.detach()


class _MeasuredLayer(LayerListener):
    """What is found of one layer while it runs forward and backward in training."""

    turn = Turn.MEASURING

    def __init__(self, recorder: _Recorder, number: int, module: torch.nn.Module) -> None:
        self.number = number
        self.passes: list[_Pass] = []
        self.tensors: dict[int, int] = {}
        """The bytes of each storage that it saves, by the storage's address, in order."""
        self.counted = False
        """Whether all of them are there."""
        self._peak_bytes = 0
        """The most device memory while it ran, above that at the step's start."""
        self._recorder = recorder
        # A hook on a streamed parameter would make backward wait for its gradient.
        self._parameters = list(module.parameters()) if compute_device([module]) is None else []
        self._passing: _Pass | None = None

    def profile(self) -> LayerProfile:
        """What was found."""
        for what in ("forward", "backward"):
            if not self.passes or any(getattr(one, f"{what}_end") is None for one in self.passes):
                raise ValueError(
                    f"layer {self.number} must run forward and backward in step(), but its {what} did not; pass "
                    "the modules that the model calls, and let step call backward()."
                )
        seconds = self._recorder.backend.seconds
        tensors = tuple(self.tensors.values())
        resident_bytes = sum(sum(layer.tensors.values()) for layer in self._recorder.layers[: self.number + 1])
        return LayerProfile(
            statistics.median(seconds((one.forward_start, one.forward_end) for one in self.passes)),
            statistics.median(seconds((one.backward_start, one.backward_end) for one in self.passes)),
            sum(tensors),
            tensors,
            max(0, self._peak_bytes - resident_bytes),
        )

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        self._passing = None
        if call.recomputes or not torch.is_grad_enabled():
            return
        first = next((tensor for tensor in tensors_in(inputs) if tensor.requires_grad), None)
        self._passing = passing = _Pass(ends_with_input=first is not None)
        if first is not None:
            hook = first.register_hook(lambda _: self._end_backward(passing))
            self._recorder.hooks.callback(hook.remove)
        self.passes.append(passing)
        self._recorder.running = self
        passing.forward_start = self._begin()

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        if self._passing is not None:
            self._recorder.running = None
            self.counted = self._recorder.counts
            self._passing.forward_end = self._end()

    def forward_returned(self, call: LayerCall, output: object) -> None:
        if self._passing is not None:
            before_backward(output, call.first_node, partial(self._begin_backward, self._passing))

    def _begin_backward(self, passing: _Pass, _: object) -> None:
        if passing.backward_start is not None:
            return  # another output had its gradient first
        passing.backward_start = self._begin()
        if passing.ends_with_input:
            return

        def one_more(_: object) -> None:
            passing.backward_end = self._end()

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
            passing.backward_end = self._end()

    def _begin(self) -> Event:
        """The mark of something that begins, forward or backward."""
        if self._recorder.reads_memory:
            torch.accelerator.reset_peak_memory_stats(self._recorder.backend.device)
        return self._recorder.backend.mark()

    def _end(self) -> Event:
        """The mark of its end."""
        mark = self._recorder.backend.mark()
        if self._recorder.reads_memory:
            peak_bytes = torch.accelerator.max_memory_allocated(self._recorder.backend.device)
            self._peak_bytes = max(self._peak_bytes, peak_bytes - self._recorder.start_bytes)
        return mark
