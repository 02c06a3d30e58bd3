"""Say what to do with a model of Llama's type, by its config.json or its sizes, without loading it.

What is counted is one process on one device, with the optimizer's state beside the weights.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from pathlib import Path

import torch

from offload.activations.context import DEFAULT_MIN_BYTES
from offload.base.checks import format_bytes, format_s
from offload.command_line.llama import Rates, loss_bytes, profile_of
from offload.command_line.shape import ITEM_BYTES, Shape, read_shape
from offload.command_line.terminal import Answer, count, entries, rate, size
from offload.command_line.ways import Needs, Way, choose, ways
from offload.planning.link import Link

H200 = Link(55.4e9, 55.5e9, 101.6e9, "an H200's")
"""On PCIe Gen5 x16, as it was measured."""

DUPLEX = 1.83
"""What both ways at once reach together, in times of one: an H200's, too."""

RATES = Rates(630e12, 4e12)
"""Of an H200: products reach 785 TFLOP/s by themselves and 80% of that inside of layers, and memory, by its datasheet,
4.8 TB/s."""

USABLE = 0.92
"""Of device memory: the rest is for the driver, and what the allocator cannot cut blocks from."""


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
    link = H200
    if options.link is not None:
        link = Link(options.link, options.link, DUPLEX * options.link, "--link")
    rates = Rates(options.flops or RATES.flop_per_s, options.bandwidth or RATES.bytes_per_s)
    profile = profile_of(shape, options.batch, options.tokens, rates, DEFAULT_MIN_BYTES)
    state = 2 * shape.item_bytes if options.optimizer_bytes is None else options.optimizer_bytes
    loss = 0 if options.fused_loss else loss_bytes(shape, options.batch, options.tokens)
    needs = Needs(shape, 2 * shape.item_bytes + state, loss)
    usable = int(USABLE * memory)
    found = [*ways(profile, needs, usable, link, options.host_memory)]
    best = choose(way for way, _ in found)
    weights = needs.parameters * needs.parameter_bytes
    activations = f"{options.batch} x {options.tokens} tokens, with {format_bytes(profile.saved_bytes)} of activations"
    fixed = f"weights, gradients and optimizer {format_bytes(weights)}, loss {format_bytes(loss)}"
    lines = entries(
        [
            ("model", f"{shape.layers} layers, {needs.parameters / 1e9:.2f}e9 parameters in {shape.dtype}"),
            ("microbatch", activations),
            ("device", f"{format_bytes(memory)}, of which {format_bytes(usable)} can be used"),
            ("speed", f"{rates.flop_per_s / 1e12:.0f} TFLOP/s in layers, {link}"),
            ("fixed", fixed),
            *((way.name, _row(way)) for way, _ in found),
            ("do", f"{best.name}: {best.write}" if best else "nothing fits: a larger device, or fewer tokens"),
        ]
    )
    lines += [line for way, made in found if way is best and way.name == "regions" for line in ("", str(made))]
    values = {
        "do": best and best.name,
        "write": best and best.write,
        "ways": [asdict(way) for way, _ in found],
        "shape": asdict(shape),
        "parameters": needs.parameters,
        "saved_bytes": profile.saved_bytes,
        "fixed_bytes": needs.fixed_bytes,
        "usable_bytes": usable,
        "link": asdict(link),
        "flop_per_s": rates.flop_per_s,
        "bytes_per_s": rates.bytes_per_s,
    }
    return Answer(lines, values, ok=best is not None)


def _device_bytes() -> int:
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here to plan for; give --memory, such as --memory 24GiB")
    return int(torch.cuda.get_device_properties().total_memory)


def _row(way: Way) -> str:
    if way.step_s is None or way.peak_bytes is None or way.host_bytes is None or way.misfit:
        return f"does not fit: {way.misfit}"
    step = f"{format_s(way.step_s)}{' and the optimizer on the host' if way.name == 'streamed weights' else ''}"
    return f"step {step}, {format_bytes(way.peak_bytes)} beside the fixed, {format_bytes(way.host_bytes)} on the host"
