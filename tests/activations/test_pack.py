"""The way of a saved tensor through ``pack``: down the files, and seldom up again."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from lab import Lab
from models import offloading

import offload

ROOT = Path(offload.__file__).parent
HANDED_UP = 5
"""As often a reader may have to climb back to a file above."""

Call = tuple[str, str, str]
"""Caller's file, called file, called function."""


def imports() -> dict[str, set[str]]:
    """Each file of the library with all files that it imports, directly and through others."""
    paths = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): str(path) for path in ROOT.rglob("*.py")}
    found: dict[str, set[str]] = {path: set() for path in paths.values()}
    for path in paths.values():
        for node in ast.walk(ast.parse(Path(path).read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
                found[path] |= {paths[name] for name in names if name in paths}
    for middle, below in found.items():
        for imported in found.values():
            if middle in imported:
                imported.update(below)
    return found


@contextmanager
def calls_between_files() -> Iterator[list[Call]]:
    """The calls from one file of the library into another, in this thread."""
    calls: list[Call] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_back is not None:
            caller, called = frame.f_back.f_code.co_filename, frame.f_code.co_filename
            if caller != called and caller.startswith(str(ROOT)) and called.startswith(str(ROOT)):
                calls.append((caller, called, frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def test_a_saved_tensor_is_seldom_handed_up(lab: Lab) -> None:
    offloaded = offloading(1, 3, lab.device)
    calls: list[Call] = []

    def layer(y: torch.Tensor) -> torch.Tensor:
        y = y.exp().exp()  # what the second one saves waits until the operation is over
        with calls_between_files() as made:
            y = y.exp()
        calls[:] = made
        return y

    for _ in range(2):  # the second time, the host buffer is one that was used before
        x = torch.zeros(64, device=lab.device, requires_grad=True)
        offloaded.forward([layer, torch.neg, torch.neg], x).sum().backward()
    names = [name for *_, name in calls]
    assert any(name.endswith("Backend.to_host") for name in names), "it shall see a copy"
    assert "MovedHandle.__init__" in names, "it shall see the handle"
    below = imports()
    up = [
        f"{Path(caller).name} calls {name} of {Path(called).name}"
        for caller, called, name in calls
        if caller in below[called]
    ]
    assert len(up) <= HANDED_UP, "\n".join(up)
