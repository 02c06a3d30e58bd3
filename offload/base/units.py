"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import re

_BYTES: dict[str, int] = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(value: int | str, name: str = "value") -> int:
    """A number of bytes from an int or from a text such as ``"40GiB"``, ``"1.5 GiB"`` or ``"512MB"``.

    Args:
        value: What the user gave; KiB to TiB count in 1024, KB to TB in 1000.
        name: The argument's name, for the error message.

    Raises:
        TypeError: ``value`` is neither an int nor a str.
        ValueError: ``value`` is negative, or a text of another form.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} must be an int (bytes) or a text such as '40GiB', got {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{name} must be at least 0 bytes, got {value}")
        return value
    match = _TEXT.fullmatch(value)
    if match is None or match[2] not in _BYTES:
        raise ValueError(
            f"{name} must be a number and a unit, such as '40GiB', got {value!r}; units are {', '.join(_BYTES)}"
        )
    return round(float(match[1]) * _BYTES[match[2]])


def format_bytes(nbytes: float) -> str:
    """``format_bytes(3 << 29)`` is ``"1.50 GiB"``; three or more significant digits, unit of 1024."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(nbytes) >= _BYTES[unit]:
            scaled = nbytes / _BYTES[unit]
            return f"{scaled:.{2 if abs(scaled) < 100 else 1}f} {unit}"
    return f"{nbytes:.0f} B"


def format_s(seconds: float) -> str:
    """``format_s(0.0123)`` is ``"12.3 ms"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale:
            scaled = seconds / scale
            return f"{scaled:.{2 if abs(scaled) < 10 else 1}f} {unit}"
    return f"{seconds * 1e6:.2f} µs" if seconds else "0 s"
