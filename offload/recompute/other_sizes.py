"""The second run of a layer for inputs of a size that was not learned, from two sizes that were.

Lengths and batch sizes vary from step to step, and the operations mostly do not. Where a layer has done the same
operations with inputs of two sizes, each dimension of a result is a linear function of the inputs' size between the two
and beyond. Only results that the second run skips or hands over need their sizes: what is recomputed has them anyway.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fractions import Fraction

import torch

from offload.base.tensors import Geometry
from offload.recompute.learn import StepResult, Trace
from offload.recompute.second_run import SecondRun

Sizes = tuple[int, ...]
"""The dimensions of all tensors among a layer's inputs, in order."""


def position(one: Sizes, other: Sizes, sizes: Sizes) -> Fraction | None:
    """Where ``sizes`` are on the line from ``one`` (0) through ``other`` (1); ``None`` if they are not on it."""
    found: Fraction | None = None
    for first, second, now in zip(one, other, sizes, strict=True):
        if first == second:
            if now != first:
                return None
            continue
        place = Fraction(now - first, second - first)
        if found is not None and place != found:
            return None
        found = place
    return found


def differ_in_one(one: Sizes, other: Sizes) -> bool:
    """Whether one number alone, such as the length of the sequences, can tell two sizes apart."""
    pairs = {(first, second) for first, second in zip(one, other, strict=True) if first != second}
    ratios = {Fraction(first, second) for first, second in pairs if second}
    return len(pairs) > 0 and (len(ratios) == 1 or len({first - second for first, second in pairs}) == 1)


def are_alike(one: Trace, other: Trace) -> bool:
    """Whether two forwards have done the same operations in the same order, with results of other sizes."""
    return one.zone < 0 and other.zone < 0 and _facts(one) == _facts(other)


def _facts(trace: Trace) -> list[object]:
    """What of a forward no size changes."""
    return [
        (trace.given, trace.generators, set(trace.constants)),
        [
            (step.operation, step.reads, step.makes, step.writes, step.container, step.draws, step.barrier, step.final)
            for step in trace.steps
        ],
        [len(step.outputs) if step.only_views else [*map(_fact, step.outputs)] for step in trace.steps],
        [(saved.storage, saved.time, saved.node, saved.dtype, saved.movable) for saved in trace.saved],
        [(storage.writers, storage.first_seen, storage.unseen) for storage in trace.storages],
    ]


def _fact(result: StepResult) -> tuple[object, ...]:
    fact: object = None
    if result.argument is None and result.geometry is None:
        fact = int if isinstance(result.value, int) else result.value
    elif result.argument is None and result.geometry is not None:
        order = _order(result.geometry)
        # An object of its own is equal to no other: such a result has no size that could be known.
        fact = result.geometry[0], result.geometry[4:], object() if order is None else order
    return result.storage, result.device, result.argument, fact


def _order(geometry: Geometry) -> list[int] | None:
    """The dimensions from the innermost to the outermost, if the tensor fills its memory; else ``None``."""
    _, start, size, stride, *_ = geometry
    order = sorted(range(len(size)), key=lambda dim: (stride[dim], size[dim]))
    return order if start == 0 and tuple(stride) == _strides(size, order) else None


def _strides(size: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides, step = [0] * len(size), 1
    for dim in order:
        strides[dim] = step
        step *= max(1, size[dim])
    return tuple(strides)


def at_size(run: SecondRun, other: Trace, place: Fraction) -> SecondRun | None:
    """A second run with the results' sizes at a place on the line to ``other``; ``None`` where one is no whole number.

    The traces are those for which :func:`are_alike` holds.
    """
    if not run.hands_over:
        return run
    found = copy.copy(run)
    found.results, found.sized = {}, True
    for time, outputs in run.results.items():
        pairs = zip(outputs, other.steps[time].outputs, strict=True)
        sized = [_result_at(one, another, place) for one, another in pairs]
        if None in sized:
            return None
        found.results[time] = tuple(filter(None, sized))
    return found


def _result_at(one: StepResult, other: StepResult, place: Fraction) -> StepResult | None:
    if one.argument is not None:
        return one
    if one.geometry is None or other.geometry is None:
        if type(one.value) is not int or one.value == other.value:
            return one
        value = one.value + (other.value - one.value) * place
        return one._replace(value=int(value)) if value.denominator == 1 else None
    size = [first + (second - first) * place for first, second in zip(one.geometry[2], other.geometry[2], strict=True)]
    order = _order(one.geometry)
    if order is None or any(length.denominator != 1 or length < 0 for length in map(Fraction, size)):
        return None
    lengths = [int(length) for length in size]
    geometry = (*one.geometry[:2], torch.Size(lengths), _strides(lengths, order), *one.geometry[4:])
    return one._replace(geometry=geometry)
