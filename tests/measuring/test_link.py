"""The link: what both directions share, and the measurement through the library's own streams."""

import functools
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.device.select import get_backend
from offload.measuring import measure_link as measure
from offload.measuring.measure_link import measure_link
from offload.planning.profile import Link

rates = st.floats(1e7, 1e12)


class TestRates:
    LINK = Link(60e9, 40e9, 50e9)

    def test_one_direction_has_the_link_to_itself(self):
        assert self.LINK.rates(d2h=True, h2d=False) == (60e9, 0)
        assert self.LINK.rates(d2h=False, h2d=True) == (0, 40e9)
        assert self.LINK.rates(d2h=False, h2d=False) == (0, 0)

    def test_both_share_in_proportion(self):
        assert self.LINK.rates(d2h=True, h2d=True) == pytest.approx((30e9, 20e9))

    def test_neither_is_faster_than_alone(self):
        assert Link(60e9, 40e9, 900e9).rates(d2h=True, h2d=True) == (60e9, 40e9)

    @given(rates, rates, rates)
    def test_sum_is_the_duplex_bandwidth_if_that_is_the_limit(self, d2h, h2d, duplex):
        both = sum(Link(d2h, h2d, duplex).rates(d2h=True, h2d=True))
        assert both == pytest.approx(min(duplex, d2h + h2d))


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_refuses(value):
    text = r"h2d_bytes_per_s must be a positive, finite number \(bytes per second\), got "
    with pytest.raises(ValueError, match=f"^{text}{value!r}$"):
        Link(1.0, value, 1.0)


def test_refuses_a_factor_in_place_of_a_bandwidth():
    with pytest.raises(ValueError, match=r"^duplex_bytes_per_s must be .*, got 1 for a link of 1e\+09 alone; "):
        Link(1e9, 1e9, 1.0)
    assert Link(1e9, 5e9, 1e4).duplex_bytes_per_s == 1e4


def test_str():
    assert str(Link(55.4e9, 55.5e9, 101.6e9, "cuda:0")) == "cuda:0: d2h 55.4, h2d 55.5, both 101.6 GB/s"


class Clock:
    """Time that passes with each copy, by the stream that it goes to."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def copy(self, stream, target, source):
        self.now += self.seconds[stream]


def copies_meet(monkeypatch, patience_s):
    """Whether, where both directions are measured at once, each copy can wait until one of the other direction runs."""
    backend = get_backend("cpu")
    copy, copy_s = backend.copy, measure._copy_s
    meeting = None
    met = []

    def wait_for_the_other(barrier):
        try:
            barrier.wait(patience_s)
        except threading.BrokenBarrierError:
            met.append(False)
        else:
            met.append(True)

    def copy_after_meeting(stream, target, source):
        if meeting is not None:
            stream.submit(functools.partial(wait_for_the_other, meeting))
        copy(stream, target, source)

    def measure_with_meetings(backend, copies, pieces):
        nonlocal meeting
        meeting = threading.Barrier(2) if len(copies) == 2 else None
        return copy_s(backend, copies, pieces)

    monkeypatch.setattr(backend, "copy", copy_after_meeting)
    monkeypatch.setattr(measure, "_copy_s", measure_with_meetings)
    measure_link("cpu")
    return all(met) and len(met) > 0


class TestMeasurement:
    PIECE = 1 << 20

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch):
        monkeypatch.setattr(measure, "PIECE_BYTES", self.PIECE)
        monkeypatch.setattr(measure, "REPEATS", 3)

    def test_on_the_cpu(self):
        assert measure_link("cpu").device == "cpu"  # a Link's rates are positive

    def test_sees_a_slow_stream(self, monkeypatch):
        """Copies go through the streams that activations use, so what slows these is measured."""
        backend = get_backend("cpu")
        d2h, h2d = backend.copy_streams
        clock = Clock({d2h: 0.02, h2d: 0.01})
        monkeypatch.setattr(measure, "time", clock)
        monkeypatch.setattr(backend, "copy", clock.copy)
        link = measure_link("cpu")
        assert link.d2h_bytes_per_s == pytest.approx(self.PIECE / 0.02)
        assert link.h2d_bytes_per_s == pytest.approx(self.PIECE / 0.01)
        assert link.duplex_bytes_per_s == pytest.approx(2 * self.PIECE / 0.03)

    def test_directions_run_beside_each_other(self, monkeypatch):
        assert copies_meet(monkeypatch, patience_s=60)

    def test_waits_for_what_compute_has_queued(self, monkeypatch):
        """Device memory comes from compute's allocator, which may hand it out while compute still uses it."""
        compute = get_backend("cpu").compute_stream()
        done = []
        compute.submit(lambda: (time.sleep(0.1), done.append(True)))
        copied_early = []
        backend = get_backend("cpu")
        copy = type(backend).copy

        def spy(self, stream, target, source, *args):
            stream.submit(lambda: copied_early.append(not done))
            copy(self, stream, target, source, *args)

        monkeypatch.setattr(type(backend), "copy", spy)
        measure_link("cpu")
        assert copied_early
        assert not any(copied_early)

    @pytest.mark.gpu
    def test_on_the_gpu(self):
        assert measure_link().device == f"cuda:{torch.cuda.current_device()}"
