"""The folders of ``offload/``: imports run downwards and in no circle, files are short, and a page lists them."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import offload
from offload.base import torch_private

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "offload"
MAP = ROOT / "MAP.md"
FILES = sorted(LIBRARY.rglob("*.py"))
ROOMS = sorted(path.parent for path in LIBRARY.glob("*/__init__.py"))

LINES_OF_A_FILE = 450


def test_every_room_is_in_a_contract() -> None:
    """A room that the contracts do not name could import what it likes."""
    layers = (ROOT / "pyproject.toml").read_text("utf-8").partition("[tool.importlinter]")[2]
    assert set(re.findall(r"offload\.(\w+)", layers)) == {room.name for room in ROOMS} | {
        "offload_layers",
        "prepare",
        "prepared",
        "long_context",
    }


def test_a_file_is_read_in_one_sitting() -> None:
    assert not [path for path in FILES if len(path.read_text("utf-8").splitlines()) > LINES_OF_A_FILE]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_says_what_it_is_for_and_where_to_begin(room: Path) -> None:
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8")))
    assert said, "must have a docstring"
    assert re.search(r"\b[Mm]ay\s+import\b", said), "must say what the room may import"
    first = re.search(r"Open\s+``(\w+\.py)``\s+first", said)
    assert first, "must name the file to open first"
    assert (room / first[1]).is_file()


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


UNCHANGED = """
import sys, torch, torch.utils.checkpoint as checkpoint

def state():
    mode = checkpoint._CachingTorchDispatchMode.__torch_dispatch__
    return torch.UntypedStorage.resize_, checkpoint._VersionWrapper, mode, *sys.meta_path

before, loaded = state(), set(sys.modules)
import offload
assert state() == before, "importing the library changes PyTorch or the interpreter"
library = set(sys.modules) - loaded
assert not library & {"offload.command_line", "offload.callbacks"}
import offload.callbacks.base
library = set(sys.modules) - loaded
assert {name.partition(".")[0] for name in library} <= sys.stdlib_module_names | {"offload"}, library
assert not library & {"offload.callbacks.huggingface", "offload.callbacks.lightning"}
offload.OffloadContext(None, 1)
assert all(one is not other for one, other in zip(state()[:3], before)), "the changes are not made"
patched = state()
offload.OffloadContext(None, 1)
assert state() == patched, "the changes are made twice"
"""


@pytest.mark.slow
def test_importing_the_library_changes_nothing() -> None:
    """And loads only this package and Python's own modules, beyond what PyTorch has loaded: no command, no trainer."""
    done = subprocess.run([sys.executable, "-c", UNCHANGED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


OTHERS = {"_version", "_base", "_getframe", "_replace", "_loss_function", "_gradient_checkpointing_func"}
OTHERS |= {"_c10d_functional", "_c10d_functional_autograd", "_get_grad_norm"}
"""What PyTorch documents of tensors and operations; private names of Python and of Hugging Face."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_in(tree: ast.AST) -> set[str]:
    """The names that a file gives to something of its own."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def foreign_names(tree: ast.AST, own: set[str]) -> list[str]:
    """The private names in a file that are not the library's: of attributes, of modules, and as texts."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("__", "offload")):
            names = [*(node.module or "").split("."), *(one.name for one in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for one in node.names for part in one.name.split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names = [node.value]
        found += [f"line {node.lineno}: {name}" for name in names if is_private(name) and name not in own]
    return found


def test_private_names_of_pytorch_are_in_one_file() -> None:
    trees = {path.relative_to(LIBRARY).as_posix(): ast.parse(path.read_text("utf-8")) for path in FILES}
    own = set[str]().union(*map(names_in, trees.values())) | OTHERS | {"_bytes", "_end"}
    found = {name: foreign_names(tree, own) for name, tree in trees.items() if name != "base/torch_private.py"}
    assert not {name: used for name, used in found.items() if used}


def test_a_missing_private_name_is_an_error_that_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    use = torch_private._find("_C._no_such_function")
    with pytest.raises(RuntimeError, match=r"torch\._C\._no_such_function, which torch 3\.0\.0 does not have"):
        use(1)
    monkeypatch.setattr(torch_private, "_lacking", ["_C._functions._NoNode"])
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda *_: None)  # as before the first layer
    with pytest.raises(RuntimeError, match=r"torch\._C\._functions\._NoNode, which torch 3\.0\.0 does not have"):
        offload.get_cpu_offload_context(True, 1, 3)
    monkeypatch.setattr(torch_private, "_lacking", [])
    monkeypatch.setattr(torch.nn, "Module", type("Module", (), {}))
    with pytest.raises(RuntimeError, match=r"Module\._forward_pre_hooks, which torch 3\.0\.0 does not have"):
        offload.get_cpu_offload_context(True, 1, 3)


SAME = {"OffloadCallback", "_logger"}  # one callback for each trainer, and each file's logger


def assigned(statement: ast.stmt) -> list[ast.expr]:
    """What a statement assigns to."""
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign | ast.AugAssign) else []


def top_level_names(tree: ast.Module) -> set[str]:
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    parts = (part for node in tree.body for target in assigned(node) for part in ast.walk(target))
    return names | {part.id for part in parts if isinstance(part, ast.Name)}


def test_no_name_stands_at_top_level_in_two_files() -> None:
    places = Counter(name for path in FILES for name in top_level_names(ast.parse(path.read_text("utf-8"))))
    assert {name for name, number in places.items() if number > 1} - {"__all__"} <= SAME


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(LIBRARY).as_posix())
def test_no_file_sets_an_attribute_of_another(path: Path) -> None:
    """Neither of a module nor of a class: a late binding is an import in the other direction that no tool sees."""
    tree = ast.parse(path.read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {
        one.asname or one.name for node in imports if (node.module or "").startswith("offload") for one in node.names
    }
    targets = [part for node in ast.walk(tree) if isinstance(node, ast.stmt) for part in assigned(node)]
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr")
    set_on = [target.value for target in targets if isinstance(target, ast.Attribute)]
    set_on += [call.args[0] for call in calls]
    assert not [ast.unparse(one) for one in set_on if ast.unparse(one).partition(".")[0] in names]


def test_a_run_draws_as_many_cases_as_a_test_says(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    [conftest] = [
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(ROOT / "tests" / "conftest.py")
    ]

    def drawn(seed: int) -> list[str]:
        monkeypatch.setenv("OUTSIDE_SEED", str(seed))
        items = [
            pytest.Function.from_parent(request.node.parent, name=f"test_this[{case}]", callobj=lambda: None)
            for case in range(20)
        ]
        for item in items:
            item.add_marker(pytest.mark.drawn(5))
        items[0].add_marker(pytest.mark.nightly)
        conftest.pytest_collection_modifyitems(items)
        return [item.name for item in items if not item.get_closest_marker("nightly")]

    assert len(drawn(0)) == len(drawn(1)) == 5
    assert drawn(0) == drawn(0) != drawn(1)
    assert len({name for seed in range(40) for name in drawn(seed)}) == 19
