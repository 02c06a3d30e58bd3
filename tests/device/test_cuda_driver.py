"""Calls of the CUDA driver: in the right context, which is left again, with errors by their names."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offload.device import cuda
from offload.device.backend import PageLockError
from offload.device.cuda import CudaBackend


class Library:
    """Pretends the driver, with contexts as a stack; a context's address is 100 and its device's number."""

    def __init__(self) -> None:
        self.stack: list[int] = []
        self.registered: dict[int, tuple[int, int]] = {}
        self.retained: list[int] = []

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802  # the driver's name, here and below
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:  # noqa: N802
        context._obj.value = 100 + device.value
        self.retained.append(device.value)
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.stack.append(context.value or 0)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.stack.pop()
        return 0

    def cuMemHostRegister_v2(self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t, flags: int) -> int:  # noqa: N802
        assert flags == 3
        if address.value in self.registered:
            return 712
        self.registered[address.value or 0] = (nbytes.value, self.stack[-1])
        return 0

    def cuMemHostUnregister(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        return 0 if self.stack and self.registered.pop(address.value or 0, None) else 713

    def cuGetErrorName(self, error: int, text: Any) -> int:  # noqa: N802
        names = {712: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"}
        text._obj.value = names.get(error)
        return 0 if error in names else 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(cuda, "driver", lambda: made)
    cuda._primary_context.cache_clear()
    yield made
    cuda._primary_context.cache_clear()
    assert made.stack == [], "the thread's context is not what it was"


def on_device(index: int) -> CudaBackend:
    """A backend that asks the driver, made without the device."""
    made = CudaBackend.__new__(CudaBackend)
    made.device = torch.device("cuda", index)
    return made


def test_a_range_is_registered_in_its_device_s_context(library: Library) -> None:
    address = 1 << 46
    on_device(2).page_lock(address, 1 << 33)
    assert library.registered == {address: (1 << 33, 102)}
    on_device(2).page_unlock(address)
    assert library.registered == {}
    assert library.retained == [2]


def test_an_error_has_the_driver_s_name(library: Library) -> None:
    on_device(0).page_lock(4096, 4096)
    with pytest.raises(PageLockError, match="cuMemHostRegister_v2: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"):
        on_device(0).page_lock(4096, 4096)


def test_an_error_without_a_name_has_its_number(library: Library) -> None:
    with pytest.raises(PageLockError, match="cuMemHostUnregister: error 713"):
        cuda._call("cuMemHostUnregister", ctypes.c_void_p(4096))
    on_device(0).page_unlock(4096)  # a finalizer has nobody to tell
