"""What the library asks of the CUDA driver itself, through ``ctypes``, which lets other threads of Python go on.

A call of the driver that fails leaves nothing behind. One of the CUDA runtime stays its *last error*, and PyTorch
would report it after the next kernel that it launches.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

_PORTABLE_AND_MAPPED = 0x1 | 0x2


class CudaDriverError(RuntimeError):
    """The driver refused a call; the text is the call and the name of the error."""


@functools.cache
def library() -> ctypes.CDLL:
    """The driver, initialised."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    return driver


def register(address: int, nbytes: int, device: int) -> None:
    """Page-lock a range of host memory for copies to and from every device.

    Raises:
        CudaDriverError: The driver refused; the range is as before.
    """
    with _context_of(device):
        _call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE_AND_MAPPED)


def unregister(address: int, device: int) -> None:
    """Undo :func:`register`."""
    with _context_of(device):
        _call("cuMemHostUnregister", ctypes.c_void_p(address))


@contextmanager
def _context_of(device: int) -> Iterator[None]:
    """Make the device's primary context, which is PyTorch's too, this thread's for a while."""
    _call("cuCtxPushCurrent_v2", _primary_context(device))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(device))
    return context


def _device(index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), index)
    return device


def _call(name: str, *arguments: object) -> None:
    error = getattr(library(), name)(*arguments)
    if error:
        text = ctypes.c_char_p()
        library().cuGetErrorName(error, ctypes.byref(text))
        raise CudaDriverError(f"{name}: {(text.value or b'error %d' % error).decode()}")
