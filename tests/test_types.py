"""The library's types as a user's type checker sees them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import NO_GPU, run_scripts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "typed_script.py"


def test_a_users_script_is_typed() -> None:
    """For pyright; ``make types`` has mypy look at the script, too.

    Pyright comes as basedpyright, whose package has all that it needs; the script asks for pyright's rules.
    """
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, str(SCRIPT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_script_runs(tmp_path: Path) -> None:
    [done] = run_scripts([[str(SCRIPT)]], tmp_path, os.environ | NO_GPU, strict=True)
    assert done.code == 0, done.output
