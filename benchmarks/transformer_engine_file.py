"""Transformer Engine's ``cpu_offload.py``, run alone: none of its compiled code is needed to move activations.

The file is not part of this repository. Someone who measures it fetches it, and writes beside it, in a text file of
the same name, where it is from and under which licence. It imports three modules of its package that need compiled
code; here they are stood in for by as much as the file uses for tensors that are not quantised.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "transformer_engine"
NEEDED = ("commit", "licence")
"""What the text file beside it must say, as ``name: value`` on a line of its own."""


class _DebugState:
    debug_enabled = False


class _QuantizedTensor:
    """No tensor of the benchmarks is one."""


def _prepare_for_saving(*tensors: Any) -> tuple[list[Any], list[None]]:
    return list(tensors), [None] * len(tensors)


def _restore_from_saved(_objects: list[None], tensors: list[Any]) -> list[Any]:
    return tensors


STAND_INS: dict[str, dict[str, Any]] = {
    f"{PACKAGE}.debug.pytorch.debug_state": {"TEDebugState": _DebugState},
    f"{PACKAGE}.pytorch.cpu_offload_v1": {},
    f"{PACKAGE}.pytorch.quantized_tensor": {
        "QuantizedTensor": _QuantizedTensor,
        "prepare_for_saving": _prepare_for_saving,
        "restore_from_saved": _restore_from_saved,
    },
}
"""Module → the names that the file uses of it."""


def describe(path: Path) -> dict[str, str]:
    """What a record says about the file: what the text beside it says, and the checksum of what was run.

    Raises:
        ValueError: There is no such file, or no text beside it that says what is needed.
    """
    if not path.is_file():
        raise ValueError(f"Transformer Engine's file must be there, got {path}; give the path of its cpu_offload.py")
    beside = path.with_suffix(".txt")
    lines = beside.read_text("utf-8").splitlines() if beside.is_file() else []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines) if value.strip()}
    missing = [name for name in NEEDED if name not in said]
    if missing:
        raise ValueError(
            f"{beside} must name {' and '.join(NEEDED)}, got no {missing[0]}; add a line '{missing[0]}: …'"
        )
    return {**said, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def load(path: Path) -> Callable[..., Any]:
    """The file's ``get_cpu_offload_context``."""
    name = f"{PACKAGE}.pytorch.cpu_offload"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"Transformer Engine's file must be a Python file, got {path}; give its cpu_offload.py")
    module = importlib.util.module_from_spec(spec)
    with _stood_in(name, module):
        spec.loader.exec_module(module)
    context: Callable[..., Any] = module.get_cpu_offload_context
    return context


@contextmanager
def _stood_in(name: str, module: ModuleType) -> Iterator[None]:
    """Only while the file is imported: afterwards, a package that is installed is found again."""
    before = {key: found for key, found in sys.modules.items() if key.split(".")[0] == PACKAGE}
    for key in before:
        del sys.modules[key]
    for path, names in STAND_INS.items():
        _add(path, names)
    _add(name, module)
    try:
        yield
    finally:
        for key in [key for key in sys.modules if key.split(".")[0] == PACKAGE]:
            del sys.modules[key]
        sys.modules.update(before)


def _add(path: str, content: dict[str, Any] | ModuleType) -> None:
    """A module at ``path``, an attribute of its package, which is added where it is not there."""
    package, _, last = path.rpartition(".")
    if isinstance(content, dict):
        module = ModuleType(path)
        vars(module).update(content)
    else:
        module = content
    module.__path__ = getattr(module, "__path__", [])
    sys.modules[path] = module
    if package:
        if package not in sys.modules:
            _add(package, {})
        setattr(sys.modules[package], last, module)
