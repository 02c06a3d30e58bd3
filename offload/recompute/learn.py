"""Learn what a layer's forward does: its operations in order, and which storage each reads, makes and writes.

A layer is learned once for each kind of input, under a dispatch mode. Below autograd and autocast the mode sees what is
really computed, by whatever module, library or function. The mode does not see a kernel that a custom function runs:
the result of such a kernel is a storage that no operation made. Every later forward runs without the mode.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.base.tensors import Geometry, geometry_of, plain_memory, plain_version_counter, tensors_of
from offload.base.torch_private import (
    CAST,
    MODULE_CALL,
    OPERATOR,
    TorchDispatchMode,
    address_of,
    count_modes,
    counting_versions,
    dispatch_modes,
)
from offload.recompute.operations import Operation, known_operation
from offload.recompute.state import states_of

_DETACH = torch.ops.aten.detach.default
_DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

Clock = Callable[[], Any]  # marks a point of the compute stream, which can be timed later


def is_counted(function: Any, args: Any) -> bool:
    """Whether an operation counts in the order of operations.

    ``detach`` does not, since hooks on saved tensors detach; nor does the cast of a parameter, which autocast leaves
    out where another layer has cast the same parameter before.
    """
    return function is not _DETACH and not (function is CAST and isinstance(args[0], torch.nn.Parameter))


class StepResult(NamedTuple):
    """One result of an operation, as it is made without running the operation."""

    storage: int | None  # the number of the storage that it looks into; ``None`` if it is no plain tensor
    geometry: Geometry | None
    device: torch.device | None
    argument: int | None = None  # the position of the written argument that it is
    value: Any = None  # what it is if it is no tensor


@dataclass(slots=True)
class Step:
    """One operation of a layer's forward."""

    operation: Operation
    reads: tuple[int, ...]  # storages that it reads
    makes: tuple[int, ...]  # storages that it makes
    writes: tuple[int, ...]  # storages, its own and others, that it writes into
    outputs: tuple[StepResult, ...]
    container: type | None  # the type of the sequence of its results; ``None`` for one result alone
    module: str
    draws: bool = False  # whether it has drawn, or says that it draws, random numbers
    only_views: bool = False  # whether it makes no memory and writes none
    barrier: bool = False  # whether something here was not seen, so that all operations up to here have to run
    final: bool = False
    """Whether it must not run twice: a collective, or one that reads memory that does not tell its changes."""
    begin: Any = None
    end: Any = None


@dataclass(slots=True)
class Storage:
    """One storage that a layer's forward has made or read."""

    nbytes: int
    writers: list[int] = field(default_factory=list)
    """The operations that write it, the one that makes it first; empty for what the layer was given."""
    changed_by: list[int] = field(default_factory=list)
    """The operations that write into it where it was there before the layer ran, as a buffer is."""
    first_seen: float = 0  # the operation at which it was seen for the first time
    unseen: bool = False  # whether it was made during forward by what the mode does not see
    unfilled_bytes: int = 0  # how much of it was only allocated so far


@dataclass(slots=True)
class SavedTensor:
    """One tensor that autograd has saved, in the order of saving."""

    storage: int | None  # its storage; ``None`` if it is no plain tensor
    time: int  # how many operations had run
    node: int  # how many autograd nodes the forward had made
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    movable: bool  # whether it may be offloaded, and so be dropped: it is large enough, and no parameter
    small: bool = False  # whether only its size forbids that: it may be dropped if all else is


class Trace:
    """What is learned of one forward of a layer."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.storages: list[Storage] = []
        self.saved: list[SavedTensor] = []
        self.generators: set[torch.Generator] = set()  # generators that operations were given
        self.given: list[int | None] = []
        """The storages of the layer's inputs; ``None`` for an input that is no plain tensor."""
        self.movable_inputs: set[int] = set()  # of :attr:`given`, those that may be offloaded
        self.constants: dict[int, torch.Tensor] = {}
        """Counters of changes of tensors that are read and are no input, attribute or parameter, by storage."""
        self.parameters_read: list[float] = []  # the first operation that reads each parameter; infinity if none does
        self.zone = -1  # the first operation whose result has a size or a way that depends on data; -1 if there is none

    @property
    def dynamic_from(self) -> int:
        """The first saved tensor after :attr:`zone`; the number of saved tensors if there is none."""
        if self.zone < 0:
            return len(self.saved)
        return next((n for n, saved in enumerate(self.saved) if saved.time > self.zone), len(self.saved))


class ModuleNames:
    """The qualified names of a layer's submodules.

    Which of them computes is read from the interpreter's stack. Hooks would say it as well, but make the compiler
    compile what is in the layer in another way, with other bits.
    """

    def __init__(self, layer: nn.Module | None) -> None:
        self._names = {} if layer is None else {id(module): name for name, module in layer.named_modules()}

    def current(self) -> str:
        """That of the innermost submodule that computes; empty for the layer itself."""
        frame = sys._getframe(1) if self._names else None
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                name: str | None = self._names.get(id(frame.f_locals["self"]))
                if name is not None:
                    return name
            frame = frame.f_back
        return ""


class LayerMode(TorchDispatchMode):
    """Sees every operation of a layer, and runs it. Compiled code inside of the layer remains compiled."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **kwargs or {})


def leave_modes(kinds: tuple[type[TorchDispatchMode], ...]) -> None:
    """Leave dispatch modes of these kinds, and those inside of them, which only an interrupt can have left there."""
    while count_modes() and any(isinstance(mode, kinds) for mode in dispatch_modes()):
        dispatch_modes()[-1].__exit__(None, None, None)


class Learn(LayerMode):
    """Notes the operations of one forward in a :class:`Trace`, while entered."""

    def __init__(
        self,
        names: ModuleNames,
        known: Iterable[torch.Tensor],  # the layer's inputs, parameters, buffers and attributes
        *,
        clock: Clock | None = None,  # marks points of the compute stream around each operation
        before_write: Callable[[torch.Tensor], None] = lambda _: None,  # told before a first write into one of them
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self._names = names
        self._clock = clock
        self._before_write = before_write
        self._numbers: dict[int, int] = {}
        self.references: list[StorageWeakRef] = []
        """One per storage: while it lives, no other storage has the same address."""
        self.outside = list(known)
        self.unseen_writes: dict[int, torch.UntypedStorage] = {}
        """Storages that no seen operation made and that a seen one writes into."""
        self.first_states: dict[torch.Generator, torch.Tensor] = {}
        """The states of the generators that operations were given, before the first of them."""
        self._outside = {
            address_of(tensor.untyped_storage()) for tensor in self.outside if plain_memory(tensor) is not None
        }

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_counted(function, args):
            result = function(*args, **kwargs)
            if function is CAST and plain_memory(result) is not None:
                # Known as the parameter is, and cast again by the second run: else whoever reads the copy would seem
                # to read what was made unseen, before which every operation has to run again.
                self._outside.add(address_of(result.untyped_storage()))
                self.number_of(result, len(self.trace.steps))
            return result
        operation = known_operation(function)
        trace, time = self.trace, len(self.trace.steps)
        given = tensors_of([*args, *kwargs.values()])
        unseen = bool(types) or not isinstance(function, OPERATOR)
        reads: dict[int, None] = {}
        written = self._written(operation, args, kwargs, time)
        final = operation.collective
        for tensor in given:
            if plain_memory(tensor) is None:
                unseen = True
                continue
            final = final or tensor.is_inference()
            number = self.number_of(tensor, time)
            reads[number] = None
            # Somebody has filled it meanwhile, whom the mode does not see.
            if trace.storages[number].unfilled_bytes and not operation.is_view:
                unseen = unseen or not (operation.overwrites and number in written)
        trace.generators.update(one for one in [*args, *kwargs.values()] if isinstance(one, torch.Generator))
        before = states_of(trace.generators, [tensor.device for tensor in given])
        for generator in trace.generators & set(before):
            self.first_states.setdefault(generator, before[generator])
        begin = None if self._clock is None else self._clock()
        result = function(*args, **kwargs)
        end = None if self._clock is None else self._clock()
        drew = any(not torch.equal(state, one.get_state()) for one, state in before.items())
        many = isinstance(result, (tuple, list))
        results = list(result) if many else [result]
        makes, outputs = self._outputs(results, args, time)
        # Only the operation itself makes such a result: a sparse tensor, or one on the meta device.
        pairs = zip(outputs, results, strict=True)
        unseen = unseen or any(made.storage is None and isinstance(one, torch.Tensor) for made, one in pairs)
        decides = operation.custom and any(isinstance(one, int | float | complex | str) for one in results)
        if trace.zone < 0 and (decides or _DYNAMIC & set(operation.tags)):
            trace.zone = time
        trace.steps.append(
            Step(
                operation,
                tuple(reads),
                tuple(makes),
                tuple(written),
                tuple(outputs),
                type(result) if many else None,
                self._names.current(),
                draws=drew or operation.draws,
                only_views=not makes and not written and all(one.storage is not None for one in outputs),
                barrier=unseen,
                final=final,
                begin=begin,
                end=end,
            )
        )
        for number in makes:
            trace.storages[number].writers.append(time)
            if operation.allocates:
                trace.storages[number].unfilled_bytes = trace.storages[number].nbytes
        for number, nbytes in written.items():
            storage = trace.storages[number]
            storage.unfilled_bytes = max(0, storage.unfilled_bytes - nbytes)
            (storage.writers if storage.writers or storage.unseen else storage.changed_by).append(time)
        return result

    def number_of(self, tensor: torch.Tensor, time: int) -> int:
        """The number of a tensor's storage, a new one if it was not seen before."""
        memory = tensor.untyped_storage()
        number = self._numbers.get(address_of(memory))
        if number is None:
            number = self._add(memory, time)
            if address_of(memory) not in self._outside:
                self.trace.storages[number].unseen = True
                if type(tensor) is torch.Tensor and not tensor.is_inference():
                    with counting_versions():
                        self.trace.constants[number] = plain_version_counter(tensor)
        return number

    def left_behind(self, other: Learn) -> bool:
        """Whether memory that an operation made is still held, and was not seen in another run."""
        if any(step.operation.collective for step in self.trace.steps):
            return False  # who communicates may hold a tensor until all ranks have it
        # Autocast holds what it has cast.
        made = {number for step in self.trace.steps if step.operation.function is not CAST for number in step.makes}
        return any(
            not self.references[number].expired() and address not in other._numbers
            for address, number in self._numbers.items()
            if number in made
        )

    def has_seen(self, tensor: torch.Tensor) -> bool:
        """Whether an operation has read or written the storage of a tensor."""
        return plain_memory(tensor) is not None and address_of(tensor.untyped_storage()) in self._numbers

    def storage_of(self, tensor: torch.Tensor) -> Storage:
        """What is noted of a tensor's storage: nothing if no operation has read or written it."""
        return (
            self.trace.storages[self.number_of(tensor, 0)] if self.has_seen(tensor) else Storage(0, first_seen=math.inf)
        )

    def same_storage(self, number: int, other: Learn) -> bool:
        """Whether a storage of this run was seen in another run as well."""
        return [*self._numbers][number] in other._numbers

    def _add(self, memory: torch.UntypedStorage, time: int) -> int:
        number = self._numbers[address_of(memory)] = len(self.trace.storages)
        self.trace.storages.append(Storage(memory.nbytes(), first_seen=time))
        self.references.append(StorageWeakRef(memory))
        return number

    def _written(self, operation: Operation, args: Any, kwargs: Any, time: int) -> dict[int, int]:
        """How many bytes an operation writes into each storage."""
        found: Counter[int] = Counter()
        for place in operation.written:
            given = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            for tensor in tensors_of(given):
                if plain_memory(tensor) is None:
                    continue
                number = self.number_of(tensor, time)
                storage = self.trace.storages[number]
                if storage.unseen:
                    self.unseen_writes[number] = tensor.untyped_storage()
                elif not (storage.writers or storage.changed_by):
                    self._before_write(tensor)
                found[number] += tensor.nbytes
        return found

    def _outputs(self, results: list[Any], args: Any, time: int) -> tuple[list[int], list[StepResult]]:
        makes: list[int] = []
        outputs: list[StepResult] = []
        for result in results:
            if not isinstance(result, torch.Tensor):
                outputs.append(StepResult(None, None, None, value=result))
                continue
            memory = plain_memory(result)
            if memory is None and (
                type(result) is not torch.Tensor or result.numel() or result.layout is not torch.strided
            ):
                outputs.append(StepResult(None, None, None))
                continue
            memory = result.untyped_storage()
            number = self._numbers.get(address_of(memory))
            if number is None:
                number = self._add(memory, time)
                makes.append(number)
            place = next((place for place, one in enumerate(args) if one is result), None)
            outputs.append(StepResult(number, geometry_of(result), result.device, place))
        return makes, outputs
