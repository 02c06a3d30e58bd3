"""Bytes and seconds as people read them."""

from __future__ import annotations


def format_bytes(nbytes: float) -> str:
    """``format_bytes(3 << 29)`` is ``"1.50 GiB"``; three or more significant digits, unit of 1024."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(nbytes) >= 1024**power:
            scaled = nbytes / 1024**power
            return f"{scaled:.{2 if abs(scaled) < 100 else 1}f} {unit}"
    return f"{nbytes:.0f} B"


def format_s(seconds: float) -> str:
    """``format_s(0.0123)`` is ``"12.3 ms"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale:
            scaled = seconds / scale
            return f"{scaled:.{2 if abs(scaled) < 10 else 1}f} {unit}"
    return f"{seconds * 1e6:.2f} µs" if seconds else "0 s"
