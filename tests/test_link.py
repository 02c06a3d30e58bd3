"""The link: what both directions share, and the measurement through the library's own streams."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.backend import get_backend
from offload.link import Link
from offload.measure import measure_link

rates = st.floats(1.0, 1e12)


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


def test_str():
    assert str(Link(55.4e9, 55.5e9, 101.6e9, "cuda:0")) == "cuda:0: d2h 55.4, h2d 55.5, both 101.6 GB/s"


class TestMeasurement:
    PIECE = 1 << 20

    def test_on_the_cpu(self):
        link = measure_link("cpu", piece_bytes=self.PIECE, repeats=3)
        assert link.device == "cpu"
        for rate in (link.d2h_bytes_per_s, link.h2d_bytes_per_s, link.duplex_bytes_per_s):
            assert 1e7 < rate < 1e12

    def test_sees_a_slow_stream(self, monkeypatch):
        """Copies go through the streams that activations use, so what slows these is measured."""
        d2h, h2d = get_backend("cpu").copy_streams
        monkeypatch.setattr(d2h, "delay_s", 0.02)
        monkeypatch.setattr(h2d, "delay_s", 0.01)
        link = measure_link("cpu", piece_bytes=self.PIECE, repeats=3)
        assert link.d2h_bytes_per_s < self.PIECE / 0.02
        assert link.h2d_bytes_per_s < self.PIECE / 0.01
        assert link.h2d_bytes_per_s > 1.2 * link.d2h_bytes_per_s

    def test_directions_run_beside_each_other(self, monkeypatch):
        for stream in get_backend("cpu").copy_streams:
            monkeypatch.setattr(stream, "delay_s", 0.02)
        link = measure_link("cpu", piece_bytes=self.PIECE, repeats=3)
        # One after the other they would reach no more than one direction alone.
        assert link.duplex_bytes_per_s > 1.3 * link.d2h_bytes_per_s

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
        measure_link("cpu", piece_bytes=1 << 12, repeats=1)
        assert copied_early
        assert not any(copied_early)

    @pytest.mark.gpu
    def test_on_the_gpu(self):
        measure_link()
        start = time.perf_counter()
        link = measure_link()
        assert time.perf_counter() - start < 1.0
        assert link.device == f"cuda:{torch.cuda.current_device()}"
        assert 1.3 * link.d2h_bytes_per_s < link.duplex_bytes_per_s

    @pytest.mark.parametrize("name", ["piece_bytes", "repeats"])
    def test_refuses(self, name):
        with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0$"):
            measure_link("cpu", **{name: 0})
