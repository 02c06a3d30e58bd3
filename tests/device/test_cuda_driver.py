"""Calls of the CUDA driver: in the right context, which is left again, with errors by their names."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from offload.device import cuda
from offload.device.backend import PageLockError


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


def test_a_range_is_registered_in_its_device_s_context(library: Library) -> None:
    address = 1 << 46
    cuda.register(address, 1 << 33, 2)
    assert library.registered == {address: (1 << 33, 102)}
    cuda.unregister(address, 2)
    assert library.registered == {}
    assert library.retained == [2]


def test_an_error_has_the_driver_s_name(library: Library) -> None:
    cuda.register(4096, 4096, 0)
    with pytest.raises(PageLockError, match="cuMemHostRegister_v2: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"):
        cuda.register(4096, 4096, 0)


def test_an_error_without_a_name_has_its_number(library: Library) -> None:
    with pytest.raises(PageLockError, match="cuMemHostUnregister: error 713"):
        cuda.unregister(4096, 0)
