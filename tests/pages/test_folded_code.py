"""Code of the notebooks that only draws is folded on the site, and other folded cells say what they fold."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("sphinx")

import page_html

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_that_draw_are_folded(path):
    cells = [one for one in json.loads(path.read_text("utf-8"))["cells"] if one["cell_type"] == "code"]
    draws = [one for one in cells if re.search(r"new_figure\(|\bplt\.", "".join(one["source"]))]
    hidden = [one for one in cells if page_html.FOLDED in one["metadata"].get("tags", ())]
    assert [one for one in hidden if "fold" not in one["metadata"]] == draws
    for one in hidden:  # in JupyterLab, too
        assert one["metadata"]["jupyter"] == {"source_hidden": True}
