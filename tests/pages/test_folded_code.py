"""Code of the notebooks that only draws is folded on the site, and nothing else is without saying so."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from docutils import nodes
from docutils.utils import new_document

pytest.importorskip("sphinx")

import page_html

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def cell(kind="code", *tags, **metadata):
    return {"cell_type": kind, "metadata": {"tags": [*tags], **metadata} if tags else {}, "source": ["1"]}


def folded(tmp_path, cells, number):
    """What stands in a document of so many cells of code after its cells were looked at."""
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}), "utf-8")
    document = new_document("a")
    for index in range(number):
        document += nodes.container("", nodes.literal_block("", str(index)), classes=["nbinput"])
        document += nodes.container("", nodes.paragraph("", "out"), classes=["nboutput"])
    page_html.fold_code(SimpleNamespace(env=SimpleNamespace(docname="a", doc2path=lambda _: str(path))), document)
    return [node.astext() for node in document.children]


def test_only_cells_with_the_tag_are_folded(tmp_path):
    cells = [cell(), cell("markdown", "hide-input"), cell("code", "hide-input"), cell("code", "other")]
    shown = folded(tmp_path, cells, 3)
    fold = page_html.FOLD.format("The code that draws this")
    assert shown == ["0", "out", fold, "1", "</details>", "out", "2", "out"]


def test_a_cell_says_what_is_folded_where_it_draws_nothing(tmp_path):
    shown = folded(tmp_path, [cell("code", "hide-input", fold="a < b")], 1)
    assert shown[0] == page_html.FOLD.format("a &lt; b")


def test_a_cell_without_code_is_refused(tmp_path):
    with pytest.raises(ValueError, match="none of its 2 cells of code must be empty, got 1 with code"):
        folded(tmp_path, [cell(), cell("code", "hide-input")], 1)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_that_draw_are_folded(path):
    cells = [one for one in json.loads(path.read_text("utf-8"))["cells"] if one["cell_type"] == "code"]
    draws = [one for one in cells if re.search(r"new_figure\(|\bplt\.", "".join(one["source"]))]
    hidden = [one for one in cells if page_html.FOLDED in one["metadata"].get("tags", ())]
    assert [one for one in hidden if "fold" not in one["metadata"]] == draws
    for one in hidden:  # in JupyterLab, too
        assert one["metadata"]["jupyter"] == {"source_hidden": True}
