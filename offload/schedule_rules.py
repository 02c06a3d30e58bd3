"""What a schedule must keep to: checks of what was given, each entry's rules, and the order that honours them all."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import TopologicalSorter
from typing import NamedTuple

from offload.points import Move, Point, backward, forward


def check_count(name: str, value: int, *, minimum: int) -> None:
    """A count is an int of at least ``minimum``.

    Raises:
        TypeError: It is not an int.
        ValueError: It is smaller.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def check_entry(layer: int, entry: tuple[bool, int, bool, int]) -> None:
    """An entry of a synchronization dictionary has the right types.

    Raises:
        TypeError: The layer is not an int.
        ValueError: The entry is not a tuple of that form.
    """
    if type(layer) is not int:
        raise TypeError(f"the keys of synchronization_dict must be layers as int, got {layer!r}")
    kinds = (bool, int, bool, int)
    well_formed = isinstance(entry, tuple | list) and len(entry) == len(kinds)
    if not well_formed or any(type(value) is not kind for value, kind in zip(entry, kinds, strict=True)):
        raise ValueError(
            f"the entry of layer {layer} must be (offload_fwd: bool, offload_num: int, reload_fwd: bool, "
            f"reload_num: int), got {entry!r}"
        )


def check_layers(moves: tuple[Move, ...], model_layers: int) -> None:
    """All layers exist, and each moves once.

    Raises:
        ValueError: One does not; the message names it.
    """
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


def check_order(order: tuple[Point, ...], model_layers: int) -> None:
    """The order holds each layer's forward and, later, its backward.

    Raises:
        ValueError: It does not.
    """
    expected = {point for layer in range(model_layers) for point in (forward(layer), backward(layer))}
    if set(order) != expected or len(order) != len(expected):
        raise ValueError(
            f"order must hold each of F0 to F{model_layers - 1} and B0 to B{model_layers - 1} once, got {list(order)}"
        )
    for layer in range(model_layers):
        if order.index(backward(layer)) < order.index(forward(layer)):
            raise ValueError(f"order must run each layer's forward before its backward, got B{layer} before F{layer}")


def check_against(move: Move, position: Mapping[Point, int]) -> None:
    """The move keeps its rules in an order.

    Args:
        move: The move.
        position: Point → its place in the order.

    Raises:
        ValueError: It breaks one; the message says which.
    """
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


def find_order(moves: tuple[Move, ...], model_layers: int) -> tuple[Point, ...]:
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
