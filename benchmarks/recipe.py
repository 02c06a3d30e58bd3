"""A full fine-tune of Llama-8B's shape within memory budgets, by one line: AdamW with float32 moments, one GPU.

    python -m benchmarks.recipe --out results/recipe.json

Each row runs in a process of its own, which PyTorch keeps to the budget: a step that needs more fails. The allocator
has expandable segments, which leave fewer gaps. The first row has weights, gradients and optimizer state on the device
and is checkpointed by Hugging Face. The loss is in chunks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import torch

import offload
from benchmarks.instruments import Row, limit_memory, peak_bytes, pinned_by_torch, reset_peak, timed
from benchmarks.llama_8b import GIB, Training
from benchmarks.report import asked, environment, table, write
from offload.device.select import resolve_device

BUDGETS_GIB = (24, 32, 48, 80, 140)
MOST_PINNED = "100GiB"
UNTIL_SETTLED = 12
"""Steps before those that are timed: measured, changed over, compared."""
STEPS = 3
SMALL_BUDGET = 1 << 20


class FineTune(Training):
    """The model, without gradients until backward makes them."""

    has_gradients = False


def step(model: Training) -> None:
    """As a training loop has it, without clipping."""
    model.loss().backward()
    model.optimizer.step()
    model.optimizer.zero_grad()


def measure(budget_gib: float, tokens: int, until_settled: int, *, small: bool) -> Row:
    """One budget, or with 0 everything on the device and checkpointed."""
    device = resolve_device(None)
    budget = round(budget_gib * GIB)
    if small:
        budget = round(budget_gib * SMALL_BUDGET)
    row: Row = {"tokens": tokens, "budget_bytes": budget}
    if budget:
        limit_memory(device, budget)
    model = FineTune(device, tokens, small=small, dtype=torch.bfloat16)
    options: dict[str, Any] = {"state_dtype": torch.float32}
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if not budget:
            stack.enter_context(model.checkpointing())
            stack.enter_context(offload.stream_optimizer(model.optimizer, resident_bytes="1TiB", **options))
            prepared = None
        else:
            stack.enter_context(warnings.catch_warnings())
            prepared = stack.enter_context(
                offload.prepare(
                    model.module,
                    model.optimizer,
                    budget,
                    MOST_PINNED,
                    layers="model.layers",
                    step_in_backward=True,
                    min_bytes=1 if small else 1 << 21,
                    **options,
                )
            )
        row["prepared_s"] = time.perf_counter() - begin
        for _ in range(until_settled if prepared else 2):
            step(model)
        reset_peak(device)
        row["times_s"] = [timed(lambda: step(model), device) for _ in range(STEPS)]
        row["step_s"] = statistics.median(row["times_s"])
        row["peak_bytes"] = peak_bytes(device)
        row["pinned_bytes"] = pinned_by_torch(device)
        if prepared is not None:
            chosen = prepared.plan.chosen
            row |= {"recipe": str(prepared.recipe), "predicted_s": chosen.step_s, "table": str(prepared.plan)}
            row["activations"] = repr(prepared.activations)
            row |= {"predicted_peak_bytes": chosen.device_bytes, "predicted_host_bytes": chosen.host_bytes}
            stats = prepared.stats()
            row["pinned_bytes"] = stats["activations"].pinned_bytes
    return row


def main() -> None:
    """Measure all rows, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Fine-tune Llama-8B's shape in full within memory budgets.")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS_GIB, help="in GiB")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 65536])
    parser.add_argument("--one", type=float, help="run this budget in this process, and print its row")
    parser.add_argument("--until-settled", type=int, default=UNTIL_SETTLED, help="steps before those that are timed")
    arguments, device = asked(parser, "results/recipe.json")
    settled = arguments.until_settled
    if arguments.one is not None:
        logging.basicConfig(format="%(relativeCreated)d ms %(message)s")
        logging.getLogger("offload").setLevel(logging.INFO)
        print(json.dumps(measure(arguments.one, arguments.tokens[0], settled, small=arguments.small)))
        return
    rows: list[Row] = []
    record: dict[str, Any] = environment(device) | {"small": arguments.small, "rows": rows}
    for tokens in arguments.tokens:
        for budget in (0, *arguments.budgets):
            command = [sys.executable, "-m", "benchmarks.recipe", "--one", str(budget), "--tokens", str(tokens)]
            command += ["--until-settled", str(settled)]
            done = subprocess.run(
                [*command, *(["--small"] if arguments.small else [])],
                capture_output=True,
                text=True,
                check=False,
                env=os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            )
            lines = done.stdout.splitlines()
            row = {"tokens": tokens, "budget_bytes": round(budget * GIB)}
            if done.returncode or not lines:
                row["error"] = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
                print(done.stderr[-4000:], file=sys.stderr)
            else:
                row = json.loads(lines[-1])
                print(done.stderr[-4000:], file=sys.stderr)
            rows.append(row)
            print(row.pop("table", ""), row, sep="\n", flush=True)
            write(arguments.out, record)
    print(table([shown(row, rows) for row in rows]))


def shown(row: Row, rows: list[Row]) -> Row:
    """A row as people read it."""
    found: Row = {"tokens": row["tokens"], "budget GiB": row["budget_bytes"] / GIB or "all on the device"}
    if "error" in row:
        return found | {"note": row["error"][:80]}
    [beside] = [one for one in rows if one["tokens"] == row["tokens"] and not one["budget_bytes"]] or [{}]
    found |= {"recipe": row.get("recipe", "checkpointed"), "step s": row["step_s"], "peak GiB": row["peak_bytes"] / GIB}
    if "step_s" in beside:
        found["x all on the device"] = row["step_s"] / beside["step_s"]
    if "predicted_s" in row:
        found["predicted s, %"] = 100 * (row["predicted_s"] / row["step_s"] - 1)
        found["predicted GiB, %"] = 100 * (row["predicted_peak_bytes"] / max(1, row["peak_bytes"]) - 1)
    return found


if __name__ == "__main__":
    main()
