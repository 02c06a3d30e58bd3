"""The matrix of what works with what names tests and scripts that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_matrix_names_what_there_is():
    page = (ROOT / "docs/howto/trainers.md").read_text("utf-8")
    matrix = page[page.index("## What works with what") :]
    names = set(re.findall(r"`((?:test_)?\w+(?:\.py)?)`", matrix))
    files = [*(ROOT / "docs/examples").glob("*.py"), *(ROOT / "tests").rglob("test_*.py")]
    tests = set(re.findall(r"^ *def (test_\w+)", "\n".join(path.read_text("utf-8") for path in files), re.MULTILINE))
    assert {name for name in names if name.endswith(".py")} <= {path.name for path in files}
    assert {name for name in names if name.startswith("test_") and not name.endswith(".py")} <= tests
    assert names > {"ddp.py", "test_sharded_layers"}
