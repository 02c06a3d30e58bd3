"""Memory budgets: what a plan by region predicts, what is measured, and the simple ways beside it.

    python -m benchmarks.budget --out results/budget.json
    python -m benchmarks.budget --only decoder --merge         parts of it, into a record that is there

The limit of each row is the step with everything kept, in the same run: nothing computes less. Every row of a model is
measured in turns of several steps, as a GPU at its power limit changes its clocks from step to step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import offload
from benchmarks.instruments import deterministic, give_memory_back, metered, timed
from benchmarks.models import Llama, Model, Stack
from benchmarks.report import environment, table, write
from benchmarks.workloads import norm_mlp, reference_decoder
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.device.select import resolve_device

GIB = 1 << 30
BUDGETS_GIB = {
    "decoder": (20, 15.2, 15, 12, 9.6, 9.5, 8, 6, 4, 2.82, 2.8, 2),
    "norm_mlp": (10, 7, 5, 3, 2),
    "llama": (10, 7, 5, 3, 2),
}
PARTS = ("host", *BUDGETS_GIB)
TURNS, STEPS = 3, 3

Row = dict[str, Any]


def models(device: torch.device, *, small: bool) -> dict[str, Callable[[], Model]]:
    """What is measured, by name; built when it is its turn."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 16, "num_attention_heads": 32}
    tokens, vocabulary, dtype = 4096, 2048, torch.bfloat16
    if small:
        sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "num_attention_heads": 4}
        tokens, vocabulary, dtype = 64, 128, torch.float32
    heads = {"num_key_value_heads": sizes["num_attention_heads"] // 4}
    return {
        "decoder": lambda: Stack(reference_decoder(small=small), device),
        "norm_mlp": lambda: Stack(norm_mlp(small=small), device),
        "llama": lambda: Llama(device, tokens=tokens, dtype=dtype, vocab_size=vocabulary, **sizes, **heads),
    }


@contextmanager
def by_plan(model: Model, plan: Any, min_bytes: int) -> Iterator[None]:
    """Offload as planned."""
    with offload.offload_layers(model.layers, plan=plan, min_bytes=min_bytes):
        yield


@contextmanager
def around_checkpoints(model: Model, min_bytes: int) -> Iterator[None]:
    """All computed again by PyTorch, and the layers' inputs travel."""
    with model.checkpointing(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with offload.offload_layers(model.layers, len(model.layers) - 2, min_bytes=min_bytes):
            yield


def measure(name: str, build: Callable[[], Model], device: torch.device, link: Any, *, small: bool) -> list[Row]:
    """All rows of one model."""
    model = build()
    min_bytes = 1 if small else DEFAULT_MIN_BYTES
    begin = time.perf_counter()
    profile = offload.profile_layers(model.layers, model.step, min_bytes=min_bytes, device=device, regions=True)
    print(f"\n{name}: profiled in {time.perf_counter() - begin:.1f} s\n{profile}")
    ways: list[tuple[Row, Callable[[], AbstractContextManager[Any]]]] = [
        ({"what": "nothing"}, nullcontext),
        ({"what": "checkpoint all"}, model.checkpointing),
        ({"what": "checkpoint all, inputs travel"}, lambda: around_checkpoints(model, min_bytes)),
    ]
    budgets = [round(gib * GIB) for gib in BUDGETS_GIB[name]]
    if small:
        budgets = [profile.saved_bytes * 3 // 4, profile.saved_bytes // 2]
    for budget in budgets:
        asked: Row = {"what": f"budget {budget / GIB:.4g} GiB", "budget_bytes": budget}
        start = time.process_time()
        try:
            plan = offload.plan(profile, budget, link, max_host_bytes="100GiB")
        except ValueError as error:
            print(f"  {budget / GIB:.2f} GiB: {error}")
            ways.append((asked | {"error": str(error)}, nullcontext))
            continue
        row = asked | {
            "predicted_s": plan.step_s,
            "predicted_peak_bytes": plan.peak_bytes,
            "planned_in_s": time.process_time() - start,
            "host_bytes": plan.host_bytes,
            "layers": plan.num_layers,
            "recompute_s": plan.recompute_s,
        }
        ways.append((row, lambda plan=plan: by_plan(model, plan, min_bytes)))
        print(plan)
    expected: list[torch.Tensor] = []
    for row, enter in ways:
        if "error" not in row:
            measure_row(model, row, enter, device, expected)
            print(row, flush=True)
    for _ in range(TURNS - 1):
        for row, enter in ways:
            if "error" not in row:
                with enter():
                    timed(model.step, device)
                    timed(model.step, device)
                    row["times_s"] += [timed(model.step, device) for _ in range(STEPS)]
    for row, _ in ways:
        if "error" not in row:
            row["step_s"] = statistics.median(row["times_s"])
            row["ratio"] = row["step_s"] / statistics.median(ways[0][0]["times_s"])
    return [{"model": name, **row} for row, _ in ways]


def measure_row(
    model: Model, row: Row, enter: Callable[[], AbstractContextManager[Any]], device: torch.device, expected: list[Any]
) -> None:
    """The peak, first times, and whether gradients are those of the first row."""
    give_memory_back(device)
    with enter():
        for _ in range(2):
            model.step()
        row["peak_bytes"], _ = metered(model.step, device)
        row["times_s"] = [timed(model.step, device) for _ in range(STEPS)]
        for leaf in model.leaves:
            leaf.grad.zero_()  # type: ignore[union-attr]
        with deterministic():
            model.step()
    found = [leaf.grad for leaf in model.leaves if leaf.grad is not None]
    if not expected:
        expected.extend(gradient.clone() for gradient in found)
    row["bit_identical"] = all(map(torch.equal, expected, found))


def host_cost(device: torch.device, operations: int = 100, repeats: int = 50) -> dict[str, dict[str, float]]:
    """Host seconds per operation of a layer of small tensors, forward and backward; the least of many runs."""
    x = torch.rand(64, device=device, requires_grad=True)

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(operations // 2):
                x = torch.tanh(x) * x
            return x

    def policy(_context: object, _operation: object, *_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    layer = Layer()
    selective = partial(create_selective_checkpoint_contexts, policy)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "nothing": lambda: layer(x),
        "checkpoint": lambda: checkpoint(layer, x, use_reentrant=False),
        "selective checkpoint": lambda: checkpoint(layer, x, use_reentrant=False, context_fn=selective),
        "regions": lambda: layer(x),
    }
    found = {}
    for name, forward in ways.items():
        with ExitStack() as stack:
            if name == "regions":
                everything = {"*": "recompute"}
                stack.enter_context(
                    offload.offload_layers(
                        [layer, torch.nn.Identity()], 0, treatments=everything, min_bytes=1, device=device
                    )
                )
            least = [math.inf, math.inf]
            for _ in range(repeats):
                timed(lambda: None, device)
                begin = time.perf_counter()
                y = forward()
                least[0] = min(least[0], time.perf_counter() - begin)
                loss = y.sum()
                timed(lambda: None, device)
                begin = time.perf_counter()
                loss.backward()
                least[1] = min(least[1], time.perf_counter() - begin)
        found[name] = {"forward_s": least[0] / operations, "backward_s": least[1] / operations}
        print(f"{name:22s} {1e6 * least[0] / operations:6.1f} {1e6 * least[1] / operations:6.1f} us per operation")
    return found


def shown(row: Row) -> Row:
    """A row as people read it."""
    if "error" in row:
        return {"model": row["model"], "what": row["what"], "note": row["error"][:60]}
    found = {"model": row["model"], "what": row["what"], "ms": 1e3 * row["step_s"], "x nothing": row["ratio"]}
    found["GiB"] = row["peak_bytes"] / GIB
    if "budget_bytes" in row:
        found["fits"] = "yes" if row["peak_bytes"] <= row["budget_bytes"] else "NO"
        found["predicted ms, %"] = 100 * (row["predicted_s"] / row["step_s"] - 1)
        found["predicted GiB, %"] = 100 * (row["predicted_peak_bytes"] / row["peak_bytes"] - 1)
        found["planned in s"] = row["planned_in_s"]
    return found | {"bits": "same" if row["bit_identical"] else "DIFFER"}


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Measure plans by region under memory budgets.")
    parser.add_argument("--out", type=Path, default=Path("results/budget.json"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--merge", action="store_true", help="keep what the record says about other models")
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    arguments = parser.parse_args()
    device = resolve_device(None)
    if device.type == "cpu" and not arguments.small:
        parser.error("the models are made for a GPU; give --small on a CPU")
    link = offload.measure_link(device)
    print(link)
    record: dict[str, Any] = {}
    if arguments.merge and arguments.out.exists():
        record = json.loads(arguments.out.read_text("utf-8"))
    rows: list[Row] = [row for row in record.get("rows", ()) if row["model"] not in arguments.only]
    record |= environment(device) | {"small": arguments.small, "link": vars(link), "rows": rows}
    if "host" in arguments.only:
        record["host_cost"] = host_cost(device, repeats=5 if arguments.small else 50)
    for name, build in models(device, small=arguments.small).items():
        if name in arguments.only:
            rows += measure(name, build, device, link, small=arguments.small)
            write(arguments.out, record)
    write(arguments.out, record)
    print(table([shown(row) for row in rows]))


if __name__ == "__main__":
    main()
