"""Streams of the CPU backend are asynchronous and in order; events are real."""

import gc
import threading
import weakref
from types import SimpleNamespace

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


def test_a_stream_runs_in_order_and_beside_its_caller(streams: tuple[CpuStream, CpuStream]) -> None:
    stream, _ = streams
    gate, done = threading.Event(), []
    stream.submit(gate.wait)
    for number in range(3):
        stream.submit(lambda number=number: done.append(number))
    event = stream.record_event()
    assert not done
    assert not event.query()
    gate.set()
    event.synchronize()
    assert done == [0, 1, 2]
    assert event.query()


def test_streams_run_beside_each_other(streams: tuple[CpuStream, CpuStream]) -> None:
    one, two = streams
    gate = threading.Event()
    one.submit(gate.wait)
    two.submit(gate.set)  # would never run behind the other
    one.synchronize()


def test_a_stream_waits_for_an_event_of_another(streams: tuple[CpuStream, CpuStream]) -> None:
    one, two = streams
    gate, done = threading.Event(), []
    one.submit(gate.wait)
    one.submit(lambda: done.append("one"))
    two.wait_event(one.record_event())
    two.submit(lambda: done.append("two"))
    gate.set()
    two.synchronize()
    assert done == ["one", "two"]


def test_synchronize_waits_for_a_stream_of_the_programs_own(lab: Lab) -> None:
    done: list[int] = []
    mine = lab.backend.new_stream("mine")
    lab.delay(mine, 0.1)
    mine.submit(lambda: done.append(1))
    lab.backend.synchronize()
    assert done


def test_an_event_marks_the_work_before_it_only(streams: tuple[CpuStream, CpuStream]) -> None:
    stream, _ = streams
    event = stream.record_event()
    gate = threading.Event()
    stream.submit(gate.wait)
    event.synchronize()
    gate.set()


def test_delay_comes_before_each_piece_of_work(
    lab: Lab, streams: tuple[CpuStream, CpuStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, _ = streams
    source, target = torch.ones(4), torch.zeros(4)
    gate = threading.Event()
    monkeypatch.setattr("offload.device.cpu.time", SimpleNamespace(sleep=lambda _: gate.wait(), perf_counter=float))
    lab.slow(d2h_s=0.05)
    lab.backend.copy(stream, target, source)
    source.fill_(7)
    gate.set()
    lab.drain()
    assert torch.equal(target, torch.full((4,), 7.0))


def test_compute_waits_for_a_copy_by_blocking_the_caller(lab: Lab) -> None:
    source, target = torch.ones(4), torch.zeros(4)
    lab.slow(d2h_s=0.02)
    lab.backend.copy(lab.d2h_stream, target, source)
    lab.backend.wait(lab.backend.compute_stream(), lab.d2h_stream.record_event(), Wait.RELEASE)
    assert torch.equal(target, source)


def test_compute_can_be_late(lab: Lab) -> None:
    tensor, target = torch.zeros(4), torch.zeros(4)
    lab.write_late(tensor, 3.0, delay_s=0.02)
    lab.d2h_stream.wait_event(lab.backend.compute_stream().record_event())
    assert not tensor.any()
    lab.backend.copy(lab.d2h_stream, target, tensor)
    lab.d2h_stream.synchronize()
    assert torch.equal(target, torch.full((4,), 3.0))


def test_poison_overwrites_what_nobody_else_holds(lab: Lab) -> None:
    lab.backend.poison = True
    alone, shared = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    other = shared[1:]
    lab.backend.discard(alone)
    lab.backend.discard(shared)
    assert torch.equal(alone, torch.full((4,), 255, dtype=torch.uint8))
    assert not other.any()


def test_nothing_is_poisoned_unless_asked(lab: Lab) -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    lab.backend.discard(tensor)
    assert not tensor.any()


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
