"""What ``torch.compile`` has to know of this library, said without loading the compiler, which takes seconds."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from torch._C._dynamo.eval_frame import set_eval_frame

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_RULES = "torch._dynamo.trace_rules"
_REMEDY = (
    "offload moves tensors here, which no graph can hold; compile without fullgraph=True, or compile each layer by "
    "itself. For torch.export, take offloading off first, by handle.remove() or by leaving out the context, or "
    "export with strict=False"
)


def interpreted(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Do what ``torch.compiler.disable`` does: the interpreter runs the function and all that it calls.

    The compiler knows such a function by the same attributes. Where a graph must not break, it shows the remedy.
    """

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        compiling = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(compiling)

    marked: Any = call
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REMEDY
    marked._torchdynamo_orig_callable = function
    return call


def leave_to_interpreter(package: str) -> None:
    """Where a compiled layer breaks its graph, the compiler would take our hooks for the program's code."""
    if "torch._dynamo" in sys.modules:
        _exclude(package, importlib.import_module(_RULES))
    else:
        sys.meta_path.insert(0, _WhenImported(_RULES, functools.partial(_exclude, package)))


def forget_compiled() -> None:
    """Let what was compiled be compiled again: the compiler does not look whether a module's hooks have changed.

    It keeps no record of which modules a piece of code has run through, so all code is affected.
    """
    compiler: Any = sys.modules.get("torch._dynamo")
    if compiler is not None:
        compiler.reset_code_caches()


def _exclude(package: str, rules: Any) -> None:
    rules.add(package)


class _WhenImported:
    """Calls a function with a module as soon as that has been imported.

    Args:
        name: The module.
        then: The function.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)  # the finder that is asked next is the real one
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._then(module)

            loader.exec_module = exec_module
        return spec
