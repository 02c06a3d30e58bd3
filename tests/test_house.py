"""The folders of ``offload/``: imports run downwards and in no circle, files are short, and a page lists them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "offload"
MAP = ROOT / "docs" / "explanation" / "map.md"
FILES = sorted(LIBRARY.rglob("*.py"))
ROOMS = sorted(path.parent for path in LIBRARY.glob("*/__init__.py"))

LINES_OF_A_FILE = 450
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lines_of(*files: Path) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in files)


def test_every_import_points_downwards_and_none_in_a_circle() -> None:
    """The contracts stand in ``pyproject.toml``; what is printed says which arrow is wrong, and in which line it is."""
    done = subprocess.run(
        [sys.executable, "-c", LINT_IMPORTS, "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_is_in_a_contract() -> None:
    """A room that the contracts do not name could import what it likes."""
    layers = (ROOT / "pyproject.toml").read_text("utf-8").partition("[tool.importlinter]")[2]
    assert set(re.findall(r"offload\.(\w+)", layers)) == {room.name for room in ROOMS} | {"offload_layers"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(LIBRARY).as_posix())
def test_a_file_is_read_in_one_sitting(path: Path) -> None:
    assert lines_of(path) <= LINES_OF_A_FILE


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_says_what_it_is_for_and_where_to_begin(room: Path) -> None:
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8")))
    assert said, "must have a docstring"
    assert re.search(r"\b[Mm]ay\s+import\b", said), "must say what the room may import"
    first = re.search(r"Open\s+``(\w+\.py)``\s+first", said)
    assert first, "must name the file to open first"
    assert (room / first[1]).is_file()


# The map.


def named(text: str) -> set[str]:
    """The files and folders that a page names."""
    return set(re.findall(r"`([\w./]+(?:\.\w+|/))`", text))


def test_what_the_map_names_is_there() -> None:
    names = named(MAP.read_text("utf-8"))
    paths = {name for name in names if name.endswith((".py", ".sh", "/"))}
    assert len(paths) > 20
    assert not [name for name in sorted(paths) if not (LIBRARY / name).exists() and not (ROOT / name).exists()]


def test_every_folder_is_on_the_map() -> None:
    names = named(MAP.read_text("utf-8"))
    assert not [room.name for room in ROOMS if f"{room.name}/" not in names]
