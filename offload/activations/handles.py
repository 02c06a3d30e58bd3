"""Handles: what the autograd graph holds instead of tensors.

The handle of an offloaded tensor holds the storage, and how the tensor looks into it. When the graph goes, for whatever
reason, everything goes with it by reference counting: device memory to the allocator, the host buffer to the pool with
the event after which it is free.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from offload.activations.saved_storage import SavedStorage, probing, version_counter
from offload.activations.what_moves import Rebuild
from offload.base.tensors import geometry_of, look_into, plain_version_counter
from offload.base.torch_private import asks_once, keeps_graph
from offload.recompute.run_again import Frame


class Token:
    """Held by every handle of a set, so that a weak reference to it tells whether the graph is gone.

    ``reload_late`` is called when backward reads a storage that is on the host.
    """

    def __init__(self, layer: int, reload_late: Callable[[SavedStorage], None]) -> None:
        self.layer = layer
        self.reload_late = reload_late


class SavedHandle:
    """A saved tensor, with its version when it was saved, and a tensor that tells its version now."""

    # A layer makes many: without a dict they cost less, and garbage collection comes less often.
    __slots__ = ("token", "version", "versions")

    token: Token
    version: int
    versions: torch.Tensor

    def unpack(self) -> torch.Tensor:
        """The tensor, on the device and ready for the current stream; an error if it was changed in place."""
        raise NotImplementedError

    def check_version(self, dtype: torch.dtype, size: torch.Size) -> None:
        """Raise as autograd does without hooks if the version has changed, and not by a thread that is probing."""
        with probing:
            now = self.versions._version
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{dtype} {list(size)}], saved in layer {self.token.layer}, is at version {now}; expected version "
                f"{self.version} instead. Clone the tensor before you change it, or change it out of place."
            )


class KeptHandle(SavedHandle):
    """A saved tensor that is kept."""

    __slots__ = ()

    def __init__(self, tensor: torch.Tensor, token: Token) -> None:
        self.token = token
        self.version = tensor._version
        # A result of the operation that saves it would own itself through the graph: hold an alias.
        self.versions = tensor if tensor.is_leaf else tensor.detach()

    def unpack(self) -> torch.Tensor:
        tensor = self.versions
        if tensor._version != self.version:
            self.check_version(tensor.dtype, tensor.size())
        return tensor


class MovedHandle(SavedHandle):
    """A saved tensor whose storage is offloaded, and how the tensor looks into it."""

    __slots__ = ("geometry", "leaf", "storage")

    def __init__(self, tensor: torch.Tensor, token: Token, storage: SavedStorage) -> None:
        self.token = token
        self.version = tensor._version
        self.versions = plain_version_counter(tensor)
        self.storage = storage
        self.geometry = geometry_of(tensor)  # a tuple of its own
        self.leaf = weakref.ref(tensor) if tensor.is_leaf else None

    def unpack(self) -> torch.Tensor:
        if self.versions._version != self.version:
            self.check_version(self.versions.dtype, self.geometry[2])
        storage = self.storage
        if storage.memory is None:
            self.token.reload_late(storage)
        reload = storage.reload
        if reload is not None and reload.awaited_by != storage.transfers.backend.compute_stream_id():
            storage.wait_for(reload)
        if reload is None and self.leaf is not None and (leaf := self.leaf()) is not None:
            return leaf  # a view that nobody else holds would become a gradient, which changes what the program holds
        found = storage.views.get(id(self))
        if found is None or found[0] is not self.geometry:  # the id was that of a handle that is gone
            memory: Any = storage.memory  # it was reloaded above if there was none
            found = self.geometry, look_into(memory, self.geometry, self.versions.data)
            storage.views[id(self)] = found
        return found[1]


class DroppedHandle(SavedHandle):
    """A saved tensor that was dropped, by its number among those of its layer; or that is held until it is dropped."""

    __slots__ = ("frame", "kept", "number", "view")

    def __init__(self, frame: Frame, number: int, kept: SavedHandle | None = None) -> None:
        self.frame = frame
        self.number = number
        self.kept = kept  # what holds it, if it was not dropped
        self.view: torch.Tensor | None = None  # the tensor, once it was recomputed

    def unpack(self) -> torch.Tensor:
        if self.kept is not None:
            self.frame.asked = self.frame.asked or self.frame.open
            return self.kept.unpack()
        if self.view is not None:
            return self.view
        tensor = self.frame.tensor(self.number)
        # Else it would be there until the graph goes, or, as all that a node has saved, until its gradients are summed.
        if not keeps_graph() and (self.frame.holds or not asks_once()):
            self.view = tensor
        return tensor


class SubclassHandle(SavedHandle):
    """A tensor subclass, as handles of its inner tensors and what rebuilds it from them.

    Changing a wrapper in place does not count as a change of its inner tensors, so both versions are checked.
    """

    __slots__ = ("dtype", "inner", "rebuild", "size", "whole")

    def __init__(self, tensor: torch.Tensor, token: Token, inner: list[SavedHandle], rebuild: Rebuild) -> None:
        self.token = token
        self.version = tensor._version
        self.versions = version_counter(tensor)
        self.dtype, self.size = tensor.dtype, tensor.size()
        self.inner = inner
        self.rebuild = rebuild
        self.whole: torch.Tensor | None = None  # held so that autograd does not put a gradient into its memory

    def unpack(self) -> torch.Tensor:
        if self.versions._version != self.version:
            self.check_version(self.dtype, self.size)
        inner = [handle.unpack() for handle in self.inner]
        if self.whole is None:
            self.whole = self.rebuild(inner)
        return self.whole


unpack = operator.methodcaller("unpack")
