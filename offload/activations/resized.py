"""Storages that the program resizes while they travel: they become the program's again.

Some programs free a saved tensor's memory by themselves, ``storage.resize_(0)``, and fill it again before backward, as
checkpoints that discard their output do. Autograd reads whatever the storage holds by then. PyTorch frees the memory at
once, while a copy may still read it, and calls nobody. So ``resize_`` itself is what gives notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

if TYPE_CHECKING:
    from offload.activations.microbatch import Round

RESIZED = "resized"
"""Why a storage stays on the device that the program has resized, in ``stats().skipped``."""

_rounds: WeakSet[Round] = WeakSet()
_resize = torch.UntypedStorage.resize_


def watch(microbatch: Round) -> None:
    """Learn when a storage that ``microbatch`` has saved is resized."""
    _rounds.add(microbatch)


def _resize_(storage: torch.UntypedStorage, nbytes: int) -> None:
    for microbatch in tuple(_rounds):
        reference = microbatch.storages.get(storage._cdata)
        saved = reference() if reference is not None else None
        if saved is not None:
            saved.give_up(storage)
    _resize(storage, nbytes)


_resize_.__doc__ = _resize.__doc__
torch.UntypedStorage.resize_ = _resize_  # type: ignore[method-assign,assignment]  # there is no hook to ask for
