"""Is a budget ever slower than the flags that people have already? Eight architectures, each at several budgets.

    python -m benchmarks.never_slower
    python -m benchmarks.never_slower --only vit gpt2 --merge
    python -m benchmarks.never_slower --only vit gpt2 --compiled

For each budget, a share of what the step adds when everything is kept: ``memory_budget=``, and beside it in the same
run PyTorch's checkpointing of as few layers as fit, and whole-layer offloading of as few layers as fit. Checkpointing
of all layers, and PyTorch's selective checkpointing with products and attention kept, are rows for every budget that
they fit. The ways take turns, and every time is the mean of some steps in a row.

With ``--compiled``, each layer compiled, too: alone, with PyTorch's checkpointing in the compiled graphs, and by
``memory_budget=, compile=``. Shares are those of the step of compiled layers then.
"""

import argparse
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import offload
from benchmarks.architectures import NAMES, build
from benchmarks.instruments import Row, attempt, give_memory_back, metered, synchronize, timed
from benchmarks.models import Model
from benchmarks.report import asked, continued, table, write
from offload.activations.context import DEFAULT_MIN_BYTES

GIB = 1 << 30
SHARES = (0.75, 0.6, 0.35, 0.15)
"""Of what a step adds with everything kept."""
TURNS, TIMES, STEPS, LEAST_S = 2, 2, 3, 2.0
"""How often each way has its turn, how many times are taken in it, of how many steps each is the mean, and how many
seconds they take at least: a host that is busy for a moment must not decide."""
SETTLES = 34
"""Steps until plans were compared: not timed, as a training run has thousands after them."""
COMPILED_SHARES = (0.75, 0.5, 0.35)
"""The same of compiled layers; another default."""
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


@contextmanager
def replaced(
    layers: Sequence[nn.Module], checkpoints: int = 0, context_fn: Any = None, backend: str | None = None
) -> Iterator[None]:
    """PyTorch's checkpointing around the forward of the first layers; each layer's forward compiled by a backend."""
    options = {"use_reentrant": False} | ({} if context_fn is None else {"context_fn": context_fn})

    def run(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    def run_in_checkpoint(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    ways: list[Any] = [run, run_in_checkpoint]
    if backend is not None:
        ways = [torch.compile(one, backend=backend) for one in ways]
    changed = layers[:checkpoints] if backend is None else layers
    for number, layer in enumerate(changed):
        vars(layer)["forward"] = partial(ways[number < checkpoints], layer.forward)
    try:
        yield
    finally:
        for layer in changed:
            del vars(layer)["forward"]
        if backend is not None:
            torch.compiler.reset()  # few kinds of layers have code at once


class Way:
    """One way to train, and its row."""

    def __init__(self, what: str, around: Callable[[], AbstractContextManager[Any]], **row: Any) -> None:
        self.row: Row = {"what": what, **row}
        self.around = around


class Case:
    """One architecture."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        link: Any,
        *,
        small: bool,
        shares: Sequence[float] = SHARES,
        turns: int = TURNS,
        compiles: str | None = None,
    ) -> None:
        self.model: Model = build(name, device, small=small)
        self.name, self.device, self.link = name, device, link
        self.shares, self.turns = shares, turns
        self.min_bytes, self.least_s = (1, 0.0) if small else (DEFAULT_MIN_BYTES, LEAST_S)
        self.compiles = compiles
        """The backend by which layers are compiled; ``None`` compiles nothing."""
        self.ways: list[Way] = []
        self._expected: dict[bool, list[torch.Tensor]] = {}
        """The gradients of layers that are left alone, and of layers that are compiled."""

    def measure(self) -> list[Row]:
        """All rows."""
        self._add_ways("", None)
        if self.compiles is not None and "error" not in self.ways[0].row:
            self._add_ways("compiled ", self.compiles)
        for turn in range(1, self.turns):
            for way in reversed(self.ways) if turn % 2 else self.ways:
                attempt(way.row, lambda way=way: self._turn(way))
        for way in self.ways:
            if "error" not in way.row:
                way.row["step_s"] = statistics.median(way.row["times_s"])
                base = next(one for one in self.ways if _is_compiled(one.row) == _is_compiled(way.row))
                way.row["ratio"] = way.row["step_s"] / statistics.median(base.row.get("times_s", [math.nan]))
        return [{"model": self.name, **way.row} for way in self.ways]

    def _add_ways(self, prefix: str, backend: str | None) -> None:
        """All ways of layers that are left alone or compiled."""
        layers = self.model.layers
        around, count = partial(replaced, layers, backend=backend), len(layers)
        nothing = self._add(f"{prefix}nothing", around)
        everything = self._add(f"{prefix}checkpoint all", partial(around, count), layers=count)
        if "error" in nothing or "error" in everything:
            return
        if not _drops(self.model.module):
            selective = partial(create_selective_checkpoint_contexts, _selective)
            self._add(f"{prefix}selective", partial(around, count, selective))
        most, least = nothing["peak_bytes"], everything["peak_bytes"]
        shares = COMPILED_SHARES if backend and self.shares is SHARES else self.shares
        for budget in [round(share * most) for share in shares if share * most > least] + [least]:
            if budget != least:
                self._add_checkpoint(prefix, around, budget, most, least)
            if budget != least and backend is None:
                self._add_offload(budget, most, nothing["step_s"])
            options: dict[str, Any] = {"memory_budget": budget, "min_bytes": self.min_bytes}
            options |= {} if backend is None else {"compile": {"backend": backend}}
            self._add(f"{prefix}budget", partial(offload.offload_layers, layers, **options), budget_bytes=budget)

    def _add(self, what: str, around: Callable[[], AbstractContextManager[Any]], **row: Any) -> Row:
        way = Way(what, around, **row)
        self.ways.append(way)
        attempt(way.row, lambda: self._first(way))
        print({"model": self.name, **way.row}, flush=True)
        return way.row

    def _first(self, way: Way) -> None:
        """The peak, first times, the host's seconds, and whether gradients are those of the first row."""
        give_memory_back(self.device)
        with warnings.catch_warnings(record=True) as caught, way.around() as handle:
            warnings.simplefilter("always")
            measuring = 0
            while getattr(handle, "state", "") == "measuring" and measuring < 10:
                self.model.step()
                measuring += 1
            if measuring and handle is not None and handle.plan is not None:
                way.row["first_predicted_s"] = handle.plan.step_s  # before any step of it was timed
            for _ in range(SETTLES if measuring else 3):
                self.model.step()
            peaks = [metered(self.model.step, self.device)[0] for _ in range(2)]
            way.row |= {"peak_bytes": max(peaks), "host_s": self._host_s()}
            way.row["times_s"] = self._times_s()
            way.row["step_s"] = statistics.median(way.row["times_s"])
            way.row |= self._same_bits(_is_compiled(way.row))
            if handle is not None:
                way.row |= {"measuring_steps": measuring}
                plan = handle.plan
                if plan is not None:
                    way.row |= {"predicted_s": plan.step_s, "predicted_peak_bytes": plan.peak_bytes}
                    way.row |= {"recompute_s": plan.recompute_s, "host_bytes": plan.host_bytes}
        told = [
            str(one.message).partition("\n")[0] for one in caught if "offload" in one.filename or "memory" in str(one)
        ]
        way.row |= {"warnings": told} if told else {}

    def _turn(self, way: Way) -> None:
        with warnings.catch_warnings(), way.around() as handle:
            warnings.simplefilter("ignore")
            for _ in range(3 + SETTLES if getattr(handle, "state", "") == "measuring" else 1):
                self.model.step()
            way.row["times_s"] += self._times_s()

    def _times_s(self) -> list[float]:
        times: list[float] = []
        while len(times) < TIMES or STEPS * sum(times) < self.least_s:
            times.append(timed(self.model.step, self.device, STEPS))
        return times

    def _host_s(self) -> float:
        """How long the host takes to issue forward."""
        synchronize(self.device)
        begin = time.perf_counter()
        loss = self.model.loss()
        took_s = time.perf_counter() - begin
        loss.backward()
        return took_s

    def _same_bits(self, compiled: bool) -> Row:
        """Whether gradients are those of layers left alone, or compiled; and how far they are from those at most."""

        def step() -> None:
            torch.manual_seed(1)
            self.model.step()

        try:
            found = self.model.gradients(step)
        except RuntimeError as error:
            print(f"no deterministic kernels: {str(error)[:80]}")
            return {"bit_identical": None}
        expected = self._expected.setdefault(compiled, [])
        if not expected:
            expected += [gradient.clone() for gradient in found]
        pairs = list(zip(expected, found, strict=True))
        distance = sum(float((one - other).float().square().sum()) for one, other in pairs)
        length = sum(float(one.float().square().sum()) for one in expected)
        same = all(torch.equal(*pair) for pair in pairs)
        return {"bit_identical": same, "gradients_apart": math.sqrt(distance / length) if length else 0.0}

    def _add_checkpoint(self, prefix: str, around: Callable[..., Any], budget: int, most: int, least: int) -> None:
        """Of as few layers as fit."""
        count = len(self.model.layers)
        first = math.ceil(count * (most - budget) / max(1, most - least))
        for some in range(max(1, first), count):
            row = self._add(f"{prefix}checkpoint some", partial(around, some), layers=some, for_bytes=budget)
            if row.get("peak_bytes", math.inf) <= budget:
                return

    def _add_offload(self, budget: int, most: int, step_s: float) -> None:
        """Whole layers, as few as fit, if the link can do that in the time of some steps."""
        layers = self.model.layers
        count = math.ceil((len(layers) + 1) * (most - budget) / max(1, most))
        copied_s = most * count / len(layers) * (1 / self.link.d2h_bytes_per_s + 1 / self.link.h2d_bytes_per_s)
        if count < len(layers) and copied_s < MOST_LINK_SHARE * 2 * step_s:
            around = partial(offload.offload_layers, layers, count, min_bytes=self.min_bytes)
            self._add("offload some", around, layers=count, for_bytes=budget)


def _is_compiled(row: Row) -> bool:
    return str(row["what"]).startswith("compiled")


def _drops(module: nn.Module) -> bool:
    return any(isinstance(one, nn.Dropout) and one.p > 0 for one in module.modules())


def beside(row: Row, rows: Sequence[Row]) -> Row | None:
    """The fastest of the other ways of a model that fits the budget of a row, compiled if the row is."""
    others = (
        one
        for one in rows
        if one["model"] == row["model"]
        and not one["what"].endswith("budget")
        and _is_compiled(one) <= _is_compiled(row)
        and "error" not in one
    )
    fitting = [one for one in others if one["peak_bytes"] <= row["budget_bytes"]]
    return min(fitting, key=lambda one: one["step_s"], default=None)


def shown(row: Row, rows: Sequence[Row]) -> Row:
    """A row as people read it."""
    found = {"model": row["model"], "what": row["what"]}
    if "layers" in row:
        found["what"] += f" ({row['layers']})"
    if "error" in row:
        return found | {"note": row["error"][:80]}
    found |= {"ms": 1e3 * row["step_s"], "x nothing": row["ratio"], "GiB": row["peak_bytes"] / GIB}
    found["host ms"] = 1e3 * row["host_s"]
    if "budget_bytes" in row:
        best = beside(row, rows)
        found["budget"] = row["budget_bytes"] / GIB
        found["held"] = "yes" if row["peak_bytes"] <= 1.02 * row["budget_bytes"] else "NO"
        found["x best other"] = "" if best is None else f"{row['step_s'] / best['step_s']:.3f}"
        found["best other"] = "" if best is None else f"{best['what']} {best.get('layers', '')}"
        if "predicted_s" in row:
            found["predicted ms, %"] = 100 * (row["predicted_s"] / row["step_s"] - 1)
    apart = f"{row['gradients_apart']:.1e} apart" if row.get("gradients_apart") else "DIFFER"
    return found | {"bits": {True: "same", False: apart, None: "-"}[row["bit_identical"]]}


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Hold memory budgets against checkpointing on many architectures.")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--turns", type=int, default=TURNS)
    backends = {"nargs": "?", "const": "inductor", "metavar": "BACKEND"}
    parser.add_argument("--compiled", help="also compile the layers, by Inductor or this backend", **backends)
    parser.add_argument("--merge", action="store_true", help="keep what the record says about other models")
    arguments, device = asked(parser, "results/never_slower.json")
    link = offload.measure_link(device)
    print(link)
    record = continued(arguments, device, link)
    rows: list[Row] = record["rows"]
    options: dict[str, Any] = {"small": arguments.small, "shares": arguments.shares}
    options |= {"turns": arguments.turns, "compiles": arguments.compiled}
    for name in arguments.only:
        begin = time.perf_counter()
        here = {"commit": record["commit"], "date": record["date"], "gpu": record["hardware"]["gpu"]}
        rows += [row | here for row in Case(name, device, link, **options).measure()]
        write(arguments.out, record)
        gc.collect()
        give_memory_back(device)
        print(f"{name} took {time.perf_counter() - begin:.0f} s", flush=True)
    print(table([shown(row, rows) for row in rows]))


if __name__ == "__main__":
    main()
