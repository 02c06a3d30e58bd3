"""Every way to save activation memory on several workloads: time, memory, ratio to the link's limit, gradients.

    python -m benchmarks.suite --out results/suite.json
    python -m benchmarks.suite --only long small_copies --merge      parts of it, into a record that is there
    python -m benchmarks.suite --transformer-engine PATH/cpu_offload.py   that file in place of the installed package

That file is not part of this repository: get it, and write beside it, in a text file of the same name, which commit it
is from and under which licence. The limit of a row is the larger of two times: the shortest in the workload for at
least the row's compute, and that in which the link moves the row's bytes to the host and, after that, back. The record
is written after every workload. A contender that is not installed, or fails, leaves a row that says so.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import offload
from benchmarks.comparison import Comparison, Way
from benchmarks.contenders import Case, cases, contenders
from benchmarks.instruments import GIB, HostCopies, Row, Step
from benchmarks.report import Record, asked, table
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.device.select import get_backend
from offload.planning.profile import Link

PARTS = ("small_copies", *cases())
PACKAGES = ("transformers", "trl", "transformer-engine")
OWN = ("offload", "offload_checkpoint")  # the families of this library
TURNS, TURN_S = 5, 0.6
"""How many turns each way has, and how many seconds the times of each take at least."""
BASE = dict.fromkeys(("checkpoint", "checkpoint_on_cpu", "offload_checkpoint"), "checkpoint")
"""Which family's step is the compute that a family cannot do without, if not that of ``nothing``."""
SIZES = tuple(1 << power for power in range(16, 27))  # bytes of one tensor: 64 KiB to 64 MiB


class Workload(Comparison):
    """The contenders on one workload, which also counts what PyTorch copies to the host for the other ways."""

    def same_bits(self, way: Way, step: Step) -> Row:
        # Under a dispatch mode, a compiled layer would run in eager mode.
        if way.row["family"] in OWN or way.row["workload"] == "compiled decoder":
            return super().same_bits(way, step)
        with HostCopies() as copies:
            found = super().same_bits(way, step)
        return found | {"copied_bytes": copies.nbytes}


def compare(case: Case, device: torch.device, *, small: bool, te_file: Path | None) -> tuple[list[Row], Row]:
    """All rows of a workload, and what there is to say about it."""
    begin = time.perf_counter()
    model = case.build(device)
    model.step()  # nobody compiles within hooks
    options: Row = {"times": 1} if case.tokens or small else {"least_s": TURN_S}
    workload = Workload(model, device, **options)
    for one in contenders(case, min_bytes=1 if small else DEFAULT_MIN_BYTES, te_file=te_file):
        row: Row = {"workload": case.name, "contender": one.label, "family": one.family, "k": one.k}
        if one.package and importlib.util.find_spec(one.package) is None:
            row["error"] = f"{one.package} is not installed"
        elif one.pins_all and case.tokens:
            row["error"] = "would pin every saved tensor"
        workload.add(row, partial(one.around, model), turns=not one.pins_all)
    rows = workload.finished(turns=1 if case.tokens else TURNS)
    facts = {"layers": len(model.layers), "tokens": case.tokens, "seconds": time.perf_counter() - begin}
    return rows, facts


def with_limit(row: Row, rows: list[Row], link: Link) -> Row:
    """A row of a workload's with its ratio to the limit."""
    if "error" in row or row.get("copied_bytes") is None:
        return row
    base = BASE.get(row["family"], "nothing")
    least = [
        one["step_s"]
        for one in rows
        if "error" not in one and base in ("nothing", BASE.get(one["family"], one["family"]))
    ]
    link_s = row["copied_bytes"] * (1 / link.d2h_bytes_per_s + 1 / link.h2d_bytes_per_s)
    limit_s = max(min(least), link_s)
    return row | {"link_s": link_s, "limit_s": limit_s, "ratio_to_limit": row["step_s"] / limit_s}


class SaveThese(torch.autograd.Function):
    """Saves the given tensors and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (grads[0], *(None for _ in ctx.saved_tensors))


def small_copies(device: torch.device, link: Link, *, small: bool) -> list[Row]:
    """Bandwidth out and back of tensors of one size after the other, each of which has a storage of its own.

    A layer's operations save the tensors, four each, and there is nothing to compute: the time is from the layer's
    begin, or backward's, until the last copy has ended, the library's own work included. Beside it stands the share of
    the link's bandwidth for large copies.
    """
    rows = []
    for nbytes in SIZES[:2] if small else SIZES:
        count = min(4096, (1 << (22 if small else 30)) // nbytes)
        times = [_there_and_back_s(device, nbytes, count) for _ in range(6)][1:]
        out, back = (count * nbytes / statistics.median(run_s) for run_s in zip(*times, strict=True))
        row = {"size_bytes": nbytes, "count": count, "out_bytes_per_s": out, "back_bytes_per_s": back}
        rows.append(row | {"out_of_link": out / link.d2h_bytes_per_s, "back_of_link": back / link.h2d_bytes_per_s})
    return rows


def _there_and_back_s(device: torch.device, nbytes: int, count: int) -> tuple[float, float]:
    layers, backend = 3, get_backend(device)
    context, sync = offload.get_cpu_offload_context(True, 1, layers, min_bytes=1, device=device)
    x = torch.ones((), device=device, requires_grad=True)
    tensors = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]

    def now_idle_s() -> float:
        """When compute and both copy streams are idle."""
        for stream in (backend.compute_stream(), *backend.copy_streams):
            stream.record_event().synchronize()
        return time.perf_counter()

    begin = now_idle_s()
    with context:
        y = x * 1
        while tensors:
            y = SaveThese.apply(y, *(tensors.pop() for _ in range(4)))
    y = sync(y)
    out_s = now_idle_s() - begin
    for _ in range(1, layers):
        with context:
            y = y * 1
        y = sync(y)
    begin = now_idle_s()
    y.backward()
    return out_s, now_idle_s() - begin


COLUMNS = {
    "contender": "contender",
    "ms": ("step_s", 1e-3),
    "spread": ("spread_s", 1e-3),
    "vs limit": "ratio_to_limit",
    "GiB": ("peak_bytes", GIB),
    "copied": ("copied_bytes", GIB),
    "pinned": ("pinned_bytes", GIB),
    "first s": "first_s",
    "same bits": "bit_identical",
    "": "error",
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Measure, print the tables, write the record."""
    parser = argparse.ArgumentParser(description="Compare ways to save activation memory.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of the suite")
    parser.add_argument("--transformer-engine", type=Path, help="its cpu_offload.py, beside a text with its commit")
    arguments, device = asked(parser, "results/suite.json")
    link = offload.measure_link(device)
    print(link)
    record = Record(arguments, device)
    record.found["versions"] |= {package: _version(package) for package in PACKAGES}
    run: Row = record.run | {"link": vars(link)}
    te_file = arguments.transformer_engine
    if te_file:
        lines = te_file.with_suffix(".txt").read_text("utf-8").splitlines()
        told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        checksum = hashlib.sha256(te_file.read_bytes()).hexdigest()
        run["transformer_engine"] = {name: told[name] for name in ("commit", "licence")} | {"sha256": checksum}
    runs = record.found.setdefault("runs", {})
    if "small_copies" in arguments.only:
        sizes = small_copies(device, link, small=arguments.small)
        print(table(sizes))
        runs["small_copies"] = run
        record.add({"link": vars(link), "sizes": sizes}, part="small_copies")
    for name, case in cases(small=arguments.small).items():
        if name in arguments.only:
            print(f"\n{case.name}")
            rows, facts = compare(case, device, small=arguments.small, te_file=te_file)
            runs[case.name] = run | facts
            rows = [with_limit(row, rows, link) for row in rows]
            record.add(*rows, instead_of=["workload"])
            print(table(rows, COLUMNS))


if __name__ == "__main__":
    main()
