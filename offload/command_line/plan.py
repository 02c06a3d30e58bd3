"""The ways to train a model, compared by its config alone: one process, one device, in the order of simplicity."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import torch

from offload.activations.context import DEFAULT_MIN_BYTES
from offload.base.checks import format_bytes, format_s
from offload.command_line.answer import Answer
from offload.command_line.count import Counted, Rates, count_model, read_config
from offload.planning.plan import Plan, make_plan
from offload.planning.profile import Link, Profile

H200 = Link(55.4e9, 55.5e9, 101.6e9, "an H200's")
"""On PCIe Gen5 x16, as it was measured."""

DUPLEX = 1.83
"""Both directions at once reach so much, in bandwidths of one: an H200's, too."""

RATES = Rates(630e12, 4e12)
"""Of an H200: products reach 785 TFLOP/s by themselves and 80% of that inside of layers, and memory, by its datasheet,
4.8 TB/s."""

USABLE = 0.92
"""Share of device memory; the rest is for the driver and for blocks that the allocator cannot split."""

SLOWER = 1.005
"""Whole layers are simpler than regions, so their step may take so much longer."""


@dataclass(frozen=True)
class WayToTrain:
    """One way to train: a name, the call to write, why it does not fit, and what a plan predicts.

    Args:
        step_s: Seconds of layers and loss.
        peak_bytes: Device memory beside weights, gradients and optimizer state.
        host_bytes: Host memory.
    """

    name: str
    write: str
    misfit: str = ""
    step_s: float | None = None
    peak_bytes: int | None = None
    host_bytes: int | None = None
    plan: Plan | None = None

    def __str__(self) -> str:
        if self.step_s is None or self.peak_bytes is None or self.host_bytes is None or self.misfit:
            return f"does not fit: {self.misfit}"
        step = format_s(self.step_s) + (" and the optimizer on the host" if self.name == "streamed weights" else "")
        sizes = f"{format_bytes(self.peak_bytes)} beside the fixed, {format_bytes(self.host_bytes)} on the host"
        return f"step {step}, {sizes}"


def answer_plan(options: argparse.Namespace) -> Answer:
    """Compare the ways to train a Hugging Face language model, by its config, without loading it."""
    memory = _device_bytes() if options.memory is None else options.memory
    link = H200 if options.link is None else Link(options.link, options.link, DUPLEX * options.link, "--link")
    rates = Rates(options.flops or RATES.flop_per_s, options.bandwidth or RATES.bytes_per_s)
    config, size = read_config(options.model, options.set), (options.batch, options.tokens)
    changes = {"lora": options.lora, "frozen": options.freeze, "fused_loss": options.fused_loss}
    model = count_model(config, *size, rates, DEFAULT_MIN_BYTES, dtype=options.dtype, **changes)
    usable, state = int(USABLE * memory), options.optimizer_bytes
    found = [*ways_to_train(model, state, usable, link, options.host_memory)]
    best = choose(found)
    saved, loss = (format_bytes(nbytes) for nbytes in (model.profile.saved_bytes, model.profile.loss_bytes))
    fixed_bytes = sum(part.fixed_bytes(state) + part.trained_bytes for part in (model.in_layers, model.outside))
    rows = [
        ("model", f"{len(model.profile.layers)} layers, {model.parameters / 1e9:.2f}e9 parameters"),
        ("microbatch", f"{options.batch} x {options.tokens} tokens, with {saved} of activations, {loss} for the loss"),
        ("device", f"{format_bytes(memory)}, of which {format_bytes(usable)} can be used"),
        ("speed", f"{rates.flop_per_s / 1e12:.0f} TFLOP/s in layers, {link}"),
        ("fixed", f"weights, gradients and optimizer {format_bytes(fixed_bytes)}"),
        *((way.name, str(way)) for way in found),
        ("do", f"{best.name}: {best.write}" if best else "nothing fits: a larger device, or fewer tokens"),
    ]
    values = {
        "do": best and best.name,
        "write": best and best.write,
        "ways": [{name: value for name, value in vars(way).items() if name != "plan"} for way in found],
        "parameters": model.parameters,
        "saved_bytes": model.profile.saved_bytes,
        "loss_bytes": model.profile.loss_bytes,
        "fixed_bytes": fixed_bytes,
        "usable_bytes": usable,
        "link": asdict(link),
    }
    table = ["", str(best.plan)] if best and best.name == "regions" else []
    return Answer(rows, values | asdict(rates), ok=best is not None, below=table)


def ways_to_train(model: Counted, state: int | None, usable: int, link: Link, host: int | None) -> Iterator[WayToTrain]:
    """The ways to train with ``state`` bytes of optimizer state for a parameter, or AdamW's two numbers of its dtype.

    A budget is what :func:`offload.offload_layers` takes as ``memory_budget``: all but weights and optimizer state. Of
    that, gradients count as if all of them were there during the whole step.
    """
    profile, layers, (inside, outside) = model.profile, model.layers, (model.in_layers, model.outside)
    budget = usable - inside.fixed_bytes(state) - outside.fixed_bytes(state)
    left = budget - inside.trained_bytes - outside.trained_bytes
    kept = make_plan(profile, sys.maxsize, link)
    misfit = "" if kept.peak_bytes <= left else f"activations and loss take {format_bytes(kept.peak_bytes)}"
    yield WayToTrain("keep all", "offload nothing", misfit, kept.step_s, kept.peak_bytes, 0, kept)
    whole = replace(profile, layers=tuple(layer.as_one_region() for layer in profile.layers))
    way = _planned_way("whole layers", "", whole, left, link, host)
    yield replace(way, write=f"offload_layers({layers}, num_layers={way.plan.num_layers})") if way.plan else way
    yield _planned_way("regions", _budgeted(layers, budget), profile, left, link, host)
    # On the device are the weights of two layers, their gradients, and the parameters outside of the layers.
    two_layers = 2 * (inside.nbytes + inside.trained_bytes) // len(profile.layers)
    budget = usable - outside.fixed_bytes(state) - two_layers
    on_host = inside.fixed_bytes(state) + inside.trained_bytes
    write, left = f'stream_weights({layers}, "cuda")', budget - outside.trained_bytes
    way = _planned_way("streamed weights", write, profile, left, link, None if host is None else host - on_host)
    made = way.plan
    if made is not None:
        if made.host_bytes or made.recompute_s:
            write += f", then {_budgeted(layers, budget)}"
        d2h_s = (inside.trained_bytes + made.host_bytes) / link.d2h_bytes_per_s
        once = inside.nbytes - inside.nbytes // len(profile.layers)  # the last layer's weights stay for its backward
        h2d_s = (2 * once + made.host_bytes) / link.h2d_bytes_per_s
        peak_bytes, host_bytes = made.peak_bytes + two_layers, made.host_bytes + on_host
        way = WayToTrain(way.name, write, "", max(made.step_s, d2h_s, h2d_s), peak_bytes, host_bytes, made)
    yield way


def choose(found: Iterable[WayToTrain]) -> WayToTrain | None:
    """The simplest way that fits; regions in place of whole layers where regions are faster."""
    fitting = {way.name: way for way in found if not way.misfit}
    whole, regions = fitting.get("whole layers"), fitting.get("regions")
    if whole and regions and "keep all" not in fitting and (whole.step_s or 0) > SLOWER * (regions.step_s or 0):
        return regions
    return next(iter(fitting.values()), None)


def _planned_way(name: str, write: str, profile: Profile, left: int, link: Link, host: int | None) -> WayToTrain:
    """The way with the figures of its plan, or with the reason why there is none."""
    if left < 0:
        return WayToTrain(name, "", f"{format_bytes(-left)} are missing for what is fixed")
    if host is not None and host < 0:
        return WayToTrain(name, "", f"{format_bytes(-host)} of host memory are missing")
    try:
        made = make_plan(profile, left, link, max_host_bytes=host)
    except ValueError:
        within = "" if host is None else f" and {format_bytes(host)} on the host"
        return WayToTrain(name, "", f"{format_bytes(left)}{within} are too little for activations and loss")
    return WayToTrain(name, write, "", made.step_s, made.peak_bytes, made.host_bytes, made)


def _budgeted(layers: str, nbytes: int) -> str:
    """The call for a budget of so many bytes, rounded down."""
    size = f"{nbytes * 10 // 2**30 / 10}GiB" if nbytes >= 2**30 else f"{max(0, nbytes) // 2**20}MiB"
    return f'offload_layers({layers}, memory_budget="{size}")'


def _device_bytes() -> int:
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here to plan for; give --memory, such as --memory 24GiB")
    return int(torch.cuda.get_device_properties().total_memory)
