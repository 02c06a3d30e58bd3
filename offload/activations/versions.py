"""Versions: whether a saved tensor was changed in place since it was saved, told without its memory.

PyTorch counts the changes of a tensor and of all its views in one counter. Autograd compares it in backward, but not
for tensors that hooks have taken, so the library does. What holds the counter must not hold the memory.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode

_probing = threading.Lock()
"""While a version is changed to see what else changes with it: another thread would take that for a change."""


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares the version counter of ``tensor`` and all its views."""
    counter = tensor.detach()
    counter.data = _nothing(tensor.dtype, tensor.device)
    return counter


def version_counter_of_wrapper(tensor: torch.Tensor) -> torch.Tensor:
    """The same for a subclass, as a plain tensor: autograd gives the counter to what ``detach`` returns below it."""
    with torch._C.DisableTorchFunctionSubclass(), _Nothing():
        return torch.Tensor.detach(tensor)


def settled_version(versions: torch.Tensor) -> int:
    """The version, while no other thread is in :func:`shares_versions`."""
    with _probing:
        return versions._version


def shares_versions(versions: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a change of one counts as a change of the other.

    It does for views. But ``torch.unsafe_chunk``, which the cells of RNNs use, and ``.data`` give tensors over one
    storage that count for themselves.
    """
    with _probing, _unsafe_preserve_version_counter(versions):
        before = tensor._version
        torch.autograd.graph.increment_version(versions)
        return tensor._version != before


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without memory, always the same."""
    return torch.empty(0, dtype=dtype, device=device)


class _Nothing(TorchDispatchMode):
    """Lets every operation return a new tensor without memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        return torch.empty(0, device="cpu")
