"""The README as a package shows it: nothing in it leads into the repository."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
    assert not re.search(r"!\[|<img|<!--", text)


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
