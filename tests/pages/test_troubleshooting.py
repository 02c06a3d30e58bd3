"""Pages name what is there: every warning and error of states, captures and host memory; tests and scripts."""

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "reference" / "troubleshooting.md").read_text("utf-8"))
SAYS = {"warn_caller": 0, "_say": 1, "OffloadStateError": 0, "CaptureError": 0, "HostMemoryError": 0}
"""What warns or is raised → which of its arguments is the text."""
WORDS = 4


def phrases(node):
    """The beginnings of the pieces of a text that has at least so many words between what is filled in."""
    texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))
    for text in texts:
        words = re.findall(r"\S+", text)
        if not text[:1].isspace() and words[0][0] in ".,;:":
            words = words[1:]
        if len(words) >= WORDS:
            yield " ".join(words[:WORDS])


@pytest.fixture(scope="module")
def quoted():
    """The beginnings of each text, by the line that says it. Not at import, which every process of tests does."""
    found = {}
    for path in sorted((ROOT / "offload").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = isinstance(node, ast.Call) and (getattr(node.func, "id", None) or getattr(node.func, "attr", None))
            if name in SAYS and len(node.args) > SAYS[name] and (said := list(phrases(node.args[SAYS[name]]))):
                found[f"{path.stem}:{node.lineno}"] = said
    return found


def test_what_is_said_is_on_the_page(quoted):
    assert len(quoted) >= 20
    missing = {where: said[0] for where, said in quoted.items() if not any(phrase in PAGE for phrase in said)}
    assert not missing, "docs/reference/troubleshooting.md lacks them"


def test_the_matrix_of_what_works_with_what_names_tests_and_scripts_that_exist():
    page = (ROOT / "docs/howto/trainers.md").read_text("utf-8")
    matrix = page[page.index("## What works with what") :]
    names = set(re.findall(r"`((?:test_)?\w+(?:\.py)?)`", matrix))
    files = [*(ROOT / "docs/examples").glob("*.py"), *(ROOT / "tests").rglob("test_*.py")]
    tests = set(re.findall(r"^ *def (test_\w+)", "\n".join(path.read_text("utf-8") for path in files), re.MULTILINE))
    assert {name for name in names if name.endswith(".py")} <= {path.name for path in files}
    assert {name for name in names if name.startswith("test_") and not name.endswith(".py")} <= tests
    assert names > {"ddp.py", "test_sharded_layers"}


def test_every_reason_to_keep_a_tensor_has_a_row():
    limits = (ROOT / "docs" / "explanation" / "limits.md").read_text("utf-8")
    table = limits[limits.index("| reason | which tensor |") :].split("\n\n")[0]
    reasons = re.findall(r"^\| (`[a-z ]+`) \|", table, re.MULTILINE)
    assert len(reasons) >= 9
    assert all(f"| {reason} |" in PAGE for reason in reasons)


@pytest.fixture
def package_readme(monkeypatch):
    """The module, with a stand-in for hatchling's class that it extends; only builds of packages have hatchling."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    import package_readme

    yield package_readme
    del sys.modules["package_readme"]


def test_a_package_has_no_relative_link_and_no_picture(package_readme):
    hook = package_readme.ReadmeHook()
    hook.root = str(ROOT)
    metadata = {}
    hook.update(metadata)
    text = metadata["readme"]["text"]
    assert "memory_budget" in text
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")] == []
    assert not re.search(r"!\[|<img|<!--|More results|## Documentation", text)


def test_text_of_links_and_other_sites_remain(package_readme):
    text = (
        "<!-- table: x -->\nSee [the guide](docs/a.md) and [PyTorch](https://pytorch.org):\n\n![Alt](a.svg)\n\nMore.\n"
    )
    assert package_readme.package_readme(text) == "See the guide and [PyTorch](https://pytorch.org).\n\nMore.\n"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_to_files_of_the_repository(name):
    """Of the pages of the site, Sphinx finds this."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text("utf-8"))
    files = [link for link in links if not link.startswith("https://")]
    assert files
    assert [link for link in files if not (ROOT / link).exists()] == []
