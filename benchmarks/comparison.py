"""All ways on one workload: what a step of each takes, holds, copies, pins and computes."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

import offload
from benchmarks.cases import Case
from benchmarks.contenders import Attached, Way, ways
from benchmarks.instruments import (
    Contender,
    HostCopies,
    Row,
    SavedTensors,
    attempt,
    give_memory_back,
    metered,
    pinned_by_torch,
    take_turns,
    timed,
)
from benchmarks.verdicts import OWN

GIB = 1 << 30
ROUNDS = 4
MOST_STEPS = 8
"""In a row, in one turn."""
REPEATED = ("nothing", "offload")
"""The families that a claim about the long sequence compares."""


class Comparison:
    """The contenders on one workload.

    Args:
        case: The workload.
        device: Where it runs.
        min_bytes: Smaller storages stay on the device with this library, in bytes.
        host_bytes: Ways that would pin more bytes than this are left out.
        te_file: Transformer Engine's ``cpu_offload.py``, to be run alone; ``None`` takes the package, if installed.
    """

    def __init__(
        self, case: Case, device: torch.device, *, min_bytes: int, host_bytes: float, te_file: Path | None = None
    ) -> None:
        self._case, self._device, self._host_bytes = case, device, host_bytes
        self._ways = ways(case, min_bytes=min_bytes, te_file=te_file)
        self._expected: list[torch.Tensor] = []
        give_memory_back(device)
        self._model = case.build(device)

    def run(self, rows: list[Row], save: Callable[[], object]) -> dict[str, Any]:
        """Measure all, add a row for each to ``rows``, call ``save`` after each, and return what is said of all."""
        begin = time.perf_counter()
        if self._case.compiled:
            self._model.step()  # nobody compiles within hooks
        with SavedTensors() as saved:
            self._model.step()
        turns: list[Contender] = []
        for way in self._ways:
            row: Row = {"workload": self._case.name, "contender": way.label, "family": way.family, "k": way.k}
            rows.append(row)
            row |= self._excuse(way, saved.pinned_bytes)
            attempt(row, partial(self._measure, way, row))
            if self._case.turns_s and not way.slow and "error" not in row:
                turns.append(Contender(row, partial(way.attach, self._model)))
            save()
            print(f"{time.perf_counter() - begin:6.1f} s  {_said(row)}", flush=True)
        turn_s = self._case.turns_s / (ROUNDS * max(1, len(turns)))
        for number, one in enumerate(turns):
            steps = min(MOST_STEPS, max(1, round(turn_s / min(one.row["times_s"])) - 1))
            turns[number] = one._replace(steps=steps)
            one.row["times_s"] = []
        take_turns(turns, self._device, rounds=ROUNDS)
        seconds = time.perf_counter() - begin
        return {"layers": len(self._model.layers), "tokens": self._case.tokens, "seconds": seconds}

    def _excuse(self, way: Way, all_pinned_bytes: int) -> Row:
        """Why a way is not measured, if it is not."""
        if way.package and importlib.util.find_spec(way.package) is None:
            return {"error": f"{way.package} is not installed"}
        if way.pins_all and all_pinned_bytes > self._host_bytes:
            return {"error": f"would pin {all_pinned_bytes / GIB:.0f} GiB of host memory"}
        return {}

    def _measure(self, way: Way, row: Row) -> None:
        give_memory_back(self._device)
        with way.attach(self._model) as attached:
            row["first_s"] = timed(attached, self._device)
            before = attached.stats() if attached.stats else offload.OffloadStats()
            row["peak_bytes"], step_s = metered(attached, self._device)
            if attached.stats:
                stats = attached.stats()
                row["copied_bytes"] = stats.offloaded_bytes - before.offloaded_bytes
                row["pinned_bytes"] = stats.pinned_bytes
            else:
                row["pinned_bytes"] = pinned_by_torch(self._device)
            row["times_s"] = [] if self._device.type == "cpu" else [step_s]  # the CPU's meter takes time itself
            while len(row["times_s"]) < (2 if way.family in REPEATED or not self._case.tokens else 1):
                row["times_s"].append(timed(attached, self._device))
            failure: Row = {}
            attempt(failure, partial(self._compare_gradients, way, attached, row))
            if failure:
                row |= {"gradients_error": failure["error"], "bit_identical": False}

    def _compare_gradients(self, way: Way, attached: Attached, row: Row) -> None:
        """Note whether gradients are those of the first way, and what PyTorch copied to the host meanwhile."""
        own, first = way.family in OWN, way is self._ways[0]
        if self._case.tokens and not own and not first:
            return
        # Under a dispatch mode, a compiled layer would run in eager mode.
        with nullcontext() if own or self._case.compiled else HostCopies() as copies:
            found = self._model.gradients(attached)
        if copies is not None:
            row["copied_bytes"] = copies.nbytes
        if first:
            self._expected = [gradient.clone() for gradient in found]
        if self._expected:
            row["bit_identical"] = all(map(torch.equal, self._expected, found))


def _said(row: Row) -> str:
    if "error" in row:
        return f"{row['contender']}: {row['error']}"
    return f"{row['contender']}: {row['times_s'][-1] * 1e3:.0f} ms, {row['peak_bytes'] / GIB:.2f} GiB"
