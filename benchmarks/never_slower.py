"""Is a budget ever slower than the flags that people have already? Nine architectures, each at several budgets.

    python -m benchmarks.never_slower
    python -m benchmarks.never_slower --only vit gpt2 --merge
    python -m benchmarks.never_slower --only vit gpt2 --compiled

For each budget, a share of what the step adds when everything is kept: ``memory_budget=``, and beside it in the same
run PyTorch's checkpointing of as few layers as fit, and whole-layer offloading of as few layers as fit. Checkpointing
of all layers, and PyTorch's selective checkpointing with products and attention kept, are rows for every budget that
they fit. A budget trains a copy of the model, and takes turns, some steps at a time, with the fastest of the other
ways: a host that is busy with something else slows both.

With ``--compiled``, each layer compiled instead: alone, with PyTorch's checkpointing in the compiled graphs, and by
``memory_budget=, compile=``. Shares are those of the step of compiled layers then.
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import offload
from benchmarks.architectures import NAMES, build
from benchmarks.comparison import Comparison, is_compiled
from benchmarks.instruments import GIB, Row, give_memory_back
from benchmarks.models import replaced
from benchmarks.report import Record, asked, table
from offload.activations.context import DEFAULT_MIN_BYTES

SHARES = (0.75, 0.6, 0.35, 0.15, 0.0)  # of what a step adds with everything kept; 0 is as checkpointing of all layers
COMPILED_SHARES = (0.75, 0.5, 0.35, 0.0)  # the same of compiled layers; another default
RIVALS = 2
"""A budget takes turns with so many other ways at most: a busy host's times do not tell which one is the fastest."""
NEAR = 1.1
"""Of these, with those that were measured to take no more than so many times what the fastest takes."""
MOST_LINK_SHARE = 0.5
"""Whole-layer offloading is run where it copies less than so many times what the link moves in a step."""

_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
}


def _selective(_context: object, operation: Any, *_: object, **__: object) -> CheckpointPolicy:
    """Products and attention are kept, unless attention draws random numbers: PyTorch would draw others again."""
    kept = operation in _PRODUCTS or "scaled_dot_product" in str(operation)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Budgets(Comparison):
    """Budgets on one architecture, by name, as ``shares`` of its peak, and the other ways in the same memory."""

    def __init__(
        self, name: str, device: torch.device, link: offload.Link, *, small: bool, shares: Sequence[float]
    ) -> None:
        model, self.copy = build(name, device, small=small), build(name, device, small=small)
        super().__init__(model, device, settle=2, steps=3, least_s=0.0 if small else 2.0)
        self.link, self.shares = link, shares
        self.min_bytes = 1 if small else DEFAULT_MIN_BYTES

    def add_all(self, backend: str | None = None) -> None:
        """All ways of layers that are left alone, or compiled by a backend."""
        layers, prefix = self.model.layers, "compiled " if backend else ""
        around, count = partial(replaced, layers, backend=backend), len(layers)
        nothing = self.add({"what": f"{prefix}nothing"}, around)
        everything = self.add({"what": f"{prefix}checkpoint all", "layers": count}, partial(around, count))
        if "error" in nothing or "error" in everything:
            return
        if not any(isinstance(one, nn.Dropout) and one.p > 0 for one in self.model.module.modules()):
            selective = partial(create_selective_checkpoint_contexts, _selective)
            self.add({"what": f"{prefix}selective"}, partial(around, count, selective))
        most, least = nothing["peak_bytes"], everything["peak_bytes"]
        shares = COMPILED_SHARES if backend and self.shares is SHARES else self.shares
        for budget in dict.fromkeys(max(round(share * most), least) for share in shares):
            if budget != least:
                self._add_checkpoint(prefix, around, budget, most, least)
            if budget != least and backend is None:
                self._add_offload(budget, most, nothing["step_s"])
            options: dict[str, Any] = {"memory_budget": budget, "min_bytes": self.min_bytes}
            options |= {} if backend is None else {"compile": {"backend": backend}}
            around_copy = partial(offload.offload_layers, self.copy.layers, **options)
            row = {"what": f"{prefix}budget", "budget_bytes": budget}
            self.add(row, around_copy, model=self.copy, rivals=self._fastest)

    def _add_checkpoint(self, prefix: str, around: Any, budget: int, most: int, least: int) -> None:
        """Of as few layers as fit."""
        count = len(self.model.layers)
        first = math.ceil(count * (most - budget) / max(1, most - least))
        for some in range(max(1, first), count):
            row = {"what": f"{prefix}checkpoint some", "layers": some, "for_bytes": budget}
            if self.add(row, partial(around, some)).get("peak_bytes", math.inf) <= budget:
                return

    def _add_offload(self, budget: int, most: int, step_s: float) -> None:
        """Whole layers, as few as fit, if the link can do that in the time of some steps."""
        layers = self.model.layers
        count = math.ceil((len(layers) + 1) * (most - budget) / max(1, most))
        copied_s = most * count / len(layers) * (1 / self.link.d2h_bytes_per_s + 1 / self.link.h2d_bytes_per_s)
        if count < len(layers) and copied_s < MOST_LINK_SHARE * 2 * step_s:
            around = partial(offload.offload_layers, layers, count, min_bytes=self.min_bytes)
            self.add({"what": "offload some", "layers": count, "for_bytes": budget}, around)

    def _fastest(self, row: Row) -> list[Row]:
        found = others(row, [way.row for way in self.ways])[:RIVALS]
        return [one for one in found if one["step_s"] <= NEAR * found[0]["step_s"]]


def others(row: Row, rows: Sequence[Row]) -> list[Row]:
    """The other ways that fit the budget of a row, compiled if the row is; the fastest first."""
    found = (one for one in rows if not one["what"].endswith("budget") and is_compiled(one) <= is_compiled(row))
    fitting = [one for one in found if "error" not in one and one["peak_bytes"] <= row["budget_bytes"]]
    return sorted(fitting, key=lambda one: one["step_s"])


def beside(row: Row, rows: Sequence[Row]) -> tuple[Row | None, float]:
    """The fastest of the other ways of a row's model that fit its budget, and how many times its seconds a step takes.

    Where steps were taken in turns, the other way that was faster beside the row's.
    """
    if found := row.get("beside"):
        other = max(found, key=lambda one: one["ratio"])
        return other, other["ratio"]
    there = [one for one in rows if (one["model"], one.get("gpu")) == (row["model"], row.get("gpu"))]
    fastest = next(iter(others(row, there)), None)
    return fastest, math.nan if fastest is None else row["step_s"] / fastest["step_s"]


COLUMNS = {
    "model": "model",
    "what": "what",
    "layers": "layers",
    "ms": ("step_s", 1e-3),
    "x nothing": "ratio",
    "x best other": "to_other",
    "predicted ms": ("predicted_s", 1e-3),
    "GiB": ("peak_bytes", GIB),
    "budget": ("budget_bytes", GIB),
    "same bits": "bit_identical",
    "apart": "gradients_apart",
    "": "error",
}


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Hold memory budgets against checkpointing on many architectures.")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="rows of others are kept by --merge")
    backends = {"nargs": "?", "const": "inductor", "metavar": "BACKEND"}
    parser.add_argument("--compiled", help="compile the layers, by Inductor or this backend", **backends)
    arguments, device = asked(parser, "results/never_slower.json")
    link = offload.measure_link(device)
    print(link)
    record = Record(arguments, device, link=vars(link))
    of_model = ["model", "compiled"]
    of_row = [*of_model, "what", "layers", "budget_bytes", "for_bytes"]
    for name in arguments.only:
        budgets = Budgets(name, device, link, small=arguments.small, shares=arguments.shares)
        instead_of = of_model if arguments.shares is SHARES else of_row
        try:
            budgets.add_all(arguments.compiled)
        except BaseException:  # a time limit interrupts
            del budgets.ways[-1:]  # it was being measured
            instead_of = of_row
            raise
        finally:
            rows = [{"model": name, "compiled": is_compiled(row), **row} for row in budgets.finished(1)]
            record.add(*rows, instead_of=instead_of)
        del budgets
        give_memory_back(device)
    rows = record.rows()
    for row in rows:
        if "budget_bytes" in row and "error" not in row:
            row["to_other"] = beside(row, rows)[1]
    print(table(rows, COLUMNS))


if __name__ == "__main__":
    main()
