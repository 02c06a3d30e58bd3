"""Streams of the CPU backend are asynchronous and in order; events are real."""

import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lab import Lab

from offload import get_cpu_offload_context
from offload.device import cuda
from offload.device.backend import PageLockError, Wait
from offload.device.cpu import CpuBackend, CpuStream
from offload.device.cuda import CudaBackend
from offload.device.select import get_backend, resolve_device


@pytest.fixture(params=["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def streams(lab: Lab) -> tuple[CpuStream, CpuStream]:
    return lab.d2h_stream, lab.h2d_stream


def test_synchronize_waits_for_a_stream_of_the_programs_own(lab: Lab) -> None:
    done: list[int] = []
    mine = lab.backend.new_stream("mine")
    lab.delay(mine, 0.1)
    mine.submit(lambda: done.append(1))
    lab.backend.synchronize()
    assert done


def test_one_backend_per_device() -> None:
    backend = get_backend("cpu")
    assert isinstance(backend, CpuBackend)
    assert backend is get_backend(torch.device("cpu", 0))
    assert backend.copy_streams is backend.copy_streams
    assert len(set(backend.copy_streams)) == 2


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_default_device_without_an_accelerator() -> None:
    assert resolve_device(None) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"device must be on this machine \(cpu only\), got 'cuda:1'"):
        resolve_device("cuda:1")


@pytest.mark.gpu
def test_default_device_with_an_accelerator() -> None:
    assert resolve_device(None) == torch.device("cuda", torch.cuda.current_device())
    assert resolve_device("cuda") == resolve_device(None)
    assert not isinstance(get_backend(), CpuBackend)
    assert get_backend("cpu") is not get_backend()


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"device must be on this machine \(.*\), got 'meta'; leave it out"):
        resolve_device("meta")


class TestFailures:
    """What goes wrong in a stream comes out where the program waits for it, once, and the stream goes on."""

    def test_a_copy_that_fails(self, lab: Lab) -> None:
        source, target = torch.ones(4), torch.zeros(4)
        before = lab.d2h_stream.record_event()
        lab.backend.copy(lab.d2h_stream, torch.zeros(3), source)
        after = lab.d2h_stream.record_event()
        before.synchronize()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"a copy has failed: RuntimeError: .* size of tensor"):
                lab.backend.wait(lab.backend.compute_stream(), after, Wait.RELEASE)
        lab.backend.copy(lab.d2h_stream, target, source)
        lab.d2h_stream.synchronize()
        assert torch.equal(target, source)

    def test_events_of_later_work_fail_as_well(self, lab: Lab) -> None:
        """Copies run in order, so the program waits only for the last of several."""
        lab.backend.copy(lab.d2h_stream, torch.zeros(3), torch.ones(4))
        lab.d2h_stream.record_event()
        lab.backend.copy(lab.d2h_stream, torch.zeros(4), torch.ones(4))
        with pytest.raises(RuntimeError, match=r"a copy has failed: RuntimeError: .* size of tensor"):
            lab.d2h_stream.synchronize()
        lab.drain()

    def test_streams_fail_together_until_the_program_knows(self, lab: Lab) -> None:
        lab.backend.copy(lab.d2h_stream, torch.zeros(3), torch.ones(4))
        failed = lab.d2h_stream.record_event()
        lab.h2d_stream.wait_event(failed)
        with pytest.raises(RuntimeError, match=r"a copy has failed: RuntimeError: .* size of tensor"):
            lab.h2d_stream.synchronize()
        # What comes next may have to be in order with the failed copy, but does not use what it should have written.
        lab.h2d_stream.wait_event(failed)
        lab.drain()

    def test_a_finalizer_waits_without_an_error(self, lab: Lab) -> None:
        lab.backend.copy(lab.h2d_stream, torch.zeros(3), torch.ones(4))
        failed = lab.h2d_stream.record_event()
        lab.backend.wait(lab.backend.compute_stream(), failed, Wait.UNREAD)
        assert failed.query()
        with pytest.raises(RuntimeError, match=r"a copy has failed: RuntimeError: .* size of tensor"):
            lab.drain()


def test_the_error_of_an_event_holds_no_tensors(streams: tuple[CpuStream, CpuStream]) -> None:
    stream, _ = streams
    held: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        tensor = torch.ones(1)
        held.append(weakref.ref(tensor))
        raise OSError("no")

    stream.submit(fail)
    event = stream.record_event()
    with pytest.raises(RuntimeError, match="a copy has failed: OSError: no"):
        event.synchronize()
    stream.synchronize()  # what is queued next has another list of errors
    gc.collect()
    assert isinstance(event.error, OSError)
    assert held[0]() is None


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


def test_garbage_that_a_copy_streams_thread_collects_does_not_wait_for_that_thread(lab: Lab) -> None:
    """Python collects it in whichever thread allocates next; memory that is still to be copied waits for the copy."""
    context, sync = get_cpu_offload_context(True, 1, 3, min_bytes=0, device="cpu")
    begin, cycle = threading.Event(), list[object]()
    gc.collect()
    gc.disable()
    try:
        lab.d2h_stream.submit(lambda: (begin.wait(), gc.collect()))
        with context:
            y = torch.rand(8, requires_grad=True).exp()
        cycle += [cycle, sync(y)]
        seen = weakref.ref(y)
        del y, cycle
        begin.set()
        assert lab.d2h_stream.record_event().wait(10)
        assert seen() is None
    finally:
        gc.enable()
