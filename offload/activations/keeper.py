"""What keeps the bytes of a value that recomputation reads: a saved storage, on the device or on the host."""

from __future__ import annotations

import weakref

import torch

from offload.activations.handles import Token, bring_back
from offload.activations.saved_storage import DROPPED, GIVEN_UP, SavedStorage


class Keeper:
    """A saved storage that holds a value's bytes.

    Weakly, so that the graph decides how long it lives, until :meth:`hold` says that recomputation reads it.
    """

    __slots__ = ("_held", "_storage", "_token", "_version", "_versions")

    def __init__(self, storage: SavedStorage, token: Token, version: int, versions: torch.Tensor) -> None:
        self._storage = weakref.ref(storage)
        self._token = token
        self._version = version
        self._versions = versions
        self._held: SavedStorage | None = None

    @property
    def held(self) -> bool:
        return self._held is not None

    def here(self) -> torch.UntypedStorage | None:
        storage = self._storage()
        return None if storage is None else storage.memory

    def hold(self) -> bool:
        storage = self._storage()
        if storage is None or storage.state is DROPPED or storage.state is GIVEN_UP:
            return False
        self._held = storage
        return True

    def bytes_on_device(self) -> torch.UntypedStorage:
        storage = self._held
        if storage is None:
            raise RuntimeError("a value that nobody holds was asked for its bytes; please report this.")
        if self._versions._version != self._version:
            raise RuntimeError(
                "what recomputation reads must not be changed in place before backward, but a tensor of "
                f"{storage.nbytes} bytes of layer {storage.layer} is at version {self._versions._version}; expected "
                f"version {self._version}. Clone the tensor before you change it, or keep what is computed from it."
            )
        return bring_back(storage, self._token)
