"""Which operations can be run again: what an operation does to memory, as its schema says it, and where schemas lie.

What is run again has to write memory of its own, and the same values as the first time. An operation that does not is
opaque: its results are kept, or travel, and what is computed from them can be recomputed nevertheless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch


class Kind(Enum):
    """What an operation does to memory."""

    VIEW = auto()
    """Looks into its argument's memory in another way: there is nothing to run again, for the memory is what counts."""
    PURE = auto()
    """Makes memory from what it reads, and writes nothing else."""
    WRITES = auto()
    """Writes into arguments, such as ``add_``."""
    EMPTY = auto()
    """Makes memory that holds nothing yet."""
    OPAQUE = auto()
    """Must not be run twice, or cannot be seen through."""


VIEW, PURE, WRITES, EMPTY, OPAQUE = Kind

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem", "fsdp")
"""Namespaces of operations in which several processes take part: one of them alone must not run one again."""

_UNDECLARED = {
    "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::batch_norm_update_stats",
    "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts",
    "aten::_cudnn_rnn", "aten::miopen_rnn",
}  # fmt: skip
"""They write what their schemas do not say: running statistics, the state that dropout draws from."""
_STATE = ("running_mean", "running_var", "dropout_state")

_CHANGES_GEOMETRY = ("aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::swap_")
"""They give a tensor other memory, or its memory another size."""

_ALLOCATES = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted",
    "aten::new_empty", "aten::new_empty_strided", "aten::_empty_affine_quantized",
}  # fmt: skip


@functools.cache
def kind_of(function: Any) -> Kind:
    """What an operation, as a dispatch mode is given it, does to memory."""
    if not isinstance(function, torch._ops.OpOverload):
        return Kind.OPAQUE  # a higher-order operator: it runs others
    name = function._schema.name
    if function.namespace in _COLLECTIVES or name in _UNDECLARED or name.startswith(_CHANGES_GEOMETRY):
        return Kind.OPAQUE
    if name in _ALLOCATES:
        return Kind.EMPTY
    if function._schema.is_mutable:
        return Kind.WRITES
    if function.is_view or name in ("aten::_reshape_alias", "aten::lift_fresh", "aten::_lazy_clone"):
        return Kind.VIEW
    return Kind.PURE


@functools.cache
def viewed_argument(function: Any) -> int:
    """The argument that a view looks into."""
    arguments = function._schema.arguments
    return next((place for place, argument in enumerate(arguments) if argument.alias_info is not None), 0)


@functools.cache
def draws(function: Any) -> bool:
    """Whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in function.tags


@functools.cache
def written_arguments(function: Any) -> tuple[int | str, ...]:
    """The arguments that an operation writes into: positions, and names of those that are given by name."""
    if not isinstance(function, torch._ops.OpOverload):
        return ()
    schema = function._schema
    if schema.name in _UNDECLARED:
        return tuple(place for place, argument in enumerate(schema.arguments) if argument.name in _STATE)
    return tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if function.namespace == "c10d" or (argument.alias_info is not None and argument.alias_info.is_write)
    )


class Operation:
    """What is asked of each call of an operation: there is one object for each, that :func:`operation_of` gives.

    Args:
        function: The operation, as a dispatch mode is given it.
    """

    __slots__ = ("draws", "function", "kind", "run", "viewed", "written")

    def __init__(self, function: Any) -> None:
        self.function = function
        self.kind = kind_of(function)
        self.draws = draws(function)
        self.written = written_arguments(function)
        self.viewed = viewed_argument(function) if self.kind is VIEW else 0
        self.run: Callable[..., Any] = function._op if type(function) is torch._ops.OpOverload else function
        """The same without a step in between, which takes time."""


operation_of = functools.cache(Operation)
"""All that is asked of an operation, looked up once."""


def argument_of(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What an operation is given for the argument of this name; ``None`` if it has none."""
    if name in kwargs:
        return kwargs[name]
    position = _position(function, name)
    return (
        None
        if position is None
        else args[position]
        if position < len(args)
        else function._schema.arguments[position].default_value
    )


@functools.cache
def _position(function: Any, name: str) -> int | None:
    names = [argument.name for argument in function._schema.arguments]
    return names.index(name) if name in names else None
