"""Times and memory of layers while they run: a mark at both ends of each forward and backward.

Where the host takes longer to queue a layer than the device to run it, the time between the marks would be the host's.
So the device is delayed before such a layer, until the host is ahead, and the host's time is taken by its own clock.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from offload.activations.what_moves import Rules, offloaded_parts
from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn, compute_device, is_sharded
from offload.base.tensors import tensors_in
from offload.base.torch_private import address_of, before_backward, when_backward_ends
from offload.device.backend import Backend, Event
from offload.observe.memory import MemoryPeak
from offload.planning.layer_costs import Peaks
from offload.planning.profile import LayerProfile

MOST_DELAY_S = 0.02
"""How long the device is delayed at most, and before the first layer of a pass: longer than hosts need to queue one."""

AHEAD = 1.5
"""Before the others: by so many times the most that a layer of this pass has taken the host."""

NEAR = 4
"""So many layers ahead of the device, the host does not yet wait for room in CUDA's queue, of 1024 kernels."""


@dataclass
class Marks:
    """The marks of one microbatch in one layer. Each pass is reached, and starts after the delay, if there is one."""

    ends_with_input: bool  # whether backward ends once the gradient of the layer's first input is known
    forward_reached: Any = None
    forward_start: Any = None
    forward_end: Any = None
    backward_reached: Any = None
    backward_start: Any = None
    backward_end: Any = None
    host_s: dict[str, float] = field(default_factory=dict)  # of the host in each pass; 0 where that is not known


class _Queueing:
    """How far the host is ahead of the device, layer by layer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._starts = deque([backend.mark()] * NEAR, NEAR)  # where the last layers start on the device
        self._start_s = 0.0  # when the host began the last one
        self._most_s = {"forward": 0.0, "backward": 0.0}  # the most that a layer has taken
        self._near = False

    def begin(self, phase: str) -> Event:
        """Delay the device unless the host is a layer ahead; where the next layer starts."""
        self._near = self._starts[0].query()
        if self._starts[-1].query():
            self._backend.delay(min(AHEAD * self._most_s[phase] or MOST_DELAY_S, MOST_DELAY_S))
        self._starts.append(self._backend.mark())
        self._start_s = time.perf_counter()
        return self._starts[-1]

    def end(self, phase: str) -> float:
        """Seconds since that on the host; 0 if these may be more than it needs to queue the layer.

        It waits for room in a queue if it is far ahead, and for the device if the layer asks that for a value.
        """
        took_s = time.perf_counter() - self._start_s
        self._most_s[phase] = max(self._most_s[phase], took_s)
        return took_s if self._near and not self._starts[-1].query() else 0.0


class LayerTimes(Attachment):
    """Times forward and backward of layers, whatever their policies, until :meth:`remove`."""

    def __init__(self, layers: Sequence[torch.nn.Module], backend: Backend, min_bytes: int = 0) -> None:
        self.backend = backend
        self.rules = Rules(backend.device, min_bytes)  # what counts among the tensors that the layers save
        self.layers = [MeasuredLayer(self, number, module) for number, module in enumerate(layers)]
        self.hooks = ExitStack()  # takes the hooks on inputs and parameters off
        self.running: MeasuredLayer | None = None  # the layer whose first forward since :meth:`start` runs now
        self.memory: MemoryPeak | None = None  # tells what is allocated, if that is asked for
        self.between_bytes = 0  # the most between the last forward and its backward, above that at the step's start
        self.last: MeasuredLayer | None = None  # the layer whose forward began last
        self._left_bytes = 0  # what was allocated when the backward of the layer ended that has ended last
        self._behind: list[torch.Tensor] = []  # the leaves that the input of the microbatch's first layer depends on
        self._most_bytes = 0
        self.paused = False  # whether layers run that are not to be timed
        self.queueing = _Queueing(backend)
        self.forwards = 0  # in training that have begun, timed or not, since the user of this set it to 0
        super().__init__(layers, self.layers)

    def remove(self) -> None:
        super().remove()
        self.hooks.close()
        self._watch(None)

    def start(self, memory: MemoryPeak | None = None) -> None:
        """Forget what was timed so far, and the peaks if ``memory`` is asked for new ones."""
        self.paused = False
        self.queueing = _Queueing(self.backend)
        self._forget()
        if memory is not None:
            for layer in self.layers:
                layer.peaks = {"forward": 0, "backward": 0}
            self.between_bytes = self._most_bytes = 0
        self._watch(memory)

    def pause(self) -> None:
        """Time nothing until the next :meth:`start`."""
        self.paused = True
        self._forget()
        self._watch(None)

    def _forget(self) -> None:
        self.hooks.close()
        for layer in self.layers:
            layer.rounds.clear()

    def _watch(self, memory: MemoryPeak | None) -> None:
        if self.memory is not None and self.memory is not memory:
            self.memory.stop()
        self.memory = memory
        if memory is not None:
            memory.start()

    @property
    def complete(self) -> bool:
        return len(self.ran) == len(self.layers)

    @property
    def ran(self) -> list[int]:
        """The layers that were timed: a program may skip others."""
        return [number for number, layer in enumerate(self.layers) if layer.complete_rounds()]

    def seconds(self) -> list[tuple[float, float]]:
        """Of each layer that ran, the median seconds of forward and of backward."""
        return [self.layers[number].seconds() for number in self.ran]

    def host_s(self, phase: str) -> list[float]:
        """Of each layer that ran, the median seconds of the host in a pass; 0 where they are not known."""
        if self.backend.device.type == "cpu":
            return [0.0] * len(self.ran)  # compute is the host's
        rounds = [self.layers[number].complete_rounds() for number in self.ran]
        found = [[one.host_s[phase] for one in each if phase in one.host_s] for each in rounds]
        return [statistics.median(filter(None, each) if any(each) else [0.0]) for each in found]

    def loss_s(self) -> float:
        """The median of the seconds between the last layer's forwards and their backwards."""
        last = self.layers[self.ran[-1]]
        return statistics.median(
            self.backend.seconds((one.forward_end, one.backward_reached) for one in last.complete_rounds())
        )

    def time(self, step: Callable[[], object], steps: int) -> None:
        """Run steps of one or several microbatches, and time them."""
        self.start()
        self._marks = [self.backend.mark()]
        for _ in range(steps):
            step()
            self._marks.append(self.backend.mark())

    def other_s(self) -> float:
        """Seconds of a microbatch of these steps beside layers and loss."""
        steps_s = statistics.median(self.backend.seconds(pairwise(self._marks))) * (len(self._marks) - 1)
        rounds = [one for layer in self.layers for one in layer.complete_rounds()]
        delays = [(one.forward_reached, one.forward_start) for one in rounds]
        delays += [(one.backward_reached, one.backward_start) for one in rounds]
        steps_s -= sum(self.backend.seconds(delays))
        known_s = sum(map(sum, self.seconds())) + self.loss_s()
        return max(0.0, steps_s / len(self.layers[-1].rounds) - known_s)

    def between_s(self, now: Event) -> float:
        """Seconds from the end of the first layer's last backward until now: what a step does beside its layers."""
        end = next((one.backward_end for one in reversed(self.layers[self.ran[0]].rounds) if one.backward_end), None)
        return 0.0 if end is None else self.backend.seconds([(end, now)])[0]

    def peaks(self) -> Peaks:
        """The most that was allocated in each part of a step by the layers that ran; zeros where nobody can tell."""
        forward, backward = (
            [self.layers[number].peaks[phase] for number in self.ran] for phase in ("forward", "backward")
        )
        return Peaks(forward, self.between_bytes, backward)

    def most_bytes(self) -> int:
        self.mark()
        return self._most_bytes

    def before_bytes(self) -> int:
        """What is saved before the first layer until the backward that has just ended, beside that layer's input.

        Nobody can tell where the layer's own gradients or weights go after its backward.
        """
        self._behind, first = [], self.layers[0].module()
        if self.memory is None or first is None or is_sharded(first) or compute_device([first]) is not None:
            return 0
        return max(0, self._left_bytes - self.memory.other_bytes())

    def begin_layers(self, inputs: object) -> None:
        """The first layer of a microbatch begins."""
        self._behind = [] if self.memory is None else list(_leaves_behind(tensors_in(inputs)))

    def end_layer(self, gradient: torch.Tensor | None = None) -> None:
        """A layer's backward has ended, with the gradient of its input."""
        if self.memory is not None:
            new_bytes = sum(leaf.nbytes for leaf in self._behind if leaf.grad is None)  # which are there in the end
            self._left_bytes = self.memory.other_bytes() - (0 if gradient is None else gradient.nbytes) + new_bytes

    def mark(self) -> tuple[Event, int]:
        """A mark, and the most that was allocated since the last one, above what there was at the step's start."""
        most_bytes = 0
        if self.memory is not None:
            most_bytes = self.memory.most_bytes()
            self.memory.begin_part()
            self._most_bytes = max(self._most_bytes, most_bytes)
        return self.backend.mark(), most_bytes

    def start_early(self, tensor: torch.Tensor) -> None:
        """Nothing is copied."""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pack hook that counts what each layer saves."""
        layer = self.running
        if layer is not None:
            for storage in (moving.untyped_storage() for moving in offloaded_parts(tensor, self.rules)):
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
        self.module = weakref.ref(module)  # weakly, as the layer's hooks hold this
        self.rounds: list[Marks] = []  # one for each microbatch
        self.tensors: dict[int, int] = {}  # the bytes of each storage that it saves, by the storage's address, in order
        self.peaks = {"forward": 0, "backward": 0}  # the most device memory, above that at the step's start
        self._recorder = recorder
        # A hook on a streamed parameter would make backward wait for its gradient.
        self._parameters = list(module.parameters()) if compute_device([module]) is None else []
        self._running: Marks | None = None

    def seconds(self) -> tuple[float, float]:
        """The median seconds of forward and of backward."""
        seconds, rounds = self._recorder.backend.seconds, self.complete_rounds()
        return (
            statistics.median(seconds((one.forward_start, one.forward_end) for one in rounds)),
            statistics.median(seconds((one.backward_start, one.backward_end) for one in rounds)),
        )

    def check_ran(self) -> None:
        """Raise a ``ValueError`` if the layer's forward or its backward did not run."""
        for what in ("forward", "backward"):
            if not self.rounds or any(getattr(one, f"{what}_end") is None for one in self.rounds):
                raise ValueError(
                    f"layer {self.number} must run forward and backward in step(), but its {what} did not; pass "
                    "the modules that the model calls, and let step call backward()."
                )

    def profile(self) -> LayerProfile:
        """What the layer costs, if it ran."""
        self.check_ran()
        tensors = tuple(self.tensors.values())
        return LayerProfile(*self.seconds(), sum(tensors), tensors)

    def complete_rounds(self) -> list[Marks]:
        return [one for one in self.rounds if one.backward_end is not None]

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        self._running = None
        if call.recomputes or not torch.is_grad_enabled():
            return
        self._recorder.forwards += 1
        if self._recorder.forwards == 1:
            self._recorder.begin_layers(inputs)
        self._recorder.last = self
        if self._recorder.paused:
            return
        first = next((tensor for tensor in tensors_in(inputs) if tensor.requires_grad), None)
        self._running = marks = Marks(ends_with_input=first is not None)
        if first is not None:
            hook = first.register_hook(partial(self._end_backward, marks))
            self._recorder.hooks.callback(hook.remove)
        self.rounds.append(marks)
        self._recorder.running = self if len(self.rounds) == 1 else None
        marks.forward_reached, _ = self._recorder.mark()
        marks.forward_start = self._recorder.queueing.begin("forward")

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        if self._running is not None:
            self._recorder.running = None
            self._running.forward_end = self._mark("forward")
            self._running.host_s["forward"] = self._recorder.queueing.end("forward")

    def forward_returned(self, call: LayerCall, output: object) -> None:
        if self._running is not None:
            marks = self._running
            if not before_backward(tensors_in(output), call.first_node, partial(self._begin_backward, marks)):
                # It is frozen, or an identity.
                marks.backward_reached = marks.backward_start = marks.backward_end = marks.forward_end

    def _begin_backward(self, marks: Marks, _: object) -> None:
        if marks.backward_start is not None:
            return  # another output had its gradient first
        marks.backward_reached, between_bytes = self._recorder.mark()
        marks.backward_start = self._recorder.queueing.begin("backward")
        if self is self._recorder.last:
            self._recorder.between_bytes = max(self._recorder.between_bytes, between_bytes)
        if marks.ends_with_input:
            return

        def one_more(_: object) -> None:
            marks.backward_end = self._mark("backward")

        hooks = [one.register_post_accumulate_grad_hook(one_more) for one in self._parameters if one.requires_grad]
        for hook in hooks:
            self._recorder.hooks.callback(hook.remove)  # of a backward that fails

        def finish() -> None:
            for hook in hooks:
                hook.remove()
            self._end_backward(marks)
            self._recorder.end_layer()  # no backward comes after that of this layer

        when_backward_ends(finish)

    def _end_backward(self, marks: Marks, gradient: torch.Tensor | None = None) -> None:
        # A leaf that is the input of several microbatches tells each of them of each gradient.
        if marks.backward_start is not None and marks.backward_end is None:
            marks.backward_end = self._mark("backward")
            marks.host_s["backward"] = self._recorder.queueing.end("backward")
            self._recorder.end_layer(gradient)

    def _mark(self, phase: str) -> Event:
        mark, most_bytes = self._recorder.mark()
        self.peaks[phase] = max(self.peaks[phase], most_bytes)
        return mark


def _leaves_behind(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves to which backward adds a gradient on its way from these tensors."""
    waiting = [tensor.grad_fn for tensor in tensors]
    seen = set[object]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
                yield leaf
            waiting += [before for before, _ in node.next_functions]
