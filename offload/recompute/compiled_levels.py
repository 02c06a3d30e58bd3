"""Levels of a compiled layer: how much of what the layer computes its graph saves for backward.

PyTorch's selective activation checkpointing, traced into the graph, decides which operations' results are saved; the
compiled backward recomputes the rest. So a level needs no second run of the layer and no dispatch mode, and whatever
the graph saves is kept or offloaded through hooks on saved tensors, as of any layer. The compiler has a setting of its
own, ``activation_memory_budget``: one for the whole process, in parts of an unknown number of bytes, and without a word
on random numbers.

An operation that draws random numbers is never kept: PyTorch's policies do not advance the generator for an operation
that is kept, and those behind it would draw other numbers in backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from offload.base.attributes import replace_attribute, unchanged
from offload.base.torch_private import (
    COMPILED_CALL,
    OPERATOR,
    ORIGINAL,
    count_modes,
    is_traced,
    schema_of,
    swap_own_generators,
    when_compiling,
)
from offload.recompute.costs import LayerPolicy, RegionProfile
from offload.recompute.layer_inputs import LayerInputs
from offload.recompute.layer_policies import LayerPolicies
from offload.recompute.policies import KEEP, OFFLOAD, RECOMPUTE, SOURCE


class Level(IntEnum):
    """What a compiled layer's graph saves, beside parameters and the layer's inputs."""

    NOTHING = 0
    ATTENTION = 1  # results of attention
    PRODUCTS = 2  # results of matrix products and convolutions, too
    ALL = 3  # whatever the compiler saves without a policy


NAMES = {Level.NOTHING: SOURCE, Level.ATTENTION: "attention", Level.PRODUCTS: "products", Level.ALL: "other operations"}
"""The region that each level keeps and the one before does not."""

LEVELS = {name: level for level, name in NAMES.items()}

_PRODUCTS = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::linear", "aten::matmul",
    "aten::convolution", "aten::_convolution", "aten::_int_mm", "aten::_scaled_mm", "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
}  # fmt: skip

_CUDA_GRAPHS = {"reduce-overhead", "max-autotune"}
"""Modes of ``torch.compile`` that capture CUDA graphs, whose memory no hook may move."""

MOST_TRIALS = 2  # with inputs of so many sizes a layer is tried: then the compiler has code for any size

_ARGUMENTS = ("backend", "mode", "options", "dynamic")


def _level_of(function: Any, args: Any, kwargs: Any) -> Level:
    """The first level that keeps an operation's results; none below :attr:`Level.ALL` if the operation draws."""
    if not isinstance(function, OPERATOR):
        return Level.ATTENTION if "attention" in str(function) else Level.ALL
    schema = schema_of(function)
    if _draws(function, schema, args, kwargs):
        return Level.ALL
    if schema.name in _PRODUCTS:
        return Level.PRODUCTS
    return Level.ATTENTION if "attention" in schema.name or "flash_attn" in schema.name else Level.ALL


def _draws(function: Any, schema: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers; attention says that it may, and does if it has dropout."""
    given = dict(zip((one.name for one in schema.arguments), args, strict=False)) | dict(kwargs)
    dropout = [given.get(one.name, one.default_value) for one in schema.arguments if "dropout" in one.name]
    if dropout:
        return any(one is None or bool(one) for one in dropout)
    return torch.Tag.nondeterministic_seeded in function.tags


def _runs_at(level: Level, found: set[Level]) -> Callable[..., Any]:
    """A function that runs a forward at a level, for the compiler to trace; each has its own cache there."""
    run: Any
    if level is Level.ALL:

        def run(forward: Any, args: Any, kwargs: Any) -> Any:
            return forward(*args, **kwargs)
    else:

        def policy(_: object, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            of = _level_of(function, args, kwargs)
            found.add(of)
            return CheckpointPolicy.MUST_SAVE if of <= level else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)

        def run(forward: Any, args: Any, kwargs: Any) -> Any:
            return checkpoint(lambda: forward(*args, **kwargs), use_reentrant=False, context_fn=contexts)

    return FunctionType(_in_no_file(run.__code__), run.__globals__, run.__name__, None, run.__closure__)


def _in_no_file(code: CodeType) -> CodeType:
    """New code, since the compiler counts compilations by code; and it leaves files of this package out."""
    parts = (_in_no_file(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_filename="<compiled layer>", co_consts=tuple(parts))


class Runs:
    """The functions that run layers at each level; layers that share them, share what is compiled."""

    def __init__(self) -> None:
        self.found: set[Level] = set()
        """Of which levels there are operations in the layers, as far as the compiler has asked."""
        self.at = {level: _runs_at(level, self.found) for level in Level}
        self.check = _runs_at(Level.NOTHING, self.found)
        """The same as for :attr:`Level.NOTHING`, to see whether a layer compiles as one graph."""


class _ThisThread(threading.local):
    runs_level = False  # whether this thread runs a layer at a level, which may be compiled first


_this_thread, _settings_before = _ThisThread(), list[bool]()


def _compiler_begins(_: object) -> None:
    if _this_thread.runs_level:
        _settings_before.append(swap_own_generators(value=False))


def _compiler_ends(_: object) -> None:
    while _settings_before:
        swap_own_generators(_settings_before.pop())


def with_default_generators(run: Callable[..., Any], *args: Any) -> Any:
    """Run what may be compiled first: what its backward recomputes draws from the default generators."""
    when_compiling(_compiler_begins, _compiler_ends)
    before, _this_thread.runs_level = _this_thread.runs_level, True
    try:
        return run(*args)
    finally:
        _this_thread.runs_level = before


def parse_compile(given: object) -> dict[str, Any] | None:
    """What ``compile=`` says for ``torch.compile``; ``None`` leaves layers as they are."""
    if given is None or given is False:
        return None
    if given is True:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            'compile must be True, or arguments of torch.compile such as {"backend": "inductor", "mode": "default"}, '
            f"got {given!r}"
        )
    unknown = [name for name in given if name not in _ARGUMENTS]
    if unknown:
        raise ValueError(f"compile must hold some of {', '.join(_ARGUMENTS)}, got {unknown[0]!r}; leave it out")
    if given.get("mode") in _CUDA_GRAPHS:
        raise ValueError(
            f"compile must not capture CUDA graphs, whose memory cannot be offloaded, got mode={given['mode']!r}; "
            'write "max-autotune-no-cudagraphs", or leave mode out.'
        )
    return dict(given)


class CompiledForward:
    """Stands in place of a layer's forward, and runs it at the level that is set, compiled by ``compiles``."""

    is_compiled = True

    def __init__(self, layer: nn.Module, runs: Runs, compiles: Callable[..., Any], *, asked: bool) -> None:
        original = layer._modules.get(ORIGINAL)
        # Weakly, as the layer holds this object.
        self._module = weakref.ref(layer if original is None else original)
        self._is_original = original is not None
        self._given = vars(layer).get("forward") if original is None else None
        """A forward that the program has given this one layer."""
        self.asked = asked  # whether the program has asked for compiling here, and not compiled the layer itself
        self._at = {level: compiles(run) for level, run in runs.at.items()}
        self._check = torch.compile(runs.check, backend=_as_it_is, fullgraph=True)
        self._runs = runs
        self.counted: Callable[..., Any] | None = None  # what runs compiled code so that its memory is counted
        self.level: Level | None = Level.NOTHING  # the level of forwards from now on; ``None`` runs the layer as it is
        self._undo = [replace_attribute(layer, "forward", self)]
        if original is None and getattr(layer, COMPILED_CALL) is not None:
            self._undo.append(replace_attribute(layer, COMPILED_CALL, None))  # it would compile the hooks, too

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        level = self.level
        if level is None or is_traced():
            return self._forward(*args, **kwargs)
        return self.at(level if torch.is_grad_enabled() else Level.ALL, args, kwargs)

    def at(self, level: Level, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.counted is None or not count_modes():
            return with_default_generators(self._at[level], self._forward, args, kwargs)
        return with_default_generators(self.counted, self._module(), self._at[level], self._forward, args, kwargs)

    def check(self, args: Any, kwargs: Any) -> None:
        """Raise whatever the compiler raises where the layer is not one graph."""
        self._check(self._forward, tuple(args), dict(kwargs))

    def has(self, level: Level) -> bool:
        """Whether a level may differ from the one below."""
        return not self._runs.found or level in self._runs.found

    def remove(self) -> None:
        """Put the layer's own forward back, also for one that has begun. A second call does nothing."""
        self.level = None
        while self._undo:
            self._undo.pop()()

    @property
    def _forward(self) -> Callable[..., Any]:
        module = self._module()
        if module is None:
            raise ReferenceError("the layer must be there while its forward runs, but it is gone; keep the model.")
        if self._is_original:
            return module  # its own hooks run inside
        return self._given or MethodType(type(module).forward, module)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the layer runs as the layer without this object."""
        return (unchanged, (self._forward,))


def _as_it_is(graph: Any, _inputs: object) -> Any:
    """A compiler's backend that compiles nothing. What runs then has no backward: PyTorch 2.11 would never free it."""
    return torch.no_grad()(graph.forward)


class CompiledPolicies(LayerPolicies):
    """The level of one compiled layer, and what each level costs: learned by trying all of them in the first step."""

    runs_again = False

    def __init__(self, layer: nn.Module, forward: CompiledForward) -> None:
        super().__init__({"*": RECOMPUTE}, layer, measures=True)
        self.forward = forward
        forward.level = Level.NOTHING
        self._tried: list[list[int]] = []  # the sizes of the inputs of each trial
        self._input_bytes: dict[Hashable, int] = {}  # of the memory of each input that the layer's costs count
        self._planned = False

    def wants_trial(self, given: tuple[Any, Any]) -> bool:
        """Whether a forward with these arguments is tried: the compiler compiles a second size anew, and few more."""
        if self._planned or len(self._tried) >= MOST_TRIALS:
            return False
        return LayerInputs(*given).sizes not in self._tried

    def learn(self, given: tuple[Any, Any], input_bytes: Mapping[Hashable, int]) -> None:
        """The layer was tried; what it costs is set by whoever compares the layer with others that are like it."""
        self.given, self._input_bytes = [*input_bytes], {**input_bytes}
        self._tried.append(LayerInputs(*given).sizes)
        self.learned += 1

    def share(self, memories: Collection[Hashable]) -> None:
        """Count no inputs that are in these memories. All inputs are one region, the first."""
        found = {one: self._input_bytes.pop(one, 0) for one in self.given if one in memories}
        self.shared_bytes = {one: nbytes or self.shared_bytes.get(one, 0) for one, nbytes in found.items()}
        nbytes = sum(found.values())
        first = (replace(one, nbytes=max(0, one.nbytes - nbytes)) for one in self.costs[:1])
        self.costs = (*first, *self.costs[1:])

    @property
    def proven(self) -> bool:
        return bool(self.costs)

    def measure_again(self) -> None:
        self.numbered, self._planned, self.forward.level = None, False, Level.NOTHING

    def follows(self, numbered: LayerPolicy | None, regions: Sequence[RegionProfile]) -> None:
        """Run at a planned level from now on. Hooks keep or offload whatever the graph saves: no other policies."""
        self.numbered, self._planned = numbered, True
        level = Level.ALL
        if numbered is not None:
            missing = (number for number in range(1, len(regions)) if number not in numbered.kept)
            level = LEVELS[regions[next(missing, len(regions)) - 1].name]
        self.forward.level = level

    def by_name(self) -> dict[str, str]:
        level = Level.ALL if self.forward.level is None else self.forward.level
        offloaded = () if self.numbered is None else self.numbered.offloaded
        return {
            cost.name: (RECOMPUTE if LEVELS[cost.name] > level else OFFLOAD if number in offloaded else KEEP).value
            for number, cost in enumerate(self.costs)
        }
