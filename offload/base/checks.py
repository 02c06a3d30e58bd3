"""Checks of what users give: ints within bounds, and sizes as bytes or as a text such as ``"24GiB"``."""

from __future__ import annotations

import re

_UNITS: dict[str, int] = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def is_int(value: object, least: int, most: int | None = None) -> bool:
    """Whether ``value`` is an int within these bounds. ``True`` is not, although Python takes it for 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return least <= value and (most is None or value <= most)


def check_int(name: str, value: object, *, least: int) -> None:
    """Refuse what is no int of at least ``least``.

    Raises:
        TypeError: It is not an int.
        ValueError: It is smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


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
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"{name} must be a number and a unit, such as '40GiB', got {value!r}; units are {', '.join(_UNITS)}"
        )
    return round(float(match[1]) * _UNITS[match[2]])


def parse_min_bytes(value: int | str) -> int:
    """The argument ``min_bytes`` in bytes.

    Raises:
        ValueError: It is no number of bytes.
    """
    try:
        return parse_bytes(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"min_bytes must be a number of bytes, at least 0, got {value!r}; or a text such as '2MiB'"
        ) from None
