"""The moments of a program that schedules speak of, and the trip of one layer between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Point(NamedTuple):
    """A moment of the program: right before the forward or backward of one layer."""

    phase: str
    """``"F"`` for forward, ``"B"`` for backward."""
    layer: int

    def __repr__(self) -> str:
        return f"{self.phase}{self.layer}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """``Point.parse("F4")`` is the point before the forward of layer 4.

        Raises:
            ValueError: ``text`` is not a letter F or B followed by a number.
        """
        phase, number = text[:1], text[1:]
        if phase not in ("F", "B") or not number.isdecimal():
            raise ValueError(f"a point must be written F<layer> or B<layer>, such as 'F4', got {text!r}")
        return cls(phase, int(number))


def forward(layer: int) -> Point:
    """The point before the forward of ``layer``."""
    return Point("F", layer)


def backward(layer: int) -> Point:
    """The point before the backward of ``layer``."""
    return Point("B", layer)


@dataclass(frozen=True)
class Move:
    """The trip of one layer's activation set to the host and back."""

    layer: int
    release: Point
    """The set's device memory has been let go before this point."""
    reload: Point
    """The copies back to the device are queued before this point."""

    @classmethod
    def from_entry(cls, layer: int, entry: tuple[bool, int, bool, int]) -> Move:
        """Read ``(offload_fwd, offload_num, reload_fwd, reload_num)``.

        Raises:
            TypeError: The layer is not an int.
            ValueError: The entry is not a tuple of that form.
        """
        if type(layer) is not int:
            raise TypeError(f"the keys of synchronization_dict must be layers as int, got {layer!r}")
        if not isinstance(entry, tuple | list) or [type(value) for value in entry] != [bool, int, bool, int]:
            raise ValueError(
                f"the entry of layer {layer} must be (offload_fwd: bool, offload_num: int, reload_fwd: bool, "
                f"reload_num: int), got {entry!r}"
            )
        offload_fwd, offload_num, reload_fwd, reload_num = entry
        return cls(
            layer,
            forward(offload_num) if offload_fwd else backward(offload_num),
            forward(reload_num) if reload_fwd else backward(reload_num),
        )

    @property
    def entry(self) -> tuple[bool, int, bool, int]:
        """The declarative form, ``(offload_fwd, offload_num, reload_fwd, reload_num)``."""
        return (self.release.phase == "F", self.release.layer, self.reload.phase == "F", self.reload.layer)
