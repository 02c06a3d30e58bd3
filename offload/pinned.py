"""Page-locked host memory of exactly the size that was asked for.

``torch.empty(pin_memory=True)`` rounds up to a power of two: 1.1 GiB take 2 GiB. Here the
pages come from an anonymous mapping, are touched by all threads at once (which is most of the
time that pinning takes) and are then registered with the CUDA driver as they are.
"""

from __future__ import annotations

import mmap
import weakref

import torch


class HostMemoryError(RuntimeError):
    """There is no more page-locked host memory: the system refused, or a limit was set."""


def pageable(nbytes: int) -> torch.Tensor:
    """Host memory of its own mapping, uint8 of shape ``[nbytes]``, all pages touched."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).zero_()


def register_pinned(nbytes: int) -> torch.Tensor:
    """Page-locked host memory for CUDA, uint8 of shape ``[nbytes]``; unlocked and freed with its storage.

    Raises:
        HostMemoryError: The driver refused, for example because of a limit on locked memory.
    """
    memory = pageable(nbytes)
    address = memory.data_ptr()
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(address, nbytes, 0))
    if error:
        raise HostMemoryError(
            f"cudaHostRegister could not page-lock {nbytes} bytes (CUDA error {error}); raise the limit on locked "
            "memory (ulimit -l), free host memory, or offload fewer layers."
        )
    finalizer = weakref.finalize(memory.untyped_storage(), cudart.cudaHostUnregister, address)
    finalizer.atexit = False
    return memory
