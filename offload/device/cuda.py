"""CUDA: copies straight through the runtime, and what keeps them fast inside of CUDA graphs.

Queueing a copy with :meth:`torch.Tensor.copy_` on another stream takes the host twice as long as the call of
the CUDA runtime that it ends in. Hundreds of saved tensors in a step make that worth a few lines.

Note:
    CUDA lays a captured graph out over streams of its own, in the order in which operations were captured. Where a
    copy forks off, it takes compute's place in line, and compute goes on in another stream. Many forks scatter
    compute over many streams, and those that wait slow the copies to the host: on an H200, from 55 to 49 GB/s. So
    in a capture each fork is preceded by an *anchor*, a tiny operation that keeps compute's place.
"""

from __future__ import annotations

import ctypes
import functools
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from offload.device.accelerator import AcceleratorBackend
from offload.device.backend import Event, Stream, Wait
from offload.host.page_locked import register_pinned

if TYPE_CHECKING:
    from offload.host.pool import HostBuffer

_HOST_TO_DEVICE = 1
_DEVICE_TO_HOST = 2
_FORKS = (Wait.READY, Wait.LANDING)


class CudaBackend(AcceleratorBackend):
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.compute_stream_id = functools.partial(torch._C._cuda_getCurrentRawStream, device.index)
        self._streams: dict[object, Stream] = {}
        self._anchor = torch.zeros(1, dtype=torch.uint8, device=device)

    def compute_stream(self) -> Stream:
        current = self.compute_stream_id()
        if current not in self._streams:
            self._streams[current] = super().compute_stream()
        return self._streams[current]

    @property
    def capturing(self) -> bool:
        return bool(torch._C._cuda_isCurrentStreamCapturing())

    def wait(self, stream: Stream, event: Event, why: Enum) -> None:
        if why in _FORKS and self.capturing:
            self._anchor.zero_()
        stream.wait_event(event)

    def to_host(self, stream: Stream, host: HostBuffer, device: torch.Tensor) -> None:
        source = device.untyped_storage().data_ptr()
        for target, nbytes in host.spans:
            self.memcpy(stream, target, source, nbytes, _DEVICE_TO_HOST)
            source += nbytes

    def to_device(self, stream: Stream, device: torch.Tensor, host: HostBuffer) -> None:
        target = device.untyped_storage().data_ptr()
        for source, nbytes in host.spans:
            self.memcpy(stream, target, source, nbytes, _HOST_TO_DEVICE)
            target += nbytes

    def memcpy(self, stream: Stream, target: int, source: int, nbytes: int, kind: int) -> None:
        """Queue one copy between two addresses on ``stream``.

        Raises:
            RuntimeError: The runtime refused.
        """
        error = _runtime().cudaMemcpyAsync(target, source, nbytes, kind, cast("Any", stream).native_handle)
        if error:
            raise RuntimeError(f"cudaMemcpyAsync of {nbytes} bytes failed with CUDA error {error}")

    def pinned(self, nbytes: int) -> torch.Tensor:
        return register_pinned(nbytes, self.device)


@functools.cache
def _runtime() -> Any:
    """The CUDA runtime that PyTorch is linked to: a library's symbols include those of what it links to."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    address = ctypes.c_void_p
    library.cudaMemcpyAsync.argtypes = (address, address, ctypes.c_size_t, ctypes.c_int, address)
    return library
