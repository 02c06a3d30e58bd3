"""Transformer Engine's ``cpu_offload.py``, run alone: none of its compiled code is needed to move activations.

The file is not part of this repository. Get it, and write beside it, in a text file of the same name, where it is from
and under which licence. The file imports three modules of its package that need compiled code; stand-ins here have as
much of them as the file uses for tensors that are not quantised.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

PACKAGE = "transformer_engine"
NEEDED = ("commit", "licence")
"""What the text file beside it must say, as ``name: value`` on a line of its own."""

STAND_INS: dict[str, dict[str, Any]] = {
    "": {},
    ".debug": {},
    ".debug.pytorch": {},
    ".debug.pytorch.debug_state": {"TEDebugState": type("TEDebugState", (), {"debug_enabled": False})},
    ".pytorch": {},
    ".pytorch.cpu_offload_v1": {},
    ".pytorch.quantized_tensor": {
        "QuantizedTensor": type("QuantizedTensor", (), {}),  # no tensor of the benchmarks is one
        "prepare_for_saving": lambda *tensors: (list(tensors), [None] * len(tensors)),
        "restore_from_saved": lambda _objects, tensors: tensors,
    },
}
"""Module, without the package's name → the names that the file uses of it."""


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
    """The file's ``get_cpu_offload_context``; afterwards, a package that is installed is found again."""
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.pytorch.cpu_offload", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules):
        for name, names in STAND_INS.items():
            stand_in = ModuleType(PACKAGE + name)
            vars(stand_in).update(names, __path__=[])
            sys.modules[stand_in.__name__] = stand_in
            parent, _, last = stand_in.__name__.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, stand_in)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    context: Callable[..., Any] = module.get_cpu_offload_context
    return context
