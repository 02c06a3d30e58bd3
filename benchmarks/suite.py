"""Every way to save activation memory on several workloads: time, memory, ratio to the link's limit, gradients.

    python -m benchmarks.suite --out results/suite.json
    python -m benchmarks.suite --only long host_cost --merge      parts of it, into a record that is there
    python -m benchmarks.suite --transformer-engine PATH/cpu_offload.py   that file in place of the installed package

Contenders whose steps are of comparable length take turns: in each round each one runs for the same time. Slower ones,
and all on the long sequence, are measured one after the other. Before each contender, all memory that PyTorch or the
library has pinned is given back, so that its first step pays for its own.

The record is written after every row. A contender that is not installed, or fails, leaves a row that says so.
"""

import argparse
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch

import offload
from benchmarks import transformer_engine_file
from benchmarks.cases import Case, cases
from benchmarks.comparison import Comparison
from benchmarks.host_cost import host_cost_per_tensor, small_copies
from benchmarks.instruments import Row, attempt
from benchmarks.report import asked, environment, table, write
from benchmarks.verdicts import verdicts, with_ratios
from offload.activations.context import DEFAULT_MIN_BYTES

GIB = 1 << 30
PARTS = ("host_cost", "small_copies", *cases())
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
        self.whole: dict[str, Any] = {"runs": {}, "rows": []}
        if merge and path.exists():
            self.whole = json.loads(path.read_text("utf-8"))
            for key, here in header.items():
                there = self.whole[key]
                if there != here:
                    raise ValueError(f"{path} must have this run's {key}, {here}, got {there}; give another --out")
        self.whole |= header
        self.rows: list[Row] = self.whole["rows"]

    def note(self, part: str, found: dict[str, Any]) -> None:
        """Note when and with what a part was measured, and what else there is to say about it."""
        self.whole["runs"][part] = self._run | found
        self.save()

    def save(self) -> None:
        """Write everything, with medians and ratios."""
        links = {name: run["link"] for name, run in self.whole["runs"].items()}
        write(self._path, self.whole | {"rows": with_ratios(self.rows, links)})

    def measure(self, case: Case, device: torch.device, arguments: argparse.Namespace) -> None:
        """All contenders on one workload, in place of the rows that the record had of it."""
        print(f"\n{case.name}")
        self.rows[:] = [row for row in self.rows if row["workload"] != case.name]
        self.note(case.name, {})
        found: dict[str, Any] = {}

        def run() -> None:
            comparison = Comparison(
                case,
                device,
                min_bytes=1 if arguments.small else DEFAULT_MIN_BYTES,
                host_bytes=arguments.host_gib * GIB,
                te_file=arguments.transformer_engine,
            )
            found.update(comparison.run(self.rows, self.save))

        attempt(found, run)
        if "error" in found:
            print(found["error"])
        self.note(case.name, found)


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
    if "host_cost" in arguments.only:
        record.whole.setdefault("host_cost", []).append(run | host_cost_per_tensor(device, small=arguments.small))
        record.note("host_cost", {})
    if "small_copies" in arguments.only:
        found = {"sizes": small_copies(device, link, small=arguments.small)}
        record.whole.setdefault("small_copies", []).append(run | found)
        record.note("small_copies", {})
    for name, case in cases(small=arguments.small).items():
        if name in arguments.only:
            record.measure(case, device, arguments)
    show(json.loads(arguments.out.read_text("utf-8")))


def show(record: dict[str, Any]) -> None:
    """Print what the record says."""
    for name in dict.fromkeys(row["workload"] for row in record["rows"]):
        print(f"\n{name}")
        print(table([_shown(row) for row in record["rows"] if row["workload"] == name]))
    for run in record.get("host_cost", []):
        names = [key.removesuffix("_spread_s") for key in run if key.endswith("_spread_s")]
        print("\nhost µs: " + ", ".join(f"{name} {run[f'{name}_s'] * 1e6:.1f}" for name in names))
    for run in record.get("small_copies", []):
        print(table(run["sizes"]))
    for verdict in verdicts(record["rows"]):
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
