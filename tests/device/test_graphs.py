"""Whose host memory is whose while CUDA graphs live. Captures and the driver are pretended, so no GPU is needed."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offload
from offload.activations import copies as under_test
from offload.activations.copies import Transfers
from offload.device import cuda as cuda_device
from offload.device import cuda as graphs
from offload.device.cuda import CaptureError, current_capture, is_capturing
from offload.host import pool as host_pool
from offload.host.pool import BUFFER_ALIGNMENT_BYTES, HostBuffer, HostPool

KIB = 1024


class Driver:
    """Pretends captures by number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: int | None = None
        monkeypatch.setattr(host_pool, "current_capture", lambda: self.now)

    @contextmanager
    def capture(self, number: int) -> Iterator[None]:
        self.now = number
        try:
            yield
        finally:
            self.now = None


class Event:
    """An event that must not be asked during a capture."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.reached = False

    def query(self) -> bool:
        assert self._driver.now is None, "a query would break the capture"
        return self.reached

    def synchronize(self) -> None:
        assert self._driver.now is None, "a synchronization would break the capture"
        self.reached = True


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def host_memory(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def pool() -> HostPool:
    return HostPool(host_memory)


def blocks(buffer: HostBuffer) -> set[tuple[int, int]]:
    """The aligned blocks of memory under a buffer."""
    return {
        (piece.slab.data_ptr(), start)
        for piece in buffer.ranges
        for start in range(piece.start, piece.start + piece.nbytes, BUFFER_ALIGNMENT_BYTES)
    }


def warm_up(pool: HostPool, *sizes: int, event: Any = None) -> None:
    """An eager step that has buffers of these sizes at once."""
    for buffer in [pool.take(nbytes) for nbytes in sizes]:
        pool.give(buffer, event)


def test_a_capture_reuses_what_it_gave_back(pool: HostPool, driver: Driver) -> None:
    warm_up(pool, KIB)
    event = Event(driver)
    with driver.capture(1):
        first = pool.take(KIB)
        pool.give(first, event)
        again = pool.take(KIB)
    assert again is first
    assert again.events == (event,), "the graph itself must wait for its own earlier copy"


def test_missing_memory_is_an_error_that_says_how_much_and_what_to_do(pool: HostPool, driver: Driver) -> None:
    warm_up(pool, 4 * KIB)
    with driver.capture(1):
        pool.take(3 * KIB)
        with pytest.raises(
            CaptureError,
            match=r"^7168 bytes of pinned host memory are missing, and none can be added while a CUDA graph is "
            r"being captured; run one step as a warm-up before the capture\.$",
        ):
            pool.take(8 * KIB)
    assert pool.pinned_bytes == 4 * KIB


class TestEvents:
    def test_of_eager_steps_are_dropped_when_a_capture_takes_the_buffer(self, pool: HostPool, driver: Driver) -> None:
        """A capture begins on an idle device, and could not wait for what was recorded outside of it."""
        warm_up(pool, KIB, 512, 512, event=Event(driver))
        with driver.capture(1):
            assert pool.take(KIB).events == pool.take(640).events == ()

    def test_stay_with_what_the_capture_leaves_over(self, pool: HostPool, driver: Driver) -> None:
        event = Event(driver)
        warm_up(pool, 4 * KIB, event=event)
        with driver.capture(1):
            pool.take(KIB)
        assert pool.take(3 * KIB).events == (event,)


def test_reading_in_a_capture_what_was_written_outside_is_refused(pool: HostPool, driver: Driver) -> None:
    eager = pool.take(KIB)
    with (
        driver.capture(1),
        pytest.raises(CaptureError, match=r"its forward ran outside of a capture; capture both, in one graph or"),
    ):
        pool.read(eager)


STEP = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 3), st.sampled_from([512, 700, 1024, 3000])),
    st.tuples(st.just("give"), st.integers(0, 3), st.integers(0, 9)),
)


@given(st.lists(STEP, max_size=40))
def test_no_memory_ever_has_two_owners(steps: list[tuple[str, int, int]]) -> None:
    """Owner 0 is eager code, the others are graphs. A graph owns all it ever took."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        driver, pool = Driver(monkeypatch), HostPool(host_memory)
        pool.reserve(64 * KIB)
        held: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        owned: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        for what, owner, number in steps:
            if what == "take":
                with driver.capture(owner) if owner else no_capture():
                    try:
                        buffer = pool.take(number)
                    except CaptureError:
                        continue
                for other, memory in owned.items():
                    assert other == owner or not memory & blocks(buffer)
                assert not any(blocks(buffer) & blocks(mine) for mine in held[owner])
                held[owner].append(buffer)
                owned[owner] |= blocks(buffer)
            elif what == "give" and held[owner]:
                buffer = held[owner].pop(number % len(held[owner]))
                pool.give(buffer, Event(driver))
                if not owner:
                    owned[owner] -= blocks(buffer)
        pool.take(1)
        alive = sum(len(memory) for memory in owned.values()) * BUFFER_ALIGNMENT_BYTES
        assert pool.used_bytes <= alive + 1


@contextmanager
def no_capture() -> Iterator[None]:
    yield


class FakeCuda:
    """The driver."""

    def __init__(self, error: int = 0) -> None:
        self.error = error

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, identity: Any, *_: Any) -> int:  # noqa: N802  # the driver's name
        status._obj.value, identity._obj.value = 1, 42
        return self.error


class TestCurrentCapture:
    def test_is_what_the_driver_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_device, "driver", FakeCuda)
        monkeypatch.setattr(graphs, "_capturing", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
        assert current_capture() == 42
        monkeypatch.setattr(cuda_device, "driver", lambda: FakeCuda(error=901))
        with pytest.raises(CaptureError, match="refused a call on the graph under capture with error 901"):
            current_capture()

    def test_another_stream_s_state_is_asked_on_that_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        current = ["compute"]
        monkeypatch.setattr(graphs, "_capturing", lambda: current[-1] in ("compute", "d2h"))

        @contextmanager
        def stream(name: str) -> Iterator[None]:
            current.append(name)
            yield
            current.pop()

        assert is_capturing(stream("d2h"))
        assert not is_capturing(stream("h2d"))


class FakeStream:
    """A stream that notes who waits for whom."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[str] = []

    def record_event(self) -> str:
        return self.name

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


class TestJoin:
    """Every stream that a capture forked is joined before it can end."""

    @staticmethod
    def transfers(compute: FakeStream, d2h: FakeStream, h2d: FakeStream) -> Transfers:
        backend: Any = SimpleNamespace(compute_stream=lambda: compute, copy_streams=(d2h, h2d))
        return Transfers(backend, HostPool(host_memory))

    def test_waits_once_for_each_stream_that_was_forked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for capturing in ([], ["d2h"], ["h2d"], ["d2h", "h2d"]):
            monkeypatch.setattr(under_test, "is_capturing", lambda stream, names=capturing: stream.name in names)
            compute, d2h = FakeStream("compute"), FakeStream("d2h")
            self.transfers(compute, d2h, FakeStream("h2d")).join()
            assert sorted(compute.waited) == capturing

    def test_before_an_error_about_missing_memory_leaves(self, monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
        monkeypatch.setattr(under_test, "is_capturing", lambda stream: stream.name == "d2h")
        compute = FakeStream("compute")
        moving = self.transfers(compute, FakeStream("d2h"), FakeStream("h2d"))
        with driver.capture(1), pytest.raises(CaptureError):
            moving.to_host(torch.empty(KIB).untyped_storage(), KIB, "ready", layer=0)
        assert compute.waited == ["d2h"]

    @pytest.mark.parametrize("failing", [None, 1])
    def test_after_the_last_forward_and_after_one_that_fails(
        self, monkeypatch: pytest.MonkeyPatch, failing: int | None
    ) -> None:
        begun: list[int] = []
        joined_after: list[int] = []
        monkeypatch.setattr(Transfers, "join", lambda _: joined_after.append(begun[-1]))

        class Layer(nn.Linear):
            def __init__(self, number: int) -> None:
                super().__init__(64, 64)
                self.number = number

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                begun.append(self.number)
                if self.number == failing:
                    raise RuntimeError("as told")
                return super().forward(x)

        layers = nn.Sequential(*map(Layer, range(3)))
        with offload.offload_layers(layers, 1, min_bytes=1, device="cpu"):
            if failing is None:
                layers(torch.ones(4, 64)).sum().backward()
            else:
                with pytest.raises(RuntimeError, match="as told"):
                    layers(torch.ones(4, 64))
        assert joined_after == [2 if failing is None else failing]
