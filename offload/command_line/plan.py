"""The ways to train a model of Llama's kind, compared by its sizes alone: one process, one device.

The optimizer's state is beside the weights. The ways are in order of simplicity.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace

import torch

from offload.activations.context import DEFAULT_MIN_BYTES
from offload.base.checks import format_bytes, format_s
from offload.command_line.answer import Answer
from offload.command_line.llama import Rates, Shape, loss_bytes, profile_of, read_shape
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

LAYERS = "model.model.layers"
"""The layers of Hugging Face's models of this kind."""


@dataclass(frozen=True)
class WayToTrain:
    """One way to train.

    Args:
        name: For people.
        write: The call to write.
        misfit: Why it does not fit; empty if it does.
        step_s: Predicted seconds of a step's layers and loss.
        peak_bytes: Device memory, beside what is fixed.
        host_bytes: Host memory.
        plan: The plan that the figures are of.
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
    """Compare the ways to train a model of Llama's kind, by its config.json or its sizes, without loading it."""
    shape = read_shape(options.model, {one.name: getattr(options, one.name, None) for one in fields(Shape)})
    memory = _device_bytes() if options.memory is None else options.memory
    link = H200 if options.link is None else Link(options.link, options.link, DUPLEX * options.link, "--link")
    rates = Rates(options.flops or RATES.flop_per_s, options.bandwidth or RATES.bytes_per_s)
    profile = profile_of(shape, options.batch, options.tokens, rates, DEFAULT_MIN_BYTES)
    state = 2 * shape.item_bytes if options.optimizer_bytes is None else options.optimizer_bytes
    parameter_bytes = 2 * shape.item_bytes + state  # weight, gradient and optimizer state
    loss = 0 if options.fused_loss else loss_bytes(shape, options.batch, options.tokens)
    usable = int(USABLE * memory)
    found = [*ways_to_train(profile, shape, parameter_bytes, loss, usable, link, options.host_memory)]
    best = choose(found)
    activations = f"{options.batch} x {options.tokens} tokens, with {format_bytes(profile.saved_bytes)} of activations"
    weights = format_bytes(shape.parameters * parameter_bytes)
    rows = [
        ("model", f"{shape.layers} layers, {shape.parameters / 1e9:.2f}e9 parameters in {shape.dtype}"),
        ("microbatch", activations),
        ("device", f"{format_bytes(memory)}, of which {format_bytes(usable)} can be used"),
        ("speed", f"{rates.flop_per_s / 1e12:.0f} TFLOP/s in layers, {link}"),
        ("fixed", f"weights, gradients and optimizer {weights}, loss {format_bytes(loss)}"),
        *((way.name, str(way)) for way in found),
        ("do", f"{best.name}: {best.write}" if best else "nothing fits: a larger device, or fewer tokens"),
    ]
    values = {
        "do": best and best.name,
        "write": best and best.write,
        "ways": [{name: value for name, value in vars(way).items() if name != "plan"} for way in found],
        "shape": asdict(shape),
        "parameters": shape.parameters,
        "saved_bytes": profile.saved_bytes,
        "fixed_bytes": shape.parameters * parameter_bytes + loss,
        "usable_bytes": usable,
        "link": asdict(link),
    }
    table = ["", str(best.plan)] if best and best.name == "regions" else []
    return Answer(rows, values | asdict(rates), ok=best is not None, below=table)


def ways_to_train(
    profile: Profile, shape: Shape, parameter_bytes: int, loss: int, usable: int, link: Link, host: int | None
) -> Iterator[WayToTrain]:
    """The ways to train.

    Args:
        profile: What the layers cost.
        shape: The sizes of the model.
        parameter_bytes: Bytes of a parameter's weight, gradient and optimizer state.
        loss: Bytes of device memory that the loss takes.
        usable: Bytes of the device.
        link: How fast copies are.
        host: Bytes of host memory; ``None`` for no limit.
    """
    left = usable - shape.parameters * parameter_bytes - loss
    kept = make_plan(profile, sys.maxsize, link)
    misfit = "" if kept.peak_bytes <= left else f"activations take {format_bytes(kept.peak_bytes)}"
    yield WayToTrain("keep all", "offload nothing", misfit, kept.step_s, kept.peak_bytes, 0, kept)
    whole = replace(profile, layers=tuple(replace(layer, regions=()) for layer in profile.layers))
    way = _planned_way("whole layers", "", whole, left, link, host)
    yield replace(way, write=f"offload_layers({LAYERS}, num_layers={way.plan.num_layers})") if way.plan else way
    yield _planned_way("regions", _budgeted(left + loss), profile, left, link, host)
    # On the device are the weights of two layers, their gradients, and the parameters outside of the layers.
    layer_bytes = shape.layer_parameters * shape.item_bytes
    left = usable - shape.outside_parameters * parameter_bytes - 4 * layer_bytes - loss
    on_host = shape.layers * shape.layer_parameters * parameter_bytes
    write = f'stream_weights({LAYERS}, "cuda")'
    way = _planned_way("streamed weights", write, profile, left, link, None if host is None else host - on_host)
    made = way.plan
    if made is not None:
        if made.host_bytes or made.recompute_s:
            write += f", then {_budgeted(left + loss)}"
        d2h_s = (shape.layers * layer_bytes + made.host_bytes) / link.d2h_bytes_per_s
        h2d_s = (2 * (shape.layers - 1) * layer_bytes + made.host_bytes) / link.h2d_bytes_per_s
        peak_bytes, host_bytes = made.peak_bytes + 4 * layer_bytes, made.host_bytes + on_host
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
        return WayToTrain(name, "", f"{format_bytes(left)}{within} are too little for activations")
    return WayToTrain(name, write, "", made.step_s, made.peak_bytes, made.host_bytes, made)


def _budgeted(left: int) -> str:
    """The call for a budget of so many bytes, rounded down."""
    return f'offload_layers({LAYERS}, memory_budget="{max(0, left) * 10 // 2**30 / 10}GiB")'


def _device_bytes() -> int:
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here to plan for; give --memory, such as --memory 24GiB")
    return int(torch.cuda.get_device_properties().total_memory)
