"""Points of a program, the move of one layer's activation set between two points, and the rules of such moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
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


def check_order(order: tuple[Point, ...], moves: Iterable[Move], model_layers: int) -> None:
    """Raise a ``ValueError`` unless each layer runs forward and, later, backward, and the moves keep their rules."""
    position = {point: index for index, point in enumerate(order)}
    if position.keys() != set(_model_order(model_layers)) or len(order) != len(position):
        raise ValueError(
            f"order must hold each of F0 to F{model_layers - 1} and B0 to B{model_layers - 1} once, got {list(order)}"
        )
    for layer in range(model_layers):
        if position[backward(layer)] < position[forward(layer)]:
            raise ValueError(f"order must run each layer's forward before its backward, got B{layer} before F{layer}")
    for rule in _broken(_rules(moves), order):
        raise ValueError(rule.refusal())


class _Rule(NamedTuple):
    """One point of the program must come before another."""

    move: Move
    earlier: Point
    later: Point
    broken: str
    may_coincide: bool = False

    def refusal(self, verdict: str = "is refused") -> str:
        return f"layer {self.move.layer}: {self.move.entry} {verdict}: {self.broken}"


def _rules(moves: Iterable[Move]) -> list[_Rule]:
    rules = []
    for move in moves:
        layer, release, reload = move.layer, move.release, move.reload
        at, leave_out = f"it is released before {release!r}, which is not", "or leave the layer out"
        early = f"{at} after its own forward F{layer}; use a later release"
        late = f"{at} earlier than its own backward; use an earlier release {leave_out}"
        swapped = f"its reload before {reload!r} does not come after its release before {release!r}; use a later reload"
        missed = f"backward of layer {layer} comes before its reload at {reload!r}; use an earlier reload"
        rules += [
            _Rule(move, forward(layer), release, early),
            _Rule(move, release, backward(layer), late),
            _Rule(move, release, reload, f"{swapped} {leave_out}"),
            _Rule(move, reload, backward(layer), missed, may_coincide=True),
        ]
    return rules


def _broken(rules: Iterable[_Rule], order: Iterable[Point]) -> list[_Rule]:
    position = {point: index for index, point in enumerate(order)}
    return [one for one in rules if not position[one.earlier] < position[one.later] + one.may_coincide]


def find_order(moves: tuple[Move, ...], model_layers: int) -> tuple[Point, ...]:
    """An order of the points in which every move keeps its rules: a model's order if possible, else a pipeline's.

    If there is none, the ``ValueError`` names an entry that contradicts those before it.
    """
    model, rules = _model_order(model_layers), _rules(moves)
    if not _broken(rules, model):
        return model
    try:
        return _microbatch_order(rules, moves, model_layers)
    except CycleError as error:
        # Each point of the cycle comes before the next one, some of them by rules.
        cycle = set(pairwise(error.args[1]))
        broken = [rule for rule in rules if (rule.earlier, rule.later) in cycle]
    if len({rule.move.layer for rule in broken}) == 1:
        raise ValueError(broken[0].refusal())
    last = max(broken, key=lambda rule: rule.move.layer)
    raise ValueError(last.refusal("contradicts the entries of earlier layers"))


def _model_order(model_layers: int) -> tuple[Point, ...]:
    """F0 F1 F2 B2 B1 B0."""
    layers = range(model_layers)
    return (*map(forward, layers), *map(backward, reversed(layers)))


def _microbatch_order(rules: Iterable[_Rule], moves: Iterable[Move], model_layers: int) -> tuple[Point, ...]:
    """Such as F0 F1 B0 F2 B1 B2: forwards first, and as little as possible between a reload and its backward.

    A ``CycleError`` says that the rules contradict each other, or F(j-1) → Fj → Bj.
    """
    sorter: TopologicalSorter[Point] = TopologicalSorter()
    for layer in range(model_layers):
        sorter.add(forward(layer), *map(forward, range(max(0, layer - 1), layer)))
        sorter.add(backward(layer), forward(layer))
    for rule in rules:
        if rule.earlier != rule.later or not rule.may_coincide:
            sorter.add(rule.later, rule.earlier)
    sorter.prepare()
    # A backward is ready only after its reload, unless that starts with it.
    reloaded = {backward(move.layer) for move in moves if move.reload != backward(move.layer)}
    order, ready = list[Point](), set[Point]()
    while sorter.is_active():
        ready.update(sorter.get_ready())
        # Backwards whose reload has started, then forwards, then other backwards.
        order.append(min(ready, key=lambda point: (point not in reloaded, point.phase == "B", point.layer)))
        ready.remove(order[-1])
        sorter.done(order[-1])
    return tuple(order)
