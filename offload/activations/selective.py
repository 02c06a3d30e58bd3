"""Hand what PyTorch's selective activation checkpointing keeps inside of a layer to the layer's activation set.

PyTorch keeps these tensors below autograd, where hooks on saved tensors do not see them: the patch gives it handles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from offload.activations.handles import SavedHandle
from offload.activations.saved_storage import give_up_resized
from offload.activations.what_moves import exclude
from offload.base.torch_private import counting_versions, is_traced, patch_once, without_modes


class _Opened(threading.local):
    def __init__(self) -> None:
        self.sets: list[Any] = []


_opened = _Opened()


def opened() -> list[Any]:
    """Of the layers whose forward runs now in this thread, innermost last: the activation set, or what measures it.

    Each has ``pack``, a pack hook, and ``start_early``, which begins the copy of a tensor before it is saved.
    """
    return _opened.sets


@contextmanager
def sees(one: Any) -> Iterator[None]:
    """Let ``one``, which measures layers, take what checkpoints keep meanwhile."""
    patch_pytorch()
    opened().append(one)
    try:
        yield
    finally:
        opened().remove(one)


def _keep(result: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    if not _takes():
        return None
    # To hold the result is none of the layer's operations. A subclass detaches by its own dispatch.
    with without_modes() if type(result) is torch.Tensor else nullcontext(), counting_versions():
        packed = opened()[-1].pack(result)
    return packed.unpack if isinstance(packed, SavedHandle) else None


def _see(arguments: Sequence[object]) -> None:
    if opened():
        for given in arguments:
            if isinstance(given, torch.nn.Parameter):
                exclude(given, "parameter")  # a view of it, below autograd, does not tell what it looks into


def _takes() -> bool:
    return bool(opened()) and not is_traced()


def _owns(pack: object) -> bool:
    return any(pack in (one.pack, getattr(one, "packing", None)) for one in opened())


def _offload_is_save(policy: Callable[..., CheckpointPolicy]) -> Callable[..., CheckpointPolicy]:
    """Save what a policy wants offloaded: eager PyTorch would recompute it, and says nothing."""
    offloaded = CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD

    def chosen(*args: Any, **kwargs: Any) -> CheckpointPolicy:
        choice = policy(*args, **kwargs)
        return CheckpointPolicy.MUST_SAVE if choice in offloaded else choice

    return chosen


def patch_pytorch() -> None:
    """Let PyTorch tell of storages that are resized and of results that checkpoints keep; called by every context."""
    patch_once(give_up_resized, _keep, _see, _takes, _owns, _offload_is_save)
