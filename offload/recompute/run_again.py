"""Run a layer's forward again in backward, and collect the saved tensors that forward has dropped.

The second run makes the same operations under a dispatch mode, which hands over what was kept instead of computing it.
Each time, the second run is compared with what was learned and with the forward: the order of operations, how many
autograd nodes each saved tensor has before it, shapes and dtypes, and where each storage that was handed over arrives.
A second run that goes another way than the learned one is started anew, without handing over anything.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.base.layer_events import LayerEndsError, is_sharded, without_listeners
from offload.base.tensors import Geometry, geometry_of, look_into, plain_memory, same_bits, tensors_of
from offload.base.torch_private import (
    CAST,
    TorchDispatchMode,
    address_of,
    before_reads,
    compiler_of,
    compiles,
    dispatch_modes,
    in_backward,
    is_compiled,
    keeps_graph,
    next_node,
    pop_hooks,
    push_hooks,
    without_modes,
)
from offload.recompute.layer_inputs import with_tensors
from offload.recompute.learn import LayerMode, StepResult, is_counted
from offload.recompute.other_sizes import at_size
from offload.recompute.second_run import NOTHING, SecondRun
from offload.recompute.state import LayerState, Settings, drawn_again

Held = Callable[[], torch.Tensor]
"""Gives a tensor that is on the device or on the host until backward, ready for the current stream."""


class AnotherWayError(Exception):
    """The second run has gone another way than the learned one."""


class OtherRunError(RuntimeError):
    """A second run of a ``layer`` is not what forward was: ``what`` the second run does."""

    def __init__(self, layer: str, what: str) -> None:
        super().__init__(
            f"{layer} cannot be recomputed: run again in backward, it {what} than in forward, since something decides "
            "its way that is no input, attribute, setting or generator of PyTorch, such as a parameter's requires_grad"
            '. Keep or offload this layer: policies={"*": "offload"}.'
        )
        self.what = what


class NotReturnedError(RuntimeError):
    """Tensors that were moved to the host remain there, as the device has no memory for them."""


class AllThereError(Exception):
    """Every dropped tensor is there: the rest of the layer need not run."""


class Frame:
    """One forward of a layer, as far as it is needed to run the layer again. The graph's handles own it."""

    # Attributes that most forwards leave as they are cost a forward no time.
    replay: SecondRun = NOTHING
    open = True  # whether the forward still runs
    asked = False  # whether the forward itself has asked for something that it has saved
    strange = False  # whether the forward has gone another way than the learned one
    learned = False  # whether the forward ran under a dispatch mode, for which some functions choose other kernels
    holds = False
    """Whether a tensor that was recomputed is held until its node is done, and not only while the node reads it."""
    timed: Callable[[], AbstractContextManager[object]] = nullcontext  # entered around the second run, to take its time
    unproven: Callable[[bool | None], None] | None = None
    """Is told whether what is handed over gives the same bits as all operations, as long as nobody has seen that, and
    ``None`` where the device has no memory to compare both."""
    aside: Callable[[Frame, dict[int, torch.Tensor]], AbstractContextManager[None]]
    """Has what was found so, and handed over, on the host while all operations run, where memory is short."""

    def __init__(
        self,
        layer: nn.Module,
        inputs: tuple[Any, Any],  # its positional and keyword arguments, with places instead of tensors
        held: list[tuple[Held, bool, bool]],  # these tensors, whether each requires a gradient, and was computed
        state: LayerState,
        reads: Iterable[torch.Tensor],  # whose versions tell of changes: parameters, and what else is read and no state
        settings: Settings,
        random: dict[torch.Generator, torch.Tensor],  # the states of the generators that the layer may draw from
        graph: object,  # lives as long as the graph that holds the frame
    ) -> None:
        self.layer = layer
        self.inputs: tuple[Any, Any] | None = inputs
        self.held = held
        self.settings = settings
        self.compiled = compiles() if is_compiled(layer) else None
        """Whether a compiled layer runs as compiled code; ``None`` for other layers."""
        self.blind = settings.casts or self.compiled is not None
        """Whether the number of autograd nodes says nothing: a compiler makes some when it is at work."""
        self.random = random
        self.graph = graph
        self.state = state
        self.before = state.snapshot()
        self.readings: list[torch.Tensor] = []
        self.versions: list[int] = []
        self.read(state.readings(self.before, reads))
        self.nodes: list[int] = []  # how many autograd nodes the forward had made at each saved tensor
        self.dropped: dict[int, tuple[torch.Size, torch.dtype]] = {}  # what was dropped, by number
        self.kept: dict[int, Held] = {}  # what may be handed over, by number
        self.recomputed: dict[int, torch.Tensor] = {}
        self.lock = threading.RLock()

    @property
    def name(self) -> str:
        return type(self.layer).__name__

    def other(self, what: str) -> Exception:
        """The second run is not what forward was; where something is handed over, it is tried again without."""
        if self.replay.hands_over and not self.strange:
            return AnotherWayError()
        return OtherRunError(self.name, what)

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note how often each of these tensors, which a second run reads, was changed in place."""
        self.readings += tensors
        self.versions += [tensor._version for tensor in tensors]

    def node(self, first: int) -> int:
        """How many autograd nodes there are since ``first``; 0 where that says nothing."""
        return 0 if self.blind else next_node() - first

    def tensor(self, number: int) -> torch.Tensor:
        """A dropped tensor; the first one that is asked for runs the layer again."""
        with self.lock:
            if number not in self.recomputed:
                if self.inputs is None:
                    raise RuntimeError(
                        f"a tensor that {self.name} has saved was asked for again after its backward; call "
                        "backward(retain_graph=True) to go through a graph twice."
                    )
                with self.timed():
                    self.recomputed = self.run()
                if not keeps_graph():
                    self.inputs, self.held, self.kept, self.before = None, [], {}, ([], [])
            return self.recomputed.pop(number)

    def run(self) -> dict[int, torch.Tensor]:
        """Run the layer again: the dropped tensors, by number."""
        self._check_unchanged()
        if self.replay.hands_over and not self.strange:
            tell, self.unproven = self.unproven, None
            found: dict[int, torch.Tensor] = {}
            try:
                found = self._run(hand_over=True)
                if tell is not None:
                    self._run_once_more(found)
                    tell(True)
                return found
            except (AnotherWayError, RuntimeError) as error:
                if not (self.replay.sized or tell is not None or isinstance(error, AnotherWayError)):
                    raise
                found.clear()  # the device need not have memory for a third run beside it
                lacks = tell is not None and isinstance(error, torch.OutOfMemoryError | NotReturnedError)
                self.strange = True  # a result of a wrong size fails in the operation that reads it
                self.replay.wrong = self.replay.wrong or not lacks
            if tell is not None:
                tell(None if lacks else False)
        if self.replay.communicates:
            raise RuntimeError(
                f"{self.name} cannot be recomputed: run again in backward, it takes another way than in "
                "forward, and would communicate once more, which other ranks need not do. Keep or offload this layer: "
                'policies={"*": "offload"}.'
            )
        return self._run(hand_over=False)

    def _check_unchanged(self) -> None:
        """Raise as autograd does if what forward has read was changed in place; and if compiled code would not run."""
        if self.compiled is not None and self.compiled != compiles():
            raise RuntimeError(
                f"{self.name} cannot be recomputed: PyTorch runs no compiled code under a dispatch mode, as a "
                "memory meter on the CPU is one, which surrounds forward alone, or backward alone. Let the mode "
                "surround both, or neither."
            )
        now = [tensor._version for tensor in self.readings]
        for tensor, version in zip(self.readings, self.versions, strict=True) if now != self.versions else ():
            if tensor._version != version:
                own = next((name for name, one in self.layer.named_buffers() if one is tensor), None)
                what = f"buffer {own!r}" if own else "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
                shape = f" of shape {list(tensor.shape)}" if tensor.numel() else ""
                forward = " If forward itself changes it now and then, leave this layer out." if own else ""
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a {what}{shape}, which the recomputation of {self.name} reads, is at version "
                    f"{tensor._version}; expected version {version} instead. Run backward before it is changed, change "
                    f"a clone of it, or keep or offload what is computed from it.{forward}"
                )

    def _run_once_more(self, found: dict[int, torch.Tensor]) -> None:
        """Compare what was ``found`` with what all operations compute, of which nothing is held."""
        check = Comparison(self, found, hand_over=False)
        with self.aside(self, found):
            self.run_under(check, LayerMode() if self.learned else None)
        if check.differing:
            raise AnotherWayError

    def _run(self, *, hand_over: bool) -> dict[int, torch.Tensor]:
        check = SavedCheck(self, hand_over=hand_over)
        mode = LayerMode() if self.learned else None
        self.run_under(check, HandOver(self, check) if hand_over else mode)
        return check.found

    def run_under(self, check: SavedCheck, mode: TorchDispatchMode | None) -> None:
        """Run the layer as it ran in forward, under a dispatch mode; ``check`` gets what autograd saves."""
        given = [held().detach().requires_grad_(needs) for held, needs, _ in self.held]  # forward has its own graph
        with torch.enable_grad():  # autocast holds what it has cast of a leaf, and of nothing else
            given = [
                one.view_as(one) if computed else one for one, (*_, computed) in zip(given, self.held, strict=True)
            ]
        args, kwargs = with_tensors(self.inputs, given)
        backward = in_backward()
        # In forward, FSDP's hooks around the layer are at work already; in backward they know of a second run.
        call: Callable[..., Any] = self.layer
        if not backward and is_sharded(self.layer):
            compiler = compiler_of(self.layer)
            call = self.layer.forward if compiler is None else compiler(self.layer.forward)
        with (
            nullcontext() if backward else without_listeners(self.layer if self.compiled is None else None),
            torch.enable_grad(),
            self.settings.again(),
            drawn_again(self.random),
            self.state.as_in(self.before),
            mode or nullcontext(),
        ):
            try:
                try:  # an interrupt may come before the next line
                    push_hooks(check.pack, lambda tensor: tensor)
                    check.first_node = next_node()
                    call(*args, **kwargs)
                except LayerEndsError:
                    pass
                except Exception:  # the layer may handle AllThereError, and TorchScript raises another one in its place
                    if not check.all_there:
                        raise
                finally:
                    pop_hooks(check.pack)
            except BaseException:
                pop_hooks(check.pack)  # an interrupt may have come before they were off
                check.found.clear()  # as in end()
                raise
        check.end()


class SavedCheck:
    """Compares what autograd saves while a layer runs again, and collects the tensors that forward has dropped.

    The layer runs under :class:`HandOver` if ``hand_over``.
    """

    def __init__(self, frame: Frame, *, hand_over: bool) -> None:
        self.frame = frame
        self.found: dict[int, torch.Tensor] = {}
        self.first_node = 0  # the number of the first autograd node of the run
        self.storages: dict[int, int] = {}  # the addresses of what was handed over, by the number of the saved tensor
        self.unfilled: dict[int, StorageWeakRef] = {}
        """Memory that nothing may read, by address, which is no other's as long as it is referred to."""
        self.all_there = False
        self._number = 0
        self._nodes, self._blind = frame.nodes, frame.blind
        self._arrivals = frame.replay.arrivals if hand_over else {}
        self._dropped = frame.dropped
        self._missing = len(frame.dropped)
        compares = not hand_over and frame.replay.hands_over
        self._compared = frame.kept.keys() - frame.replay.unlike if compares else set()
        self._to_the_end = compares  # else the layer runs no further than to the last dropped tensor

    def pack(self, tensor: torch.Tensor) -> None:
        """As a pack hook; nothing is saved, as nobody goes back through this run."""
        number = self._number
        self._number = number + 1
        if number >= len(self._nodes):
            raise self.frame.other("saves more tensors")
        if not self._blind and next_node() - self.first_node != self._nodes[number]:
            raise self.frame.other(f"makes other operations before saved tensor {number}")
        supplier = self._arrivals.get(number)
        if supplier is not None and address_of(tensor.untyped_storage()) != self.storages.get(supplier):
            raise AnotherWayError
        expected = self._dropped.get(number)
        if expected is not None:
            if tensor.shape != expected[0] or tensor.dtype is not expected[1]:
                what = f"saves {tensor.dtype} {list(tensor.shape)} as tensor {number}, not {expected}"
                raise self.frame.other(what)
            if self.is_unfilled(tensor):
                raise AnotherWayError
            self.take(number, tensor)
            self._missing -= 1
            self.all_there = not self._missing and not self._to_the_end
            if self.all_there:
                raise AllThereError
        elif number in self._compared and not same_bits(tensor, self.frame.kept[number]()):
            raise self.frame.other(f"computes other values as saved tensor {number}")

    def is_unfilled(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in memory that a second run has skipped to fill.

        Operations may be those that were learned, in their order, and read what others have made: an attribute, or what
        Python has read of a tensor, may decide which.
        """
        memory = plain_memory(tensor) if self.unfilled else None
        return memory is not None and address_of(memory) in self.unfilled

    def take(self, number: int, tensor: torch.Tensor) -> None:
        """A dropped tensor was recomputed."""
        self.found[number] = tensor

    def end(self) -> None:
        found, self.found = self.found, {}  # they have the graph of the run, which holds the hook, and so this
        if self._missing:
            raise self.frame.other("saves fewer tensors")
        # Not in the run, where a dispatch mode would see it.
        self.found = {number: one if one.is_leaf else one.detach() for number, one in found.items()}


class Comparison(SavedCheck):
    """Finds the dropped tensors that differ from those with the same numbers among ``others``."""

    def __init__(
        self, frame: Frame, others: Sequence[torch.Tensor] | dict[int, torch.Tensor], *, hand_over: bool
    ) -> None:
        super().__init__(frame, hand_over=hand_over)
        self._to_the_end = not hand_over
        self.others = others
        self.differing: set[int] = set()

    def take(self, number: int, tensor: torch.Tensor) -> None:
        with without_modes():  # to compare is none of the layer's operations
            if not same_bits(tensor, self.others[number]):
                self.differing.add(number)


class HandOver(LayerMode):
    """Runs a layer's operations, skips those that nothing depends on, and hands over what was kept.

    Raises:
        AnotherWayError: The operations are not those that were learned, in their order.
    """

    def __init__(self, frame: Frame, check: SavedCheck) -> None:
        super().__init__()
        replay = frame.replay
        self._frame = frame
        self._check = check
        self._calls, self._steps, self._results = replay.calls, replay.steps, replay.results
        self._may_change = replay.may_change
        self._suppliers, self._sized = replay.suppliers, replay.sized
        self._time = 0
        before_reads(_before_read)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        time = self._time
        learned, call, reads = self._calls[time]
        if function is not learned or (function is CAST and not is_counted(function, args)):
            return self._run_other(function, args, kwargs or {})
        self._time = time + 1
        if call is not None:
            if reads and self._check.unfilled:
                self.check_filled(tensors_of([*args, *kwargs.values()] if kwargs else args))
            return call(*args, **kwargs) if kwargs else call(*args)
        step, outputs = self._steps[time], self._results[time]
        if outputs is None:
            numbers = [None if one.storage is None else self._suppliers.get(one.storage) for one in step.outputs]
            kept = [self._frame.kept[one]() if one in self._frame.replay.whole else None for one in numbers]
            outputs = self._results[time] = at_size(step, kept, args, kwargs or {})
            if outputs is None:
                self._frame.replay.unsized.append(time)
                raise AnotherWayError
        if step.container is None:
            return self._made(outputs[0], args)
        return step.container([self._made(output, args) for output in outputs])

    def _run_other(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation that is not in the order of the plan: it does not count, or comes where the way may change."""
        if is_counted(function, args):
            if self._time < len(self._steps) or not self._may_change:
                raise self._other_way()
            self.check_filled(tensors_of([*args, *kwargs.values()]))
        return function(*args, **kwargs)

    def _other_way(self) -> AnotherWayError:
        self._time, self._may_change = len(self._steps), False  # also if the layer catches the error
        return AnotherWayError()

    def check_filled(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are about to be read."""
        if any(map(self._check.is_unfilled, tensors)):
            raise self._other_way()

    def _made(self, output: StepResult, args: Any) -> Any:
        storage, geometry, device, argument, value = output
        if argument is not None:
            return args[argument]
        if storage is None or geometry is None:
            return value
        number = self._suppliers.get(storage)
        if number is not None:
            kept = self._frame.kept[number]()
            memory = kept.untyped_storage()
            if self._sized and math.prod(geometry[2]) * geometry[0].itemsize > memory.nbytes():
                raise AnotherWayError
            self._check.storages[number] = address_of(memory)
            return kept.detach() if geometry_of(kept) == geometry else look_into(memory, geometry)
        made = _unfilled(geometry, device)
        memory = made.untyped_storage()
        self._check.unfilled[address_of(memory)] = StorageWeakRef(memory)
        return made


def _before_read(tensor: torch.Tensor) -> None:
    """Python reads a tensor, which a second run may have skipped to fill."""
    for mode in dispatch_modes():
        if isinstance(mode, HandOver):
            mode.check_filled([tensor])


def _unfilled(geometry: Geometry, device: torch.device | None) -> torch.Tensor:
    """Memory in place of a result that no executed operation reads."""
    dtype, start, size, stride, _, _ = geometry
    if not start:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    last = sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if all(size) else 0
    return torch.empty(int(start) + last + 1, dtype=dtype, device=device).as_strided(size, stride, start)
