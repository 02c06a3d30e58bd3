"""A benchmark's whole program at its small size on the CPU, and the record that it writes."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


def record_of(module: ModuleType, path: Path, *arguments: str, commit: str = "") -> dict[str, Any]:
    """What ``python -m benchmarks.MODULE --small --out PATH`` leaves, with more ``arguments``, as of a ``commit``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__name__, "--small", "--out", str(path), *arguments])
        patch.setenv("OFFLOAD_COMMIT", commit)
        patch.setattr("benchmarks.report.resolve_device", lambda _: torch.device("cpu"))
        module.main()
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return record
