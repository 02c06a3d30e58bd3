"""Results of operations that a second run skips, for inputs of a size that was not learned.

Lengths and batch sizes vary from step to step, and the operations mostly do not. An operation without memory, on
PyTorch's meta device, tells the sizes of its results. What is recomputed has its size anyway.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from offload.recompute.layer_inputs import same_layout
from offload.recompute.learn import Step, StepResult


class _Layout(NamedTuple):
    """Stands for a tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def at_size(step: Step, args: Any, kwargs: dict[str, Any]) -> tuple[StepResult, ...] | None:
    """The results of a learned operation with arguments of another size; ``None`` where they are not known."""
    results = step.outputs
    if all((one.geometry is None or one.argument is not None) and not isinstance(one.value, int) for one in results):
        return results
    try:
        made = _results(step.operation.function, _layout(args), tuple(kwargs), _layout((*kwargs.values(),)))
    except Exception:  # noqa: BLE001  # whatever an operation raises that cannot run there
        return None
    found = [_resized(learned, result) for learned, result in zip(results, made, strict=True)]
    return None if None in found else tuple(filter(None, found))


def _resized(learned: StepResult, result: Any) -> StepResult | None:
    if learned.argument is not None:
        return learned
    if learned.geometry is None:
        return None if isinstance(result, torch.Tensor) else learned._replace(value=result)
    dtype, _, size, stride, *flags = learned.geometry
    # The device may lay results out in another order than operations without memory say.
    if result.dim() != len(size) or not same_layout(result, size, stride, sized=True):
        return None
    return learned._replace(geometry=(dtype, result.storage_offset(), result.size(), result.stride(), *flags))


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
