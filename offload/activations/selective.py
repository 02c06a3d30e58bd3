"""What PyTorch's selective activation checkpointing keeps inside of a layer, handed to the layer's activation set.

It keeps results of operations in a storage of its own, below autograd, where hooks on saved tensors do not see them.
Each is wrapped in an object that gives it back once, when backward runs the checkpointed function again. So that class
is replaced by one whose objects hold a handle in place of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils import checkpoint

from offload.activations.handles import Handle
from offload.activations.what_moves import exclude
from offload.base.autograd import in_backward, is_traced
from offload.base.tensors import counting_versions


class Opened(Protocol):
    """Who takes what a layer saves: its activation set, or what measures it."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """As a pack hook."""

    def start_early(self, tensor: torch.Tensor) -> None:
        """Begin the copy of what the layer will save."""


opened: list[Opened] = []
"""Those of the layers whose forward runs now, innermost last."""


@contextmanager
def sees(one: Opened) -> Iterator[None]:
    """Let one that is no layer's set take what is kept, as if all that runs meanwhile were its layer."""
    opened.append(one)
    try:
        yield
    finally:
        opened.remove(one)


_checkpoint: Any = checkpoint  # of which the following is private: there is no hook to ask for
_Wrapper: Any = _checkpoint._VersionWrapper
_cache = _checkpoint._CachingTorchDispatchMode.__torch_dispatch__


class _Kept(_Wrapper):  # type: ignore[misc]  # private in PyTorch, and without types
    """A result that is kept, or something beside it that is no tensor."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        if isinstance(value, torch.Tensor) and opened and not (in_backward() or is_traced()):
            with counting_versions():
                packed = opened[-1].pack(value)
            if isinstance(packed, Handle):
                self.val = packed

    def get_val(self, allow_cache_entry_mutation: bool) -> Any:
        if isinstance(self.val, Handle):
            return self.val.unpack()  # it compares versions itself: a changed tensor cannot be had from the host
        return super().get_val(allow_cache_entry_mutation)


def _see(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if opened:
        for given in args:
            if isinstance(given, torch.nn.Parameter):
                exclude(given, "parameter")  # a view of it, below autograd, does not tell what it looks into
    return _cache(mode, function, types, args, kwargs)


_checkpoint._VersionWrapper = _Kept
_checkpoint._CachingTorchDispatchMode.__torch_dispatch__ = _see
