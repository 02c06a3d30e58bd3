"""Say what to do with a model of Llama's type, by its config.json or its sizes, without loading it.

What is counted is one process on one device, with the optimizer's state beside the weights. There are four ways to
train, the simplest first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from offload.activations.context import DEFAULT_MIN_BYTES
from offload.base.checks import format_bytes, format_s
from offload.command_line.llama import ITEM_BYTES, Rates, Shape, loss_bytes, profile_of, read_shape
from offload.command_line.terminal import Answer, count, rate, size
from offload.planning.link import Link
from offload.planning.plan import Plan, plan
from offload.planning.profile import Profile

H200 = Link(55.4e9, 55.5e9, 101.6e9, "an H200's")
"""On PCIe Gen5 x16, as it was measured."""

DUPLEX = 1.83
"""What both ways at once reach together, in times of one: an H200's, too."""

RATES = Rates(630e12, 4e12)
"""Of an H200: products reach 785 TFLOP/s by themselves and 80% of that inside of layers, and memory, by its datasheet,
4.8 TB/s."""

USABLE = 0.92
"""Of device memory: the rest is for the driver, and what the allocator cannot cut blocks from."""

MUCH = 1.005
"""Whole layers are simpler than regions, so they may take so much longer."""

LAYERS = "model.model.layers"
"""Where Hugging Face's models of this type have them."""


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        name: For people.
        write: The call that does it.
        misfit: Why it does not fit; empty if it does.
        step_s: Predicted seconds of a step's layers and loss.
        peak_bytes: On the device beside what is fixed.
        host_bytes: On the host.
    """

    name: str
    write: str
    misfit: str = ""
    step_s: float | None = None
    peak_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True)
class Needs:
    """What a model needs beside activations.

    Args:
        shape: Its sizes.
        parameter_bytes: For each weight, its gradient and optimizer state.
        loss_bytes: For the loss.
    """

    shape: Shape
    parameter_bytes: int
    loss_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """On the device, with all of the model there."""
        return self.shape.parameters * self.parameter_bytes + self.loss_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``plan``."""
    add = parser.add_argument
    add("model", nargs="?", type=Path, help="a config.json of Hugging Face's, or the folder that it is in")
    for name in ("layers", "hidden", "intermediate", "heads", "kv-heads", "head-dim", "vocab"):
        add(f"--{name}", type=count, help="in place of the config's")
    add("--no-gate", dest="gated", action="store_const", const=False, help="the MLP has two products in place of three")
    fused = "each norm is one operation; by default those of Hugging Face's Llama, in float32"
    add("--fused-norms", action="store_const", const=True, help=fused)
    add("--dtype", choices=[*ITEM_BYTES], help="of weights and activations, in place of the config's")
    add("--tokens", type=count, default=4096, help="of a sequence; 4096 by default")
    add("--batch", type=count, default=1, help="sequences in a microbatch; 1 by default")
    add("--memory", type=size, help="of the device, such as 24GiB; by default that of this machine's")
    add("--host-memory", type=size, help="that may be used, such as 100GiB; no limit by default")
    add("--link", type=size, help="bytes per second each way, such as 26GB; an H200's by default")
    add("--flops", type=rate, help="per second inside of layers; 630e12, an H200's, by default")
    add("--bandwidth", type=rate, help="bytes per second of device memory; 4e12, an H200's, by default")
    add("--optimizer-bytes", type=size, help="of state per parameter; by default AdamW's two numbers of the dtype")
    without_logits = "the loss never holds all logits: offload.use_chunked_loss, or Liger's"
    add("--fused-loss", action="store_true", help=without_logits)


def answer(options: argparse.Namespace) -> Answer:
    """Count, and compare the ways."""
    given = {one.name: getattr(options, one.name) for one in fields(Shape) if hasattr(options, one.name)}
    shape = read_shape(options.model, given)
    memory = _device_bytes() if options.memory is None else options.memory
    link = H200 if options.link is None else Link(options.link, options.link, DUPLEX * options.link, "--link")
    rates = Rates(options.flops or RATES.flop_per_s, options.bandwidth or RATES.bytes_per_s)
    profile = profile_of(shape, options.batch, options.tokens, rates, DEFAULT_MIN_BYTES)
    state = 2 * shape.item_bytes if options.optimizer_bytes is None else options.optimizer_bytes
    loss = 0 if options.fused_loss else loss_bytes(shape, options.batch, options.tokens)
    needs = Needs(shape, 2 * shape.item_bytes + state, loss)
    usable = int(USABLE * memory)
    found = [*ways(profile, needs, usable, link, options.host_memory)]
    best = choose(way for way, _ in found)
    activations = f"{options.batch} x {options.tokens} tokens, with {format_bytes(profile.saved_bytes)} of activations"
    fixed = f"weights, gradients and optimizer {format_bytes(needs.fixed_bytes - loss)}, loss {format_bytes(loss)}"
    rows = [
        ("model", f"{shape.layers} layers, {shape.parameters / 1e9:.2f}e9 parameters in {shape.dtype}"),
        ("microbatch", activations),
        ("device", f"{format_bytes(memory)}, of which {format_bytes(usable)} can be used"),
        ("speed", f"{rates.flop_per_s / 1e12:.0f} TFLOP/s in layers, {link}"),
        ("fixed", fixed),
        *((way.name, _row(way)) for way, _ in found),
        ("do", f"{best.name}: {best.write}" if best else "nothing fits: a larger device, or fewer tokens"),
    ]
    table = [line for way, made in found if way is best and way.name == "regions" for line in ("", str(made))]
    values = {
        "do": best and best.name,
        "write": best and best.write,
        "ways": [asdict(way) for way, _ in found],
        "shape": asdict(shape),
        "parameters": shape.parameters,
        "saved_bytes": profile.saved_bytes,
        "fixed_bytes": needs.fixed_bytes,
        "usable_bytes": usable,
        "link": asdict(link),
        "flop_per_s": rates.flop_per_s,
        "bytes_per_s": rates.bytes_per_s,
    }
    return Answer(rows, values, ok=best is not None, below=table)


def ways(
    profile: Profile, needs: Needs, usable: int, link: Link, host: int | None
) -> Iterator[tuple[Way, Plan | None]]:
    """The ways, each with its plan if it fits, on a device and a host that have so many bytes."""
    left = usable - needs.fixed_bytes
    kept = plan(profile, sys.maxsize, link)
    misfit = "" if kept.peak_bytes <= left else f"activations take {format_bytes(kept.peak_bytes)}"
    yield Way("keep all", "offload nothing", misfit, kept.step_s, kept.peak_bytes, 0), kept
    whole = replace(profile, layers=tuple(replace(layer, regions=()) for layer in profile.layers))
    way, made = _planned(Way("whole layers", ""), whole, left, link, host)
    yield replace(way, write=f"offload_layers({LAYERS}, num_layers={made.num_layers})" if made else ""), made
    budgeted = _budgeted(left + needs.loss_bytes)
    yield _planned(Way("regions", budgeted), profile, left, link, host)
    # On the device are the weights of two layers, as many gradients, and all that is outside of the layers.
    shape = needs.shape
    layer_bytes = shape.layer_parameters * shape.item_bytes
    left = usable - shape.outside_parameters * needs.parameter_bytes - 4 * layer_bytes - needs.loss_bytes
    on_host = shape.layers * shape.layer_parameters * needs.parameter_bytes
    rest = None if host is None else host - on_host
    write = f'stream_weights({LAYERS}, "cuda")'
    way, made = _planned(Way("streamed weights", write), profile, left, link, rest)
    if made is not None:
        if made.host_bytes or made.recompute_s:
            write += f", then {_budgeted(left + needs.loss_bytes)}"
        d2h_s = (shape.layers * layer_bytes + made.host_bytes) / link.d2h_bytes_per_s
        h2d_s = (2 * (shape.layers - 1) * layer_bytes + made.host_bytes) / link.h2d_bytes_per_s
        way = replace(
            way,
            write=write,
            step_s=max(made.step_s, d2h_s, h2d_s),
            peak_bytes=made.peak_bytes + 4 * layer_bytes,
            host_bytes=made.host_bytes + on_host,
        )
    yield way, made


def choose(found: Iterable[Way]) -> Way | None:
    """The simplest way that fits; regions in place of whole layers where they are faster."""
    fitting = {way.name: way for way in found if not way.misfit}
    whole, regions = fitting.get("whole layers"), fitting.get("regions")
    if whole and regions and "keep all" not in fitting and (whole.step_s or 0) > MUCH * (regions.step_s or 0):
        return regions
    return next(iter(fitting.values()), None)


def _planned(way: Way, profile: Profile, left: int, link: Link, host: int | None) -> tuple[Way, Plan | None]:
    """The way with what its plan comes to, or why there is none."""
    if left < 0:
        return replace(way, write="", misfit=f"{format_bytes(-left)} are missing for what is fixed"), None
    if host is not None and host < 0:
        return replace(way, write="", misfit=f"{format_bytes(-host)} of host memory are missing"), None
    try:
        made = plan(profile, left, link, max_host_bytes=host)
    except ValueError:
        within = "" if host is None else f" and {format_bytes(host)} on the host"
        return replace(way, write="", misfit=f"{format_bytes(left)}{within} are too little for activations"), None
    return replace(way, step_s=made.step_s, peak_bytes=made.peak_bytes, host_bytes=made.host_bytes), made


def _budgeted(left: int) -> str:
    """What a step may add on the device, rounded down."""
    return f'offload_layers({LAYERS}, memory_budget="{max(0, left) * 10 // 2**30 / 10}GiB")'


def _device_bytes() -> int:
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here to plan for; give --memory, such as --memory 24GiB")
    return int(torch.cuda.get_device_properties().total_memory)


def _row(way: Way) -> str:
    if way.step_s is None or way.peak_bytes is None or way.host_bytes is None or way.misfit:
        return f"does not fit: {way.misfit}"
    step = f"{format_s(way.step_s)}{' and the optimizer on the host' if way.name == 'streamed weights' else ''}"
    return f"step {step}, {format_bytes(way.peak_bytes)} beside the fixed, {format_bytes(way.host_bytes)} on the host"
