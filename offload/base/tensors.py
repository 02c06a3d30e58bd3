"""Which tensors are what their storage holds."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager

import torch


def has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether a storage with a size has memory: that of a zero tensor or of a wrapper has none."""
    try:
        return bool(storage.data_ptr())
    except RuntimeError:
        return False


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what its storage holds: of no subclass but ``Parameter``, strided, with memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_nested) and has_memory(tensor.untyped_storage())


def counting_versions() -> AbstractContextManager[object]:
    """Let ``detach`` inside of a dispatch mode give a tensor that counts changes together with its origin.

    PyTorch has left the part that sees to this by the time that a mode is called.
    """
    guard: AbstractContextManager[object] = torch._C._SetExcludeDispatchKeyGuard(_COUNTING, False)
    return guard


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares the version counter of a plain ``tensor`` and all its views."""
    counter = tensor.detach()
    counter.data = _nothing(tensor.dtype, tensor.device)
    return counter


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without memory, always the same."""
    return torch.empty(0, dtype=dtype, device=device)


_COUNTING = torch._C.DispatchKey.ADInplaceOrView
