"""Schedules: when each layer's activation set is released and reloaded.

A :class:`Schedule` is pure data. It names two *points* of the program for each offloaded layer, such as "before forward
of layer 4" (``F4``): the one at which the layer's device memory must have been released, and the one at which its
reload starts. Copies to the host start earlier, when autograd saves each tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from offload.base.checks import check_int, check_type, describe, warn_caller


class Point(NamedTuple):
    """A point of the program: right before the forward or backward of one layer."""

    phase: str  #: ``"F"`` for forward, ``"B"`` for backward.
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
    release: Point  #: The set's device memory has been released before this point.
    reload: Point  #: The copies back to the device are queued before this point.

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


SynchronizationDict = Mapping[int, tuple[bool, int, bool, int]]


@dataclass(frozen=True)
class Schedule:
    """What is released and what is reloaded at which point of one microbatch's forward and backward.

    Args:
        model_layers: Number of layers, N; layers are numbered 0 … N-1.
        moves: One :class:`Move` per offloaded layer, in any order.
        order: The order in which the program reaches its 2N points; by default a model's, whose forwards come in turn,
            then backwards, later layers first. Where layers are microbatches of a pipeline, say their order.

    Raises:
        ValueError: A layer is out of range or named twice, or the order does not let a layer run forward, be released,
            be reloaded and run backward in this sequence. The message names the entry and the reason.
    """

    model_layers: int
    moves: tuple[Move, ...] = ()
    order: tuple[Point, ...] = ()
    _released: dict[Point, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _reloaded: dict[Point, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _position: dict[Point, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int("model_layers", self.model_layers, least=1)
        for move in self.moves:
            check_type("each of moves", move, Move, "a Move, of a layer, a release and a reload")
        moves = tuple(sorted(self.moves, key=lambda move: move.layer))
        check_moves(moves, self.model_layers)
        order = tuple(self.order) or model_order(self.model_layers)
        hint = "" if self.order else ". If the program runs in another order than F0, F1, ... B1, B0, pass it as order="
        check_order(order, moves, self.model_layers, hint)
        position = {point: index for index, point in enumerate(order)}
        by_reload = sorted(moves, key=lambda move: position[backward(move.layer)])
        released = _group((move.release, move.layer) for move in moves)
        reloaded = _group((move.reload, move.layer) for move in by_reload)
        # __dict__ is the way to fill a frozen dataclass.
        vars(self).update(moves=moves, order=order, _released=released, _reloaded=reloaded, _position=position)

    @classmethod
    def default(cls, num_layers: int, model_layers: int) -> Schedule:
        """Offload the first k = ``num_layers`` of N = ``model_layers`` layers, at most N-1; N-1 leave no overlap.

        Layer i is released before layer N-k+i starts forward, and its reload starts when layer N-k+i has finished
        backward, so that at most N-k activation sets are on the device.
        """
        check_int("model_layers", model_layers, least=1)
        check_int("num_layers", num_layers, least=0)
        if num_layers > model_layers - 1:
            raise ValueError(
                f"num_layers must be at most model_layers - 1 = {model_layers - 1}, got {num_layers}; "
                "the last layer's backward follows its forward at once, so offloading it saves nothing."
            )
        if num_layers and num_layers == model_layers - 1:
            warn_caller(
                f"num_layers = model_layers - 1 = {num_layers} keeps one activation set on the device, so "
                "copies cannot overlap with compute; "
                + (f"use num_layers={num_layers - 1} or less" if num_layers > 1 else "it takes three layers or more")
                + " for overlap."
            )
        kept = model_layers - num_layers
        moves = tuple(Move(i, forward(kept + i), backward(kept + i - 1)) for i in range(num_layers))
        return cls(model_layers, moves)

    @classmethod
    def from_synchronization_dict(
        cls, entries: SynchronizationDict, model_layers: int, order: Iterable[Point | str] = ()
    ) -> Schedule:
        """Build a schedule from ``{layer: (offload_fwd, offload_num, reload_fwd, reload_num)}``.

        The layer has been released before layer ``offload_num`` begins forward (``True``) or backward (``False``), and
        its reload starts before layer ``reload_num`` begins forward or backward.

        Args:
            entries: The dictionary. A layer that is not in it is kept on the device.
            model_layers: Number of layers.
            order: The order in which the program runs, such as ``["F0", "F1", "B0", "B1"]``; a model's by default.
        """
        if not isinstance(entries, Mapping):
            raise TypeError(f"synchronization_dict must map layers to their entries, got {type(entries).__name__}")
        moves = tuple(Move.from_entry(layer, entry) for layer, entry in entries.items())
        points = tuple(Point.parse(point) if isinstance(point, str) else point for point in order)
        return cls(model_layers, moves, points)

    @property
    def offloaded_layers(self) -> tuple[int, ...]:
        """The layers that are offloaded, in ascending order."""
        return tuple(move.layer for move in self.moves)

    def releases(self, point: Point) -> tuple[int, ...]:
        """The layers whose device memory must have been released before ``point``."""
        return self._released.get(point, ())

    def reloads(self, point: Point) -> tuple[int, ...]:
        """The layers whose reload starts before ``point``, first needed first."""
        return self._reloaded.get(point, ())

    def position(self, point: Point) -> int:
        """How many points of the order come before ``point``."""
        return self._position[point]

    def resident(self) -> Iterator[tuple[Point, tuple[int, ...]]]:
        """Each point of the order with the layers whose activation sets are on the device while it runs."""
        on_device: set[int] = set()
        for point in self.order:
            on_device.difference_update(self.releases(point))
            on_device.update(self.reloads(point))
            on_device.add(point.layer)
            yield point, tuple(sorted(on_device))
            if point.phase == "B":
                on_device.discard(point.layer)

    def __repr__(self) -> str:
        entries = {move.layer: move.entry for move in self.moves}
        order = "" if self.order == model_order(self.model_layers) else f", {[*map(repr, self.order)]}"
        return f"Schedule.from_synchronization_dict({entries}, {self.model_layers}{order})"

    def __str__(self) -> str:
        """A grid: a column per point in program order, a row per layer.

        ``F`` and ``B`` are forward and backward, ``#`` is a set on the device, ``.`` one on the host, ``r`` a reload.
        """
        columns = [*map(repr, self.order)]
        width = max(map(len, columns))
        steps = [*enumerate(self.resident())]
        lines = ["layer " + " ".join(name.rjust(width) for name in columns)]
        for layer in range(self.model_layers):
            begin, end = self.position(forward(layer)), self.position(backward(layer))
            cells = [""] * len(self.order)
            for index, (point, resident) in steps[begin : end + 1]:
                cells[index] = "r" if layer in self.reloads(point) else "#" if layer in resident else "."
            cells[begin], cells[end] = "F", "B"
            lines.append(f"{layer:>5} " + " ".join(cell.rjust(width) for cell in cells).rstrip())
        return "\n".join(lines)


def released_before(calls: Iterable[int], releases: Callable[[int], Iterable[int]]) -> list[tuple[int, ...]]:
    """Before each forward and behind the last one, the layers that ``releases`` says by the number of a layer.

    They have run since the first layers began again: what layers have saved before that is released no more.
    """
    found, begun, last = list[tuple[int, ...]](), set[int](), -1
    for number in calls:
        if number <= last:
            begun, last = set(), -1
        passed = range(last + 1, number + 1)  # layers are skipped
        found.append(tuple(one for point in passed for one in releases(point) if one in begun))
        begun.add(last := number)
    return [*found, ()]


def _group(pairs: Iterable[tuple[Point, int]]) -> dict[Point, tuple[int, ...]]:
    groups: defaultdict[Point, list[int]] = defaultdict(list)
    for point, layer in pairs:
        groups[point].append(layer)
    return {point: tuple(layers) for point, layers in groups.items()}


@runtime_checkable
class HasSchedule(Protocol):
    """A plan, or anything else that carries a schedule."""

    @property
    def schedule(self) -> Schedule:
        """The schedule."""


def check_schedule(value: object) -> None:
    """Raise a ``TypeError`` for what is no schedule, with what to write in its place."""
    if isinstance(getattr(value, "schedule", None), Schedule):
        raise TypeError(f"schedule must be a Schedule, got {describe(value)}, which has one; pass it as plan=")
    written = "Schedule.default(4, 32), or Schedule.from_synchronization_dict(entries, 32) of a dictionary"
    check_type("schedule", value, Schedule, f"a Schedule, such as {written}")
