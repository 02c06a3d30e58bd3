"""A full fine-tune of Llama-8B's shape within memory budgets, by one line: AdamW with float32 moments, one GPU.

    python -m benchmarks.recipe --out results/recipe.json

Each row runs in a process of its own, which PyTorch keeps to the budget: a step that needs more fails. The allocator
has expandable segments, which leave fewer gaps. The first row has weights, gradients and optimizer state on the device
and is checkpointed by Hugging Face. The loss is in chunks. A row takes about ``--seconds``: it runs steps until the
recipe and the plan of the activations are settled, as far as there is time, and times what steps are left. The record
is written after each row; ``--merge`` keeps the rows that it has.

``--by-hand`` measures, for each budget, each recipe that fits, put together by ``stream_weights``, ``stream_optimizer``
and a plan of the activations; one process has them all, and profiles the layers once. ``--largest`` looks for the model
with the most layers that the one line trains, beside the limit by arithmetic: the memory of device and host, in
parameters. ``--longest`` looks for the longest sequence by budget, as :mod:`benchmarks.longest_training` says.
"""

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
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import offload
from benchmarks.instruments import GIB, Row, device_peak, give_memory_back, limit_memory, pinned_by_torch, timed
from benchmarks.longest_training import LongTraining, Search
from benchmarks.models import SHAPE, SMALL, Training
from benchmarks.recipes_by_hand import ByHand
from benchmarks.report import Record, asked, table
from offload.device.select import resolve_device

BUDGETS_GIB = (24, 32, 48, 80, 140)
MOST_PINNED_GIB = 100.0
MOST_PINNED = f"{MOST_PINNED_GIB:.0f}GiB"
UNTIL_SETTLED = 40
"""Steps before those that are timed, if there is time: measured, changed over, three kinds of plans compared."""
LEAST_UNTIL_SETTLED = 4
STEPS = 3
SMALL_BUDGET = 1 << 20
BYTES_OF_A_PARAMETER = 10  # weights in bfloat16, and two float32 moments; gradients are consumed
FREE_SHARE = 0.06
"""Of a budget, for what a step needs beside weights and optimizer state, where the search for a model begins."""
LEAST_SHARE = 0.8  # of the layers that arithmetic allows, where that search ends
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


class Deep(Training):
    """A model with more layers, of which each is made on the device and then put where it is to begin."""

    def __init__(self, device: torch.device, tokens: int, layers: int, *, small: bool, on_host: bool) -> None:
        shape = (SMALL if small else SHAPE) | {"num_hidden_layers": 1}
        super().__init__(device, tokens, small=small, shape=shape, dtype=torch.bfloat16, has_gradients=False)
        inner, config = self.model.model, self.model.config
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types * layers
        place = torch.device("cpu") if on_host else device
        inner.layers[0].to(place)
        for number in range(1, layers):
            with torch.device(device):
                layer = type(inner.layers[0])(config, number).to(torch.bfloat16).train()
            for parameter in layer.parameters():
                if parameter.ndim > 1:
                    parameter.data.normal_(std=config.initializer_range)
            inner.layers.append(layer.to(place))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)


def budget_of(budget_gib: float, *, small: bool) -> int:
    """In bytes."""
    return round(budget_gib * (SMALL_BUDGET if small else GIB))


def min_bytes(*, small: bool) -> int:
    """The least size of an activation that is offloaded."""
    return 1 if small else 1 << 21


def model_of(arguments: argparse.Namespace, device: torch.device) -> Training:
    """The model that a process trains."""
    small, tokens = arguments.small, arguments.tokens[0]
    if not arguments.layers:
        return Training(device, tokens, small=small, dtype=torch.bfloat16, has_gradients=False)
    weights = 2 * parameters_of(arguments.layers, small=small)
    on_host = weights > budget_of(arguments.one, small=small) / 2
    return Deep(device, tokens, arguments.layers, small=small, on_host=on_host)


def trained(model: Training, arguments: argparse.Namespace, budget: int, device: torch.device) -> Any:
    """In what the model is trained: within the budget by one line, or with everything on the device."""
    options: dict[str, Any] = {"min_bytes": min_bytes(small=arguments.small)}
    if not budget:
        stack = contextlib.ExitStack()
        stack.enter_context(model.checkpointing())
        resident = offload.stream_optimizer(model.optimizer, resident_bytes="1TiB", state_dtype=torch.float32)
        stack.enter_context(resident)
        return stack
    options |= {"layers": "model.layers", "step_in_backward": True, "state_dtype": torch.float32}
    host = budget_of(arguments.host, small=arguments.small)
    return offload.prepare(model.module, model.optimizer, budget, host, **options)


def measure(arguments: argparse.Namespace) -> Row:
    """One budget, or with 0 everything on the device and checkpointed."""
    device, small, begin = resolve_device(None), arguments.small, time.perf_counter()
    budget, tokens = budget_of(arguments.one, small=small), arguments.tokens[0]
    row: Row = {"tokens": tokens, "budget_bytes": budget}
    if budget:
        limit_memory(device, budget)
    model = model_of(arguments, device)
    row["parameters"] = sum(one.numel() for one in model.module.parameters())

    def step() -> None:
        model.loss().backward()
        model.optimizer.step()
        model.optimizer.zero_grad()

    made_s = time.perf_counter()
    with warnings.catch_warnings(), trained(model, arguments, budget, device) as handle:
        row["prepared_s"] = time.perf_counter() - made_s
        prepared = isinstance(handle, offload.PreparedTraining)
        if prepared:
            print("before any step:", handle.plan, sep="\n", file=sys.stderr, flush=True)
        end = begin + arguments.seconds
        row["steps_before"], last_s = 0, 0.0
        least, most = (LEAST_UNTIL_SETTLED, arguments.until_settled) if budget else (1, 2)
        while row["steps_before"] < most or (prepared and handle.activations is None):  # as soon as a plan is followed
            followed = row["steps_before"] >= least and not (prepared and handle.activations is None)
            if followed and time.perf_counter() + STEPS * last_s > end:
                break
            last_s = timed(step, device)
            row["steps_before"] += 1
            print(f"step {row['steps_before']}: {last_s:.2f} s", file=sys.stderr, flush=True)
        peak_bytes = device_peak(device)
        times_s, plan = list[float](), handle.activations if prepared else None
        while not times_s or (len(times_s) < STEPS and time.perf_counter() + last_s < end):
            took_s = timed(step, device)
            if prepared and handle.activations is not plan:
                times_s, plan = [], handle.activations  # plans take turns until the fastest is known
            times_s.append(took_s)
        row |= {"times_s": times_s, "step_s": statistics.median(times_s)}
        row |= {"tokens_per_s": tokens / row["step_s"], "peak_bytes": peak_bytes()}
        row |= described(handle) if prepared else {"pinned_bytes": pinned_by_torch(device)}
    return row | {"seconds": time.perf_counter() - begin}


def described(prepared: offload.PreparedTraining) -> Row:
    """What was chosen, and what was predicted."""
    plan, stats = prepared.plan, prepared.stats()
    chosen, weights = plan.chosen, stats.get("weights")
    return {
        "recipe": str(prepared.recipe),
        "table": str(plan),
        "state_bytes": list(chosen.state_bytes),
        "activations": repr(prepared.activations),
        "predicted_s": chosen.step_s,
        "predicted_peak_bytes": chosen.device_bytes,
        "predicted_host_bytes": chosen.host_bytes,
        "pinned_bytes": stats["activations"].pinned_bytes + (weights.weight_bytes if weights else 0),
    }


def run(arguments: argparse.Namespace, budget_gib: float, tokens: int, *more: str) -> Row:
    """A row, by a process of its own."""
    command = [sys.executable, "-m", "benchmarks.recipe", "--one", str(budget_gib), "--tokens", str(tokens)]
    command += ["--until-settled", str(arguments.until_settled), "--seconds", str(arguments.seconds)]
    command += ["--host", str(arguments.host), *(["--small"] if arguments.small else []), *more]
    row: Row = {"tokens": tokens, "budget_bytes": budget_of(budget_gib, small=arguments.small)}
    most_s, env = 2 * arguments.seconds, os.environ | ALLOCATOR
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=most_s, env=env)
        lines, said = done.stdout.splitlines(), done.stderr
        if done.returncode or not lines:
            killed = f"ended by signal {-done.returncode}; " if done.returncode < 0 else ""
            row["error"] = killed + (said.strip().splitlines() or ["nothing was printed"])[-1]
        else:
            row = json.loads(lines[-1])
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr or ""
        steps = [line for line in said.splitlines() if line.startswith("step ")]
        row["error"] = f"cut after {most_s:.0f} s; {steps[-1] if steps else 'no step was over'}"
    print(said[-4000:], file=sys.stderr)
    print(row.pop("table", ""), row, sep="\n", flush=True)
    return row


def parameters_of(layers: int, *, small: bool) -> int:
    """Parameters of the model with so many layers."""
    shape = SMALL if small else SHAPE
    hidden = shape["hidden_size"]
    key = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    layer = 2 * hidden * (hidden + key) + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    return layers * layer + 2 * shape["vocab_size"] * hidden + hidden


def find_largest(arguments: argparse.Namespace, budget_gib: float, tokens: int) -> Row:
    """The model with the most layers that trains: from what arithmetic allows, to fewer."""
    small = arguments.small
    device, host = (budget_of(one, small=small) for one in (budget_gib, arguments.host))
    limit = (device + host) // BYTES_OF_A_PARAMETER
    layer, outside = parameters_of(1, small=small) - parameters_of(0, small=small), parameters_of(0, small=small)
    usable = 0.92 * device - FREE_SHARE * device + host
    layers = arguments.layers or int((usable / BYTES_OF_A_PARAMETER - outside) / layer)
    row, tried, least = Row(), Row(), LEAST_SHARE * layers
    while layers >= least:
        print(f"limit {limit / 1e9:.2f}e9 parameters; {layers} layers have", parameters_of(layers, small=small) / 1e9)
        row = run(arguments, budget_gib, tokens, "--layers", str(layers))
        tried[str(layers)] = row.get("error", "trains")
        if "error" not in row:
            break
        layers -= max(1, round(0.02 * layers))
    row |= {"layers": layers, "tried": tried, "limit_parameters": limit, "host_limit_bytes": host}
    return row | {"of_limit": row.get("parameters", 0) / limit}


def printed(arguments: argparse.Namespace, *options: str) -> Iterator[Row]:
    """The rows that a process of its own prints, and an empty one where a budget is done."""
    command = [sys.executable, "-m", "benchmarks.recipe", "--here", *options, "--host", str(arguments.host)]
    command += ["--seconds", str(arguments.seconds), *(["--small"] if arguments.small else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | ALLOCATOR) as process:
        for line in process.stdout or ():
            if line.startswith("{"):
                row = json.loads(line)
                print(row.pop("table", ""), row, sep="\n", flush=True)
                yield row
    if process.returncode:
        print(f"{' '.join(command)} ended with {process.returncode}; rows may be missing", file=sys.stderr)


def find_longest(arguments: argparse.Namespace) -> Iterator[Row]:
    """The longest sequence of each budget, once after each step with it; by one process, or another after an error."""
    budgets, found = [*arguments.budgets], set[int]()
    while budgets:
        for row in printed(arguments, "--longest", "--budgets", *map(str, budgets)):
            if row:
                found.add(row["budget_bytes"])
                yield row
            else:
                budgets.pop(0)
        if budgets and (budget := budget_of(budgets.pop(0), small=arguments.small)) not in found:
            yield {"budget_bytes": budget, "error": "see the log"}


def longest_here(arguments: argparse.Namespace, device: torch.device) -> None:
    """Print the rows of all budgets, in this process."""
    small, host = arguments.small, budget_of(arguments.host, small=arguments.small)
    limit_memory(device, budget_of(arguments.budgets[0], small=small))  # of the first, where the model has room, too
    training = LongTraining(device, small=small)
    options: dict[str, Any] = {"layers": "model.layers", "step_in_backward": True, "state_dtype": torch.float32}
    options |= {"min_bytes": min_bytes(small=small)}
    with training.long() as weights:
        for one in arguments.budgets:
            begin, budget = time.perf_counter(), budget_of(one, small=small)
            give_memory_back(device, pinned=False)
            limit_memory(device, budget)
            prepare = partial(offload.prepare, training.llama.module, training.optimizer, budget, host, **options)
            search = Search(training, prepare, arguments.seconds)
            for found in search.rows():
                row: Row = {"budget_bytes": budget, "host_limit_bytes": host} | found | described(search.prepared)
                row["pinned_bytes"] += weights.stats().weight_bytes
                print(json.dumps(row | {"seconds": time.perf_counter() - begin}), flush=True)
            print("{}", flush=True)  # this budget is done


def by_hand_here(arguments: argparse.Namespace, device: torch.device) -> None:
    """Print the rows of all recipes of all budgets, in this process."""
    small, host = arguments.small, budget_of(arguments.host, small=arguments.small)
    model = Training(device, arguments.tokens[0], small=small, dtype=torch.bfloat16, has_gradients=False)
    hands = ByHand(model, device, host, min_bytes(small=small))
    for budget in arguments.budgets:
        for row in hands.rows(budget_of(budget, small=small)):
            print(json.dumps({"tokens": arguments.tokens[0]} | row), flush=True)


COLUMNS = {
    "tokens": "tokens",
    "longest": "longest_tokens",
    "budget": ("budget_bytes", GIB),
    "recipe": "recipe",
    "s": "step_s",
    "predicted": "predicted_s",
    "GiB": ("peak_bytes", GIB),
    "predicted GiB": ("predicted_peak_bytes", GIB),
    "layers": "layers",
    "1e9 parameters": ("parameters", 1e9),
    "of the limit": "of_limit",
    "": "error",
}


def main() -> None:
    """Measure all rows, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Fine-tune Llama-8B's shape in full within memory budgets.")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS_GIB, help="in GiB")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 65536])
    parser.add_argument("--host", type=float, default=MOST_PINNED_GIB, help="pinned memory, in GiB")
    parser.add_argument("--one", type=float, help="run this budget in this process, and print its row")
    parser.add_argument("--layers", type=int, help="of that process, or where --largest begins")
    parser.add_argument("--until-settled", type=int, default=UNTIL_SETTLED, help="steps before those that are timed")
    parser.add_argument("--seconds", type=float, default=150.0, help="of each row")
    parser.add_argument("--largest", action="store_true", help="the largest model, and no other rows")
    parser.add_argument("--by-hand", action="store_true", help="each recipe that fits, and no other rows")
    parser.add_argument("--longest", action="store_true", help="the longest sequences, and no other rows")
    parser.add_argument("--here", action="store_true", help="of the last two: in this process, and print the rows")
    arguments, device = asked(parser, "results/recipe.json")
    if arguments.one is not None or arguments.here:
        logging.basicConfig(format="%(relativeCreated)d ms %(message)s")
        logging.getLogger("offload").setLevel(logging.INFO)
    if arguments.one is not None:
        print(json.dumps(measure(arguments)))
        return
    if arguments.here:
        (by_hand_here if arguments.by_hand else longest_here)(arguments, device)
        return
    record = Record(arguments, device)
    for row in find_longest(arguments) if arguments.longest else ():
        record.add(row, part="longest", instead_of=["budget_bytes"])
    for budget in arguments.budgets if arguments.largest else ():
        row = find_largest(arguments, budget, arguments.tokens[0])
        record.add(row, part="largest", instead_of=["budget_bytes", "tokens"])
    budgets = [str(one) for one in arguments.budgets]
    for tokens in arguments.tokens if arguments.by_hand else ():
        for row in printed(arguments, "--by-hand", "--tokens", str(tokens), "--budgets", *budgets):
            record.add(row, part="by_hand", instead_of=["budget_bytes", "tokens", "recipe"])
    others = arguments.by_hand or arguments.largest or arguments.longest
    for tokens in () if others else arguments.tokens:
        for budget in (0, *arguments.budgets):
            record.add(run(arguments, budget, tokens), instead_of=["budget_bytes", "tokens"])
    print(table([row for part in ("rows", "by_hand", "largest", "longest") for row in record.rows(part)], COLUMNS))


if __name__ == "__main__":
    main()
