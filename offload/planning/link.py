"""What connects device and host, and how fast it is.

How many layers can be offloaded for free depends on nothing else as much as on this. The link
is full duplex: both directions at once move almost twice the bytes of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.base.checks import check_number, check_type


@dataclass(frozen=True)
class Link:
    """Bandwidth between device and host memory.

    Args:
        d2h_bytes_per_s: Device to host, alone.
        h2d_bytes_per_s: Host to device, alone.
        duplex_bytes_per_s: Sum of both directions while both are busy.
        device: What was measured, for people.

    Raises:
        ValueError: A bandwidth is not a positive, finite number, or both directions together have less than a
            millionth of one alone.
    """

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    duplex_bytes_per_s: float
    device: str = ""

    def __post_init__(self) -> None:
        for name in ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_bytes_per_s"):
            check_number(name, getattr(self, name), positive=True, unit="bytes per second")
        slower = min(self.d2h_bytes_per_s, self.h2d_bytes_per_s)
        if self.duplex_bytes_per_s < slower / 1e6:  # a factor; measured ones can be far below one alone
            raise ValueError(
                "duplex_bytes_per_s must be the bytes per second of both directions together, got "
                f"{self.duplex_bytes_per_s:g} for a link of {slower:g} alone; if unknown, write {2 * slower:g}."
            )

    def rates(self, *, d2h: bool, h2d: bool) -> tuple[float, float]:
        """Bytes per second of the d2h and the h2d stream, of which the given ones are busy.

        Both at once share the duplex bandwidth in the proportion of what each reaches alone, and
        neither is faster than alone.
        """
        if not (d2h and h2d):
            return (self.d2h_bytes_per_s * d2h, self.h2d_bytes_per_s * h2d)
        share = min(1.0, self.duplex_bytes_per_s / (self.d2h_bytes_per_s + self.h2d_bytes_per_s))
        return (self.d2h_bytes_per_s * share, self.h2d_bytes_per_s * share)

    def __str__(self) -> str:
        rates = (self.d2h_bytes_per_s, self.h2d_bytes_per_s, self.duplex_bytes_per_s)
        d2h, h2d, duplex = (f"{rate / 1e9:.1f}" for rate in rates)
        return f"{self.device or 'link'}: d2h {d2h}, h2d {h2d}, both {duplex} GB/s"


def check_link(link: object) -> None:
    """Raise a ``TypeError`` for what is no link."""
    check_type("link", link, Link, "a Link, such as measure_link() gives or Link(55e9, 55e9, 100e9) says")
