"""Timelines: their figures, the table, the Chrome trace and the plot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.base.checks import format_bytes, format_s, parse_bytes
from offload.observe.timeline import Span, Timeline, merged


@pytest.fixture
def timeline() -> Timeline:
    """Ten seconds of compute with a stall in the middle; a copy each way, half of one beside the stall."""
    return Timeline(
        (
            Span("compute", "backward", 6.0, 10.0, "B0", 0),
            Span("compute", "forward", 0.0, 4.0, "F0", 0),
            Span("compute", "stall", 4.0, 6.0, "wait for offload 0", 0),
            Span("d2h", "offload", 2.0, 6.0, "offload 0", 0, 400),
            Span("h2d", "reload", 6.0, 8.0, "reload 0", 0, 400),
        ),
        ((0.0, 0), (1.0, 400), (6.0, 0), (7.0, 300)),
        "one of one",
    )


class TestFigures:
    def test_of_a_known_timeline(self, timeline):
        assert timeline.duration_s == 10.0
        assert timeline.stall_s == 2.0
        assert timeline.busy_s("compute") == 8.0
        late = Timeline((*timeline.spans, Span("compute", "late", 10.0, 11.0)))
        assert (late.busy_s("compute"), late.late_s) == (8.0, 1.0)
        assert timeline.busy_s("d2h") == 4.0
        assert timeline.copied_bytes("d2h") == 400
        assert timeline.copied_bytes("compute") == 0
        assert timeline.overlap == pytest.approx(4 / 6)  # 2 of 4 s out, 2 of 2 s back
        assert timeline.peak_bytes == 400

    def test_spans_are_sorted_and_overlapping_ones_count_once(self, timeline):
        starts = [span.start_s for span in timeline.spans]
        assert starts == sorted(starts)
        assert [span.label for span in timeline.lane("compute")] == ["F0", "wait for offload 0", "B0"]
        spans = (Span("d2h", "offload", 0.0, 2.0), Span("d2h", "offload", 1.0, 3.0), Span("d2h", "offload", 1.0, 2.0))
        assert Timeline(spans).busy_s("d2h") == 3.0
        inside = (Span("d2h", "offload", 0.0, 4.0), Span("d2h", "offload", 1.0, 2.0))
        assert Timeline(inside).duration_s == 4.0
        assert Timeline((*inside, Span("d2h", "offload", 3.0, 5.0))).busy_s("d2h") == 5.0
        (one,) = merged((*inside, Span("d2h", "offload", 3.0, 4.0)), lambda _: 0.0)
        assert one.end_s == 4.0
        recorded = Timeline((Span("compute", "forward", 100.0, 101.0), Span("compute", "backward", 102.0, 104.0)))
        assert (recorded.start_s, recorded.duration_s) == (100.0, 4.0)

    def test_empty(self):
        empty = Timeline(())
        assert (empty.duration_s, empty.stall_s, empty.overlap, empty.peak_bytes) == (0.0, 0.0, 1.0, 0)
        assert "step 0 s" in str(empty)


def test_table(timeline):
    assert str(timeline).splitlines() == [
        "one of one",
        "stream        busy  of step      copied    GB/s",
        "compute     8.00 s      80%",
        "d2h         4.00 s      40%       400 B     0.0",
        "h2d         2.00 s      20%       400 B     0.0",
        "step 10.0 s, stalled 2.00 s, 67% of the copies beside compute, peak 400 B",
    ]
    assert repr(timeline) == "<Timeline 'one of one': 10.0 s, stalled 2.00 s, overlap 67%, peak 400 B>"


@pytest.mark.slow
class TestPlot:
    @pytest.fixture(autouse=True)
    def _matplotlib(self):
        pytest.importorskip("matplotlib")

    def test_background_is_transparent_and_no_figure_is_left_open(self, timeline):
        import matplotlib.pyplot as plt

        before = plt.get_fignums()
        figure = timeline.plot()
        assert plt.get_fignums() == before
        assert figure.get_facecolor()[3] == 0
        assert all(ax.get_facecolor()[3] == 0 for ax in figure.axes)

    def test_draws_into_given_axes(self, timeline):
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, 2)
        assert timeline.plot(axes[1], title="mine") is figure
        assert len(axes[1].patches) == 5
        assert not axes[0].patches
        assert axes[1].get_title(loc="left") == "mine"
        plt.close(figure)


def test_units():
    assert [format_bytes(n) for n in (0, 1023, 1 << 10, 3 << 29)] == ["0 B", "1023 B", "1.00 KiB", "1.50 GiB"]
    assert format_bytes(200 << 30) == "200.0 GiB"
    assert [format_s(t) for t in (0, 1.5e-8, 2e-5, 0.0123, 1.5)] == ["0 s", "0.01 µs", "20.0 µs", "12.3 ms", "1.50 s"]


@given(st.integers(0, 10**15))
def test_a_size_parses_back_within_a_hundredth(nbytes):
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.01)
