"""Records of runs: what was measured, on what, with which versions."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import offload
from offload.device.select import resolve_device


def asked(parser: argparse.ArgumentParser, out: str) -> tuple[argparse.Namespace, torch.device]:
    """What the command line says, with the options of all commands beside the parser's, and the device."""
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--merge", action="store_true", help="keep what the record says about other rows")
    arguments, device = parser.parse_args(), resolve_device(None)
    if device.type == "cpu" and not arguments.small:
        parser.error("the sizes are made for a GPU; give --small on a CPU")
    return arguments, device


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and commit of this run."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware = {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    else:
        hardware = {"gpu": None}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {**hardware, "cpu_count": os.cpu_count(), "machine": platform.machine()},
        "versions": {
            "offload": offload.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "commit": os.environ.get("OFFLOAD_COMMIT") or _head(),
    }


class Record:
    """What a command measures, in a file that is whole after each row; ``facts`` are what else the record says.

    Raises:
        ValueError: The rows that ``--merge`` is to keep are from another GPU or PyTorch.
    """

    def __init__(self, arguments: argparse.Namespace, device: torch.device, **facts: Any) -> None:
        here = environment(device)
        self.run = {key: here[key] for key in ("commit", "date")}
        self.path = arguments.out
        kept: dict[str, Any] = {}
        if arguments.merge and self.path.exists():
            kept = json.loads(self.path.read_text("utf-8"))
            there = kept["hardware"]["gpu"], kept["versions"]["torch"]
            if there != (here["hardware"]["gpu"], here["versions"]["torch"]):
                raise ValueError(f"{self.path} must be of this GPU and PyTorch, got {there}; give another --out")
        self.found: dict[str, Any] = {"rows": []} | kept | here | {"small": arguments.small} | facts

    def rows(self, part: str = "rows") -> list[dict[str, Any]]:
        """The rows of a part, which are written."""
        found: list[dict[str, Any]] = self.found.setdefault(part, [])
        return found

    def add(self, *rows: dict[str, Any], part: str = "rows", instead_of: Sequence[str] = ()) -> None:
        """Write rows, in place of those that have the same values of some keys."""
        new = {tuple(row.get(key) for key in instead_of) for row in rows} if instead_of else set()
        kept = [one for one in self.rows(part) if tuple(one.get(key) for key in instead_of) not in new]
        self.found[part] = [*kept, *(row | self.run for row in rows)]
        self.write()

    def write(self) -> None:
        """Write what is there so far."""
        write(self.path, self.found)


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write ``record`` as JSON, floats rounded to six digits; an interrupt leaves the file that was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(_rounded(record), indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str | tuple[str, float]] | None = None) -> str:
    """Rows as a table: all of their values; or by title, the key of a value, and what the value is divided by."""

    def cell(row: Mapping[str, Any], of: str | tuple[str, float]) -> Any:
        key, unit = (of, 0.0) if isinstance(of, str) else of
        value = row.get(key)
        return value[:80] if isinstance(value, str) else value / unit if unit and value is not None else value

    shown = [{title: cell(row, of) for title, of in columns.items()} if columns else dict(row) for row in rows]
    return tabulate(shown, headers="keys", floatfmt=".2f", missingval="")


def _head() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
