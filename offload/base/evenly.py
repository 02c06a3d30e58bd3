"""An order of numbers of which each beginning is spread evenly. Pure data, no torch."""

from __future__ import annotations


def evenly(count: int) -> list[int]:
    """``evenly(5)`` is ``[0, 4, 2, 1, 3]``: the bits of 0, 1, 2, ... in reverse."""
    bits = max(0, count - 1).bit_length()
    reverse = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [number for number in reverse if number < count]
