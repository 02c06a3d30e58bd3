"""The activation set of a layer with a policy for each region: what is saved is kept, offloaded or dropped by number.

A layer's first forward with each kind of input is learned, and the layer is run again at once: every saved tensor is
compared bit by bit. From then on, forward runs under hooks on saved tensors alone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from offload.activations.activation_set import ActivationSet
from offload.activations.handles import DroppedHandle, KeptHandle, SavedHandle
from offload.activations.what_moves import decide
from offload.base.layer_events import LayerListener, Turn, listeners_on
from offload.base.tensors import plain_memory
from offload.base.torch_private import (
    address_of,
    is_compiled,
    leave_modes,
    next_node,
    without_modes,
)
from offload.device.capture import CaptureError
from offload.recompute.layer_inputs import take_apart
from offload.recompute.layer_policies import InputKind, LayerPolicies
from offload.recompute.learn import Learn, SavedTensor
from offload.recompute.list_regions import list_regions
from offload.recompute.modules import ModuleNames
from offload.recompute.policies import KEEP, RECOMPUTE
from offload.recompute.prove import prove_all, prove_hand_over
from offload.recompute.random import states_of
from offload.recompute.run_again import Frame, HandOver, Held
from offload.recompute.state import LayerState, contents_of, in_autocast
from offload.recompute.way import Way, names_of

_logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""From so many times on, a layer that takes another way each time is recomputed as a whole or not at all."""


class RegionSet(ActivationSet):
    """What one layer of one microbatch saved, by the policies of the layer's regions.

    Args:
        args: As an :class:`ActivationSet` takes them.
        policies: What happens to the layer's regions.
        stays: Whether the set is never offloaded.
    """

    def __init__(self, *args: Any, policies: LayerPolicies, stays: bool) -> None:
        super().__init__(*args, stays=stays)
        self._policies = policies
        self._key: InputKind = (None, ())
        self._sized = False
        """Whether the inputs have a size that was not learned."""
        self._proves = False
        """Whether the second run is compared when forward has ended."""
        self._way: Way | None = None
        self._frame: Frame | None = None
        self._learn: Learn | None = None
        self._held: list[DroppedHandle] = []
        """Handles that hold their tensors until the layer has been run again and compared, by number."""
        self._originals: list[torch.Tensor] = []
        self._number = 0
        self._first_node = 0
        self._contents: Any = None

    def enter(self, inputs: object = None) -> None:
        layer = self._policies.layer
        for mode in (Learn, HandOver):  # of a run that an interrupt has kept from leaving it
            leave_modes(mode)
        if layer is not None and inputs is not None:
            self._begin(layer, inputs)
        super().enter(inputs)

    def _begin(self, layer: nn.Module, inputs: Any) -> None:
        policies, backend = self._policies, self.transfers.backend
        tensors: list[torch.Tensor] = []
        key: list[Any] = list(policies.kind_of_layer(layer))

        def take(tensor: torch.Tensor) -> int:
            for number, known in enumerate(tensors):
                if known is tensor:
                    return number
            tensors.append(tensor)
            return len(tensors) - 1

        sizes: list[int] = []
        placed = (take_apart(inputs[0], take, key, sizes), take_apart(inputs[1], take, key, sizes))
        key += [torch.is_autocast_enabled(backend.device.type), in_autocast()]
        self._key = tuple(key), tuple(sizes)
        way, replay = policies.find(self._key)
        self._sized = way is not None and way.sizes != self._key[1]
        if way is not None and backend.capturing:
            way = None if self._sized else self._captured(way)
            replay = None if way is None else way.replay
        self._way = way
        if replay is not None and not replay.run.dropped:
            self._hook = self._pack_by_number
            return
        if backend.capturing and (way is None or not way.proven):
            raise CaptureError(
                f"layer {self.layer} has policies, and must run outside of a capture first, to prove what can be "
                "recomputed; warm up with two steps before the capture."
            )
        saved = way.saved_inputs if way is not None else frozenset()
        held: list[tuple[Held, bool]] = [
            (self._hold(tensor, saved=number in saved), tensor.requires_grad) for number, tensor in enumerate(tensors)
        ]
        state = LayerState(layer, gathered=_is_gathered(layer)) if way is None else way.state
        generators = () if way is None else way.trace.generators
        random = {} if backend.capturing else states_of(generators, [backend.device])
        frame = self._frame = Frame(layer, placed, held, state, backend.device, random)
        if way is None or replay is None:
            self._begin_learning(layer, frame, inputs, tensors)
        else:
            frame.replay = replay
            frame.readings += way.constants()
            if policies.clock is not None:
                frame.timed = policies.timed
            self._proves = replay.hands_over and way.unproven_sizes > 0 if self._sized else not way.proven
            self._hook = self._pack_to_prove if self._proves else self._pack_by_number
        self._first_node = next_node()

    def _captured(self, way: Way) -> Way:
        """What a CUDA graph does, which draws other random numbers in each replay: none are drawn again."""
        if not way.draws_unseen and not any(step.draws for step in way.trace.steps):
            return way
        if way.captured is None:
            captured = way.captured = Way(way.trace, way.state, way.names)
            captured.forced, captured.hands_over = way.forced, way.hands_over
            # The capture has the host memory that its warm-up needed: what was recomputed there is kept here.
            captured.instead = KEEP
            captured.reason = "its random numbers are drawn unseen" if way.draws_unseen else way.reason
            captured.settle(self._policies, draws=False)
            captured.proven = True
        return way.captured

    def _hold(self, tensor: torch.Tensor, *, saved: bool) -> SavedHandle:
        """An input, which the second run needs: offloaded with the set if autograd saves it or a layer computed it.

        A mask is neither: all layers are given the same.
        """
        offloads = self._policies.source is not KEEP and (saved or tensor.grad_fn is not None)
        if offloads and not self._stays and isinstance(decide(tensor, self._rules), type):
            return self.pack(tensor)
        return KeptHandle(tensor, self.alive or self._new_token())

    def leave(self, *, failed: bool) -> None:
        super().leave(failed=failed)
        leave_modes(Learn)
        frame, learn, way = self._frame, self._learn, self._way
        held, originals = self._held, self._originals
        self._frame = self._learn = self._way = None
        self._held, self._originals, self._hook = [], [], None
        if frame is not None:
            frame.open = False
        if failed or frame is None:
            return
        if learn is not None:
            way = self._finish_learning(frame, learn, originals)
        elif way is not None and self._proves:
            self._prove(frame, way, originals)
            way.unproven_sizes -= self._sized and not frame.strange
            way.proven = way.proven or not self._sized
        if way is not None and held:
            self._settle(frame, way, held, originals)

    def _pack_by_number(self, tensor: torch.Tensor) -> SavedHandle:
        """The pack hook of a layer that was learned."""
        way, frame, number, now = self._way, self._frame, self._number, next_node()
        self._number = number + 1
        if way is None:
            return self.pack(tensor)
        if self._known.operation and now != self._known.node:
            self._end_operation()
        if frame is None:
            return self._pack_undropped(tensor, way, number)
        node = 0 if frame.blind else now - self._first_node
        frame.nodes.append(node)
        if frame.strange:
            return self._keep(tensor)
        if number < way.limit:
            expected_node, shape, policy = way.expected[number]
            if node != expected_node or (tensor.shape != shape and not self._sized):
                return self._take_another_way(tensor)
        elif way.trace.zone >= 0:
            policy = way.rest if isinstance(decide(tensor, self._rules), type) else KEEP
        else:
            return self._take_another_way(tensor)
        self.in_graph = True
        token = self.alive or self._new_token()
        if policy is RECOMPUTE:
            frame.dropped[number] = tensor.shape, tensor.dtype
            return DroppedHandle(frame, number, token)
        handle = KeptHandle(tensor, token) if policy is KEEP or self._stays else self.pack(tensor)
        if number in frame.replay.numbers:
            frame.kept[number] = handle
        return handle

    def _pack_undropped(self, tensor: torch.Tensor, way: Way, number: int) -> SavedHandle:
        """The same where nothing is dropped: the layer is not run again."""
        _, shape, policy = way.expected[number] if number < way.limit else (0, None, None)
        keeps = self._stays or (policy is KEEP and (tensor.shape == shape or self._sized))
        return self._keep(tensor) if keeps else self.pack(tensor)

    def _keep(self, tensor: torch.Tensor) -> SavedHandle:
        self.in_graph = True
        return KeptHandle(tensor, self.alive or self._new_token())

    def _take_another_way(self, tensor: torch.Tensor) -> SavedHandle:
        """This forward is not the one that was learned: what it saves from here on is kept, and the next is learned."""
        if self._frame is not None:
            self._frame.strange = True
        self._policies.forget(self._key)
        return self._keep(tensor)

    # Learning.

    def _begin_learning(self, layer: nn.Module, frame: Frame, inputs: Any, tensors: list[torch.Tensor]) -> None:
        clones: dict[int, torch.Tensor] = {}
        state = frame.state

        def before_write(tensor: torch.Tensor) -> None:
            if tensor.untyped_storage().nbytes() <= 1 << 20:
                clones[address_of(tensor.untyped_storage())] = tensor.detach().clone()

        backend = self.transfers.backend
        clock = backend.mark if self._policies.measures else None
        names = ModuleNames(layer)
        learn = Learn(names, [*tensors, *state.tensors()], clock=clock, before_write=before_write)
        given = [learn.number_of(one, 0) if plain_memory(one) is not None else None for one in tensors]
        movable = [isinstance(decide(one, self._rules), type) for one in tensors]
        learn.trace.given = given
        learn.trace.movable_inputs = {
            one for one, moves in zip(given, movable, strict=True) if one is not None and moves
        }
        self._contents = contents_of(inputs), state.contents(), clones, inputs
        self._learn = learn
        state.begin_learning()
        self._hook = self._pack_to_learn
        frame.learned = not is_compiled(layer)
        if frame.learned:  # what a compiled layer computes is not to be seen: it is recomputed as a whole
            learn.__enter__()

    def _pack_to_learn(self, tensor: torch.Tensor) -> SavedHandle:
        learn, frame = self._learn, self._frame
        if learn is None or frame is None:
            return self.pack(tensor)
        with without_modes():
            trace = learn.trace
            plain = plain_memory(tensor) is not None
            time = len(trace.steps)
            trace.saved.append(
                SavedTensor(
                    learn.number_of(tensor, time) if plain else None,
                    time,
                    frame.node(self._first_node),
                    tensor.shape,
                    tensor.dtype,
                    plain and type(tensor) is torch.Tensor and isinstance(decide(tensor, self._rules), type),
                )
            )
            if type(tensor) in (torch.Tensor, nn.Parameter):
                return self._hold_saved(tensor)
        return self._hold_saved(tensor)  # a subclass detaches by its own dispatch

    def _pack_to_prove(self, tensor: torch.Tensor) -> SavedHandle:
        """The pack hook of a forward whose second run is compared with it."""
        return self._hold_saved(tensor)

    def _hold_saved(self, tensor: torch.Tensor) -> SavedHandle:
        if self._frame is None:
            return self.pack(tensor)
        self._frame.nodes.append(self._frame.node(self._first_node))
        handle = DroppedHandle(self._frame, len(self._held), self.alive or self._new_token())
        handle.kept = KeptHandle(tensor, handle.token)
        self.in_graph = True
        self._held.append(handle)
        self._originals.append(tensor if tensor.is_leaf else tensor.detach())
        return handle

    def _finish_learning(self, frame: Frame, learn: Learn, originals: list[torch.Tensor]) -> Way:
        policies, backend, trace, state = self._policies, self.transfers.backend, learn.trace, frame.state
        given, attributes, clones, inputs = self._contents
        self._contents = None
        if policies.failures[self._key] >= MOST_FAILURES:
            trace.zone = 0
        way = Way(trace, state, names_of(trace))
        way.reason = _changed_argument(given, contents_of(inputs), inputs)
        if frame.asked:
            way.reason = "forward computes gradients of its own"
        if attributes != state.contents():
            way.reason = "forward changes what an attribute holds"
        way.reason = way.reason or state.learn(frame.before, clones, learn.has_seen)
        if way.reason is None and set(trace.written) & set(trace.given):
            way.reason = "forward writes into an input"
        if way.reason is None and len(trace.written) > len(clones):
            way.reason = "forward writes into a large tensor from outside"
        drew = any(not torch.equal(before, generator.get_state()) for generator, before in frame.random.items())
        way.draws_unseen = drew and not any(step.draws for step in trace.steps)
        seconds = [0.0] * len(trace.steps)
        forward_s = 0.0
        if policies.wants_proof and way.reason is None:
            marks = prove_all(frame, way, learn, originals, backend if policies.measures else None)
            if marks:
                seconds, forward_s = marks
        if way.again and policies.failures[self._key] < MOST_FAILURES:
            policies.failures[self._key] += 1
            frame.strange = True
            return way
        if way.reason is not None:
            self._say(f"layer {self.layer} ({type(frame.layer).__name__}) is never recomputed: {way.reason}")
        if policies.measures or policies.planned is not None:
            policies.costs = list_regions(way, seconds, forward_s)
            policies.follow_plan()
        way.settle(policies)
        policies.add(self._key, way)
        for name in way.names_of(way.forced):
            self._say(f"{name} comes out with other bits when it is recomputed: it is not")
        if way.impossible:
            names = ", ".join(sorted(way.names_of(way.impossible)))
            reason = "they depend on a collective, which must run once, or on a tensor that does not count its changes"
            self._say(f"layer {self.layer} does not recompute {names}: {reason}")
        frame.replay = way.replay
        frame.readings = state.readings(frame.before) + way.constants()
        self._prove(frame, way, originals)
        return way

    def _say(self, line: str) -> None:
        if line not in self._policies.said:
            self._policies.said.add(line)
            _logger.info("%s", line)

    def _prove(self, frame: Frame, way: Way, originals: list[torch.Tensor]) -> None:
        """Run the layer again as in backward, and compare what was dropped; where it differs, run all operations."""
        same = len(originals) == len(way.nodes) or way.trace.zone >= 0
        same = same and frame.nodes[: way.limit] == way.nodes[: way.limit]
        proves = same and (not frame.replay.hands_over or prove_hand_over(frame, originals))
        if not same or (self._sized and not proves):
            self._policies.forget(self._key)
            frame.strange = True
        elif not proves:
            way.hands_over = False
            way.forced |= way.differing
            if way.replay.communicates:
                way.reason = "it communicates, and handing over gave other bits"
            way.settle(self._policies)
            frame.replay = way.replay
            self._say(f"layer {self.layer} is recomputed with all of its operations: handing over gave other bits")

    def _settle(self, frame: Frame, way: Way, held: list[DroppedHandle], originals: list[torch.Tensor]) -> None:
        """Drop, keep or offload what was held until now, as the policies say."""
        for number, (handle, tensor) in enumerate(zip(held, originals, strict=True)):
            if frame.strange:
                continue
            if number < way.limit:
                policy = way.policies[number]
            else:
                policy = way.rest if isinstance(decide(tensor, self._rules), type) else KEEP
            if policy is RECOMPUTE:
                frame.dropped[number] = tensor.shape, tensor.dtype
                handle.kept = None
                continue
            if policy is not KEEP:
                handle.kept = self.pack(tensor)
            if number in frame.replay.numbers and handle.kept is not None:
                frame.kept[number] = handle.kept
        for number in way.saved_inputs:  # else the input would be held on the device as well
            kept, needs = frame.held[number]
            frame.held[number] = self._hold(kept.unpack(), saved=True), needs
        originals.clear()


def _changed_argument(before: Any, after: Any, inputs: Any) -> str | None:
    """Whether forward changes what an argument holds, as layers with a cache of keys and values do."""
    if before == after:
        return None
    names = [str(name) for name, value in inputs[1].items() if name in ("past_key_values", "past_key_value", "cache")]
    hint = "; pass use_cache=False" if names else ""
    return f"forward changes what an argument holds{f' ({names[0]})' if names else ''}{hint}"


def _is_gathered(layer: nn.Module) -> bool:
    """Whether the layer's parameters are brought for each run, by streaming or by FSDP."""
    if any(kind.__name__ == "FSDPModule" for module in layer.modules() for kind in type(module).__mro__):
        return True
    return any(listener.turn is Turn.WEIGHTS for listener in listeners_on(layer, LayerListener))
