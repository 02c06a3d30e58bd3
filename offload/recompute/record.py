"""What a layer's forward has computed, as calls and the values that they read and made; and how one is made again.

A value is what a storage holds between two writes into it. Views need no calls: a call knows how each tensor that it
was given looks into its value. So the record is in single assignment form, whatever the layer does in place: a write
makes a new value of the storage, and running it again writes into a copy of the old one.

Who owns what: a saved tensor that is to be computed again holds its value, the value the call that made it, the call
the values that it read. Nothing holds a call for its own sake, so what nobody needs is gone with the forward, and all
of it with the graph. A call lets go of what it read as soon as it has run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from offload.base.tensors import Geometry, copy_of_storage, look_into, tensors_of, whole
from offload.recompute.operations import Operation
from offload.recompute.random import RandomState


class Keeper(Protocol):
    """Who keeps a value's bytes until backward, on the device or on the host."""

    @property
    def held(self) -> bool:
        """Whether it does so for the calls that are to run again; else only as long as the graph wants them."""

    def hold(self) -> bool:
        """Keep the bytes for a call that is to run again; whether they are kept at all."""

    def here(self) -> torch.UntypedStorage | None:
        """Memory that holds them now, while the forward runs, if it was not let go."""

    def bytes_on_device(self) -> torch.UntypedStorage:
        """Memory that holds them, for the current stream."""


class Value:
    """What a storage holds between two writes.

    Args:
        call: What has made it; ``None`` for a source, which the layer was given or nobody saw being made.
        place: Of which of the call's results it is the memory.
        nbytes: Of the storage.
    """

    # Defaults of the class, as most values of a forward have no others, and each is made while the device waits.
    tensor: weakref.ref[torch.Tensor] | None = None
    """What the call has returned, weakly, as the program owns it; ``None`` once it was looked into in another way."""
    geometry: Geometry | None = None
    """How that tensor, or the one that the layer was given, looks into the storage; filled in when a call reads it."""
    memory: torch.Tensor | None = None
    """Its bytes after it was made again, as long as they are wanted; if a geometry is known, as this tensor's."""
    given: torch.Tensor | None = None
    """Of a source: a tensor over the program's own memory, which tells whether that was changed since."""
    keeper: Keeper | None = None
    uses = 0
    """How many have yet to read it: calls that are to run again, and a saved tensor that is it."""
    empty = False
    """Whether it is new memory that no operation was seen to write; if it is read, something unseen has written it."""
    overwritten = False
    """Whether the storage holds another value by now."""
    drawn = False
    """Of a source: whether it holds random numbers that nobody can draw again, as inside of a CUDA graph."""
    version = 0
    """Of :attr:`given`, when it was read."""
    aliases: tuple[torch.Tensor, ...] = ()
    """Without memory: what counts the changes of tensors that look into the storage and count for themselves."""
    versions: tuple[int, ...] = ()
    """Those of :attr:`aliases` at the end of the forward; empty until then."""

    def __init__(self, call: Call | None, place: int, nbytes: int) -> None:
        self.call = call
        self.place = place
        self.nbytes = nbytes

    def is_as_made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the one that a call has made it in. If so, no attribute of it need be asked.

        Else it could have become a look of another kind, by an assignment to ``.data``, which nobody is told.
        """
        return self.tensor is not None and self.tensor() is tensor

    @property
    def changed(self) -> bool:
        """Whether the program has changed it since it was read, unseen."""
        return self.given is not None and self.given._version != self.version

    def overwrite(self) -> None:
        """The storage is about to hold another value: whoever keeps it does not keep this one any more.

        What a source held is kept, or was copied: its keeper can tell whether it was really changed.
        """
        self.overwritten = True
        if self.call is not None or not self.held:
            self.keeper = None

    @property
    def held(self) -> bool:
        """Whether somebody keeps the bytes for the calls that are to run again."""
        return self.keeper is not None and self.keeper.held

    def hold(self) -> bool:
        """Let who keeps the bytes, if somebody does, keep them for a call that is to run again; whether one does."""
        if self.keeper is None or self.overwritten or not self.keeper.hold():
            return False
        self.given = None  # the keeper may let the device memory go
        return True

    def bytes(self) -> torch.UntypedStorage:
        """Memory that holds the value now.

        Raises:
            RuntimeError: It was changed in place since it was read.
        """
        there = self._there()
        # Only what is held is read.
        return self.keeper.bytes_on_device() if there is None else there.untyped_storage()  # type: ignore[union-attr]

    def look(self, geometry: Geometry) -> torch.Tensor:
        """A tensor that looks into it; raises as :meth:`bytes` does."""
        there = self._there()
        if there is not None and geometry is self.geometry:
            return there  # most operations read what others have made as it is
        return look_into(self.bytes(), geometry)

    def _there(self) -> torch.Tensor | None:
        """A tensor over memory that holds it, unless a keeper has that."""
        if self.memory is not None:
            return self.memory
        if self.changed or (self.versions and self.versions != tuple(alias._version for alias in self.aliases)):
            raise RuntimeError(
                "what a layer's forward has read must not be changed in place before its backward if the layer is "
                f"recomputed, but a tensor of {self.nbytes} bytes was; clone it before the change, or keep what is "
                "computed from it."
            )
        return self.given

    def used(self) -> None:
        """One of those who wanted it has read it."""
        self.uses -= 1
        if not self.uses:
            self.memory = self.given = self.keeper = None


class Look(NamedTuple):
    """How a tensor that a call was given looks into a value, if in another way than that of the value itself."""

    value: Value
    geometry: Geometry


class Call:
    """One operation of a layer's forward, with what it was given.

    Args:
        number: Which of the layer's calls it is.
        time: Which call of the same operation it is in the layer, counted from 0.
        operation: What it is a call of.
        args: Its arguments, with a :class:`Value` or a :class:`Look` for each tensor.
        kwargs: Those that it was given by name, likewise.
        reads: The values that it reads, each once.
        random: The generator's state before it, if it draws random numbers.
    """

    one_region = False
    """Whether all that it makes is treated alike."""

    __slots__ = ("args", "dtype", "kwargs", "makes", "needed", "number", "operation", "random", "reads", "time")

    def __init__(
        self,
        number: int,
        time: int,
        operation: Operation,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        reads: Iterable[Value],
        random: RandomState | None,
    ) -> None:
        self.number = number
        self.time = time
        self.operation = operation
        self.args = args
        self.kwargs = kwargs
        self.reads = reads
        self.random = random
        self.dtype = torch.get_default_dtype()
        """What operations make that are told no other."""
        self.makes: list[weakref.ref[Value]] = []
        """The values of the results, and of what it writes. Each holds the call, so not the other way round."""
        self.needed = False
        """Whether it is to run again, and has not done so."""

    def writes(self) -> Iterable[Value]:
        """The values that it overwrites, each once."""
        given = (
            self.kwargs.get(at) if isinstance(at, str) else self.args[at : at + 1] for at in self.operation.written
        )
        return dict.fromkeys(_values_in(list(given)))

    def need(self) -> None:
        """See that it can run again: hold what is kept of what it reads, and let what made the rest run again too."""
        waiting = [self]
        while waiting:
            call = waiting.pop()
            if call.needed:
                continue
            call.needed = True
            for value in call.reads:
                value.uses += 1
                if value.aliases:
                    value.versions = tuple(alias._version for alias in value.aliases)
                if value.keeper is not None and value.hold():
                    value.call = None  # nobody asks any more how it came about, which may hold much memory
                elif value.call is not None:
                    waiting.append(value.call)

    def before(self) -> list[Call]:
        """It and the calls that have to run before it, in the order of the forward."""
        found: dict[int, Call] = {}
        waiting = [self]
        while waiting:
            call = waiting.pop()
            if call.number not in found:
                found[call.number] = call
                waiting += [v.call for v in call.reads if v.call is not None and v.memory is None and not v.held]
        return [found[number] for number in sorted(found)]

    def results(self, bytes_of: Callable[[Value], torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Run it again: the memory of what it makes, by :attr:`Value.place`."""
        made = self._again(lambda value, geometry: look_into(bytes_of(value), geometry), bytes_of)
        return [tensor.untyped_storage() for tensor in made]

    def _again(
        self,
        look: Callable[[Value, Geometry], torch.Tensor],
        bytes_of: Callable[[Value], torch.UntypedStorage],
    ) -> list[torch.Tensor]:
        """Run it again: tensors over the memory of what it makes, by :attr:`Value.place`."""
        copies: dict[Value, torch.Tensor] = {}
        read = look
        if self.operation.written:
            copies = {value: whole(copy_of_storage(bytes_of(value))) for value in self.writes()}

            def read(value: Value, geometry: Geometry) -> torch.Tensor:
                copy = copies.get(value)
                return look(value, geometry) if copy is None else look_into(copy.untyped_storage(), geometry)

        args = tensors_given(self.args, read)
        kwargs = dict(zip(self.kwargs, tensors_given(self.kwargs.values(), read), strict=True)) if self.kwargs else {}
        if self.random is None and self.dtype is torch.get_default_dtype():
            result = self.operation.run(*args, **kwargs)
        else:
            with self.random or nullcontext(), with_default_dtype(self.dtype):
                result = self.operation.run(*args, **kwargs)
        return [*tensors_of(result), *copies.values()]

    def run(self) -> None:
        """Run it again, for the last time: what it makes has memory then, and what it has read may go."""
        results = self._again(Value.look, Value.bytes)
        for reference in self.makes:
            value = reference()
            if value is not None and value.uses and not value.held:
                value.memory = results[value.place]
        reads = self.reads
        self.needed, self.args, self.kwargs, self.reads = False, (), {}, ()
        for value in reads:
            value.used()


@contextmanager
def with_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let operations make what they are told no other type for in this one."""
    present = torch.get_default_dtype()
    if dtype is present:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(present)


def _values_in(given: Any) -> Iterator[Value]:
    if isinstance(given, Value):
        yield given
    elif isinstance(given, Look):
        yield given.value
    elif isinstance(given, list):
        for item in given:
            yield from _values_in(item)


def tensors_given(written_down: Iterable[Any], look: Callable[[Value, Geometry], torch.Tensor]) -> list[Any]:
    """What a call was given, with tensors in place of values and looks."""
    given: list[Any] = []
    for item in written_down:
        kind = type(item)
        if kind is Value:
            given.append(look(item, item.geometry))
        elif kind is Look:
            given.append(look(item.value, item.geometry))
        else:
            given.append(tensors_given(item, look) if kind is list else item)
    return given
