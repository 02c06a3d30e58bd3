"""What ``torch.compile`` has to know of this library, said without loading the compiler, which takes seconds."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
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


def is_compiled(module: Any) -> bool:
    """Whether a module's whole forward is compiled, by ``module.compile()`` or ``torch.compile(module)``."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def leave_to_interpreter(package: str) -> None:
    """Where a compiled layer breaks its graph, the compiler would take our hooks for the program's code."""
    if "torch._dynamo" in sys.modules:
        importlib.import_module(_RULES).add(package)
    else:
        sys.meta_path.insert(0, _WhenRulesAreImported(package))


def forget_compiled() -> None:
    """Let what was compiled be compiled again: the compiler does not look whether a module's hooks have changed.

    It keeps no record of which modules a piece of code has run through, so all code is affected.
    """
    compiler: Any = sys.modules.get("torch._dynamo")
    if compiler is not None:
        compiler.reset_code_caches()


class _WhenRulesAreImported:
    """Adds the package to the compiler's rules as soon as those have been imported."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _RULES:
            return None
        sys.meta_path.remove(self)  # the finder that is asked next is the real one
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def exec_module(rules: Any) -> None:
                load(rules)
                rules.add(self._package)

            loader.exec_module = exec_module
        return spec
