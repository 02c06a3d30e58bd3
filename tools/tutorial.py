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


class _ThisPythonKernel(AsyncKernelManager):
    """A kernel in this interpreter; an installed kernel spec of the same name may belong to another one."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        # At the next lower level the kernel warns that root can listen in on the loopback device.
        return KernelSpec(argv=[*argv, "--log-level=ERROR"], language="python")


class _CheckedNotebook(NotebookClient):
    """Runs checks after cells, ``checks`` by the cells' ids; of a notebook with a ``name``, it says how far it is."""

    checks: dict[str, str]
    name: str = ""
    heading: str = ""
    number: int = 0

    async def async_execute_cell(self, cell: nbformat.NotebookNode, *arguments: Any, **options: Any) -> Any:
        if cell.cell_type == "markdown":
            lines = [line for line in cell.source.splitlines() if line.startswith("#")]
            self.heading = lines[-1].lstrip("# ") if lines else self.heading
        if cell.cell_type != "code" or not cell.source.strip():
            return cell
        self.number += 1
        begin_s = time.monotonic()
        if self.name:
            total = sum(one.cell_type == "code" and bool(one.source.strip()) for one in self.nb.cells)
            print(f"{self.name}, {self.number} of {total}: {self.heading} ... ", end="", flush=True)
        cell = await super().async_execute_cell(cell, *arguments, **options)
        if self.name:
            print(f"{time.monotonic() - begin_s:.1f} s", flush=True)
        # A progress bar that is over has left blanks.
        cell.outputs = [one for one in cell.outputs if one.output_type != "stream" or one.text.strip()]
        if cell.id in self.checks:
            code = self.checks[cell.id]
            reply = await self.kc.execute(code, silent=True, reply=True)  # silent: not counted as a cell
            if reply["content"]["status"] != "ok":
                raise CellExecutionError.from_cell_and_msg(nbformat.v4.new_code_cell(code), reply["content"])
        return cell


def execute(
    path: Path, *, env: dict[str, str] | None = None, cell_timeout_s: int | None = None, says: bool = False
) -> nbformat.NotebookNode:
    """Execute a notebook in its own folder, with its checks, and return it with the outputs; the file stays as it is.

    Args:
        path: The notebook.
        env: Variables to set for the notebook, on top of this process's.
        cell_timeout_s: Seconds that one cell may take; None for no limit.
        says: Print a line for each cell: its number, its heading and its seconds.

    Raises:
        CellExecutionError: If a cell raises, or what is checked after it; the message shows the code and the traceback.
        ValueError: If a check names a cell that the notebook does not have.
    """
    notebook = nbformat.read(path, as_version=4)
    file = path.parent / "checks" / f"{path.stem}.py"
    _, *parts = re.split(r"^# %% after (.+)$", file.read_text("utf-8") if file.exists() else "", flags=re.MULTILINE)
    checks = dict(zip(parts[::2], parts[1::2], strict=True))
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
    )
    client.checks, client.name = checks, path.name if says else ""
    return client.execute(env={**os.environ, **(env or {})})


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
            notebook = execute(arguments.notebook, env={"OFFLOAD_TUTORIAL_RESULT": str(result)}, says=True)
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
    # It needs nothing from the network, so formulas in TeX stay as they are written.
    exporter = HTMLExporter(embed_images=True, require_js_url="", mathjax_url="")
    html, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": arguments.notebook.stem}})
    page.write_text(html, encoding="utf-8")
    print(tabulate(rows, headers="keys", floatfmt=".4g"))
    if not torch.accelerator.is_available():
        print(textwrap.fill(ON_A_CPU, 100))
    print(f"Open {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
