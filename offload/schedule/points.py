"""Points of a program, the move of one layer's activation set between two points, and the rules of such moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Point(NamedTuple):
    """A point of the program: right before the forward or backward of one layer."""

    phase: str
    """``"F"`` for forward, ``"B"`` for backward."""
    layer: int

    def __repr__(self) -> str:
        return f"{self.phase}{self.layer}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """``Point.parse("F4")`` is the point before the forward of layer 4."""
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
    """The offload and the reload of one layer's activation set."""

    layer: int
    release: Point
    """The set's device memory has been released before this point."""
    reload: Point
    """The copies back to the device are queued before this point."""

    @classmethod
    def from_entry(cls, layer: int, entry: tuple[bool, int, bool, int]) -> Move:
        """Read ``(offload_fwd, offload_num, reload_fwd, reload_num)``."""
        if type(layer) is not int:
            raise TypeError(f"the keys of synchronization_dict must be layers as int, got {layer!r}")
        if not isinstance(entry, tuple | list) or [type(value) for value in entry] != [bool, int, bool, int]:
            raise ValueError(
                f"the entry of layer {layer} must be (offload_fwd: bool, offload_num: int, reload_fwd: bool, "
                f"reload_num: int), got {entry!r}"
            )
        offload_fwd, offload_num, reload_fwd, reload_num = entry
        release = Point("F" if offload_fwd else "B", offload_num)
        return cls(layer, release, Point("F" if reload_fwd else "B", reload_num))

    @property
    def entry(self) -> tuple[bool, int, bool, int]:
        """The declarative form, ``(offload_fwd, offload_num, reload_fwd, reload_num)``."""
        return (self.release.phase == "F", self.release.layer, self.reload.phase == "F", self.reload.layer)


def check_moves(moves: Iterable[Move], model_layers: int) -> None:
    """Raise a ``ValueError`` unless all layers exist, and each has at most one move."""
    seen: set[int] = set()
    for move in moves:
        for layer in (move.layer, move.release.layer, move.reload.layer):
            if not isinstance(layer, int) or not 0 <= layer < model_layers:
                raise ValueError(
                    f"layer {move.layer}: {move.entry} names layer {layer!r}, but layers are numbered 0 to "
                    f"{model_layers - 1}"
                )
        if move.layer in seen:
            raise ValueError(f"layer {move.layer} has more than one entry; give one")
        seen.add(move.layer)


def model_order(model_layers: int) -> tuple[Point, ...]:
    """F0 F1 F2 B2 B1 B0."""
    layers = range(model_layers)
    return (*map(forward, layers), *map(backward, reversed(layers)))


def check_order(order: tuple[Point, ...], moves: Iterable[Move], model_layers: int, hint: str) -> None:
    """Raise a ``ValueError`` unless each layer runs forward and, later, backward, and the moves fit in between."""
    position = {point: index for index, point in enumerate(order)}
    if position.keys() != set(model_order(model_layers)) or len(order) != len(position):
        raise ValueError(
            f"order must hold each of F0 to F{model_layers - 1} and B0 to B{model_layers - 1} once, got {list(order)}"
        )
    for layer in range(model_layers):
        if position[backward(layer)] < position[forward(layer)]:
            raise ValueError(f"order must run each layer's forward before its backward, got B{layer} before F{layer}")
    for move in moves:
        layer, release, reload = move.layer, move.release, move.reload
        begin, released, reloaded, end = (position[at] for at in (forward(layer), release, reload, backward(layer)))
        at, leave_out = f"it is released before {release!r}, which is not", "or leave the layer out"
        broken = None
        if released <= begin:
            broken = f"{at} after its own forward F{layer}; use a later release"
        elif released >= end:
            broken = f"{at} earlier than its own backward; use an earlier release {leave_out}"
        elif reloaded <= released:
            broken = (
                f"its reload before {reload!r} does not come after its release before {release!r}; use a later reload "
                f"{leave_out}"
            )
        elif reloaded > end:
            broken = f"backward of layer {layer} comes before its reload at {reload!r}; use an earlier reload"
        if broken is not None:
            raise ValueError(f"layer {layer}: {move.entry} is refused: {broken}{hint}")
