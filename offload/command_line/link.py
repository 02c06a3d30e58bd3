"""Measure the link between device and host, beside what its bus promises.

What offloading costs is copies against compute, so a matrix product is timed in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict

import torch

from offload.command_line.machine import Bus, bus_of, name_of, pci_address
from offload.command_line.terminal import Answer, add_device, size
from offload.device.backend import Backend
from offload.device.select import get_backend
from offload.measuring.profile_layers import PIECE_BYTES, measure_link
from offload.planning.link import Link

SIDE = 8192
"""Of the square matrices: large enough that a product runs at the device's full rate."""

CPU_SIDE = 1024
"""Of those of the CPU."""

PRODUCTS = 5
"""Timed, after as many that warm up; the median counts."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``link``."""
    add_device(parser)
    parser.add_argument("--piece", type=size, default=PIECE_BYTES, help="the size of one copy; 64MiB by default")


def answer(options: argparse.Namespace) -> Answer:
    """Measure, and say what it means."""
    backend = get_backend(options.device)
    link = measure_link(backend.device, piece_bytes=options.piece)
    bus = bus_of(pci_address(backend.device))
    return describe(name_of(backend.device), link, bus, product_flop_per_s(backend))


def product_flop_per_s(backend: Backend) -> float:
    """Floating-point operations per second of a bfloat16 matrix product."""
    side = CPU_SIDE if backend.device.type == "cpu" else SIDE
    left, right = (torch.randn(side, side, device=backend.device).bfloat16() for _ in range(2))
    result = torch.empty_like(left)
    marks = []
    for _ in range(2 * PRODUCTS):
        begin = backend.mark()
        torch.mm(left, right, out=result)
        marks.append((begin, backend.mark()))
    return 2.0 * side**3 / statistics.median(backend.seconds(marks)[PRODUCTS:])


def free_flop_per_byte(link: Link, flop_per_s: float) -> float:
    """From how many operations on, per byte that travels, copies take no longer than compute.

    All that travels has to leave during forward, and to come back during backward, which takes twice as long.
    """
    return flop_per_s / min(link.d2h_bytes_per_s, 2 * link.h2d_bytes_per_s)


def describe(device: str, link: Link, bus: Bus | None, flop_per_s: float) -> Answer:
    """The answer to what was measured."""
    each_way = min(link.d2h_bytes_per_s, link.h2d_bytes_per_s)
    ratio = each_way / bus.bytes_per_s if bus else None
    free = free_flop_per_byte(link, flop_per_s)
    promised = "unknown: neither nvidia-smi nor the system says which bus the device is on"
    if link.device == "cpu":
        promised = "unknown: there is no bus between memory and memory"
    if bus is not None and ratio is not None:
        promised = f"{bus.bytes_per_s / 1e9:.1f} GB/s each way by {bus}; reached {ratio:.0%}"
        if ratio > 1:
            promised += ", so it is another link that copies take"
    meaning = (
        f"offloading costs no time from {free:,.0f} FLOP of forward per byte that travels. The bfloat16 output of a "
        "linear layer takes as many FLOP per byte as the layer has inputs. Of what takes fewer, a part can travel for "
        "free, in that proportion."
    )
    out, back, both = (rate / 1e9 for rate in (link.d2h_bytes_per_s, link.h2d_bytes_per_s, link.duplex_bytes_per_s))
    rows = [
        ("device", device),
        ("link", f"{out:.1f} GB/s to the host, {back:.1f} back, {both:.1f} both at once"),
        ("promised", promised),
        ("compute", f"{flop_per_s / 1e12:.3g} TFLOP/s in a bfloat16 product of large matrices"),
        ("free", meaning),
    ]
    values = asdict(link) | {
        "device": device,
        "pcie_generation": bus and bus.generation,
        "pcie_width": bus and bus.width,
        "promised_bytes_per_s": bus and bus.bytes_per_s,
        "ratio": ratio,
        "flop_per_s": flop_per_s,
        "free_flop_per_byte": free,
    }
    return Answer(rows, values)
