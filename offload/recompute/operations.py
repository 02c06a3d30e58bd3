"""Which operations can be run again: what an operation does to memory, as its schema says it, and where schemas lie.

The dispatch mode that learns a layer's forward has to know which memory each operation reads, makes and writes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from offload.base.torch_private import OPERATOR, schema_of, without_wrapper

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

_ALLOCATES = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted",
    "aten::new_empty", "aten::new_empty_strided", "aten::_empty_affine_quantized",
}  # fmt: skip

_VIEWS = {"aten::_reshape_alias", "aten::lift_fresh", "aten::_lazy_clone"}  # beside those that PyTorch calls so

_OVERWRITES = {
    "copy_", "fill_", "zero_",
    "bernoulli_", "exponential_", "normal_", "random_", "uniform_",
}  # fmt: skip
"""They do not read what they write into; neither do operations with ``out=``."""


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
        schema = schema_of(function)  # a higher-order operator has none, and runs others
        name: str = str(function) if schema is None else schema.name
        namespace: str = getattr(function, "namespace", "")
        self.name = name.removeprefix("aten::")
        self.allocates = name in _ALLOCATES  # whether it makes memory that holds nothing yet
        self.is_view = schema is not None and not schema.is_mutable and (function.is_view or name in _VIEWS)
        self.draws = torch.Tag.nondeterministic_seeded in function.tags  # whether the operation may draw random numbers
        self.written = _written_by(function)
        """The arguments that the operation writes into: positions, and names of those that are given by name."""
        self.overwrites = self.name in _OVERWRITES or any(isinstance(place, str) for place in self.written)
        self.tags = function.tags
        self.collective = namespace in _COLLECTIVES
        self.custom = namespace not in _NATIVE
        """Whether the operation is none of PyTorch's own, so that it may draw random numbers without saying so."""


known_operation = functools.cache(Operation)  # all that is asked of an operation, looked up once
