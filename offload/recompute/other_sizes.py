"""Results of operations that a second run skips, for inputs of a size that was not learned.

Lengths and batch sizes vary from step to step, and the operations mostly do not. An operation without memory, on
PyTorch's meta device, tells the sizes of its results. What is recomputed has its size anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from offload.base.tensors import geometry_of
from offload.recompute.layer_inputs import same_layout
from offload.recompute.learn import Step, StepResult


class _Layout(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def at_size(
    step: Step, kept: Sequence[torch.Tensor | None], args: Any, kwargs: dict[str, Any]
) -> tuple[StepResult, ...] | None:
    """The results of a learned operation, which is skipped, for arguments of another size; ``None`` if not known.

    ``kept`` is, for each result, what was kept of it, if that is all of it.
    """
    pairs = list(zip(step.outputs, kept, strict=True))
    made: Any = kept
    if any(_has_size(learned) and given is None for learned, given in pairs):
        try:
            made = _results(step.operation.function, _layout(args), tuple(kwargs), _layout((*kwargs.values(),)))
        except Exception:  # noqa: BLE001  # whatever an operation raises that cannot run there
            return None
    found = []
    for (learned, given), result in zip(pairs, made, strict=True):
        if not _has_size(learned):
            found.append(learned)
        elif given is not None:
            found.append(learned._replace(geometry=geometry_of(given)))
        elif learned.geometry is None:
            found.append(learned._replace(value=result))
        else:
            dtype, _, size, stride, *flags = learned.geometry
            plain = isinstance(result, torch.Tensor) and result.dim() == len(size)
            # The device may lay results out in another order than operations without memory say.
            if not plain or not same_layout(result, size, stride, sized=True):
                return None
            geometry = (dtype, result.storage_offset(), result.size(), result.stride(), *flags)
            found.append(learned._replace(geometry=geometry))
    return tuple(found)


def _has_size(learned: StepResult) -> bool:
    """Whether a result may be of another size: not one without elements, which no size of the inputs fills."""
    filled = isinstance(learned.value, int) if learned.geometry is None else math.prod(learned.geometry[2]) > 0
    return learned.argument is None and filled


@lru_cache(4096)  # layers of one kind run the same operations
def _results(function: Any, args: Any, names: tuple[str, ...], values: Any) -> Any:
    made = function(*_on_meta(args), **dict(zip(names, _on_meta(values), strict=True)))
    return made if isinstance(made, (tuple, list)) else [made]


def _layout(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Layout(value.size(), value.stride(), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(map(_layout, value))
    if isinstance(value, torch.device):
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


def _on_meta(value: Any) -> Any:
    if isinstance(value, _Layout):
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device="meta")
    return [_on_meta(item) for item in value] if isinstance(value, tuple) else value
