"""Times and memory of layers while they run: a mark at both ends of each forward and backward."""

from __future__ import annotations

import statistics
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from offload.activations.what_moves import Rules, offloaded_parts
from offload.base.checks import warn_caller
from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn, compute_device, is_sharded
from offload.base.tensors import plain_address, plain_memory, tensors_in
from offload.base.torch_private import (
    address_of,
    before_backward,
    has_gradient_hooks,
    in_backward,
    in_checkpoint,
    when_backward_ends,
)
from offload.device.backend import Backend, Event
from offload.measuring.memory_left import bytes_of_gradients
from offload.measuring.queueing import PASSES, Phase, Queueing
from offload.observe.memory import MemoryPeak
from offload.optimizer.early import consumed_bytes
from offload.planning.layer_costs import Peaks


@dataclass
class Pass:
    """Forward or backward of one layer in one microbatch: reached, and started after the delay, if there is one."""

    reached: Any = None
    start: Any = None
    end: Any = None
    ends_with_input: bool = False  # whether backward ends once the gradient of the layer's first input is known
    host_s: float = 0.0  # of the host; 0 where that is not known


class LayerTimes(Attachment):
    """Times forward and backward of layers, whatever their policies, until :meth:`remove`."""

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        backend: Backend,
        min_bytes: int = 0,
        ended: Callable[[], object] = lambda: None,
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        self.backend = backend
        self.rules = Rules(backend.device, min_bytes)  # what counts among the tensors that the layers save
        self.layers = [MeasuredLayer(self, number, module) for number, module in enumerate(layers)]
        self.hooks = ExitStack()  # takes the hooks on inputs and parameters off
        self.running: MeasuredLayer | None = None  # the layer whose first forward since :meth:`start` runs now
        self.memory: MemoryPeak | None = None  # tells what is allocated, if that is asked for
        self.between_bytes = 0  # the most between the last forward and its backward, above that at the step's start
        self.last: MeasuredLayer | None = None  # the layer whose forward began last
        self._left_bytes = 0  # what was allocated when the backward of the layer ended that has ended last
        self.behind: list[torch.Tensor] = []  # the leaves that the input of the microbatch's first layer depends on
        self.early: list[torch.Tensor] = []  # those whose gradient has come from elsewhere before: tied weights
        self._before = 1, 0  # elements of the largest inputs, and what was saved before the first layer
        self._most_bytes = 0
        self.layers_bytes = 0  # the most until the backward of the layer has ended that has ended last
        self.paused = False  # whether layers run that are not to be timed
        self.queueing = Queueing(backend)
        self.forwards = 0  # in training that have begun, timed or not, since the user of this set it to 0
        self.ended = ended  # called once the backward of a microbatch is over that was said to begin
        self.lost = lost  # called as the graph of one goes that had no backward
        self._awaits_end = False  # whether no layer of the microbatch has a hook yet that calls it
        self.ends_with = len(layers)  # the layer to which the backward comes that ends a microbatch, if there is one
        self._begun = 0  # how many microbatches have begun since the end of a backward
        self._awaited = weakref.WeakSet[Callable[[], object]]()  # held by the graphs that await their backward
        self._newest: object = None  # refers to that of the newest graph, to be told when it is gone
        self._version = 0  # of a parameter, when the last microbatch began
        self.in_flight = 0  # how many others of the same step awaited their backward when it began
        self.together = 0  # the most of them since :meth:`start`; none, if no backward has ended
        self.rounds: list[tuple[int, dict[Phase, Pass]]] = []  # of all layers since then, each behind a layer's number
        self.alone = False  # whether no other microbatch has run beside the one that ended last
        self.joined = False  # whether its backward was that of others, too, whose memory it has freed
        super().__init__(layers, self.layers)

    def remove(self) -> None:
        super().remove()
        self.hooks.close()
        self._newest = None
        self.ended = self.lost = lambda: None
        if self.memory is not None:
            self.memory.stop()

    def let_go(self) -> None:
        self.ended = self.lost = lambda: None
        self.layers, self.last, self.running = [], None, None

    def start(self, memory: MemoryPeak | None = None, *, paused: bool = False) -> None:
        """Forget what was timed so far, and the peaks if ``memory`` is asked for new ones; time nothing if paused."""
        self.paused, self.together, self.queueing = paused, 0, Queueing(self.backend)
        self.hooks.close()
        for layer in self.layers:
            layer.rounds.clear()
        self.rounds.clear()
        if self.memory is not None and self.memory is not memory:
            self.memory.stop()
        self.memory = memory
        if memory is not None:
            for layer in self.layers:
                layer.peaks = dict.fromkeys(PASSES, 0)
            self.between_bytes = self._most_bytes = 0
            memory.start()

    def begin_microbatch(self) -> bool:
        """A microbatch begins, of which the end is to be told. Returns whether one before still awaits its backward."""
        if (version := next(self._versions(), 0)) != self._version:  # a step has changed the parameters since
            self._version = version
            self._awaited.clear()
        if self._awaits_end:
            self.ends_with = len(self.layers)
        self._awaits_end, self.forwards, self.in_flight = True, 0, len(self._awaited)
        self._begun = self._begun + 1 if self.in_flight else 1
        return self._begun > 1

    def _versions(self) -> Iterator[int]:
        """Of trained parameters, which an optimizer's step changes."""
        modules = (module for layer in self.layers if (module := layer.module()) is not None)
        return (one._version for module in modules for one in module.parameters() if one.requires_grad)

    def await_end(self, layer: int, call: LayerCall, output: object) -> None:
        """A layer has returned this: the microbatch ends with the backward that comes to it, unless none does."""
        if self._awaits_end and not call.recomputes and torch.is_grad_enabled():
            ends = partial(when_backward_ends, self._end_microbatch)

            def begins(_: object) -> None:
                self._awaited.discard(ends)
                ends()

            self._awaits_end = not before_backward(tensors_in(output), call.first_node, begins)
            if not self._awaits_end:
                self.ends_with = layer
                self._awaited.add(ends)
                self._newest = weakref.ref(ends, lambda _: self.lost() if self._begun else None)

    def _end_microbatch(self) -> None:
        self.alone = self._begun == 1 and not self.in_flight and not self._awaited
        self.joined = self.in_flight > len(self._awaited)
        self.together, self._begun = max(self.together, self._begun), 0
        self.ended()

    @property
    def calls(self) -> list[int]:
        """The layers in the order of their forwards, if the first ones began again before a backward."""
        again = self.rounds if self.together > 1 else ()
        return [number for number, one in again if one["backward"].end is not None]

    @property
    def ran(self) -> list[int]:
        """The layers that were timed: a program may skip others."""
        return [number for number, layer in enumerate(self.layers) if layer.complete_rounds()]

    def seconds(self) -> list[tuple[float, float]]:
        """Of each layer that ran, the median seconds of forward and of backward."""

        def median_s(number: int, phase: Phase) -> float:
            marks = ((one[phase].start, one[phase].end) for one in self.layers[number].complete_rounds())
            return statistics.median(self.backend.seconds(marks))

        return [(median_s(number, "forward"), median_s(number, "backward")) for number in self.ran]

    def host_s(self, phase: Phase) -> list[float]:
        """Of each layer that ran, the median seconds of the host in a pass; 0 where they are not known."""
        rounds = (self.layers[number].complete_rounds() for number in self.ran)
        return [statistics.median([one[phase].host_s for one in each if one[phase].host_s] or [0.0]) for each in rounds]

    def loss_s(self) -> float:
        """The median of the seconds between the last layer's forwards and their backwards."""
        rounds = self.layers[(self.calls or self.ran)[-1]].complete_rounds()[-1 if self.calls else 0 :]
        return statistics.median(self.backend.seconds((one["forward"].end, one["backward"].reached) for one in rounds))

    def time(self, step: Callable[[], object], steps: int) -> None:
        self.start()
        self._marks = [self.backend.mark()]
        for _ in range(steps):
            step()
            self._marks.append(self.backend.mark())
        for layer in self.layers:
            layer.check_ran()

    def other_s(self) -> float:
        """Seconds of a microbatch of these steps beside layers and loss."""
        steps_s = statistics.median(self.backend.seconds(pairwise(self._marks))) * (len(self._marks) - 1)
        passes = [each for layer in self.layers for one in layer.complete_rounds() for each in one.values()]
        steps_s -= sum(self.backend.seconds((each.reached, each.start) for each in passes))
        known_s = sum(map(sum, self.seconds())) + self.loss_s()
        return max(0.0, steps_s / len(self.layers[-1].rounds) - known_s)

    def between_s(self, now: Event) -> float:
        """Seconds from the end of the first layer's last backward until now: what a step does beside its layers."""
        end = self.layers[self.ran[0]].complete_rounds()[-1]["backward"].end
        return self.backend.seconds([(end, now)])[0]

    def peaks(self) -> Peaks:
        """The most that was allocated in each part of a step by the layers that ran; zeros where nobody can tell."""
        forward, backward = ([self.layers[number].peaks[phase] for number in self.ran] for phase in PASSES)
        return Peaks(forward, self.between_bytes, backward)

    def most_bytes(self) -> int:
        self.mark()
        return self._most_bytes

    def measure_before(self, elements: int) -> None:
        """Note what inputs of so many elements save before the first layer, until the backward that has just ended.

        Nobody can tell where the layer's own gradients or weights go after its backward.
        """
        memory, first = self.memory, self.layers[0].module()
        if memory is not None and first is not None and not is_sharded(first) and compute_device([first]) is None:
            early_bytes = sum(leaf.nbytes for leaf in self.early)  # in what was measured already
            found_bytes = self._left_bytes - early_bytes - self._other_bytes(memory)
            # Of small inputs it may be what is there with inputs of any size, such as weights in another dtype.
            self._before = max(self._before, (elements, max(0, found_bytes)))
        self.behind, self.early = [], []

    def before_bytes(self, elements: int) -> int:
        """What is saved before the first layer of inputs of so many elements, beside that layer's input."""
        return round(elements * self._before[1] / self._before[0])

    def find_behind(self, tensors: Iterable[torch.Tensor]) -> None:
        """Find the leaves to which backward adds a gradient on its way from these tensors."""
        self.behind, self.early = [], []
        waiting, seen = [tensor.grad_fn for tensor in tensors], set[object]()
        given: defaultdict[object, list[int]] = defaultdict(list)  # where gradients are that a leaf gets on this way

        def note(leaves: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None], _: object) -> None:
            for leaf, gradient in zip(leaves, gradients, strict=False):
                given[leaf].append(plain_address(gradient))

        def compare(leaf: torch.Tensor, total: Sequence[torch.Tensor | None]) -> None:
            # Autograd adds later gradients to the first one. A leaf's hook may give other memory for the sum.
            elsewhere = len(given[leaf]) == 1 and plain_address(total[0]) not in (0, *given[leaf])
            if elsewhere and not has_gradient_hooks(leaf, accumulated=False):
                self.early.append(leaf)

        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            # A hook that held its node would keep a graph that nobody runs.
            leaves = [getattr(before, "variable", None) for before, _ in node.next_functions]
            if any(leaf is not None for leaf in leaves):
                self.hooks.callback(node.register_hook(partial(note, leaves)).remove)
            if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
                self.behind.append(leaf)
                self.hooks.callback(node.register_prehook(partial(compare, leaf)).remove)
            waiting += [before for before, _ in node.next_functions]

    def end_layer(self, gradient: torch.Tensor | None = None) -> None:
        """A layer's backward has ended, with the gradient of its input."""
        if self.memory is not None:
            self.layers_bytes = self._most_bytes
            self._left_bytes = self._other_bytes(self.memory) - (0 if gradient is None else gradient.nbytes)

    def _other_bytes(self, memory: MemoryPeak) -> int:
        """What is allocated now beside the first layer's input and gradients, which may be consumed, or come later."""
        device = self.backend.device
        return memory.other_bytes() - consumed_bytes(device) - bytes_of_gradients(self.behind, device)

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


def count_inputs(memory: MemoryPeak, inputs: Iterable[torch.Tensor], device: torch.device) -> None:
    """Count what the step has allocated for the first layer, as an embedding's output: leaves outlive a step."""
    made = (one for one in inputs if one.device == device and not (one.is_leaf and one.requires_grad))
    storages = [storage for tensor in made if (storage := plain_memory(tensor)) is not None]
    memory.count({address_of(storage): storage for storage in storages}.values())


def warn_if_checkpointed(call: LayerCall, names: str) -> bool:
    """Say that a layer runs in a checkpoint of the program, in forward or in backward; whether it does."""
    if call.in_checkpoint or not (in_checkpoint() or (in_backward() and torch.is_grad_enabled())):
        return False
    warn_caller(
        "layers must run without torch.utils.checkpoint around them, which decides itself what is saved: "
        f"{names} cannot be measured, and memory_budget does nothing. Leave the checkpoint out: what does not fit is "
        "recomputed by the plan."
    )
    return True


class MeasuredLayer(LayerListener):
    """Times, bytes and memory of one layer in training."""

    turn = Turn.MEASURING

    def __init__(self, times: LayerTimes, number: int, module: torch.nn.Module) -> None:
        self.number = number
        self.module = weakref.ref(module)  # weakly, as the layer's hooks hold this
        self.rounds: list[dict[Phase, Pass]] = []  # one for each microbatch
        self.tensors: dict[int, int] = {}  # the bytes of each storage that it saves, by the storage's address, in order
        self.peaks: dict[Phase, int] = dict.fromkeys(PASSES, 0)  # the most memory, above that at the step's start
        self._times = times
        # A hook on a streamed parameter would make backward wait for its gradient.
        here = module.parameters() if compute_device([module]) is None else ()
        self._parameters = [*map(weakref.ref, here)]  # profiles must not keep them
        self._running: dict[Phase, Pass] | None = None

    def check_ran(self) -> None:
        """Raise a ``ValueError`` if the layer's forward or its backward did not run."""
        for what in PASSES:
            if not self.rounds or any(one[what].end is None for one in self.rounds):
                raise ValueError(
                    f"layer {self.number} must run forward and backward in step(), but its {what} did not; pass "
                    "the modules that the model calls, and let step call backward()."
                )

    def complete_rounds(self) -> list[dict[Phase, Pass]]:
        return [one for one in self.rounds if one["backward"].end is not None]

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        self._running, times = None, self._times
        if call.recomputes or not torch.is_grad_enabled():
            return
        times.forwards += 1
        times.last = self
        if times.paused:
            return
        if times.forwards == 1 and times.memory is not None:
            times.find_behind(tensors_in(inputs))
        self._running = now = {phase: Pass() for phase in PASSES}
        first = next((tensor for tensor in tensors_in(inputs) if tensor.requires_grad), None)
        if first is not None:
            now["backward"].ends_with_input = True
            hook = first.register_hook(partial(self._end_backward, now["backward"]))
            times.hooks.callback(hook.remove)
        self.rounds.append(now)
        times.rounds.append((self.number, now))
        times.running = self if len(self.rounds) == 1 else None
        now["forward"].reached, _ = times.mark()
        now["forward"].start = times.queueing.begin("forward")

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        if self._running is not None:
            self._times.running = None
            self._end(self._running["forward"], "forward")

    def forward_returned(self, call: LayerCall, output: object) -> None:
        times = self._times
        if self._running is not None:
            forward, backward = self._running["forward"], self._running["backward"]
            if not before_backward(tensors_in(output), call.first_node, partial(self._begin_backward, backward)):
                # It is frozen, or an identity.
                backward.reached = backward.start = backward.end = forward.end
        times.await_end(self.number, call, output)

    def _begin_backward(self, backward: Pass, _: object) -> None:
        times = self._times
        if backward.start is not None:
            return  # another output had its gradient first
        backward.reached, between_bytes = times.mark()
        backward.start = times.queueing.begin("backward")
        if self is times.last:
            times.between_bytes = max(times.between_bytes, between_bytes)
        if backward.ends_with_input:
            return

        def one_more(_: object) -> None:
            backward.end = self._mark("backward")

        trained = (one for found in self._parameters if (one := found()) is not None and one.requires_grad)
        hooks = [one.register_post_accumulate_grad_hook(one_more) for one in trained]
        for hook in hooks:
            times.hooks.callback(hook.remove)  # of a backward that fails

        def finish() -> None:
            for hook in hooks:
                hook.remove()
            self._end_backward(backward)
            times.end_layer()  # no backward comes after that of this layer

        when_backward_ends(finish)

    def _end_backward(self, backward: Pass, gradient: torch.Tensor | None = None) -> None:
        # A leaf that is the input of several microbatches tells each of them of each gradient.
        if backward.start is not None and backward.end is None:
            self._end(backward, "backward")
            self._times.end_layer(gradient)

    def _end(self, one: Pass, phase: Phase) -> None:
        one.end = self._mark(phase)
        one.host_s = self._times.queueing.end(phase)

    def _mark(self, phase: Phase) -> Event:
        mark, most_bytes = self._times.mark()
        self.peaks[phase] = max(self.peaks[phase], most_bytes)
        return mark
