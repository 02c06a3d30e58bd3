"""Run a notebook, show how far it is, print its result as a table and say which page to open.

    python tools/tutorial.py notebooks/01_basic.ipynb

The notebook chooses the device, normally the best one present. What must hold in it stands beside it, so that its
readers see what teaches: ``checks/01_basic.py`` has a part for each cell after which something is checked, headed by
that cell's id as ``# %% after basic-07``. It runs in the notebook's kernel, and leaves no trace in the notebook.

The last of these parts hands the result over: the environment variable ``OFFLOAD_TUTORIAL_RESULT`` holds a path, and
it writes a JSON list of rows to it, each an object from column title to number or text, all with the same keys.

With ``--inplace`` the outputs are written into the notebook, for committing it; the rows are not asked for.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import torch
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from tabulate import tabulate

ON_A_CPU = (
    "On a CPU, memory and gradients are as on a GPU. Times are not: copies and model share the processor. One core is "
    "left to the copies here, so they run while the others compute; a GPU has copy engines."
)
"""As the first tutorial prints at its beginning."""

CellCallback = Callable[[int], None]  # called with the index of a cell


class _ThisPythonKernel(AsyncKernelManager):
    """A kernel in this interpreter; an installed kernel spec of the same name may belong to another one."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        # At the next lower level the kernel warns that root can listen in on the loopback device.
        return KernelSpec(argv=[*argv, "--log-level=ERROR"], language="python")


class _CheckedNotebook(NotebookClient):
    """Runs checks after cells: ``checks`` is their code, by the cells' ids."""

    checks: dict[str, str]

    async def async_execute_cell(self, cell: nbformat.NotebookNode, *arguments: Any, **options: Any) -> Any:
        cell = await super().async_execute_cell(cell, *arguments, **options)
        if cell.cell_type == "code":  # a progress bar that is over has left blanks
            cell.outputs = [one for one in cell.outputs if one.output_type != "stream" or one.text.strip()]
        if cell.id in self.checks:
            code = self.checks[cell.id]
            reply = await self.kc.execute(code, silent=True, reply=True)  # silent: not counted as a cell
            if reply["content"]["status"] != "ok":
                raise CellExecutionError.from_cell_and_msg(nbformat.v4.new_code_cell(code), reply["content"])
        return cell


def checks_of(path: Path) -> dict[str, str]:
    """The checks of a notebook, by the id of the cell after which each of them runs."""
    checks = path.parent / "checks" / f"{path.stem}.py"
    if not checks.exists():
        return {}
    _, *parts = re.split(r"^# %% after (.+)$", checks.read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def execute(
    path: Path,
    *,
    env: dict[str, str] | None = None,
    cell_timeout_s: int | None = None,
    on_cell_start: CellCallback | None = None,
    on_cell_end: CellCallback | None = None,
) -> nbformat.NotebookNode:
    """Execute a notebook in its own folder, with its checks, and return it with the outputs; the file stays as it is.

    Args:
        path: The notebook.
        env: Variables to set for the notebook, on top of this process's.
        cell_timeout_s: Seconds that one cell may take; None for no limit.
        on_cell_start: Called with the index of a code cell before it runs.
        on_cell_end: Called in the same way after it ran.

    Raises:
        CellExecutionError: If a cell raises, or what is checked after it; the message shows the code and the traceback.
        ValueError: If a check names a cell that the notebook does not have.
    """
    notebook = nbformat.read(path, as_version=4)
    checks = checks_of(path)
    if unknown := checks.keys() - {cell.id for cell in notebook.cells if cell.cell_type == "code"}:
        raise ValueError(f"checks of {path.name} must come after its cells of code, got {sorted(unknown)}")
    client = _CheckedNotebook(
        notebook,
        kernel_manager_class=_ThisPythonKernel,
        resources={"metadata": {"path": str(path.parent.resolve())}},
        timeout=cell_timeout_s,
        record_timing=False,  # would be a difference in every cell of a committed notebook
        shutdown_kernel="immediate",  # taking apart what it has imported takes seconds
        coalesce_streams=True,  # a progress bar leaves what a terminal would show in the end
        on_cell_execute=on_cell_start and (lambda cell_index, **_: on_cell_start(cell_index)),
        on_cell_executed=on_cell_end and (lambda cell_index, **_: on_cell_end(cell_index)),
    )
    client.checks = checks
    return client.execute(env={**os.environ, **(env or {})})


def _headings(notebook: nbformat.NotebookNode) -> list[str]:
    """For each cell, the heading it stands under."""
    headings, current = [], ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            lines = [line for line in cell.source.splitlines() if line.startswith("#")]
            current = lines[-1].lstrip("# ") if lines else current
        headings.append(current)
    return headings


def _execute_and_say(path: Path, result: Path) -> nbformat.NotebookNode:
    """Execute a notebook, with a line for each cell: its number, its seconds and its heading."""
    notebook = nbformat.read(path, as_version=4)
    headings = _headings(notebook)
    # nbclient passes over empty cells without a call.
    total = sum(cell.cell_type == "code" and bool(cell.source.strip()) for cell in notebook.cells)
    began_s: list[float] = []

    def start(index: int) -> None:
        began_s.append(time.monotonic())
        print(f"{path.name}, {len(began_s)} of {total}: {headings[index]} ... ", end="", flush=True)

    def end(_index: int) -> None:
        print(f"{time.monotonic() - began_s[-1]:.1f} s", flush=True)

    return execute(path, env={"OFFLOAD_TUTORIAL_RESULT": str(result)}, on_cell_start=start, on_cell_end=end)


def _to_html(notebook: nbformat.NotebookNode, title: str) -> str:
    """One page that needs nothing from the network, so formulas in TeX stay as they are written."""
    exporter = HTMLExporter(embed_images=True, require_js_url="", mathjax_url="")
    html, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": title}})
    return html


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--output", type=Path, default=Path("build/tutorial"), help="folder for the page")
    parser.add_argument("--inplace", action="store_true", help="write the outputs into the notebook instead")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        try:
            notebook = _execute_and_say(arguments.notebook, result)
        except CellExecutionError as error:
            print(error, file=sys.stderr)
            return 1
        if arguments.inplace:
            nbformat.write(notebook, arguments.notebook)
            return 0
        if not result.exists():
            print(f"{arguments.notebook} wrote no rows to OFFLOAD_TUTORIAL_RESULT", file=sys.stderr)
            return 1
        rows = json.loads(result.read_text())

    page = arguments.output / arguments.notebook.with_suffix(".html").name
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_to_html(notebook, arguments.notebook.stem), encoding="utf-8")
    print(tabulate(rows, headers="keys", floatfmt=".4g"))
    if not torch.accelerator.is_available():
        print(textwrap.fill(ON_A_CPU, 100))
    print(f"Open {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
