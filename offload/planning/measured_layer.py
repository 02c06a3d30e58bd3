"""What is found of layers while they run: the marks at the four ends of each pass, and the memory between them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from offload.activations.what_moves import Rules, travellers
from offload.base.autograd import before_backward, tensors_in
from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn, compute_device
from offload.device.backend import Backend, Event
from offload.planning.profile import LayerProfile


@dataclass
class Pass:
    """One microbatch's pass through one layer, with the marks at its four ends."""

    ends_with_input: bool
    forward_start: Any = None
    forward_end: Any = None
    backward_start: Any = None
    backward_end: Any = None


class Measurement:
    """What the measured layers share."""

    layers: list[MeasuredLayer]

    def __init__(self, backend: Backend, min_bytes: int) -> None:
        self.backend = backend
        self.rules = Rules(backend.device, min_bytes)
        self.hooks = ExitStack()
        """Takes the hooks on inputs and parameters off."""
        self.running: MeasuredLayer | None = None
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

    def start_early(self, tensor: torch.Tensor) -> None:
        """Nothing is copied."""

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


class MeasuredLayer(LayerListener):
    """What is found of one layer while it runs forward and backward in training."""

    turn = Turn.MEASURING

    def __init__(self, recorder: Measurement, number: int, module: torch.nn.Module) -> None:
        self.number = number
        self.passes: list[Pass] = []
        self.tensors: dict[int, int] = {}
        """The bytes of each storage that it saves, by the storage's address, in order."""
        self.counted = False
        """Whether all of them are there."""
        self._peak_bytes = 0
        """The most device memory while it ran, above that at the step's start."""
        self._recorder = recorder
        # A hook on a streamed parameter would make backward wait for its gradient.
        self._parameters = list(module.parameters()) if compute_device([module]) is None else []
        self._passing: Pass | None = None

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
        self._passing = passing = Pass(ends_with_input=first is not None)
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

    def _begin_backward(self, passing: Pass, _: object) -> None:
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

    def _end_backward(self, passing: Pass) -> None:
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


class LayerTimes(Attachment):
    """Times forward and backward of layers, as they are run in whatever way, until :meth:`remove`."""

    def __init__(self, layers: Sequence[torch.nn.Module], backend: Backend) -> None:
        self._recorder = Measurement(backend, 0)
        self._timed = [MeasuredLayer(self._recorder, number, module) for number, module in enumerate(layers)]
        super().__init__(layers, self._timed)

    def remove(self) -> None:
        super().remove()
        self._recorder.hooks.close()

    def clear(self) -> None:
        """Forget what was timed so far."""
        for layer in self._timed:
            layer.passes.clear()

    @property
    def complete(self) -> bool:
        """Whether each layer has run forward and backward."""
        return all(layer.passes and layer.passes[0].backward_end is not None for layer in self._timed)

    def seconds(self) -> list[tuple[float, float]]:
        """Of each layer, those of its first forward and backward."""
        firsts = [layer.passes[0] for layer in self._timed]
        forward = self._recorder.backend.seconds((one.forward_start, one.forward_end) for one in firsts)
        backward = self._recorder.backend.seconds((one.backward_start, one.backward_end) for one in firsts)
        return list(zip(forward, backward, strict=True))

    def loss_s(self) -> float:
        """Seconds between the last layer's forward and its backward."""
        last = self._timed[-1].passes[0]
        return self._recorder.backend.seconds([(last.forward_end, last.backward_start)])[0]
