"""How the pages say what was measured: times, sizes, shares, the machine."""

from collections.abc import Mapping
from typing import Any

GIB = 1 << 30
GB = 1e9


def ms(seconds: float, digits: int = 0) -> str:
    """Milliseconds, without the unit."""
    return f"{seconds * 1e3:,.{digits}f}"


def gib(nbytes: float, digits: int = 2) -> str:
    """GiB, without the unit."""
    return f"{nbytes / GIB:.{digits}f}"


def gib1(nbytes: float) -> str:
    """GiB with one digit."""
    return gib(nbytes, 1)


def gb(nbytes: float) -> str:
    """``gb(1.5e9)`` is ``"1.5 GB"``."""
    return f"{nbytes / GB:.1f} GB"


def percent(share: float) -> str:
    """One digit, and no minus before zero."""
    return f"{round(100 * share, 1) + 0.0:.1f}%".replace("-", "−")


def more(ratio: float) -> str:
    """``1.0004`` is ``+0.0%``, and ``0.9`` is ``−10.0%``, with a minus sign."""
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f}%".replace("-", "−")


def way_of(what: str) -> str:
    """A way to run a step as the pages name it: that of records in which nothing is offloaded, and any other."""
    return "keep all" if what == "nothing" else what


def torch_of(record: Mapping[str, Any]) -> str:
    """PyTorch's version in a record, without what it was built for."""
    version: str = record["versions"]["torch"]
    return f"torch {version.partition('+')[0]}"


def day_of(run: Mapping[str, Any]) -> str:
    """When it was measured."""
    date: str = run["date"]
    return date.partition("T")[0]


def link_of(link: Mapping[str, float]) -> str:
    """The link's bandwidth in both directions."""
    d2h, h2d = (f"{link[f'{name}_bytes_per_s'] / GB:.0f}" for name in ("d2h", "h2d"))
    return f"link {d2h} GB/s to the host and {h2d} GB/s to the GPU"
