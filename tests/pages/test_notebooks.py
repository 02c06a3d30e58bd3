"""Executes notebooks on the CPU, where they choose a small size, and checks their committed outputs."""

import ast
import json
import re
from pathlib import Path

import nbformat
import page_html
import pytest
import tutorial
from nbclient.exceptions import CellExecutionError
from tutorial import execute

import offload
import offload.pipelining  # which is imported by itself

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def errors(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs if output.output_type == "error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        # The tutorial; what the others teach is in the code of the pages, too.
        pytest.param(path, id=path.name, marks=() if path.name[:2] == "01" else pytest.mark.nightly)
        for path in NOTEBOOKS
    ],
)
def test_executes(path, tmp_path):
    result = tmp_path / "result.json"
    variables = {"CUDA_VISIBLE_DEVICES": "", "OFFLOAD_TUTORIAL_RESULT": str(result)}
    notebook = execute(path, env=variables, cell_timeout_s=900)
    assert not errors(notebook)
    if path.name == "01_basic.ipynb":  # the one that `make tutorial` runs
        rows = json.loads(result.read_text())
        assert len(rows) > 1
        assert all(row.keys() == rows[0].keys() for row in rows)


def test_the_tutorial_says_the_same_of_a_cpu_as_its_command():
    first = code_cells(nbformat.read(NOTEBOOKS[0], as_version=4))[0]
    said = {ast.unparse(node.targets[0]): node.value for node in ast.walk(ast.parse(first.source)) if _names(node)}
    assert ast.literal_eval(said["ON_A_CPU"]) == tutorial.ON_A_CPU


def _names(node):
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)


@pytest.mark.gpu
def test_the_tutorial_executes_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # as a user has it
    variables = {"OFFLOAD_TUTORIAL_RESULT": str(tmp_path / "result.json")}
    assert not errors(execute(NOTEBOOKS[0], env=variables, cell_timeout_s=900))


@each_notebook
def test_is_committed_as_executed(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not errors(notebook)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "restart the kernel, run all cells and save"
    streams = [one.text for cell in code_cells(notebook) for one in cell.outputs if one.output_type == "stream"]
    assert all(text.strip() and "\r" not in text for text in streams), "a progress bar is in the outputs"
    assert not [text for text in streams if "/site-packages/" in text], "a path of the machine is in the outputs"


@each_notebook
def test_shows_what_teaches(path):
    """What it uses of the library is public and there, and what must hold stands beside it."""
    for cell in code_cells(nbformat.read(path, as_version=4)):
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, ast.Assert), cell.id
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "offload":
                assert hasattr(offload, node.attr), f"{cell.id}: {node.attr}"
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            inside = {module for module in modules if module.startswith("offload.")}
            assert inside <= {"offload.pipelining"}, cell.id


@each_notebook
def test_no_link_has_code_in_it(path):
    """Pandoc's reStructuredText nests no markup: the page would show the address."""
    texts = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    assert not re.findall(r"\[[^\]]*`[^\]]*\]\(", "\n".join(texts))


@each_notebook
def test_cells_that_draw_are_folded(path):
    """On the site and in JupyterLab; other folded cells say what they fold."""
    cells = code_cells(nbformat.read(path, as_version=4))
    draws = [one for one in cells if re.search(r"new_figure\(|\bplt\.", one.source)]
    hidden = [one for one in cells if page_html.FOLDED in one.metadata.get("tags", ())]
    assert [one for one in hidden if "fold" not in one.metadata] == draws
    assert all(one.metadata["jupyter"] == {"source_hidden": True} for one in hidden)


def small_notebook(tmp_path, checks, two="a + 1"):
    cells = [nbformat.v4.new_code_cell("a = 1\na", id="one"), nbformat.v4.new_code_cell(two, id="two")]
    path = tmp_path / "small.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "small.py").write_text(checks, "utf-8")
    return path


def test_what_does_not_hold_is_an_error(tmp_path):
    path = small_notebook(tmp_path, "# %% after two\nassert a == 2, 'it is not two'\n")
    with pytest.raises(CellExecutionError, match="it is not two"):
        execute(path, cell_timeout_s=600)


def test_each_file_of_checks_belongs_to_a_notebook():
    files = (NOTEBOOKS[0].parent / "checks").glob("*")
    assert {file.name for file in files if file.is_file()} <= {f"{path.stem}.py" for path in NOTEBOOKS}
    assert "01_basic.ipynb" in [path.name for path in NOTEBOOKS]
