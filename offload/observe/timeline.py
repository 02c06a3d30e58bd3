"""Timelines, as data: what the compute, d2h and h2d streams did when, and the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.base.checks import format_bytes, format_s
from offload.observe.plot import plot_timeline
from offload.observe.spans import COPY_LANES, LANES, WAITING, Lane, Span, covered_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Timeline:
    """The spans of one step, and its memory over time.

    Args:
        spans: In any order; they are kept sorted by start.
        memory: ``(seconds, bytes on the device from then on)``.
        title: A line for the table and the plot.
    """

    spans: tuple[Span, ...]
    memory: tuple[tuple[float, int], ...] = ()
    title: str = ""

    def __post_init__(self) -> None:
        spans = sorted(self.spans, key=lambda span: (span.start_s, span.end_s))
        memory = sorted(self.memory, key=lambda sample: sample[0])
        object.__setattr__(self, "spans", tuple(spans))
        object.__setattr__(self, "memory", tuple(memory))

    def lane(self, lane: Lane) -> tuple[Span, ...]:
        """The spans of one stream, by start."""
        return tuple(span for span in self.spans if span.lane == lane)

    @property
    def start_s(self) -> float:
        """When the first span starts."""
        return self.spans[0].start_s if self.spans else 0.0

    @property
    def duration_s(self) -> float:
        """Seconds from the first span's start to the last one's end."""
        return max((span.end_s for span in self.spans), default=0.0) - self.start_s

    @property
    def stall_s(self) -> float:
        """Seconds that the compute stream waited for copies."""
        return covered_s(span for span in self.spans if span.kind == "stall")

    @property
    def late_s(self) -> float:
        """Seconds that the compute stream waited for the host, which had not queued more."""
        return covered_s(span for span in self.spans if span.kind == "late")

    def busy_s(self, *lanes: Lane) -> float:
        """Seconds in which the stream, or one of several, did something; waiting does not count."""
        return covered_s(span for span in self.spans if span.lane in lanes and span.kind not in WAITING)

    def copied_bytes(self, lane: Lane) -> int:
        """Bytes that the stream copied."""
        return sum(span.nbytes for span in self.lane(lane))

    @property
    def overlap(self) -> float:
        """Fraction of the copies' time that ran beside busy compute, 0 to 1; 1 where nothing was copied."""
        copies_s = sum(self.busy_s(lane) for lane in COPY_LANES)
        beside_s = sum(self.busy_s(lane) + self.busy_s("compute") - self.busy_s(lane, "compute") for lane in COPY_LANES)
        return max(0.0, beside_s / copies_s) if copies_s else 1.0  # a difference of sums may be rounded to less

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were on the device at once."""
        return max((nbytes for _, nbytes in self.memory), default=0)

    def plot(
        self, ax: Axes | None = None, *, title: str | None = None, size: tuple[float, float] = (9.0, 3.8)
    ) -> Figure:
        """Draw the three streams, labelled by layer, with stalls hatched, and the memory curve below.

        The figure is readable on light and dark pages. In a notebook it shows itself; in a script call its ``savefig``.

        Args:
            ax: Draw the streams here, without the memory curve; a new figure if left out.
            title: In place of the timeline's own.
            size: Inches of the new figure.
        """
        return plot_timeline(self.spans, self.memory, self.title if title is None else title, ax, size)

    def __repr__(self) -> str:
        return (
            f"<Timeline {self.title!r}: {format_s(self.duration_s)}, stalled {format_s(self.stall_s)}, "
            f"overlap {self.overlap:.0%}, peak {format_bytes(self.peak_bytes)}>"
        )

    def __str__(self) -> str:
        """A small table: what each stream did for how long, and the step's figures."""
        lines = [f"{'stream':<8}{'busy':>10}{'of step':>9}{'copied':>12}{'GB/s':>8}"]
        for lane in LANES:
            busy_s, copied = self.busy_s(lane), self.copied_bytes(lane)
            line = f"{lane:<8}{format_s(busy_s):>10}{busy_s / (self.duration_s or 1.0):>9.0%}"
            if copied and busy_s:
                line += f"{format_bytes(copied):>12}{copied / busy_s / 1e9:>8.1f}"
            lines.append(line)
        lines.append(
            f"step {format_s(self.duration_s)}, stalled {format_s(self.stall_s)}, "
            f"{self.overlap:.0%} of the copies beside compute, peak {format_bytes(self.peak_bytes)}"
        )
        return "\n".join([self.title] * bool(self.title) + lines)
