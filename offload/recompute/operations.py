"""Which operations can be run again: what an operation does to memory, as its schema says it, and where schemas lie.

The dispatch mode that learns a layer's forward has to know which memory each operation reads, makes and writes. An
operation whose schema does not say so is opaque.
"""

from __future__ import annotations

import functools
from enum import Enum, auto
from typing import Any

import torch

from offload.base.torch_private import OPERATOR, schema_of, without_wrapper


class Effect(Enum):
    """What an operation does to memory."""

    VIEW = auto()  # looks into its argument's memory in another way, and makes none
    PURE = auto()  # makes memory from what it reads, and writes nothing else
    WRITES = auto()  # writes into arguments, such as ``add_``
    EMPTY = auto()  # makes memory that holds nothing yet
    OPAQUE = auto()  # its schema does not say what it does to memory


VIEW, EMPTY, OPAQUE = Effect.VIEW, Effect.EMPTY, Effect.OPAQUE

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem", "fsdp")
"""Namespaces of operations in which several processes take part: one of them alone must not run one again."""

_UNDECLARED = {
    "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::batch_norm_update_stats",
    "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts",
    "aten::_cudnn_rnn", "aten::miopen_rnn",
}  # fmt: skip
"""They write what their schemas do not say: running statistics, the state that dropout draws from."""
_STATE = ("running_mean", "running_var", "dropout_state")

_NATIVE = ("aten", "prims", "prim")

_CHANGES_GEOMETRY = ("aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::swap_")
"""They give a tensor other memory, or its memory another size."""

_ALLOCATES = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted",
    "aten::new_empty", "aten::new_empty_strided", "aten::_empty_affine_quantized",
}  # fmt: skip

_OVERWRITES = {
    "copy_", "fill_", "zero_",
    "bernoulli_", "exponential_", "normal_", "random_", "uniform_",
}  # fmt: skip
"""They do not read what they write into; neither do operations with ``out=``."""


def _effect_of(function: Any) -> Effect:
    if not isinstance(function, OPERATOR):
        return OPAQUE  # a higher-order operator: it runs others
    name = schema_of(function).name
    if function.namespace in _COLLECTIVES or name in _UNDECLARED or name.startswith(_CHANGES_GEOMETRY):
        return OPAQUE
    if name in _ALLOCATES:
        return EMPTY
    if schema_of(function).is_mutable:
        return Effect.WRITES
    if function.is_view or name in ("aten::_reshape_alias", "aten::lift_fresh", "aten::_lazy_clone"):
        return VIEW
    return Effect.PURE


def _written_by(function: Any) -> tuple[int | str, ...]:
    if not isinstance(function, OPERATOR):
        return ()
    schema = schema_of(function)
    if schema.name in _UNDECLARED:
        return tuple(place for place, argument in enumerate(schema.arguments) if argument.name in _STATE)
    return tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if function.namespace == "c10d" or (argument.alias_info is not None and argument.alias_info.is_write)
    )


class Operation:
    """What is asked of an operation, as a dispatch mode is given it; :func:`known_operation` gives one for each."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.call = without_wrapper(function)
        schema = schema_of(function)
        self.name: str = schema.name.removeprefix("aten::") if schema is not None else str(function)
        """Without the namespace ``aten``."""
        self.effect = _effect_of(function)
        self.draws = torch.Tag.nondeterministic_seeded in function.tags  # whether the operation may draw random numbers
        self.written = _written_by(function)
        """The arguments that the operation writes into: positions, and names of those that are given by name."""
        self.overwrites = self.name in _OVERWRITES or any(isinstance(place, str) for place in self.written)
        self.tags = getattr(function, "tags", ())
        self.collective = getattr(function, "namespace", "") in _COLLECTIVES
        self.custom = getattr(function, "namespace", "") not in _NATIVE
        """Whether the operation is none of PyTorch's own, so that it may draw random numbers without saying so."""


known_operation = functools.cache(Operation)  # all that is asked of an operation, looked up once
