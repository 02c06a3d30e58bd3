"""The command line: ``python -m offload plan``, or ``offload plan``.

It plans how to train a model within a device's memory, by the model's config alone: one process, one device.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from offload import __version__
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.base.checks import check_int, format_bytes, parse_bytes
from offload.command_line.count import Counted, Rates, count_model, read_config
from offload.measuring.memory_left import AUTO_SHARE
from offload.optimizer.chunks import NUM_SLOTS
from offload.optimizer.stream import CHUNK_BYTES
from offload.planning.plan import make_plan
from offload.planning.profile import Link
from offload.planning.recipes import Prediction, TrainingPlan, plan_recipes
from offload.planning.training_bytes import RECIPES, TrainingBytes

H200 = Link(55.4e9, 55.5e9, 101.6e9, "an H200's")  # on PCIe Gen5 x16, as it was measured

DUPLEX = 1.83  # both directions at once reach so much, in bandwidths of one: an H200's, too

RATES = Rates(630e12, 4e12)
"""Of an H200: 64% of the matrix products and 83% of the memory bandwidth in its datasheet, 989 TFLOP/s in bfloat16 and
4.8 TB/s. Single operations reach more (``results/long_context.json``), whole layers do not."""

SIMPLER = 1.05  # so much longer a step may be with all on the device, which leaves a training loop free


def answer_plan(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Plan how to train a Hugging Face language model, by its config, without loading it."""
    for name, least in (("tokens", 1), ("batch", 1), ("lora", 1), ("optimizer_bytes", 0)):
        if (given := getattr(options, name)) is not None:
            check_int(f"--{name.replace('_', '-')}", given, least=least)
    memory = _device_bytes() if options.memory is None else options.memory
    link = H200 if options.link is None else Link(options.link, options.link, DUPLEX * options.link, "--link")
    rates = Rates(options.flops, options.bandwidth)
    config, size = read_config(options.model, options.set), (options.batch, options.tokens)
    changes = {"state": options.optimizer_bytes, "lora": options.lora, "fused_loss": options.fused_loss}
    model = count_model(config, *size, rates, DEFAULT_MIN_BYTES, **changes)
    made = recipes_for(model, int(AUTO_SHARE * memory), link, options.host_memory)
    write = call_for(model, made, memory)
    saved, loss = (format_bytes(nbytes) for nbytes in (model.profile.saved_bytes, model.profile.loss_bytes))
    lines = [
        f"model       {len(model.profile.layers)} layers, {model.parameters / 1e9:.2f}e9 parameters",
        f"microbatch  {options.batch} x {options.tokens} tokens, with {saved} of activations, {loss} for the loss",
        f"device      {format_bytes(memory)}, of which {format_bytes(made.memory_budget)} can be used",
        f"speed       {rates.flop_per_s / 1e12:.0f} TFLOP/s in layers, {link}",
        fill(f"do          {write or _remedy(made, options.host_memory)}", 100, subsequent_indent=12 * " "),
        f"\n{made}",
    ]
    plan = made.chosen.plan if write else None
    if plan and (plan.host_bytes or plan.recompute_s):
        lines.append(f"\n{plan}")
    recipes = [
        {"recipe": str(one.recipe), "step_s": one.step_s if one.plan else None, "reason": one.reason}
        | {"device_bytes": one.device_bytes, "host_bytes": one.host_bytes, "state_bytes": one.state_bytes}
        for one in made.recipes
    ]
    return "\n".join(lines), {
        "ok": write is not None,
        "write": write,
        "recipes": recipes,
        "parameters": model.parameters,
        "saved_bytes": model.profile.saved_bytes,
        "loss_bytes": model.profile.loss_bytes,
        "optimizer_s": model.profile.other_s,
        "usable_bytes": made.memory_budget,
        "link": asdict(link),
    }


def recipes_for(model: Counted, usable: int, link: Link, host: int | None) -> TrainingPlan:
    """Where weights, gradients and optimizer state may be, each with a plan of the activations in what is left."""
    training = replace(model.training, slots=NUM_SLOTS * min(CHUNK_BYTES, usable // 180))
    made = plan_recipes(
        Prediction(training, link, RECIPES[0], arithmetic_s=model.profile.other_s),
        usable,
        host,
        lambda device, host, left: make_plan(model.profile, device, left, max_host_bytes=host),
        training.gradient_bytes(RECIPES[0]),
        [one for one in RECIPES if one.optimizer != "cpu" or not _in_float32(training)],
    )
    simple = made.recipes[0]
    if made.fits and not simple.reason and simple.step_s <= SIMPLER * made.chosen.step_s:
        made = replace(made, in_place=simple.recipe)
    return made


def call_for(model: Counted, made: TrainingPlan, memory: int) -> str | None:
    """The call to write for the chosen recipe; ``None`` if none fits.

    A budget of ``offload_layers`` is what a step adds to weights and optimizer state, one of ``prepare`` is all memory.
    """
    if not made.fits:
        return None
    recipe, plan, limit = made.chosen.recipe, made.chosen.plan, made.max_host_bytes
    host = "" if limit is None else f', max_host_bytes="{_rounded_down(limit)}"'
    if recipe == RECIPES[0]:
        if plan is None or not (plan.host_bytes or plan.recompute_s):
            return "offload nothing: all fits"
        left = made.memory_budget - model.training.held_bytes(recipe)
        return f'offload_layers({model.layers}, memory_budget="{_rounded_down(left)}"{host})'
    steps = ", step_in_backward=True" if recipe.gradients == "consumed" else ""
    options = f"{host}{steps}{_in_float32(model.training)}"
    return f'prepare(model, optimizer, memory_budget="{_rounded_down(memory)}"{options})'


def _remedy(made: TrainingPlan, host: int | None) -> str:
    """What would help, as nothing fits."""
    device = f"a device of {format_bytes(math.ceil(made.least.device_bytes / AUTO_SHARE))}"
    if all(one.reason.endswith("without activations") for one in made.recipes):
        return f"nothing fits, even without a token: {device}, or fewer trained parameters"
    return f"nothing fits: fewer tokens, {'' if host is None else 'more host memory, '}or {device}"


def _in_float32(training: TrainingBytes) -> str:
    """The arguments for two float32 numbers of state per parameter of 16 bits, and for float32 weights beside them."""
    trained = training.trained_elements
    if training.gradients != 2 * trained or training.state not in (8 * trained, 10 * trained):
        return ""
    return ", state_dtype=torch.float32" + (", master_weights=True" if training.state == 10 * trained else "")


def _rounded_down(nbytes: int) -> str:
    return f"{nbytes * 10 // 2**30 / 10:g}GiB" if nbytes >= 2**30 else f"{nbytes // 2**20}MiB"


def _device_bytes() -> int:
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here to plan for; give --memory, such as --memory 24GiB")
    return int(torch.cuda.get_device_properties().total_memory)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command with these arguments, or the process's, and write its answer to standard output.

    The exit status is 0, or 1 if nothing fits, or 2 with one line on standard error for what cannot be answered.
    """
    options = read_options(sys.argv[1:] if words is None else words)
    try:
        text, values = answer_plan(options)
    except (ImportError, ValueError, TypeError, OSError) as error:
        sys.stderr.write(f"offload plan: {error}\n")
        return 2
    try:
        sys.stdout.write(f"{json.dumps(values, indent=1) if options.json else text}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as ``head`` has seen enough; Python would write the rest when it ends
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return 0 if values["ok"] else 1


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of a command, by name; wrong ones, help and the version exit."""
    parser = argparse.ArgumentParser("offload", description="Ask about a model before a line of code is written.")
    parser.add_argument("--version", action="version", version=f"offload {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = (answer_plan.__doc__ or "").partition("\n")[0]
    add = commands.add_parser("plan", help=text, description=text).add_argument
    add("model", help="the path of a Hugging Face config.json or of its folder, or a model type such as llama")
    add("--json", action="store_true", help="answer as JSON, for programs")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the config, in place of its value")
    add("--lora", type=int, metavar="RANK", help="train LoRA's adapters on all linear layers, and nothing else")
    add("--tokens", type=int, default=4096, help="tokens of a sequence; 4096 by default")
    add("--batch", type=int, default=1, help="sequences in a microbatch; 1 by default")
    add("--memory", type=_size, help="device memory, such as 24GiB; by default that of this machine's GPU")
    add("--host-memory", type=_size, help="host memory that may be used, such as 100GiB; no limit by default")
    add("--link", type=_size, help="bytes per second each way, such as 26GB; an H200's by default")
    rates = "per second inside of layers; by default an H200's"
    add("--flops", type=float, default=RATES.flop_per_s, help=f"FLOP {rates}, 630e12")
    add("--bandwidth", type=float, default=RATES.bytes_per_s, help=f"bytes of device memory {rates}, 4e12")
    state = "bytes of optimizer state per parameter; by default AdamW's two numbers of the dtype"
    add("--optimizer-bytes", type=int, help=state)
    add("--fused-loss", action="store_true", help="the loss never holds all logits: offload.use_chunked_loss, Liger's")
    # A size below 0 looks like another option, and would be said to be missing.
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and re.match(r"-\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return parser.parse_args(joined)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("value ")) from None
