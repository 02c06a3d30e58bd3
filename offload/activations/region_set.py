"""The activation set of a layer with a policy for each region: what is saved is kept, offloaded or dropped."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from offload.activations.activation_set import ActivationSet, Saved
from offload.activations.copies import Transfers
from offload.activations.handles import DroppedHandle, KeptHandle, SavedHandle
from offload.activations.what_moves import Rules, decide
from offload.base.tensors import plain_memory
from offload.base.torch_private import address_of, is_compiled, next_node, pop_hooks, without_modes
from offload.device.cuda import CaptureError
from offload.recompute.layer_inputs import LayerInputs, changed_argument, same_layout
from offload.recompute.layer_policies import InputKind, LayerPolicies
from offload.recompute.learn import Learn, ModuleNames, SavedTensor, leave_modes
from offload.recompute.policies import KEEP, RECOMPUTE
from offload.recompute.prove import memory_bytes, on_host, prove_all, prove_all_again, prove_hand_over
from offload.recompute.run_again import Frame, HandOver, Held
from offload.recompute.second_run import SecondRun
from offload.recompute.state import CLONED_BYTES, LayerState, Settings, contents_of, kept_by_hooks, states_of
from offload.recompute.way import Way, list_regions, names_of

_logger = logging.getLogger(__name__)

LACKS = "the device has no memory to compare that with handing over"
MOST_FAILURES = 3  # as often may a layer take another way; then it is recomputed as a whole, or never


class RegionSet(ActivationSet):
    """What one layer of one microbatch saved, by the policies of the layer's regions."""

    _key: InputKind = (None, ())
    _sized = False  # whether the inputs have a size that was not learned
    _proves = False  # whether the second run is compared when forward has ended
    _way: Way | None = None
    _frame: Frame | None = None
    _learn: Learn | None = None
    _number = 0  # the number of the tensor that is saved next
    _first_node = 0
    _limit = 0  # forward has gone another way if it has saved fewer tensors
    _contents: Any = None
    _aliases: WeakTensorKeyDictionary | None = None  # of leaves that are held; few forwards hold any
    _held: tuple[DroppedHandle, ...] = ()  # by number: they hold their tensors until the second run was compared

    def __init__(
        self, layer: int, transfers: Transfers, rules: Rules, known: Saved, *, stays: bool, policies: LayerPolicies
    ) -> None:
        super().__init__(layer, transfers, rules, known, stays=stays)
        self._policies = policies

    def enter(self, inputs: object = None) -> None:
        layer = self._policies.layer()
        leave_modes((Learn, HandOver))  # of a run that an interrupt has kept from leaving it
        if layer is not None and inputs is not None:
            self._begin(layer, inputs)
        if self._way is None or self._frame is not None or not (self._stays or self._way.keeps_all):
            self.in_graph = True
            super().enter(inputs)

    def _begin(self, layer: nn.Module, given: Any) -> None:
        policies, backend = self._policies, self.transfers.backend
        inputs, settings = LayerInputs(*given), Settings.now(backend.device)
        self._key = policies.kind_of(layer, inputs, settings)
        way, replay = policies.find(self._key)
        self._sized = way is not None and way.sizes != self._key[1]
        capturing = backend.capturing
        if way is not None and capturing:
            way = None if self._sized else way.in_capture(policies)
            replay = None if way is None else way.replay
        self._way = way
        self._first_node = next_node()
        if way is not None and replay is not None and not replay.dropped:
            self._follow(way, None)
            return
        if capturing and (way is None or not way.proven):
            raise CaptureError(
                f"layer {self.layer} has policies, and must run outside of a capture first, to prove what can be "
                "recomputed; warm up with two steps before the capture."
            )
        state = LayerState(layer) if way is None else way.state
        random = {} if capturing else states_of(() if way is None else way.trace.generators, (backend.device,))
        saved = () if way is None else way.saved_inputs
        tensors = enumerate(inputs.tensors)
        held = [
            (self._hold(number, tensor, saved=number in saved), tensor.requires_grad, tensor.grad_fn is not None)
            for number, tensor in tensors
        ]
        reads = () if way is None else way.reads
        frame = Frame(layer, inputs.placed, held, state, reads, settings, random, self._token)
        self._frame = frame
        if way is None or replay is None:
            self._begin_learning(layer, frame, inputs, given)
        else:
            frame.replay = replay
            frame.holds = policies.holds
            if policies.clock is not None:
                frame.timed = policies.timed
            self._proves = replay.hands_over and way.unproven_sizes > 0 if self._sized else not way.proven
            if self._proves and way.can_repeat_all:
                # What is saved is held until forward has ended, and is on the host or beside a second run then. Where
                # memory is too short for that, two second runs are compared in backward.
                nbytes = way.most_bytes(self._key[1])
                if policies.is_short(nbytes if self.transfers.spares_device(nbytes) else 2 * nbytes):
                    self._proves = False
                    self._prove_in_backward(frame, way)
            if self._proves:
                self.packing = self._hold_saved
            else:
                self._follow(way, frame)
                frame.nodes = way.nodes if way.trace.zone < 0 else way.nodes[: way.limit]
                frame.dropped = {} if self._sized else way.dropped.copy()

    def _follow(self, way: Way, frame: Frame | None) -> None:
        """Whatever is saved from now on is what was learned."""
        packing = self._pack_in_order(way, frame)
        next(packing)
        self.packing = packing.send
        self._limit = 0 if frame is None else way.limit

    def _hold(self, number: int, tensor: torch.Tensor, *, saved: bool) -> Held:
        """Hold an input, which the second run needs.

        It is offloaded with the set if autograd saves it or a layer computed it: not a mask, which all layers share.
        """
        keeps = self._stays or self._policies.source is KEEP or not (saved or tensor.grad_fn is not None)
        keeps = keeps or (self._way is not None and self._way.trace.given[number] in self._way.resident)
        offloads = not keeps and isinstance(decide(tensor, self._rules), type)
        return (self.pack(tensor) if offloads else KeptHandle(tensor, self._token)).unpack

    def leave(self, *, failed: bool) -> None:
        super().leave(failed=failed)
        frame, learn, way, held, aliases = self._frame, self._learn, self._way, self._held, self._aliases
        self._frame = self._learn = self._way = self._aliases = self.packing = None
        self._held = ()
        if learn is not None:
            leave_modes((Learn,))
        if frame is not None:
            frame.open = False
        if failed or frame is None:
            self._contents = None  # the arguments have the graph of the layers before, which holds this set
            return
        if self._number < self._limit and not frame.strange:
            self._take_another_way(frame, self._number)  # it has saved less
        originals = [one.kept.versions for one in held if one.kept is not None]
        if learn is not None:
            way = self._finish_learning(frame, learn, originals)
        elif way is not None and self._proves and self._prove(frame, way, originals):
            way.unproven_sizes -= self._sized and frame.replay.hands_over and not frame.strange
            way.proven = way.proven or not self._sized
        if not held:
            return
        # Back to what the program still holds: autograd makes what nobody else holds a gradient.
        leaves = {id(alias): tensor for tensor, alias in (aliases or {}).items()}
        originals = [leaves.get(id(one), one) for one in originals]
        for one, tensor in zip(held, originals, strict=True):
            if one.kept is not None:
                one.kept.versions = tensor
        if way is not None:
            self._settle(frame, way, held, originals)

    def _pack_in_order(self, way: Way, frame: Frame | None) -> Generator[SavedHandle | None, torch.Tensor, None]:
        """Pack what a learned layer saves; the pack hook is ``send``: a layer saves many, and a method costs more."""
        known, first, token = self._known, self._first_node, self._token
        blind, sized, stays = frame is None or frame.blind, self._sized, self._stays
        # Autograd holds the pack hook as long as anything that it has packed: nothing may be left in a variable here.
        made: list[SavedHandle] = []
        try:
            tensor = yield None
            for number, (node, shape, stride, dtype, policy) in enumerate(way.expected[: way.limit]):
                now = next_node()
                if known.operation and now != known.node:
                    self._end_operation()
                if (
                    (now - first != node and not blind)
                    or (tensor.shape != shape and not sized)
                    or tensor.dtype is not dtype
                    or (stride and tensor.stride() != stride and not same_layout(tensor, shape, stride, sized))
                ):
                    break
                self._number = number + 1
                if policy is RECOMPUTE and frame is not None:
                    if sized:
                        frame.dropped[number] = tensor.shape, dtype
                    del tensor  # else it would be held until the next one is saved
                    tensor = yield DroppedHandle(frame, number)
                    continue
                handle = KeptHandle(tensor, token) if policy is KEEP or stays else self.pack(tensor)
                if stride is not None and frame is not None:
                    frame.kept[number] = handle.unpack
                made.append(handle)
                del tensor, handle
                tensor = yield made.pop()
            while True:
                if known.operation and next_node() != known.node:
                    self._end_operation()
                made.append(self._pack_unexpected(tensor, way, frame))
                del tensor
                tensor = yield made.pop()
        except KeyboardInterrupt:
            # PyTorch ends no forward after it, so hooks would be left; and what has raised here packs nothing more.
            pop_hooks(self.packing or self.pack)
            raise

    def _pack_unexpected(self, tensor: torch.Tensor, way: Way, frame: Frame | None) -> SavedHandle:
        """A tensor that is saved where the way depends on data, or that was not learned."""
        number = self._number
        self._number = number + 1
        if frame is None:
            return KeptHandle(tensor, self._token) if self._stays else self.pack(tensor)
        if not frame.strange and (number < way.limit or way.trace.zone < 0):
            self._take_another_way(frame, number)
        frame.nodes.append(frame.node(self._first_node))
        if frame.strange or way.rest is KEEP or not isinstance(decide(tensor, self._rules), type):
            return KeptHandle(tensor, self._token)
        if way.rest is RECOMPUTE:
            frame.dropped[number] = tensor.shape, tensor.dtype
            return DroppedHandle(frame, number)
        return KeptHandle(tensor, self._token) if self._stays else self.pack(tensor)

    def _take_another_way(self, frame: Frame, number: int) -> None:
        """This forward is not the one that was learned: what it saves from here on is kept, and the next is learned."""
        frame.strange = True
        frame.read(frame.state.parameters)  # when the learned way reads them says nothing of this one
        frame.nodes = frame.nodes[:number]
        frame.dropped = {one: expected for one, expected in frame.dropped.items() if one < number}
        self._policies.forget(self._key)

    # Learning.

    def _begin_learning(self, layer: nn.Module, frame: Frame, inputs: LayerInputs, arguments: Any) -> None:
        tensors = inputs.tensors
        clones: dict[int, torch.Tensor] = {}
        state = frame.state

        def before_write(tensor: torch.Tensor) -> None:
            if tensor.untyped_storage().nbytes() <= CLONED_BYTES:
                clones[address_of(tensor.untyped_storage())] = tensor.detach().clone()

        known = [*tensors, *layer.parameters(), *state.tensors()]
        learn = Learn(ModuleNames(layer), known, before_write=before_write)
        given = [learn.number_of(one, 0) if plain_memory(one) is not None else None for one in tensors]
        movable = [isinstance(decide(one, self._rules), type) for one in tensors]
        learn.trace.given = given
        learn.trace.movable_inputs = {
            one for one, moves in zip(given, movable, strict=True) if one is not None and moves
        }
        self._contents = contents_of(arguments), state.contents(), clones, arguments
        self._learn = learn
        state.begin_learning()
        self.packing = self._pack_to_learn
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
            moves = plain and type(tensor) is torch.Tensor
            moves = moves and isinstance(decide(tensor, self._rules._replace(min_bytes=0)), type)
            small = moves and tensor.untyped_storage().nbytes() < self._rules.min_bytes
            time = len(trace.steps)
            trace.saved.append(
                SavedTensor(
                    learn.number_of(tensor, time) if plain else None,
                    time,
                    frame.node(self._first_node),
                    tensor.shape,
                    tensor.stride() if plain else (),
                    tensor.dtype,
                    moves and not small,
                    small,
                )
            )
            if type(tensor) in (torch.Tensor, nn.Parameter):
                return self._hold_saved(tensor)
        return self._hold_saved(tensor)  # a subclass detaches by its own dispatch

    def _hold_saved(self, tensor: torch.Tensor) -> SavedHandle:
        """The pack hook of a forward whose second run is compared with it."""
        if self._frame is None:
            return self.pack(tensor)
        self._frame.nodes.append(self._frame.node(self._first_node))
        alias = tensor
        if type(tensor) is torch.Tensor and not tensor.requires_grad:
            # Also of a leaf, which the program may hold: its memory may be on the host while the layer runs again.
            if self._aliases is None:
                self._aliases = WeakTensorKeyDictionary()
            if tensor not in self._aliases:
                self._aliases[tensor] = tensor.detach()
            alias = self._aliases[tensor]
        handle = DroppedHandle(self._frame, len(self._held), KeptHandle(alias, self._token))
        self._held += (handle,)  # few forwards do this
        return handle

    def _finish_learning(self, frame: Frame, learn: Learn, originals: list[torch.Tensor]) -> Way:
        policies, backend, trace, state = self._policies, self.transfers.backend, learn.trace, frame.state
        given, attributes, clones, inputs = self._contents
        self._contents = None
        if policies.failures[self._key] >= MOST_FAILURES:
            trace.zone = 0
        way = Way(trace, state, names_of(trace))
        way.reason = changed_argument(given, contents_of(inputs), inputs)
        if frame.asked:
            way.reason = "forward computes gradients of its own"
        if attributes != state.contents():
            way.reason = "forward changes what an attribute holds"
        changes = trace.zone >= 0
        way.reason = way.reason or state.learn(frame.before, clones, learn.has_seen, may_change=changes)
        trace.parameters_read = [learn.storage_of(one).first_seen for one in state.parameters]
        written = {number for number, storage in enumerate(trace.storages) if storage.changed_by}
        if way.reason is None and written & set(trace.given):
            way.reason = "forward writes into an input"
        if way.reason is None and len(written) > len(clones):
            way.reason = "forward writes into a large tensor from outside"
        drew = any(not torch.equal(before, generator.get_state()) for generator, before in frame.random.items())
        way.draws_unseen = drew and not any(step.draws for step in trace.steps)
        seconds, forward_s = [0.0] * len(trace.steps), 0.0
        may_recompute = policies.measures or policies.planned is not None or RECOMPUTE in policies.patterns.values()
        kept = map(learn.storage_of, kept_by_hooks(frame.layer))
        if may_recompute and way.reason is None and any(one.writers for one in kept):
            # A second run would call the hook once more, with results that lead to no graph.
            way.reason = "a hook keeps tensors that the layer computes"
        if may_recompute and way.reason is None:
            short, clock = policies.is_short(2 * memory_bytes(originals)), backend if policies.measures else None
            measured = prove_all(frame, way, learn, originals, clock, self.transfers.lend, short=short)
            seconds, forward_s = measured or (seconds, forward_s)
        if way.again and policies.failures[self._key] < MOST_FAILURES:
            policies.failures[self._key] += 1
            frame.strange = True
            return way
        if way.reason is not None:
            self._say(f"layer {self.layer} ({type(frame.layer).__name__}) is never recomputed: {way.reason}")
        if policies.measures or policies.planned is not None:
            policies.costs = list_regions(way, seconds, forward_s)
            policies.given = [learn.references[one] for one in way.sources]
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
        frame.read(state.readings(frame.before, way.reads))
        self._prove(frame, way, originals, again=True)
        return way

    def _say(self, line: str) -> None:
        if line not in self._policies.said:
            self._policies.said.add(line)
            _logger.info("%s", line)

    def _prove(self, frame: Frame, way: Way, originals: list[torch.Tensor], *, again: bool = False) -> bool:
        """Run the layer again as in backward, and compare what was dropped; where it differs, run all operations.

        Where memory is short, backward compares two second runs instead: then the result is ``False``. What was just
        learned is proven ``again`` in the next microbatch.
        """
        same: bool | None = way.saves(originals, frame.nodes, sized=self._sized)
        proves, short, saved_bytes = same, False, memory_bytes(originals)
        if same and frame.replay.hands_over:
            # Backward needs no copies of what is saved, which take seconds in ordinary memory.
            in_backward = way.can_repeat_all and not self.transfers.spares_device(saved_bytes)
            short = self._policies.is_short(2 * saved_bytes)  # a second run may need as much again
            lend = None if in_backward else self.transfers.lend
            proves = None if short and in_backward else prove_hand_over(frame, originals, lend, short=short)
            if proves is None and way.can_repeat_all:
                self._prove_in_backward(frame, way, again=again)
                return False
        self._policies.proofs += 1
        if not same or (self._sized and not proves):
            self._policies.forget(self._key)
            frame.strange = not (same and way.can_repeat_all)
            if not frame.strange:  # else all is kept, for which plans have no room
                frame.replay = way.replay.at_other_size(skips=False)
                frame.strange = not prove_all_again(frame, originals, self.transfers.lend, short=short)
        elif not proves:
            self._run_all(way, lacks=proves is None)
            frame.replay = way.replay
        return True

    def _prove_in_backward(self, frame: Frame, way: Way, *, again: bool = False) -> None:
        frame.unproven = partial(self._told_in_backward, way, way.replay, again=again)
        frame.aside = partial(self._aside, way)

    def _aside(self, way: Way, frame: Frame, found: dict[int, torch.Tensor]) -> AbstractContextManager[None]:
        """Have what was ``found`` and handed over on the host: what the layer computes, as it may read the rest."""
        held = (getattr(frame.kept.get(number), "__self__", None) for number in frame.replay.arrivals)
        here = [*found.values(), *(one.versions for one in held if isinstance(one, KeptHandle))]
        nbytes = way.run_bytes_like(memory_bytes(found.values()), found)
        return on_host(here if way.lacks else self._policies.in_the_way(here, nbytes), self.transfers.lend)

    def _told_in_backward(self, way: Way, settled: SecondRun, same: bool | None, *, again: bool = False) -> None:
        """A second run that was handed something has computed the same as one with all operations, or has not."""
        self._policies.proofs += 1
        if way.replay is not settled:  # another plan is followed by now
            return
        way.lacks += same is None
        if same is None and way.lacks < MOST_FAILURES:
            self._say(f"layer {self.layer} was recomputed with all of its operations: {LACKS}, and tries again")
            return
        if not same and not self._sized:
            self._run_all(way, lacks=same is None)
        elif not same:
            self._policies.forget(self._key)
        way.unproven_sizes -= self._sized and same is True
        way.proven = way.proven or (same is True and not (self._sized or again))

    def _run_all(self, way: Way, *, lacks: bool) -> None:
        way.run_all(self._policies)
        why = LACKS if lacks else "handing over gave other bits"
        self._say(f"layer {self.layer} is recomputed with all of its operations: {why}")

    def _settle(self, frame: Frame, way: Way, held: Sequence[DroppedHandle], originals: list[torch.Tensor]) -> None:
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
                frame.kept[number] = handle.kept.unpack
        for number in () if self._stays else way.saved_inputs:  # else the input would be held on the device as well
            kept, needs, computed = frame.held[number]
            if isinstance(getattr(kept, "__self__", None), KeptHandle):
                frame.held[number] = self._hold(number, kept(), saved=True), needs, computed
        originals.clear()
