"""Memory budgets: what a plan by region predicts, what is measured, and the simple ways beside it.

    python -m benchmarks.budget --out results/budget.json
    python -m benchmarks.budget --only decoder --merge         parts of it, into a record that is there

The limit of each row is the step with everything kept, in the same run: nothing computes less. Every row of a model is
measured in turns of several steps, as a GPU at its power limit changes its clocks from step to step. Steps are timed
some in a row, as a training loop runs them that does not wait for the device in each step. What was there before the
first step is frozen, as training loops do that wait for the host: Python's collector visits only what is new.
"""

import argparse
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import offload
from benchmarks.host_cost import host_cost_per_operation
from benchmarks.instruments import Contender, Row, Step, give_memory_back, metered, take_turns, timed
from benchmarks.llama_8b import GIB, SHAPE, SMALL
from benchmarks.models import Llama, Model, Stack
from benchmarks.report import asked, continued, table, write
from benchmarks.workloads import reference_decoder
from offload.activations.context import DEFAULT_MIN_BYTES

BUDGETS_GIB = {
    "decoder": (20, 15.2, 15, 12, 9.6, 9.5, 8, 6, 4, 2.82, 2.8, 2),
    "llama": (20, 15, 12, 9.5, 8, 6, 4, 2.8, 2),
    "llama_short": (8, 4),
}
LINES_GIB = {"llama": (6, 2.8), "llama_short": (4,)}
"""Budgets that are given to ``memory_budget=`` as well."""
COLLECTING = "nothing frozen: "
"""Before the names of rows in which the collector visits all objects of the process."""
COLLECTING_GIB = {"llama": (4,), "llama_short": (4,)}
"""Budgets whose plans are run once more so."""
PARTS = ("host", *BUDGETS_GIB)
TURNS, TIMES, STEPS = 2, 3, 3
"""How often each row has its turn, how many times are taken in it, and of how many steps each is the mean."""
PROFILED = 9
"""Steps whose median is a profile's."""
TOKENS, SHORT = 7168, 4096
"""Of the Llama: the most thousands for which 2 GiB suffice; and so few that the step waits for the host."""
HOPELESS = 1.5
"""So many times the step, whole layers are not worth measuring: checkpointing takes 1.25 times."""
WARM_UP_S = 20.0
"""A GPU that has rested is faster than it is at its power limit, by some percent."""


def models(device: torch.device, *, small: bool) -> dict[str, Callable[[], Model]]:
    """What is measured, by name; built when it is its turn."""
    shape, dtype = SHAPE | {"num_hidden_layers": 16, "vocab_size": 2048}, torch.bfloat16
    many, few = TOKENS, SHORT
    if small:
        shape, dtype, many, few = SMALL, torch.float32, 64, 32

    def llama(tokens: int) -> Model:
        return Llama(device, tokens=tokens, dtype=dtype, **shape)

    return {
        "decoder": lambda: Stack(reference_decoder(small=small), device),
        "llama": lambda: llama(many),
        "llama_short": lambda: llama(few),
    }


@contextmanager
def within(model: Model, *around: AbstractContextManager[Any]) -> Iterator[Step]:
    """The model's step, in these contexts."""
    with ExitStack() as stack:
        for one in around:
            stack.enter_context(one)
        yield model.step


@contextmanager
def around_checkpoints(model: Model, min_bytes: int) -> Iterator[Step]:
    """Every layer is checkpointed by PyTorch, and the layers' inputs are offloaded."""
    with model.checkpointing(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with offload.offload_layers(model.layers, len(model.layers) - 2, min_bytes=min_bytes):
            yield model.step


class Case:
    """One model: how it is trained within budgets, and what that takes.

    Args:
        name: Of the model.
        build: Makes it.
        device: Where it is trained.
        small: At small sizes, for a CPU.
    """

    def __init__(self, name: str, build: Callable[[], Model], device: torch.device, *, small: bool) -> None:
        self.name = name
        self.model = build()
        self.device = device
        self.small = small
        self.min_bytes = 1 if small else DEFAULT_MIN_BYTES
        self.rows: list[Row] = []
        self._ways: list[Contender] = []
        self._expected: list[torch.Tensor] = []

    def measure(self, link: Any) -> list[Row]:
        """All rows."""
        self._warm_up()
        gc.collect()
        gc.freeze()
        begin = time.perf_counter()
        profile = offload.profile_layers(
            self.model.layers,
            self.model.step,
            min_bytes=self.min_bytes,
            device=self.device,
            steps=1 if self.small else PROFILED,
            regions=True,
        )
        print(f"\n{self.name}: profiled in {time.perf_counter() - begin:.1f} s\n{profile}")
        self._add({"what": "nothing"}, lambda: nullcontext(self.model.step))
        self._add({"what": "checkpoint all"}, lambda: within(self.model, self.model.checkpointing()))
        self._add({"what": "checkpoint all, inputs travel"}, lambda: around_checkpoints(self.model, self.min_bytes))
        whole = replace(profile, layers=tuple(replace(one, regions=()) for one in profile.layers))
        for gib in BUDGETS_GIB[self.name]:
            budget = round(gib * GIB)
            if self.small:
                budget = round(profile.saved_bytes * gib / 24)
            self._add_plan(f"budget {gib:.4g} GiB", profile, budget, link)
            self._add_plan(f"whole layers, {gib:.4g} GiB", whole, budget, link, most_s=HOPELESS * profile.compute_s)
        for one in self._ways:
            self._measure_first(one)
        take_turns(self._ways, self.device, rounds=TURNS - 1, times=TIMES)
        for gib in LINES_GIB.get(self.name, ()):
            self._measure_line(gib, profile.saved_bytes // 2 if self.small else round(gib * GIB))
        gc.unfreeze()
        again = [f"budget {gib:.4g} GiB" for gib in COLLECTING_GIB.get(self.name, ())]
        for one in self._ways:
            if one.row["what"] in again:
                self._measure_collecting(one)
        for row in self.rows:
            if "error" not in row:
                row["step_s"] = statistics.median(row["times_s"])
                row["ratio"] = row["step_s"] / statistics.median(self.rows[0]["times_s"])
        return [{"model": self.name, **row} for row in self.rows]

    def _warm_up(self) -> None:
        begin = time.perf_counter()
        while time.perf_counter() - begin < (0 if self.small else WARM_UP_S):
            timed(self.model.step, self.device)

    def _add(self, row: Row, attach: Callable[[], AbstractContextManager[Step]]) -> None:
        self.rows.append(row)
        self._ways.append(Contender(row, attach, STEPS))

    def _add_plan(self, what: str, profile: Any, budget: int, link: Any, most_s: float = math.inf) -> None:
        row: Row = {"what": what, "budget_bytes": budget}
        start = time.process_time()
        try:
            plan = offload.plan(profile, budget, link, max_host_bytes="100GiB")
        except ValueError as error:
            self.rows.append(row | {"error": str(error)})
            return
        if plan.step_s > most_s:
            return
        row |= {
            "predicted_s": plan.step_s,
            "predicted_peak_bytes": plan.peak_bytes,
            "planned_in_s": time.process_time() - start,
            "host_bytes": plan.host_bytes,
            "layers": plan.num_layers,
            "recompute_s": plan.recompute_s,
        }
        planned = partial(offload.offload_layers, self.model.layers, plan=plan, min_bytes=self.min_bytes)
        self._add(row, lambda: within(self.model, planned()))

    def _measure_first(self, one: Contender) -> None:
        """The peak, first times, and whether gradients are those of the first row."""
        give_memory_back(self.device)
        with one.attach() as step:
            for _ in range(2):
                step()
            one.row["peak_bytes"], _ = metered(step, self.device)
            one.row["times_s"] = self._times_s()
            one.row["bit_identical"] = self._same_bits()
        print(one.row, flush=True)

    def _times_s(self) -> list[float]:
        return [timed(self.model.step, self.device, STEPS) for _ in range(TIMES)]

    def _same_bits(self) -> bool:
        found = self.model.gradients(self.model.step)
        if not self._expected:
            self._expected = [gradient.clone() for gradient in found]
        return all(map(torch.equal, self._expected, found))

    def _measure_line(self, gib: float, budget: int) -> None:
        """The steps after ``memory_budget=``: two that measure, and then those that follow the plan."""
        give_memory_back(self.device)
        row: Row = {"what": f"memory_budget= {gib:.4g} GiB", "budget_bytes": budget}
        with offload.offload_layers(
            self.model.layers, memory_budget=budget, min_bytes=self.min_bytes, max_host_bytes="100GiB"
        ) as handle:
            steps = [metered(self.model.step, self.device) for _ in range(5)]
            row["learning_s"] = [step_s for _, step_s in steps[:2]]
            row["planning_s"] = steps[2][1]  # the step that plans, and is the first to follow the plan
            row["times_s"] = self._times_s()
            row["peak_bytes"] = max(peak_bytes for peak_bytes, _ in steps[2:])
            row["predicted_s"], row["predicted_peak_bytes"] = handle.plan.step_s, handle.plan.peak_bytes
            row["bit_identical"] = self._same_bits()
        self.rows.append(row)
        print(row, flush=True)

    def _measure_collecting(self, frozen: Contender) -> None:
        """A row once more, with nothing frozen, as often as in all its turns together."""
        row = {key: frozen.row[key] for key in ("budget_bytes", "predicted_s", "predicted_peak_bytes")}
        again = frozen._replace(row=row | {"what": COLLECTING + frozen.row["what"]})
        self._measure_first(again)
        take_turns([again], self.device, rounds=1, times=TIMES * (TURNS - 1))
        self.rows.append(again.row)


def best_other(row: Row, rows: list[Row]) -> float | None:
    """Of the simple ways that fit the budget of a plan by region, the seconds of the fastest."""
    if not row["what"].startswith("budget"):
        return None
    simple = (
        one
        for one in rows
        if one["model"] == row["model"] and not one["what"].startswith(("budget", "memory", COLLECTING))
    )
    fitting = [one["step_s"] for one in simple if one.get("peak_bytes", math.inf) <= row["budget_bytes"]]
    return min(fitting, default=None)


def shown(row: Row, rows: list[Row]) -> Row:
    """A row as people read it."""
    if "error" in row:
        return {"model": row["model"], "what": row["what"], "note": row["error"][:60]}
    found = {"model": row["model"], "what": row["what"], "ms": 1e3 * row["step_s"], "x nothing": row["ratio"]}
    found["GiB"] = row["peak_bytes"] / GIB
    if "budget_bytes" in row:
        found["fits"] = "yes" if row["peak_bytes"] <= row["budget_bytes"] else "NO"
        found["predicted ms, %"] = 100 * (row["predicted_s"] / row["step_s"] - 1)
        found["predicted GiB, %"] = 100 * (row["predicted_peak_bytes"] / row["peak_bytes"] - 1)
        found["planned in s"] = row.get("planned_in_s", 0.0)
        other_s = best_other(row, rows)
        found["x best other"] = "" if other_s is None else f"{row['step_s'] / other_s:.3f}"
    return found | {"bits": "same" if row["bit_identical"] else "DIFFER"}


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Measure plans by region under memory budgets.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--merge", action="store_true", help="keep what the record says about other models")
    arguments, device = asked(parser, "results/budget.json")
    link = offload.measure_link(device)
    print(link)
    record = continued(arguments, device, link)
    rows: list[Row] = record["rows"]
    if "host" in arguments.only:
        costs: Row = dict(host_cost_per_operation(device, small=arguments.small))
        record["host_cost"] = costs | {"commit": record["commit"], "date": record["date"]}
    for name, build in models(device, small=arguments.small).items():
        if name in arguments.only:
            found = Case(name, build, device, small=arguments.small).measure(link)
            here = {"commit": record["commit"], "date": record["date"], "cpu_count": record["hardware"]["cpu_count"]}
            rows += [row | here for row in found]
            write(arguments.out, record)
    write(arguments.out, record)
    print(table([shown(row, rows) for row in rows]))


if __name__ == "__main__":
    main()
