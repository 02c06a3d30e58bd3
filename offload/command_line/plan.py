"""The recipes to train a model within a device's memory, by the model's config alone: one process, one device."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

import torch

from offload.activations.context import DEFAULT_MIN_BYTES
from offload.base.checks import check_int, format_bytes
from offload.command_line.count import Counted, Rates, count_model, read_config
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

USABLE = 0.92  # share of device memory; the rest is for the driver and for blocks that the allocator cannot split


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
    made = recipes_for(model, int(USABLE * memory), link, options.host_memory)
    write = call_for(model, made, memory)
    saved, loss = (format_bytes(nbytes) for nbytes in (model.profile.saved_bytes, model.profile.loss_bytes))
    lines = [
        f"model       {len(model.profile.layers)} layers, {model.parameters / 1e9:.2f}e9 parameters",
        f"microbatch  {options.batch} x {options.tokens} tokens, with {saved} of activations, {loss} for the loss",
        f"device      {format_bytes(memory)}, of which {format_bytes(made.memory_budget)} can be used",
        f"speed       {rates.flop_per_s / 1e12:.0f} TFLOP/s in layers, {link}",
        f"do          {write or 'nothing fits: a larger device, or fewer tokens'}",
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
    training = replace(model.training, slots=NUM_SLOTS * min(CHUNK_BYTES, usable // 90))
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
    recipe, plan = made.chosen.recipe, made.chosen.plan
    if recipe == RECIPES[0]:
        if plan is None or not (plan.host_bytes or plan.recompute_s):
            return "offload nothing: all fits"
        left = made.memory_budget - model.training.held_bytes(recipe)
        return f'offload_layers({model.layers}, memory_budget="{_rounded_down(left)}")'
    steps = ", step_in_backward=True" if recipe.gradients == "consumed" else ""
    return f'prepare(model, optimizer, memory_budget="{_rounded_down(memory)}"{steps}{_in_float32(model.training)})'


def _in_float32(training: TrainingBytes) -> str:
    """The arguments for two float32 numbers of state per parameter of 16 bits, and for float32 weights beside them."""
    trained = training.trained_elements
    if training.gradients != 2 * trained or training.state not in (8 * trained, 10 * trained):
        return ""
    return ", state_dtype=torch.float32" + (", master_weights=True" if training.state == 10 * trained else "")


def _rounded_down(nbytes: int) -> str:
    return f"{nbytes * 10 // 2**30 / 10}GiB" if nbytes >= 2**30 else f"{nbytes // 2**20}MiB"


def _device_bytes() -> int:
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here to plan for; give --memory, such as --memory 24GiB")
    return int(torch.cuda.get_device_properties().total_memory)
