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
    """What the command line says, with ``--out`` and ``--small`` beside the parser's options, and the device."""
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
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


def continued(arguments: argparse.Namespace, device: torch.device, link: Any) -> dict[str, Any]:
    """The record of this run; with ``--merge``, with the rows that the file has of models beside ``--only``."""
    record: dict[str, Any] = {}
    if arguments.merge and arguments.out.exists():
        record = json.loads(arguments.out.read_text("utf-8"))
    rows = [row for row in record.get("rows", ()) if row["model"] not in arguments.only]
    return record | environment(device) | {"small": arguments.small, "link": vars(link), "rows": rows}


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write ``record`` as JSON, floats rounded to six digits; an interrupt leaves the file that was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(_rounded(record), indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as a table."""
    return tabulate([dict(row) for row in rows], headers="keys", floatfmt=".2f", missingval="")


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
