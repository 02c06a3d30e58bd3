"""When an activation set moves: schedules as data.

A :class:`Schedule` is pure data and imports no torch. The same object is executed by the
library, simulated by the planner, printed as a grid and drawn in the docs.

A schedule speaks of *points* of the program, "before forward of layer 4" (``F4``) or "before
backward of layer 0" (``B0``), and says for each offloaded layer at which point its device
memory must have been released and at which point its reload starts. Copies to the host
start earlier, when autograd saves each tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from offload.link import Link
    from offload.pipeline_walk import StageProfile

SynchronizationDict = Mapping[int, tuple[bool, int, bool, int]]


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
        """Read ``(offload_fwd, offload_num, reload_fwd, reload_num)``."""
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


@dataclass(frozen=True)
class Schedule:
    """What is released and what is reloaded at which point of one microbatch's forward and backward.

    Args:
        model_layers: Number of layers, N; layers are numbered 0 … N-1.
        moves: One :class:`Move` per offloaded layer, in any order.
        order: The order in which the program reaches its 2N points. It is found from the moves if
            left out. If the moves fit a model's layers, it is theirs: forwards in turn, then backwards,
            later layers first. Else the layers are taken to be microbatches: backwards in turn too, each
            as late as the moves allow, but at once when its reload has started.

    Raises:
        ValueError: A layer is out of range or named twice, or no order of forwards and backwards
            (or not the given one) lets a layer run forward, be released, be reloaded and run
            backward in this sequence. The message names the entry and the reason.
    """

    model_layers: int
    moves: tuple[Move, ...] = ()
    order: tuple[Point, ...] = ()
    _released: dict[Point, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _reloaded: dict[Point, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_count("model_layers", self.model_layers, minimum=1)
        moves = tuple(sorted(self.moves, key=lambda move: move.layer))
        _check_layers(moves, self.model_layers)
        order = tuple(self.order) or _find_order(moves, self.model_layers)
        _check_order(order, self.model_layers)
        position = {point: index for index, point in enumerate(order)}
        for move in moves:
            _check_against(move, position)
        by_reload = sorted(moves, key=lambda move: position[backward(move.layer)])
        for name, value in (
            ("moves", moves),
            ("order", order),
            ("_released", _group((move.release, move.layer) for move in moves)),
            ("_reloaded", _group((move.reload, move.layer) for move in by_reload)),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def default(cls, num_layers: int, model_layers: int) -> Schedule:
        """Offload the first k = ``num_layers`` of N = ``model_layers`` layers.

        Layer i is released before layer N-k+i starts forward, and its reload starts when layer
        N-k+i has finished backward, so that at most N-k activation sets are on the device.

        Raises:
            ValueError: k is negative or larger than N-1.

        Warns:
            UserWarning: k = N-1, which leaves no layer to overlap the copies with.
        """
        _check_count("model_layers", model_layers, minimum=1)
        _check_count("num_layers", num_layers, minimum=0)
        if num_layers > model_layers - 1:
            raise ValueError(
                f"num_layers must be at most model_layers - 1 = {model_layers - 1}, got {num_layers}; "
                "the last layer's backward follows its forward at once, so offloading it saves nothing."
            )
        if num_layers and num_layers == model_layers - 1:
            warnings.warn(
                f"num_layers = model_layers - 1 = {num_layers} keeps one activation set on the device, so "
                f"copies cannot overlap with compute; use num_layers={num_layers - 1} or less for overlap.",
                stacklevel=3,
            )
        kept = model_layers - num_layers
        moves = tuple(Move(i, forward(kept + i), backward(kept + i - 1)) for i in range(num_layers))
        return cls(model_layers, moves)

    @classmethod
    def from_synchronization_dict(
        cls, entries: SynchronizationDict, model_layers: int, order: Iterable[Point | str] = ()
    ) -> Schedule:
        """Build a schedule from ``{layer: (offload_fwd, offload_num, reload_fwd, reload_num)}``.

        The layer has been released before layer ``offload_num`` begins forward (``True``) or
        backward (``False``), and its reload starts before layer ``reload_num`` begins forward or
        backward.

        Args:
            entries: The dictionary. A layer that is not in it stays on the device.
            model_layers: Number of layers.
            order: The order in which the program runs, such as ``["F0", "F1", "B0", "B1"]``, if it
                should be checked too.

        Raises:
            ValueError: As the class; also an entry that is not a tuple of that form.
            TypeError: ``entries`` is not a mapping, or one of its keys not an int.
        """
        if not isinstance(entries, Mapping):
            raise TypeError(f"synchronization_dict must map layers to their entries, got {type(entries).__name__}")
        for layer, entry in entries.items():
            _check_entry(layer, entry)
        moves = tuple(Move.from_entry(layer, entry) for layer, entry in entries.items())
        points = tuple(Point.parse(point) if isinstance(point, str) else point for point in order)
        return cls(model_layers, moves, points)

    @classmethod
    def from_pipeline(
        cls,
        actions: Iterable[Any],
        profile: Mapping[int, StageProfile] | None = None,
        link: Link | None = None,
        *,
        memory_budget: int | str | None = None,
        fraction: float | None = None,
        lookahead: int | None = None,
        parts: int = 1,
    ) -> Schedule:
        """Derive a schedule from the order in which a pipeline rank runs.

        Its layers are the microbatches of the rank's stages in the order of their forwards, each cut into
        ``parts``. See :func:`offload.pipeline_schedule.plan_pipeline` for the arguments and errors.
        """
        from offload.pipeline_schedule import plan_pipeline

        return plan_pipeline(
            actions,
            profile,
            link,
            memory_budget=memory_budget,
            fraction=fraction,
            lookahead=lookahead,
            parts=parts,
        ).schedule

    @property
    def offloaded_layers(self) -> tuple[int, ...]:
        """The layers that travel, in ascending order."""
        return tuple(move.layer for move in self.moves)

    def releases(self, point: Point) -> tuple[int, ...]:
        """The layers whose device memory must be gone before ``point``."""
        return self._released.get(point, ())

    def reloads(self, point: Point) -> tuple[int, ...]:
        """The layers whose reload starts before ``point``, first needed first."""
        return self._reloaded.get(point, ())

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
        order = [repr(point) for point in self.order]
        if self.order == _find_order(self.moves, self.model_layers):
            return f"Schedule.from_synchronization_dict({entries}, {self.model_layers})"
        return f"Schedule.from_synchronization_dict({entries}, {self.model_layers}, {order})"

    def __str__(self) -> str:
        """A grid: a column per point in program order, a row per layer.

        ``F`` and ``B`` mark the layer's forward and backward, ``#`` a set that is on the device,
        ``.`` one that is on the host, ``r`` one whose reload starts at this point.
        """
        columns = [repr(point) for point in self.order]
        width = max(map(len, columns))
        resident = dict(self.resident())
        position = {point: index for index, point in enumerate(self.order)}
        lines = ["layer " + " ".join(name.rjust(width) for name in columns)]
        for layer in range(self.model_layers):
            cells = []
            for index, point in enumerate(self.order):
                alive = position[forward(layer)] <= index <= position[backward(layer)]
                if point.layer == layer:
                    cell = point.phase
                elif not alive:
                    cell = ""
                elif layer in self.reloads(point):
                    cell = "r"
                else:
                    cell = "#" if layer in resident[point] else "."
                cells.append(cell.rjust(width))
            lines.append(f"{layer:>5} " + " ".join(cells).rstrip())
        return "\n".join(lines)


def _group(pairs: Iterable[tuple[Point, int]]) -> dict[Point, tuple[int, ...]]:
    groups: dict[Point, tuple[int, ...]] = {}
    for point, layer in pairs:
        groups[point] = (*groups.get(point, ()), layer)
    return groups


def _check_count(name: str, value: int, *, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def _check_entry(layer: int, entry: tuple[bool, int, bool, int]) -> None:
    if type(layer) is not int:
        raise TypeError(f"the keys of synchronization_dict must be layers as int, got {layer!r}")
    kinds = (bool, int, bool, int)
    well_formed = isinstance(entry, tuple | list) and len(entry) == len(kinds)
    if not well_formed or any(type(value) is not kind for value, kind in zip(entry, kinds, strict=True)):
        raise ValueError(
            f"the entry of layer {layer} must be (offload_fwd: bool, offload_num: int, reload_fwd: bool, "
            f"reload_num: int), got {entry!r}"
        )


def _check_layers(moves: tuple[Move, ...], model_layers: int) -> None:
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


def _check_order(order: tuple[Point, ...], model_layers: int) -> None:
    expected = {point for layer in range(model_layers) for point in (forward(layer), backward(layer))}
    if set(order) != expected or len(order) != len(expected):
        raise ValueError(
            f"order must hold each of F0 to F{model_layers - 1} and B0 to B{model_layers - 1} once, got {list(order)}"
        )
    for layer in range(model_layers):
        if order.index(backward(layer)) < order.index(forward(layer)):
            raise ValueError(f"order must run each layer's forward before its backward, got B{layer} before F{layer}")


def _check_against(move: Move, position: Mapping[Point, int]) -> None:
    for rule in _rules(move):
        if not rule.holds(position):
            raise ValueError(f"layer {move.layer}: {move.entry} is refused: {rule.broken}")


class _Rule(NamedTuple):
    earlier: Point
    later: Point
    broken: str
    may_coincide: bool = False

    def holds(self, position: Mapping[Point, int]) -> bool:
        if self.earlier == self.later:
            return self.may_coincide
        return position[self.earlier] < position[self.later]


def _rules(move: Move) -> tuple[_Rule, ...]:
    layer, release, reload = move.layer, move.release, move.reload
    return (
        _Rule(
            forward(layer),
            release,
            f"it is released before {release!r}, which is not after its own forward F{layer}; use a later release",
        ),
        _Rule(
            release,
            backward(layer),
            f"it is released before {release!r}, which is not earlier than its own backward; "
            "use an earlier release or leave the layer out",
        ),
        _Rule(
            release,
            reload,
            f"its reload before {reload!r} does not come after its release before {release!r}; "
            "use a later reload or leave the layer out",
        ),
        _Rule(
            reload,
            backward(layer),
            f"backward of layer {layer} comes before its reload at {reload!r}; use an earlier reload",
            may_coincide=True,
        ),
    )


def _find_order(moves: tuple[Move, ...], model_layers: int) -> tuple[Point, ...]:
    """The likeliest order of the points that honours every move; see :class:`Schedule`.

    Raises:
        ValueError: No order honours them; the message names the entry that closes the contradiction.
    """
    before = _before(model_layers)
    for move in moves:
        _add(_before(model_layers), move, "is refused")
        _add(before, move, "contradicts the entries of earlier layers")
    model = _model_order(model_layers)
    position = {point: index for index, point in enumerate(model)}
    if all(rule.holds(position) for move in moves for rule in _rules(move)):
        return model
    return _microbatch_order(before, moves)


def _model_order(model_layers: int) -> tuple[Point, ...]:
    """F0 F1 F2 B2 B1 B0."""
    layers = range(model_layers)
    return (*map(forward, layers), *map(backward, reversed(layers)))


def _before(model_layers: int) -> dict[Point, set[Point]]:
    """What each point must follow, whatever the moves: F(j-1) → Fj → Bj."""
    before = {}
    for layer in range(model_layers):
        before[forward(layer)] = {forward(layer - 1)} if layer else set()
        before[backward(layer)] = {forward(layer)}
    return before


def _add(before: dict[Point, set[Point]], move: Move, verdict: str) -> None:
    for rule in _rules(move):
        if rule.earlier == rule.later:
            possible = rule.may_coincide
        else:
            before[rule.later].add(rule.earlier)
            possible = not _reaches(before, rule.earlier, rule.later)
        if not possible:
            raise ValueError(f"layer {move.layer}: {move.entry} {verdict}: {rule.broken}")


def _reaches(before: Mapping[Point, set[Point]], point: Point, target: Point) -> bool:
    """Whether ``target`` must come before ``point``."""
    pending, seen = [point], {point}
    while pending:
        for earlier in before[pending.pop()] - seen:
            if earlier == target:
                return True
            seen.add(earlier)
            pending.append(earlier)
    return False


def _microbatch_order(before: Mapping[Point, set[Point]], moves: tuple[Move, ...]) -> tuple[Point, ...]:
    """F0 F1 B0 F2 B1 B2, say: forwards first, but as little as possible between a reload and its backward."""
    sorter = TopologicalSorter(before)
    sorter.prepare()
    order: list[Point] = []
    ready: set[Point] = set()
    reloaded: set[Point] = set()
    while sorter.is_active():
        ready.update(sorter.get_ready())
        point = min(ready, key=lambda p: (p not in reloaded, p.phase == "B", p.layer))
        ready.remove(point)
        order.append(point)
        sorter.done(point)
        reloaded.update(backward(move.layer) for move in moves if move.reload == point)
    return tuple(order)
