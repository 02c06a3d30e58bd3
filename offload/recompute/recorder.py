"""What sees a layer's forward: a dispatch mode that writes each operation down, and says what a saved tensor is.

Below autograd and autocast it sees what is really computed, by whatever module, library or function. What PyTorch's
dispatcher does not see (kernels that a custom function launches by itself) shows as memory that nobody has made: a
source, like the layer's inputs. Nothing is held of what comes by, but for sources.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from offload.base.tensors import counting_versions, is_plain, version_counter
from offload.recompute.kinds import Kind, argument_of, draws, kind_of, written_arguments
from offload.recompute.random import RandomState, default_generator
from offload.recompute.record import Call, Look, Value, copy_of_storage, tensors_of


class Recorder(TorchDispatchMode):
    """Writes down the operations of one layer's forward, while entered."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, tuple[Value, StorageWeakRef]] = {}
        """What the storages hold now, by their addresses, which no other storage has while the reference lives."""
        self._calls = 0
        self._times: Counter[Any] = Counter()
        """How often each operation was seen."""

    def given(self, tensor: torch.Tensor, value: Value) -> None:
        """A source was read for the first time."""

    def made(self, tensor: torch.Tensor, value: Value, *, new: bool) -> None:
        """A call has made a value, in new memory or over another value."""

    def forget_all(self) -> None:
        """The layer's forward is over: what was written down lives on only where somebody wants it."""
        self._values.clear()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside of the layer stays compiled; what it makes are sources."""
        return True

    def value_at(self, address: int) -> Value | None:
        """What the storage at this address holds now, if the layer has computed or read it."""
        found = self._values.get(address)
        return None if found is None else found[0]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(function)
        if kind is Kind.VIEW:
            return function(*args, **kwargs)
        written = [] if kind is Kind.PURE or kind is Kind.EMPTY else _written(function, args, kwargs)
        call = None if types or kind is Kind.OPAQUE else self._call(function, args, kwargs, written)
        if call is None:
            self._save_from(written)
        result = function(*args, **kwargs)
        if call is None:
            self._forget([*tensors_of(result), *written])
        else:
            self._make(call, tensors_of(result), written, empty=kind is Kind.EMPTY)
        return result

    def _call(self, function: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Call | None:
        """A call that can be run again, if that is possible."""
        for tensor in written:
            value = self.value_at(tensor.untyped_storage()._cdata) if is_plain(tensor) else None
            if value is None or value.call is None:
                return None  # what the layer has not made would be written twice
            value.empty = False
        try:
            random = _random_state(function, args, kwargs) if draws(function) else None
            looks, named = self._written_down(args), self._written_down(kwargs)
        except UnseenError:
            return None
        self._calls += 1
        time = self._times[function]
        self._times[function] = time + 1
        return Call(self._calls, time, function, looks, named, random)

    def _written_down(self, given: Any) -> Any:
        """What an operation is given, with looks in place of tensors."""
        if isinstance(given, torch.Tensor):
            return Look(
                self.read(given), given.dtype, given.storage_offset(), given.size(), given.stride(), given.is_conj(),
                given.is_neg(),
            )  # fmt: skip
        if isinstance(given, dict):
            return {name: self._written_down(item) for name, item in given.items()}
        if isinstance(given, list | tuple):
            return [self._written_down(item) for item in given]
        return given

    def read(self, tensor: torch.Tensor) -> Value:
        """What a tensor holds; a source from now on, if nobody has seen it being computed.

        Raises:
            UnseenError: It is more than what its storage holds, or would not tell if it was changed.
        """
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise UnseenError
        storage = tensor.untyped_storage()
        found = self._values.get(storage._cdata)
        if found is not None and not found[0].empty:
            return found[0]
        if not is_plain(tensor) or tensor.is_inference():
            raise UnseenError  # PyTorch does not tell whether an inference tensor was changed since
        value = Value(None, 0, storage.nbytes())
        with counting_versions():
            value.given, value.version = tensor.detach(), tensor._version
        self._values[storage._cdata] = value, StorageWeakRef(storage)
        self.given(tensor, value)
        return value

    def _make(self, call: Call, results: list[torch.Tensor], written: list[torch.Tensor], *, empty: bool) -> None:
        """Note what a call has made: memory that is new, and what it has written."""
        for place, tensor in enumerate(results):
            if not is_plain(tensor):
                continue
            known = self.value_at(tensor.untyped_storage()._cdata)
            if known is None:
                value = self._add(call, place, tensor)
                value.empty = empty
                self.made(tensor, value, new=True)
            elif not any(tensor is one for one in written):
                # It looks into what the call was given, as that of ``_unsafe_view`` does, but counts for itself.
                with counting_versions():
                    known.aliases.append(version_counter(tensor))
        place = len(results)
        for tensor in written:
            old = self.value_at(tensor.untyped_storage()._cdata)
            if old is not None and old.call is not call:  # else another view of it was written as well
                old.overwrite()
                value = self._add(call, place, tensor)
                value.aliases = old.aliases
                self.made(tensor, value, new=False)
                place += 1

    def _add(self, call: Call, place: int, tensor: torch.Tensor) -> Value:
        storage = tensor.untyped_storage()
        value = Value(call, place, storage.nbytes())
        call.makes.append(weakref.ref(value))
        self._values[storage._cdata] = value, StorageWeakRef(storage)
        return value

    def _save_from(self, written: list[torch.Tensor]) -> None:
        """An operation that is not written down is about to write into these: keep what calls have read there."""
        for tensor in written:
            value = self.value_at(tensor.untyped_storage()._cdata) if is_plain(tensor) else None
            if value is not None and value.given is not None:
                value.memory, value.given = copy_of_storage(tensor.untyped_storage()), None

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        """Nobody has seen how these were computed: who reads them reads a source."""
        for tensor in tensors:
            if is_plain(tensor):
                found = self._values.pop(tensor.untyped_storage()._cdata, None)
                if found is not None:
                    found[0].overwrite()


class UnseenError(Exception):
    """What an operation is given cannot be written down."""


def _written(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation is about to write into."""
    given = (kwargs.get(at) if isinstance(at, str) else args[at : at + 1] for at in written_arguments(function))
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
