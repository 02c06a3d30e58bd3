"""Every way to save activation memory on several workloads: time, memory, ratio to the link's limit, gradients.

    python -m benchmarks.suite --out results/suite.json
    python -m benchmarks.suite --only long host_cost --merge      parts of it, into a record that is there
    python -m benchmarks.suite --transformer-engine PATH/cpu_offload.py   that file in place of the installed package

Contenders whose steps are of comparable length take turns, because a GPU at its power limit changes its clocks from
step to step: in each round each one runs for the same time, and a time is that of several steps in a row, divided by
their number. Slower ones, and all on the long sequence, are measured one after the other. Before each contender, all
memory that PyTorch or the library has pinned is given back, so that its first step pays for its own.

The record is written after every row. A contender that is not installed, or fails, leaves a row that says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch

import offload
from benchmarks import transformer_engine_file
from benchmarks.cases import CASES, Case, cases, small_cases
from benchmarks.comparison import Comparison, attempt
from benchmarks.per_tensor import LARGE_ELEMENTS, RUN_BYTES, SIZES, host_cost, small_copies
from benchmarks.report import asked, environment, table, write
from benchmarks.verdicts import Row, verdicts, with_ratios
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.planning.link import Link

GIB = 1 << 30
PARTS = ("host_cost", "small_copies", *CASES)
PACKAGES = ("transformers", "trl", "transformer-engine")
HOLDS = {True: "holds", False: "FAILS", None: "-----"}


class Record:
    """What was measured so far, in a file that is whole after each row.

    Args:
        path: The file.
        header: Hardware, versions and size: the same for all runs in a record.
        run: Date, commit and link of this run.
        merge: Keep the parts of the record that is there and that this run does not measure.

    Raises:
        ValueError: The record that is there is from other hardware or versions, or of another size.
    """

    def __init__(self, path: Path, header: dict[str, Any], run: dict[str, Any], *, merge: bool) -> None:
        self._path = path
        self._run = run
        self._parts: dict[str, Any] = {"runs": {}, "rows": []}
        if merge and path.exists():
            self._parts = json.loads(path.read_text("utf-8"))
            for key, here in header.items():
                there = self._parts[key]
                if there != here:
                    raise ValueError(f"{path} must have this run's {key}, {here}, got {there}; give another --out")
        self._parts |= header
        self.rows: list[Row] = self._parts["rows"]

    def begin(self, workload: str) -> None:
        """A workload is measured, or measured again: drop the rows that it had."""
        self.rows[:] = [row for row in self.rows if row["workload"] != workload]
        self.note(workload, {})

    def note(self, name: str, found: dict[str, Any]) -> None:
        """Note when and with what a part was measured, and what else there is to say about it."""
        self._parts["runs"][name] = self._run | found
        self.save()

    def add(self, name: str, run: dict[str, Any]) -> None:
        """Add a run of a part that has no rows; those of earlier runs stay when records are merged."""
        self._parts.setdefault(name, []).append(self._run | run)
        self.note(name, {})

    def save(self) -> dict[str, Any]:
        """Write everything, with ratios and verdicts, and return it."""
        rows = with_ratios(self.rows, {name: run["link"] for name, run in self._parts["runs"].items()})
        whole = {**self._parts, "rows": rows, "verdicts": verdicts(rows)}
        beside = self._path.with_suffix(".part")
        write(beside, whole)
        beside.replace(self._path)
        return whole


def main() -> None:
    """Measure, print the tables, write the record."""
    parser = argparse.ArgumentParser(description="Compare ways to save activation memory.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of the suite")
    parser.add_argument("--merge", action="store_true", help="keep what the record says about other parts")
    parser.add_argument("--host-gib", type=float, default=100, help="the most host memory to pin at a time")
    parser.add_argument("--transformer-engine", type=Path, help="its cpu_offload.py, beside a text with its commit")
    arguments, device = asked(parser, "results/suite.json")
    te = {}
    if arguments.transformer_engine:
        te = {"transformer_engine": transformer_engine_file.describe(arguments.transformer_engine)}
    link = offload.measure_link(device)
    print(link)
    here = environment(device)
    run = {"date": here.pop("date"), "commit": here.pop("commit"), "link": vars(link), **te}
    here["versions"] |= {package: _version(package) for package in PACKAGES}
    record = Record(arguments.out, {**here, "small": arguments.small}, run, merge=arguments.merge)
    measure_tensors(record, arguments, device, link)
    compare(record, arguments, device, link)
    show(record.save())


def measure_tensors(record: Record, arguments: argparse.Namespace, device: torch.device, link: Link) -> None:
    """What a saved tensor costs, as far as it was asked for."""
    if "host_cost" in arguments.only:
        large, repeats = (1 << 14, 5) if arguments.small else (LARGE_ELEMENTS, 30)
        record.add("host_cost", host_cost(device, large_elements=large, repeats=repeats))
    if "small_copies" in arguments.only:
        sizes, run_bytes = (SIZES[:3], 1 << 24) if arguments.small else (SIZES, RUN_BYTES)
        record.add("small_copies", {"sizes": small_copies(device, link, sizes=sizes, run_bytes=run_bytes)})


def compare(record: Record, arguments: argparse.Namespace, device: torch.device, link: Link) -> None:
    """All contenders on the workloads that were asked for."""
    host_bytes = arguments.host_gib * GIB
    wanted = small_cases(arguments.only) if arguments.small else cases(arguments.only, device, link, host_bytes)
    for case in wanted:
        print(f"\n{case.name}")
        record.begin(case.name)

        def run(case: Case = case) -> None:
            comparison = Comparison(
                case,
                device,
                min_bytes=1 if arguments.small else DEFAULT_MIN_BYTES,
                host_bytes=host_bytes,
                te_file=arguments.transformer_engine,
            )
            record.note(case.name, comparison.run(record.rows, record.save))

        failure: Row = {}
        attempt(failure, run)
        if failure:
            print(failure["error"])
            record.note(case.name, failure)


def show(record: dict[str, Any]) -> None:
    """Print what the record says."""
    for name in dict.fromkeys(row["workload"] for row in record["rows"]):
        print(f"\n{name}")
        print(table([_shown(row) for row in record["rows"] if row["workload"] == name]))
    for run in record.get("host_cost", []):
        names = [key.removesuffix("_spread_s") for key in run if key.endswith("_spread_s")]
        print("\nhost µs: " + ", ".join(f"{name} {run[f'{name}_s'] * 1e6:.1f}" for name in names))
    for run in record.get("small_copies", []):
        print(table([_copies_shown(row) for row in run["sizes"]]))
    print()
    for verdict in record["verdicts"]:
        print(f"{HOLDS[verdict['holds']]}  {verdict['claim']}: {verdict['measured']}")


def _shown(row: Row) -> dict[str, Any]:
    def scaled(key: str, scale: float) -> float | None:
        return None if row.get(key) is None else row[key] * scale

    return {
        "contender": row["contender"],
        "step ms": scaled("step_s", 1e3),
        "spread ms": scaled("spread_s", 1e3),
        "vs limit": row.get("ratio_to_limit"),
        "peak GiB": scaled("peak_bytes", 1 / GIB),
        "copied GiB": scaled("copied_bytes", 1 / GIB),
        "pinned GiB": scaled("pinned_bytes", 1 / GIB),
        "first s": row.get("first_s"),
        "identical": row.get("error", row.get("bit_identical")),
    }


def _copies_shown(row: Row) -> dict[str, Any]:
    return {
        "KiB": row["size_bytes"] >> 10,
        "out GB/s": row["out_bytes_per_s"] / 1e9,
        "of link": row["out_of_link"],
        "back GB/s": row["back_bytes_per_s"] / 1e9,
        "of the link": row["back_of_link"],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
