"""Checks of users' arguments; sizes and times as text; warnings at the user's line."""

from __future__ import annotations

import math
import re
import sys
import warnings
from numbers import Real

_UNITS: dict[str, int] = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("iB", 1024), ("B", 1000), ("", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_LEAST_BYTES, _MOST_BYTES = 1 << 10, 1 << 50  # less than any training needs, more than any device has
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def is_int(value: object, least: int, most: int | None = None) -> bool:
    """Whether ``value`` is an int within these bounds. A bool is not."""
    return type(value) is int and least <= value and (most is None or value <= most)


def check_int(name: str, value: object, *, least: int) -> None:
    """Raise a ``TypeError`` unless ``value`` is an int, and a ``ValueError`` if it is less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {describe(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_type(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise a ``TypeError`` that says what was ``expected`` unless ``value`` is of this kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, got {describe(value)}")


def check_callable(name: str, value: object) -> None:
    """Raise a ``TypeError`` unless ``value`` can be called."""
    if not callable(value):
        raise TypeError(
            f"{name} must be a function without arguments, got {describe(value)}; pass {name}, not {name}()"
        )


def check_number(name: str, value: object, *, positive: bool = False, unit: str = "") -> None:
    """Raise a ``TypeError`` unless ``value`` is a number, and a ``ValueError`` if it is negative or not finite."""
    wanted = f"{'a positive, finite number' if positive else 'a finite number, at least 0'}{unit and f' ({unit})'}"
    if isinstance(value, bool) or not isinstance(value, (float, int, Real)):  # Real alone takes longer
        raise TypeError(f"{name} must be {wanted}, got {describe(value)}")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def describe(value: object) -> str:
    """The value as an error shows it: itself if short, else its type with an article."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def parse_bytes(value: int | str, name: str = "value") -> int:
    """A number of bytes from an int or from a text such as ``"40GiB"``, ``"1.5 gib"``, ``"40G"`` or ``"512MB"``."""
    # KiB to TiB, and K to T, count in 1024, KB to TB in 1000. Errors call the value by its ``name``.
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} must be an int (bytes) or a text such as '40GiB', got {describe(value)}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{name} must be at least 0 bytes, got {value}")
        return value
    match = _TEXT.fullmatch(value)
    scale = None if match is None else {unit.lower(): scale for unit, scale in _UNITS.items()}.get(match[2].lower())
    if match is None or scale is None:
        raise ValueError(
            f"{name} must be a number and a unit, such as '40GiB', got {value!r}; units are {', '.join(_UNITS)}"
        )
    return round(float(match[1]) * scale)


def parse_budget(memory_budget: int | str) -> int:
    """A memory budget as :func:`parse_bytes` takes it; raises a ``ValueError`` if no device has so many or so few."""
    nbytes = parse_bytes(memory_budget, "memory_budget")
    if not _LEAST_BYTES <= nbytes < _MOST_BYTES:  # 24 is meant to be GiB
        raise ValueError(
            f"memory_budget must be at least {format_bytes(_LEAST_BYTES)} and less than {format_bytes(_MOST_BYTES)}, "
            f"got {memory_budget!r}; write a part of the device's memory, such as '40GiB'."
        )
    return nbytes


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


def warn_caller(message: str) -> None:
    """Warn as from the innermost frame that is neither this library's nor PyTorch's."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("offload", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
