"""All contenders on one workload: what each one's step takes, holds, copies, pins and computes."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import offload
from benchmarks.cases import Case
from benchmarks.contenders import Attached, Contender, contenders
from benchmarks.instruments import (
    HostCopies,
    SavedTensors,
    deterministic,
    give_memory_back,
    metered,
    pinned_by_torch,
    timed,
)
from benchmarks.models import Model
from benchmarks.verdicts import OWN, Row

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
        min_bytes: Smaller storages stay on the device with this library.
        host_bytes: Who would pin more than this is left out.
        te_file: Transformer Engine's ``cpu_offload.py``, to be run alone; ``None`` takes the package, if installed.
    """

    def __init__(
        self, case: Case, device: torch.device, *, min_bytes: int, host_bytes: float, te_file: Path | None = None
    ) -> None:
        self._case = case
        self._device = device
        self._host_bytes = host_bytes
        self._contenders = contenders(
            case.ks, case.checkpoint_ks, te_ks=case.te_ks, te_file=te_file, min_bytes=min_bytes
        )
        self._expected: list[torch.Tensor] = []
        give_memory_back(device)
        self._model: Model = case.build(device)

    def run(self, rows: list[Row], save: Callable[[], object]) -> dict[str, Any]:
        """Measure them all.

        Args:
            rows: A row for each contender is added to these.
            save: Called whenever something has been added.

        Returns:
            What there is to say about the workload itself.
        """
        begin = time.perf_counter()
        if self._case.compiled:
            self._model.step()  # nobody compiles within hooks
        with SavedTensors() as saved:
            self._model.step()
        turns: dict[Contender, Row] = {}
        for contender in self._contenders:
            row = self._new_row(contender)
            rows.append(row)
            row |= self._excuse(contender, saved.pinned_bytes)
            attempt(row, partial(self._measure, contender, row))
            if contender.takes_turns and self._case.turns_s and "error" not in row:
                turns[contender] = row
            save()
            print(f"{time.perf_counter() - begin:6.1f} s  {_said(row)}", flush=True)
        self._take_turns(turns, save)
        seconds = time.perf_counter() - begin
        return {"layers": len(self._model.layers), "tokens": self._case.tokens, "seconds": seconds}

    def _new_row(self, contender: Contender) -> Row:
        names = {"contender": contender.label, "family": contender.family, "k": contender.k}
        return {"workload": self._case.name, **names}

    def _excuse(self, contender: Contender, all_pinned_bytes: int) -> Row:
        """Why a contender is not measured, if it is not."""
        if contender.package and importlib.util.find_spec(contender.package) is None:
            return {"error": f"{contender.package} is not installed"}
        if contender.pins_all and all_pinned_bytes > self._host_bytes:
            return {"error": f"would pin {all_pinned_bytes / GIB:.0f} GiB of host memory"}
        return {}

    def _measure(self, contender: Contender, row: Row) -> None:
        give_memory_back(self._device)
        with contender.attach(self._model) as attached:
            row["first_s"] = timed(attached.step, self._device)
            before = attached.stats() if attached.stats else offload.OffloadStats()
            row["peak_bytes"], step_s = metered(attached.step, self._device)
            if attached.stats:
                stats = attached.stats()
                row |= {
                    "copied_bytes": stats.offloaded_bytes - before.offloaded_bytes,
                    "pinned_bytes": stats.pinned_bytes,
                    "wasted_bytes": stats.wasted_bytes - before.wasted_bytes,
                    "late_reloads": stats.late_reloads,
                }
            else:
                row["pinned_bytes"] = pinned_by_torch(self._device)
            times_s = [] if self._device.type == "cpu" else [step_s]
            while len(times_s) < (2 if contender.family in REPEATED or not self._case.tokens else 1):
                times_s.append(timed(attached.step, self._device))
            row["times_s"] = times_s
            failure: Row = {}
            attempt(failure, partial(self._compare_gradients, contender, attached, row))
            if failure:
                row |= {"gradients_error": failure["error"], "bit_identical": False}

    def _compare_gradients(self, contender: Contender, attached: Attached, row: Row) -> None:
        """Note whether gradients are those of the first contender, and what PyTorch copied to the host meanwhile."""
        own = contender.family in OWN
        first = contender is self._contenders[0]
        if self._case.tokens and not own and not first:
            return
        for leaf in self._model.leaves:
            assert leaf.grad is not None
            leaf.grad.zero_()
        with deterministic():
            if own or self._case.compiled:
                attached.step()  # under a dispatch mode, a compiled layer would run in eager mode
            else:
                with HostCopies() as copies:
                    attached.step()
                row["copied_bytes"] = copies.nbytes
        found = [leaf.grad for leaf in self._model.leaves if leaf.grad is not None]
        if first:
            self._expected = [gradient.clone() for gradient in found]
        if self._expected:
            row["bit_identical"] = all(map(torch.equal, self._expected, found))

    def _take_turns(self, rows: dict[Contender, Row], save: Callable[[], object]) -> None:
        """Each contender in turn runs for the same time, in several rounds; every second one is in reverse.

        How fast a GPU at its power limit runs depends on what ran before, by some percent.
        """
        turn_s = self._case.turns_s / (ROUNDS * max(1, len(rows)))
        steps = {
            contender: min(MOST_STEPS, max(1, round(turn_s / min(row["times_s"])) - 1))
            for contender, row in rows.items()
        }
        times: dict[Contender, list[float]] = {contender: [] for contender in rows}
        for number in range(ROUNDS):
            for contender, row in reversed(rows.items()) if number % 2 else rows.items():
                attempt(row, partial(self._turn, contender, row, times[contender], steps[contender]))
            save()

    def _turn(self, contender: Contender, row: Row, times_s: list[float], steps: int) -> None:
        with contender.attach(self._model) as attached:
            attached.step()
            turn_s = timed(lambda: [attached.step() for _ in range(steps)], self._device)
        times_s.append(turn_s / steps)
        row["times_s"] = list(times_s)


def attempt(row: Row, run: Callable[[], object]) -> None:
    """Run it, unless the row says that it failed before. A failure is a result of its own, and the others go on."""
    if "error" in row:
        return
    try:
        run()
    except Exception as error:  # noqa: BLE001  # whatever a contender raises
        row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _said(row: Row) -> str:
    if "error" in row:
        return f"{row['contender']}: {row['error']}"
    return f"{row['contender']}: {row['times_s'][-1] * 1e3:.0f} ms, {row['peak_bytes'] / GIB:.2f} GiB"
