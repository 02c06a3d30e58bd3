"""Runs every example as a user would: as a script, in a folder of its own.

An example that needs a GPU says so with a constant, ``REQUIRES = "cuda"``; all others run on the CPU.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "docs" / "examples").glob("*.py"))


def needs_cuda(example: Path) -> bool:
    for statement in ast.parse(example.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="REQUIRES")], value=ast.Constant(value=value)):
                assert value == "cuda", f'{example.name}: REQUIRES must be "cuda", got {value!r}'
                return True
    return False


def run(example: Path, folder: Path, **hidden: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        cwd=folder,
        env={**os.environ, "MPLBACKEND": "agg", **hidden},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("example", [path for path in EXAMPLES if not needs_cuda(path)], ids=lambda path: path.name)
def test_on_the_cpu(example: Path, tmp_path: Path) -> None:
    run(example, tmp_path, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            path, id=path.name, marks=pytest.mark.multigpu(n=2) if path.stem == "pipeline" else pytest.mark.gpu
        )
        for path in EXAMPLES
    ],
)
def test_on_gpus(example: Path, tmp_path: Path) -> None:
    run(example, tmp_path)


def test_there_are_examples():
    assert [path for path in EXAMPLES if not needs_cuda(path)]
