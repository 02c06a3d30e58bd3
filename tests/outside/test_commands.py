"""The commands that run all, on little."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, record: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.outside", *arguments, "--record", str(record)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(record.read_text())
    return found


@pytest.mark.slow
@pytest.mark.nightly
def test_operations_replace_what_they_run(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"runs": {"operation float32": {"samples": 0}, "module float32": {"samples": 1}}}))
    record = run("operations", "--kinds", "operation", "--dtypes", "float32", "--names", "sin", record=path)
    assert record["runs"]["module float32"] == {"samples": 1}
    found = record["runs"]["operation float32"]
    assert found["runs"] == 6
    assert found["moved"] == 6  # where all is recomputed, the input is offloaded
    assert not found["different"]
