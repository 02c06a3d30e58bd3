"""Streams of the CPU backend are asynchronous and in order; events are real."""

import gc
import weakref

import pytest
import torch
from lab import Lab

from offload.device.backend import Wait
from offload.device.cpu import CpuBackend, CpuStream
from offload.device.select import get_backend, resolve_device
from offload.host.page_locked import page_locked


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


@pytest.mark.gpu
def test_pinned_memory_is_pinned_and_of_exactly_the_size() -> None:
    memory = page_locked((3 << 20) + 1, get_backend("cuda"))
    assert memory.is_pinned()
    assert memory.untyped_storage().nbytes() == (3 << 20) + 1


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
