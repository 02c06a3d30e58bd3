"""Storages that the program resizes while they travel: they become the program's again.

Some programs free a saved tensor's memory by themselves, ``storage.resize_(0)``, and fill it again before backward, as
checkpoints that discard their output do. Autograd reads whatever the storage holds by then. PyTorch frees the memory at
once, while a copy may still read it, and calls nobody. So ``resize_`` itself is what gives notice.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch

from offload.activations.storage import KnownStorages

# Weakly, as the graphs own the microbatches; by identity, as a dict cannot be hashed.
_watched: WeakValueDictionary[int, KnownStorages] = WeakValueDictionary()
_resize = torch.UntypedStorage.resize_


def watch(known: KnownStorages) -> None:
    """Learn when one of these storages, and of those that are added to them, is resized."""
    _watched[id(known)] = known


def _resize_(storage: torch.UntypedStorage, nbytes: int) -> None:
    for known in tuple(_watched.values()):
        saved = known.find(storage._cdata)
        if saved is not None:
            saved.give_up(storage)
    _resize(storage, nbytes)


_resize_.__doc__ = _resize.__doc__
torch.UntypedStorage.resize_ = _resize_  # type: ignore[method-assign,assignment]  # there is no hook to ask for
