"""Times and memory of layers while they run: a mark at both ends of each forward and backward."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from offload.activations.what_moves import Rules, travellers
from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn, compute_device
from offload.base.tensors import tensors_in
from offload.base.torch_private import address_of, before_backward, when_backward_ends
from offload.device.backend import Backend, Event
from offload.planning.closed_form import Peaks
from offload.planning.profile import LayerProfile


@dataclass
class Pass:
    """The marks of one microbatch in one layer."""

    ends_with_input: bool
    forward_start: Any = None
    forward_end: Any = None
    backward_start: Any = None
    backward_end: Any = None


class LayerTimes(Attachment):
    """Times forward and backward of layers, whatever their policies, until :meth:`remove`.

    Args:
        layers: In call order.
        backend: Of the device on which they run.
        min_bytes: Storages below this size do not count among what the layers save.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], backend: Backend, min_bytes: int = 0) -> None:
        self.backend = backend
        self.rules = Rules(backend.device, min_bytes)
        self.layers = [MeasuredLayer(self, number, module) for number, module in enumerate(layers)]
        self.hooks = ExitStack()
        """Takes the hooks on inputs and parameters off."""
        self.running: MeasuredLayer | None = None
        """Whose forward runs now."""
        self.counts = False
        """Whether this is the step in which bytes are counted."""
        self.reads_memory = False
        """Whether this is the step in which an accelerator is asked what is allocated."""
        self.start_bytes = 0
        """What the allocator said when the step began."""
        self.between_bytes = 0
        """The most that was allocated between the last forward and its backward, above that at the step's start."""
        self._most_bytes = 0
        """The most of all that was allocated."""
        super().__init__(layers, self.layers)

    def remove(self) -> None:
        super().remove()
        self.hooks.close()

    def start(self, *, reads_memory: bool = False) -> None:
        """Forget what was timed so far; from now on, ask an accelerator what is allocated only if that is wanted."""
        for layer in self.layers:
            layer.passes.clear()
        self.reads_memory = reads_memory
        if reads_memory:
            torch.accelerator.reset_peak_memory_stats(self.backend.device)  # what was before may have needed more
            self.start_bytes = torch.accelerator.memory_allocated(self.backend.device)

    @property
    def complete(self) -> bool:
        """Whether each layer has run forward and backward."""
        return all(layer.passes and layer.passes[0].backward_end is not None for layer in self.layers)

    @property
    def rounds(self) -> int:
        """How many microbatches have come by."""
        return len(self.layers[-1].passes)

    def seconds(self) -> list[tuple[float, float]]:
        """Of each layer, the median of those of its forwards, and of its backwards."""
        return [layer.seconds() for layer in self.layers]

    def loss_s(self) -> float:
        """The median of the seconds between the last layer's forwards and their backwards."""
        return statistics.median(
            self.backend.seconds((one.forward_end, one.backward_start) for one in self.layers[-1].complete_passes())
        )

    def peaks(self) -> Peaks:
        """The most that was allocated while each layer ran, and between the passes; zeros where nobody can tell."""
        layers = self.layers
        forward, backward = [one.forward_bytes for one in layers], [one.backward_bytes for one in layers]
        return Peaks(forward, self.between_bytes, backward)

    def most_bytes(self) -> int:
        """The most of all that was allocated."""
        self.mark()
        return self._most_bytes

    def mark(self) -> tuple[Event, int]:
        """A mark, and the most that was allocated since the last one, above what there was at the step's start."""
        most_bytes = 0
        if self.reads_memory:
            most_bytes = torch.accelerator.max_memory_allocated(self.backend.device) - self.start_bytes
            torch.accelerator.reset_peak_memory_stats(self.backend.device)
            self._most_bytes = max(self._most_bytes, most_bytes)
        return self.backend.mark(), most_bytes

    def start_early(self, tensor: torch.Tensor) -> None:
        """Nothing is copied."""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The pack hook of that step."""
        layer = self.running
        if layer is not None and not layer.counted:
            for storage in (moving.untyped_storage() for moving in travellers(tensor, self.rules)):
                for earlier in self.layers[: layer.number]:
                    if earlier.tensors.pop(address_of(storage), None) is not None:
                        # As when it is offloaded: with the later layer, whose backward is first, as its first tensor.
                        layer.tensors = {address_of(storage): storage.nbytes()} | layer.tensors
                layer.tensors.setdefault(address_of(storage), storage.nbytes())
        # A result of the operation that saves it would own itself through the graph: give an alias.
        return tensor if tensor.is_leaf else tensor.detach()


class MeasuredLayer(LayerListener):
    """Times, bytes and memory of one layer in training."""

    turn = Turn.MEASURING

    def __init__(self, recorder: LayerTimes, number: int, module: torch.nn.Module) -> None:
        self.number = number
        self.passes: list[Pass] = []
        self.tensors: dict[int, int] = {}
        """The bytes of each storage that it saves, by the storage's address, in order."""
        self.counted = False
        """Whether all of them are there."""
        self.forward_bytes = self.backward_bytes = 0
        """The most device memory while it ran, above that at the step's start."""
        self._recorder = recorder
        # A hook on a streamed parameter would make backward wait for its gradient.
        self._parameters = list(module.parameters()) if compute_device([module]) is None else []
        self._passing: Pass | None = None

    def seconds(self) -> tuple[float, float]:
        """The medians of those of its forwards and backwards."""
        seconds, passes = self._recorder.backend.seconds, self.complete_passes()
        return (
            statistics.median(seconds((one.forward_start, one.forward_end) for one in passes)),
            statistics.median(seconds((one.backward_start, one.backward_end) for one in passes)),
        )

    def profile(self) -> LayerProfile:
        """What the layer costs.

        Raises:
            ValueError: Its forward or its backward did not run.
        """
        for what in ("forward", "backward"):
            if not self.passes or any(getattr(one, f"{what}_end") is None for one in self.passes):
                raise ValueError(
                    f"layer {self.number} must run forward and backward in step(), but its {what} did not; pass "
                    "the modules that the model calls, and let step call backward()."
                )
        tensors = tuple(self.tensors.values())
        return LayerProfile(*self.seconds(), sum(tensors), tensors)

    def complete_passes(self) -> list[Pass]:
        """Those whose backward has ended."""
        return [one for one in self.passes if one.backward_end is not None]

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
        passing.forward_start, _ = self._recorder.mark()

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        if self._passing is not None:
            self._recorder.running = None
            self.counted = self._recorder.counts
            self._passing.forward_end, most_bytes = self._recorder.mark()
            self.forward_bytes = max(self.forward_bytes, most_bytes)

    def forward_returned(self, call: LayerCall, output: object) -> None:
        if self._passing is not None:
            before_backward(tensors_in(output), call.first_node, partial(self._begin_backward, self._passing))

    def _begin_backward(self, passing: Pass, _: object) -> None:
        if passing.backward_start is not None:
            return  # another output had its gradient first
        passing.backward_start, between_bytes = self._recorder.mark()
        if self._recorder.reads_memory and self is self._recorder.layers[-1]:
            self._recorder.between_bytes = max(self._recorder.between_bytes, between_bytes)
        if passing.ends_with_input:
            return

        def one_more(_: object) -> None:
            self._mark_backward(passing)

        hooks = [one.register_post_accumulate_grad_hook(one_more) for one in self._parameters if one.requires_grad]
        for hook in hooks:
            self._recorder.hooks.callback(hook.remove)  # of a backward that fails

        def finish() -> None:
            for hook in hooks:
                hook.remove()
            self._end_backward(passing)

        when_backward_ends(finish)

    def _end_backward(self, passing: Pass) -> None:
        # A leaf that is the input of several passes tells each of them of each gradient.
        if passing.backward_start is not None and passing.backward_end is None:
            self._mark_backward(passing)

    def _mark_backward(self, passing: Pass) -> None:
        passing.backward_end, most_bytes = self._recorder.mark()
        self.backward_bytes = max(self.backward_bytes, most_bytes)


def rest_s(backend: Backend, marks: Sequence[Event], rounds: int, known_s: float) -> float:
    """Seconds of a microbatch beside the known ones, in steps between marks with ``rounds`` microbatches in all."""
    microbatch_s = statistics.median(backend.seconds(pairwise(marks))) * (len(marks) - 1) / rounds
    return max(0.0, microbatch_s - known_s)
