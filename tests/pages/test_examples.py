"""Runs every example as a user would: as a script, in a folder of its own.

An example that needs a GPU says so with a constant, ``REQUIRES = "cuda"``; all others run on the CPU.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
RANKS = {"ddp", "fsdp2", "pipeline"}  # they use two GPUs, or none
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def needs_cuda(example: Path) -> bool:
    for statement in ast.parse(example.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="REQUIRES")], value=ast.Constant(value=value)):
                assert value == "cuda", f'{example.name}: REQUIRES must be "cuda", got {value!r}'
                return True
    return False


def run(example: Path, folder: Path, **hidden: str) -> None:
    outside = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        # What is imported for the first time is compiled, and some packages have escapes that Python 3.12 warns of.
        [sys.executable, "-W", "error", "-W", "ignore::SyntaxWarning", str(example)],
        cwd=folder,
        env={**outside, "MPLBACKEND": "agg", **hidden},
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
        pytest.param(path, id=path.name, marks=pytest.mark.multigpu(n=2) if path.stem in RANKS else pytest.mark.gpu)
        for path in EXAMPLES
    ],
)
def test_on_gpus(example: Path, tmp_path: Path) -> None:
    run(example, tmp_path)


@pytest.mark.parametrize("path", [*EXAMPLES, *NOTEBOOKS], ids=lambda path: path.name)
def test_what_asks_for_determinism_sets_up_cublas_for_it(path):
    """On a GPU it would be an error otherwise, which no run on the CPU shows."""
    text = path.read_text("utf-8")
    assert "use_deterministic_algorithms(True)" not in text or "CUBLAS_WORKSPACE_CONFIG" in text


def test_there_are_examples():
    assert [path for path in EXAMPLES if not needs_cuda(path)]
