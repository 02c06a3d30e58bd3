"""What sees a layer's forward: a dispatch mode that writes each operation down, and says what a saved tensor is.

Below autograd and autocast it sees what is really computed, by whatever module, library or function. What PyTorch's
dispatcher does not see (kernels that a custom function launches by itself) shows as memory that nobody has made: a
source, like the layer's inputs. Nothing is held of what comes by, but for sources.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload.base.tensors import (
    copy_of_storage,
    geometry_of,
    is_plain,
    look_into,
    plain_memory,
    plain_version_counter,
    tensors_of,
)
from offload.base.torch_private import counting_versions
from offload.recompute.operations import EMPTY, OPAQUE, VIEW, Operation, argument_of, operation_of
from offload.recompute.random import RandomState, default_generator
from offload.recompute.record import Call, Look, Value

_Tensor, _Parameter, _strided, _MANY = torch.Tensor, torch.nn.Parameter, torch.strided, (list, tuple)
_free_weak_ref = torch.UntypedStorage._free_weak_ref


Given = Callable[[torch.Tensor, Value], None]
Made = Callable[[torch.Tensor, Value, bool], None]


class Recorder(TorchDispatchMode):
    """Writes down the operations of one layer's forward, while entered.

    Args:
        given: Told of each source, with its value, when it is read for the first time.
        made: Told of each value that a call makes, and whether it is in new memory or over another value; if somebody
            wants to know.
    """

    supports_higher_order_operators = True

    def __init__(self, given: Given, made: Made | None = None) -> None:
        super().__init__()
        self._given, self._made = given, made
        self._values: dict[int, Value] = {}
        """What the storages hold now, by their addresses."""
        self._addresses: list[Any] = []
        """Weak references to these storages, as C++ has them: while they live, no other storage has the address."""
        self._drawn: set[int] = set()
        """The addresses of storages with random numbers that cannot be drawn again."""
        self._calls = 0
        self._times: dict[Operation, int] = {}
        """How often each operation was seen."""

    def __del__(self) -> None:
        for reference in self._addresses:
            _free_weak_ref(reference)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not by a wrapper around each call: the compiler leaves all of this package to the interpreter."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside of the layer stays compiled; what it makes are sources."""
        return True

    def holds(self, tensor: torch.Tensor) -> Value | None:
        """What the storage of a tensor holds now, if the layer has computed or read it."""
        return self._values.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(function)
        kind = operation.kind
        if kind is VIEW:
            self._look(args[operation.viewed])
            return operation.run(*args, **kwargs)
        written = _written(operation, args, kwargs) if operation.written else []
        call = None if types or kind is OPAQUE else self._call(operation, args, kwargs, written)
        if call is None:
            self._save_from(written)
        result = operation.run(*args, **kwargs)
        if call is None:
            self._forget([*tensors_of(result), *written])
            if operation.draws:
                self._draw([*tensors_of(result), *written])
        else:
            self._make(call, tensors_of(result), written, empty=kind is EMPTY)
        return result

    def _call(self, operation: Operation, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Call | None:
        """A call that can be run again, if that is possible."""
        for tensor in written:
            value = self.holds(tensor) if is_plain(tensor) else None
            if value is None or value.call is None:
                return None  # what the layer has not made would be written twice
            value.empty = False
        try:
            random = _random_state(operation.function, args, kwargs) if operation.draws else None
            reads: dict[Value, None] = {}
            looks = self._written_down(args, reads)
            named = dict(zip(kwargs, self._written_down(kwargs.values(), reads), strict=True)) if kwargs else kwargs
        except UnseenError:
            return None
        self._calls += 1
        time = self._times.get(operation, 0)
        self._times[operation] = time + 1
        return Call(self._calls, time, operation, looks, named, reads, random)

    def _written_down(self, given: Iterable[Any], reads: dict[Value, None]) -> list[Any]:
        """What an operation is given, with values and looks in place of tensors; ``reads`` collects the values."""
        found: list[Any] = []
        for item in given:
            if type(item) is _Tensor and item.layout is _strided:
                held = self._values.get(item.untyped_storage()._cdata)
                value = self.read(item) if held is None or held.empty else held
            elif isinstance(item, _Tensor):
                value = self.read(item)
            else:
                found.append(self._written_down(item, reads) if isinstance(item, _MANY) else item)
                continue
            reads[value] = None
            made = value.tensor
            if made is not None and made() is item:
                if value.geometry is None:
                    value.geometry = geometry_of(item)
                found.append(value)
            else:
                geometry = geometry_of(item)
                found.append(value if geometry == value.geometry else Look(value, geometry))
        return found

    def read(self, tensor: torch.Tensor) -> Value:
        """What a tensor holds; a source from now on, if nobody has seen it being computed.

        Raises:
            UnseenError: It is more than what its storage holds, or would not tell if it was changed.
        """
        if type(tensor) not in (_Tensor, _Parameter) or tensor.layout is not _strided:
            raise UnseenError
        storage = tensor.untyped_storage()
        found = self._values.get(storage._cdata)
        if found is not None and not found.empty:
            return found
        if not is_plain(tensor) or tensor.is_inference():
            raise UnseenError  # PyTorch does not tell whether an inference tensor was changed since
        value = self._add(None, 0, storage)
        value.geometry = geometry_of(tensor)
        with counting_versions():
            value.given, value.version = tensor.detach(), tensor._version
        value.drawn = storage._cdata in self._drawn
        self._given(tensor, value)
        return value

    def _make(self, call: Call, results: list[torch.Tensor], written: list[torch.Tensor], *, empty: bool) -> None:
        """Note what a call has made: memory that is new, and what it has written."""
        for place, tensor in enumerate(results):
            storage = plain_memory(tensor)
            if storage is None:
                continue
            known = self._values.get(storage._cdata)
            if known is None:
                value = self._add(call, place, storage)
                value.tensor = weakref.ref(tensor)
                if empty:
                    value.empty = True
                if self._made is not None:
                    self._made(tensor, value, True)
            elif not any(tensor is one for one in written):
                # It looks into what the call was given, as that of ``_unsafe_view`` does, but counts for itself.
                self._look(tensor)
                with counting_versions():
                    known.aliases += (plain_version_counter(tensor),)
        place = len(results)
        for tensor in written:
            storage = tensor.untyped_storage()
            old = self._values.get(storage._cdata)
            if old is not None and old.call is not call:  # else another view of it was written as well
                old.overwrite()
                value = self._add(call, place, storage)
                value.aliases = old.aliases
                if self._made is not None:
                    self._made(tensor, value, False)
                place += 1

    def _add(self, call: Call | None, place: int, storage: torch.UntypedStorage) -> Value:
        value = Value(call, place, storage.nbytes())
        if call is not None:
            call.makes.append(weakref.ref(value))
        self._addresses.append(storage._weak_ref())
        self._values[storage._cdata] = value
        return value

    def _look(self, tensor: torch.Tensor) -> None:
        """Somebody is about to look into it in another way."""
        value = self.holds(tensor) if type(tensor) is _Tensor and tensor.layout is _strided else None
        if value is not None and value.tensor is not None:
            if value.geometry is None and value.is_as_made(tensor):
                value.geometry = geometry_of(tensor)
            value.tensor = None

    def _save_from(self, written: list[torch.Tensor]) -> None:
        """An operation that is not written down is about to write into these: keep what calls have read there."""
        for tensor in written:
            value = self.holds(tensor) if is_plain(tensor) else None
            if value is not None and value.geometry is not None and (value.given is not None or value.held):
                value.memory = look_into(copy_of_storage(tensor.untyped_storage()), value.geometry)
                value.given = None

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        """Nobody has seen how these were computed: who reads them reads a source."""
        for tensor in tensors:
            if is_plain(tensor):
                found = self._values.pop(tensor.untyped_storage()._cdata, None)
                if found is not None:
                    found.overwrite()

    def _draw(self, tensors: list[torch.Tensor]) -> None:
        """Note where random numbers are that cannot be drawn again."""
        for tensor in filter(is_plain, tensors):
            storage = tensor.untyped_storage()
            self._addresses.append(storage._weak_ref())
            self._drawn.add(storage._cdata)


class UnseenError(Exception):
    """What an operation is given cannot be written down."""


def _written(operation: Operation, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation is about to write into."""
    given = (kwargs.get(at) if isinstance(at, str) else args[at : at + 1] for at in operation.written)
    return [tensor for argument in given for tensor in tensors_of(argument)]


def _random_state(function: Any, args: Any, kwargs: Any) -> RandomState | None:
    """The state of the generator that an operation is about to draw from, if it draws."""
    if argument_of(function, "dropout_p", args, kwargs) == 0:
        return None
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnseenError  # a graph's replays draw other numbers each time
    generator = next((given for given in (*args, *kwargs.values()) if isinstance(given, torch.Generator)), None)
    if generator is None:
        tensors = tensors_of(args) or tensors_of(list(kwargs.values()))
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or torch.get_default_device())
        generator = default_generator(device)
    return RandomState(generator)
