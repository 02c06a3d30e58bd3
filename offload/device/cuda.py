"""CUDA: copies straight through the runtime, CUDA graphs under capture, and page-locking.

Queueing a copy with :meth:`torch.Tensor.copy_` on another stream takes the host twice as long as the call of the CUDA
runtime that it ends in. Page-locking asks the driver, through ``ctypes``, which lets other threads of Python go on. An
error of the runtime, unlike one of the driver, stays its *last error*: PyTorch would report it after its next kernel.

Note:
    CUDA lays a captured graph out over streams of its own, in the order of capture. Where a copy forks off, it takes
    compute's place in line, and compute goes on in another stream. Many forks scatter compute over many streams, and
    those that wait slow the copies to the host: on an H200, from 55 to 49 GB/s. So in a capture each fork is preceded
    by an *anchor*, a tiny operation that keeps compute's place.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch

from offload.base.torch_private import raw_stream, spin
from offload.device.backend import Backend, Event, PageLockError, Stream, Wait

_HOST_TO_DEVICE = 1
_DEVICE_TO_HOST = 2
_PORTABLE_AND_MAPPED = 0x1 | 0x2
CYCLES_PER_S = 2e9  # GPUs run at somewhat less
_FORKS = (Wait.READY, Wait.LANDING)  # the waits after which a copy leaves compute's line


class CudaBackend(Backend):
    """One CUDA device."""

    locks_any_memory = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.compute_stream_id = functools.partial(raw_stream, device.index)
        self._streams: dict[object, Stream] = {}  # by `compute_stream_id`: making the object anew takes longer
        self._other = self.new_stream("other")
        self._anchor = torch.zeros(1, dtype=torch.uint8, device=device)
        self._memcpy_async = _memcpy_async()

    def compute_stream(self) -> Stream:
        current = self.compute_stream_id()
        if current not in self._streams:
            self._streams[current] = super().compute_stream()
        return self._streams[current]

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def wait(self, stream: Stream, event: Event, why: Enum) -> None:
        if why in _FORKS and self.capturing:
            self._anchor.zero_()
        stream.wait_event(event)

    def give_way(self, stream: Stream) -> None:
        # Copies to the host run in the order in which they were queued, those of all streams: a number that the program
        # reads would come after gigabytes. But a copy has no place yet while its stream waits for another one. (H200:
        # behind six copies of 128 MiB, the number comes after 14.4 ms, and after 2.2 where they give way.)
        self._other.wait_event(stream.record_event())
        stream.wait_event(self.record_timed(self._other))

    def delay(self, seconds: float) -> None:
        spin(round(CYCLES_PER_S * seconds))

    def to_host(self, stream: Stream, pieces: Sequence[torch.Tensor], memory: torch.UntypedStorage) -> None:
        self.memcpy(stream, pieces, memory.data_ptr(), _DEVICE_TO_HOST)

    def to_device(self, stream: Stream, memory: torch.UntypedStorage, pieces: Sequence[torch.Tensor]) -> None:
        self.memcpy(stream, pieces, memory.data_ptr(), _HOST_TO_DEVICE)

    def use_here(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(cast("torch.Stream", self.compute_stream()))

    def memcpy(self, stream: Stream, pieces: Sequence[torch.Tensor], device: int, direction: int) -> None:
        """Queue the copies between ``pieces`` on the host and memory that begins at the address ``device``."""
        queue = cast("Any", stream).native_handle
        for piece in pieces:
            host, nbytes = piece.data_ptr(), piece.nbytes
            target, source = (host, device) if direction == _DEVICE_TO_HOST else (device, host)
            error = self._memcpy_async(target, source, nbytes, direction, queue)
            if error:
                raise RuntimeError(
                    f"cudaMemcpyAsync of {nbytes} bytes failed with CUDA error {error}; where an earlier kernel has "
                    "failed, CUDA_LAUNCH_BLOCKING=1 tells which."
                )
            device += nbytes

    def page_lock(self, address: int, nbytes: int) -> None:
        with self._context():
            _call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE_AND_MAPPED)

    def page_unlock(self, address: int) -> None:
        # A finalizer calls, and has nobody to tell; after an error of the device, the driver refuses everything.
        with contextlib.suppress(PageLockError), self._context():
            _call("cuMemHostUnregister", ctypes.c_void_p(address))

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """Make the device's primary context, which is PyTorch's too, this thread's for a while."""
        _call("cuCtxPushCurrent_v2", _primary_context(self.device.index))
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def _memcpy_async() -> Callable[..., int]:
    """``cudaMemcpyAsync`` of the runtime that PyTorch is linked to: a library's symbols include those it links to."""
    function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so")).cudaMemcpyAsync
    address = ctypes.c_void_p
    function.argtypes = (address, address, ctypes.c_size_t, ctypes.c_int, address)
    return function


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver, initialised."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuInit(0)
    return library


@functools.cache
def _primary_context(index: int) -> ctypes.c_void_p:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def _call(name: str, *arguments: object) -> None:
    error = getattr(driver(), name)(*arguments)
    if error:
        text = ctypes.c_char_p()
        driver().cuGetErrorName(error, ctypes.byref(text))
        raise PageLockError(f"{name}: {(text.value or b'error %d' % error).decode()}")


class CaptureError(RuntimeError):
    """A graph cannot be captured now; the message says what to do first."""


def current_capture() -> int | None:
    """The number of the CUDA graph capture that the current stream is part of, if any; no two have the same."""
    if not _capturing():
        return None
    status, identity = ctypes.c_int(), ctypes.c_uint64()
    answers, stream = map(ctypes.byref, (status, identity)), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = driver().cuStreamGetCaptureInfo_v2(stream, *answers, None, None, None)
    if error:
        raise CaptureError(f"the CUDA driver refused a call on the graph under capture with error {error}")
    return identity.value


def is_capturing(stream: Stream) -> bool:
    """Whether ``stream`` is part of a CUDA graph capture."""
    if not _capturing():
        return False
    with cast("torch.Stream", stream):
        return _capturing()


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
