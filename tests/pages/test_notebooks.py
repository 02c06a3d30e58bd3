"""Executes every notebook on the CPU, where it chooses a small size, and checks its committed outputs."""

import json
from pathlib import Path

import nbformat
import pytest
from tutorial import execute

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def errors(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs if output.output_type == "error"]


@pytest.mark.slow
@each_notebook
def test_executes(path, tmp_path):
    result = tmp_path / "result.json"
    variables = {"CUDA_VISIBLE_DEVICES": "", "OFFLOAD_TUTORIAL_RESULT": str(result)}
    notebook = execute(path, env=variables, cell_timeout_s=240)
    assert not errors(notebook)
    if path.name == "01_basic.ipynb":  # the one that `make tutorial` runs
        rows = json.loads(result.read_text())
        assert len(rows) > 1
        assert all(row.keys() == rows[0].keys() for row in rows)


@pytest.mark.gpu
def test_the_tutorial_executes_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # as a user has it
    variables = {"OFFLOAD_TUTORIAL_RESULT": str(tmp_path / "result.json")}
    assert not errors(execute(NOTEBOOKS[0], env=variables, cell_timeout_s=240))


@each_notebook
def test_is_committed_as_executed(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not errors(notebook)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "restart the kernel, run all cells and save"


def test_the_tutorial_is_there():
    assert "01_basic.ipynb" in [path.name for path in NOTEBOOKS]
