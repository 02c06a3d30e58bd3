"""Memory budgets: what a plan by region predicts, what is measured, and the simple ways beside it.

    python -m benchmarks.budget --out results/budget.json
    python -m benchmarks.budget --only decoder --merge         parts of it, into a record that is there

The limit of each row is the step with everything kept, in the same run: nothing computes less. Steps are timed some in
a row, as a training loop runs them that does not wait for the device in each step. What was there before the first step
is frozen, as training loops do that wait for the host: Python's collector visits only what is new.
"""

import argparse
import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import offload
from benchmarks.comparison import Comparison
from benchmarks.instruments import GIB, Row, timed
from benchmarks.models import SHAPE, SMALL, Llama, Model
from benchmarks.report import Record, asked, table
from benchmarks.workloads import reference_decoder
from offload.activations.context import DEFAULT_MIN_BYTES

BUDGETS_GIB = {
    "decoder": (20, 15.2, 15, 12, 9.6, 9.5, 8, 6, 4, 2.82, 2.8, 2),
    "llama": (20, 15, 12, 9.5, 8, 6, 4, 2.8, 2),
}
LINES_GIB = {"decoder": (), "llama": (6, 2.8)}
"""Budgets that are given to ``memory_budget=`` as well."""
PROFILED = 9  # steps whose median is a profile's
TOKENS = 7168  # of the Llama: the most thousands for which 2 GiB suffice
HOPELESS = 1.5
"""So many times the step, whole layers are not worth measuring: checkpointing takes 1.25 times."""
WARM_UP_S = 20.0  # a GPU that has rested is faster than it is at its power limit, by some percent


def build(name: str, device: torch.device, *, small: bool) -> Model:
    """One of the models."""
    if name == "decoder":
        return reference_decoder(small=small).build(device)
    if small:
        return Llama(device, tokens=64, dtype=torch.float32, **SMALL)
    shape = SHAPE | {"num_hidden_layers": 16, "vocab_size": 2048}
    return Llama(device, tokens=TOKENS, dtype=torch.bfloat16, **shape)


@contextmanager
def around_checkpoints(model: Model, min_bytes: int) -> Iterator[None]:
    """Every layer is checkpointed by PyTorch, and the layers' inputs are offloaded."""
    with (
        model.checkpointing(),
        warnings.catch_warnings(action="ignore", category=UserWarning),
        offload.offload_layers(model.layers, len(model.layers) - 2, min_bytes=min_bytes),
    ):
        yield


def compare(name: str, device: torch.device, link: offload.Link, *, small: bool) -> list[Row]:
    """All rows of a model."""
    model, min_bytes = build(name, device, small=small), 1 if small else DEFAULT_MIN_BYTES
    begin = time.perf_counter()
    while time.perf_counter() - begin < (0 if small else WARM_UP_S):
        timed(model.step, device)
    gc.collect()
    gc.freeze()
    options = {"min_bytes": min_bytes, "device": device, "steps": 1 if small else PROFILED}
    profile = offload.profile_layers(model.layers, model.step, regions=True, **options)
    print(f"\n{name}:\n{profile}")
    offloaded = partial(offload.offload_layers, model.layers, min_bytes=min_bytes)
    comparison = Comparison(model, device, settle=1, steps=3, times=3)
    comparison.add({"what": "nothing"})
    comparison.add({"what": "checkpoint all"}, model.checkpointing)
    comparison.add({"what": "checkpoint all, inputs offloaded"}, partial(around_checkpoints, model, min_bytes))
    whole = replace(profile, layers=tuple(replace(one, regions=()) for one in profile.layers))
    for gib in BUDGETS_GIB[name]:
        budget = round(profile.saved_bytes * gib / 24 if small else gib * GIB)
        for what, planned in ((f"budget {gib:.4g} GiB", profile), (f"whole layers, {gib:.4g} GiB", whole)):
            row: Row = {"what": what, "budget_bytes": budget}
            start = time.process_time()
            try:
                plan = offload.plan(planned, budget, link, max_host_bytes="100GiB")
            except ValueError as error:
                comparison.add(row | {"error": str(error)})
                continue
            row |= {"planned_in_s": time.process_time() - start, "layers": plan.num_layers}
            if planned is profile or plan.step_s <= HOPELESS * profile.compute_s:
                comparison.add(row, partial(offloaded, plan=plan))
    for gib in LINES_GIB[name]:
        budget = profile.saved_bytes // 2 if small else round(gib * GIB)
        asked_for: dict[str, Any] = {"memory_budget": budget, "max_host_bytes": "100GiB"}
        row = {"what": f"memory_budget= {gib:.4g} GiB", "budget_bytes": budget}
        comparison.add(row, partial(offloaded, **asked_for))
    rows = comparison.finished(turns=2)
    gc.unfreeze()
    return [{"model": name, **row} for row in rows]


COLUMNS = {
    "model": "model",
    "what": "what",
    "ms": ("step_s", 1e-3),
    "predicted": ("predicted_s", 1e-3),
    "x nothing": "ratio",
    "budget": ("budget_bytes", GIB),
    "GiB": ("peak_bytes", GIB),
    "predicted GiB": ("predicted_peak_bytes", GIB),
    "planned in s": "planned_in_s",
    "same bits": "bit_identical",
    "": "error",
}


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Measure plans by region under memory budgets.")
    parser.add_argument("--only", nargs="+", choices=BUDGETS_GIB, default=list(BUDGETS_GIB))
    arguments, device = asked(parser, "results/budget.json")
    link = offload.measure_link(device)
    print(link)
    record = Record(arguments, device, link=vars(link))
    for name in arguments.only:
        record.add(*compare(name, device, link, small=arguments.small), instead_of=["model"])
    print(table(record.rows(), COLUMNS))


if __name__ == "__main__":
    main()
