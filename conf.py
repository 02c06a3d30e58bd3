"""Sphinx settings. The source folder is the repository's root, so that pages and notebooks stay in place."""

import ast
import importlib
import json
import os
import shutil
import sys
import zlib
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from sphinx.ext.autodoc.mock import mock
from sphinx.pycode import ModuleAnalyzer

from offload.activations.context import DEFAULT_MIN_BYTES

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools" / "pages"))  # for the extension of this site

project = "offload"
author = "The offload authors"
copyright = "2026, The offload authors"
release = version = installed_version("offload")

root_doc = "index"
include_patterns = ["index.md", "CHANGELOG.md", "docs/**.md", "notebooks/*.ipynb"]
exclude_patterns = [".*", "build"]  # or all of .venv is looked through for them

extensions = [
    "myst_parser",
    "nbsphinx",
    "page_html",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]

# --- Reference ------------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_mock_imports = ["lightning", "transformers"]  # of the callbacks: slow to import, and may be missing
autodoc_typehints = "description"  # signatures stay short; types stand beside the arguments, as links
autodoc_typehints_description_target = "documented"
python_maximum_signature_line_length = 88  # longer ones get a line for each argument
napoleon_numpy_docstring = False
nitpick_ignore_regex = [
    ("py:exc", r"torch\.OutOfMemoryError"),  # PyTorch's own pages do not list it
    ("py:class", r"offload\..*\.LayerOutput"),  # a type variable: what was given comes back
    ("py:class", r"offload\.schedule\.schedule\.HasSchedule"),  # a protocol: whatever has a schedule, such as a plan
    ("py:class", "LayerPolicies"),  # what the library makes of ``policies``; nobody gives it by hand
    ("py:class", r"offload\.recompute\.policies\.Policy"),  # ``offload.Policy``, which is documented
    ("py:class", r"(offload\.device\.backend\.)?Stream"),  # a protocol: PyTorch's streams are such
]


def _inventory(name: str) -> str:
    """Writes an intersphinx inventory from ``docs/_inventories/NAME.txt`` and returns its path.

    The list holds what this documentation refers to, so that building needs no network. Each line is a name,
    its role and its page; add one where ``-n`` reports that a name of Python or PyTorch was not found.
    """
    entries = []
    for line in (ROOT / "docs" / "_inventories" / f"{name}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            target, role, page = line.split()
            entries.append(f"{target} py:{role} 1 {page if '#' in page else page + '#' + target} -\n")
    # Sphinx looks for the word zlib in the fourth line.
    header = f"# Sphinx inventory version 2\n# Project: {name}\n# Version:\n# The rest is zlib.\n"
    path = ROOT / "build" / "inventories" / f"{name}.inv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.encode() + zlib.compress("".join(entries).encode()))
    return str(path)


intersphinx_mapping = {
    "matplotlib": ("https://matplotlib.org/stable/", _inventory("matplotlib")),
    "python": ("https://docs.python.org/3/", _inventory("python")),
    "torch": ("https://docs.pytorch.org/docs/stable/", _inventory("torch")),
}


def _import_types() -> None:
    """Imports what modules import for type checkers only: autodoc has to find each name of an annotation."""
    for path in sorted((ROOT / "offload").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        with mock(autodoc_mock_imports):
            module = importlib.import_module(name.removesuffix(".__init__"))
        for block in ast.parse(path.read_text("utf-8")).body:
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
                exec(ast.unparse(block.body), vars(module))  # noqa: S102  # the library's own lines


_import_types()


def _keep_colons(_app: object, what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Napoleon takes what an attribute's first line has before a colon for its type. Here it never is one."""
    if what in {"attribute", "property", "data"}:
        lines[:0] = ["..", ""]  # an empty comment


# --- Pages ----------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_substitutions = {"default_min_bytes": f"{DEFAULT_MIN_BYTES >> 20} MiB"}
myst_heading_anchors = 3  # [text](page.md#heading) works down to this level

# --- Notebooks ------------------------------------------------------------------------------------

nbsphinx_execute = "never"  # they are committed as executed, some of them on a GPU
nbsphinx_assume_equations = False  # there are none, and MathJax would come from another server
nbsphinx_requirejs_path = ""  # nothing here uses it, and it gets in the way of other scripts
nbsphinx_prolog = """
.. only:: html

   :download:`Download this notebook </{{ env.doc2path(env.docname, base=False) }}>`
"""

# nbsphinx calls pandoc. Where there is none, the package pypandoc_binary brings it.
if shutil.which("pandoc") is None:
    import pypandoc

    os.environ["PATH"] += os.pathsep + str(Path(pypandoc.__file__).parent / "files")

# --- HTML -----------------------------------------------------------------------------------------

html_theme = "furo"
pygments_dark_style = "github-dark"  # Furo's default underlines the names of modules
html_title = f"offload {release}"
html_static_path = ["docs/_static"]
html_css_files = ["offload.css"]
html_js_files = ["scrollers.js"]
html_search_scorer = "docs/_static/search_scorer.js"
html_favicon = "docs/_static/favicon.svg"
html_show_sourcelink = False  # a notebook has its own link above

copybutton_selector = "div.highlight:not(.output_area *) > pre"  # code, not what it printed
copybutton_prompt_text = r"^\$ "
copybutton_prompt_is_regexp = True


# --- The planner ------------------------------------------------------------------------------------


def _add_planner(app: Any, page: str, _template: str, _context: object, _doctree: object) -> None:
    """Its scripts and style, on this page alone."""
    if page == "docs/will_it_fit":
        from budget_results import planner_rows

        app.add_css_file("planner.css")
        app.add_js_file(None, body=f"globalThis.offloadMeasured = {json.dumps(planner_rows())};")
        app.add_js_file("planner_core.js")
        app.add_js_file("planner_plans.js")
        app.add_js_file("planner.js")


def setup(app: Any) -> None:
    """Connects what is defined above."""
    drop_in = ModuleAnalyzer.for_module("offload.activations.drop_in")
    drop_in.analyze()
    drop_in.overloads.clear()  # its signature says it all, three for type checkers would say it four times
    app.connect("autodoc-process-docstring", _keep_colons, priority=400)  # before Napoleon, at 500
    app.connect("html-page-context", _add_planner)
