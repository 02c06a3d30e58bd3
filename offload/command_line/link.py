"""The link between device and host: measured, and as its PCIe bus promises."""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

import torch

from offload.command_line.answer import Answer
from offload.device.backend import Backend
from offload.device.select import get_backend
from offload.measuring.measure_link import measure_link
from offload.planning.profile import Link

LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.9846e9, 4: 1.9692e9, 5: 3.9385e9, 6: 7.5625e9}
"""Of one lane in one direction, by generation, after line encoding and before packet headers. Source: PCI Express Base
Specification: 8b/10b up to Gen2, 128b/130b up to Gen5, and 242 of 256 bytes in Gen6."""

PRODUCT_SIDE = {"cuda": 8192, "cpu": 256}
"""Side of the square matrices, by type of device: large enough for a product at the device's full rate. A CPU without
bfloat16 arithmetic takes seconds for a product of side 1024."""

PRODUCTS = 5
"""How many products are timed, after as many to warm up; the median counts."""


@dataclass(frozen=True)
class Bus:
    """The PCIe link of a device: the generation and the lanes that both ends have, and the lanes in use."""

    generation: int
    width: int
    now_width: int

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth that the bus promises in each direction."""
        return LANE_BYTES_PER_S[self.generation] * self.width

    def __str__(self) -> str:
        return f"PCIe Gen{self.generation} x{self.width}"


def answer_link(options: argparse.Namespace) -> Answer:
    """Measure the link between device and host, beside what its bus promises."""
    backend = get_backend(options.device)
    link = measure_link(backend.device, piece_bytes=options.piece)
    return describe_link(device_name(backend.device), link, bus_of(pci_address(backend.device)), _flop_per_s(backend))


def describe_link(device: str, link: Link, bus: Bus | None, flop_per_s: float) -> Answer:
    """The answer for a measured link, the bus that it is on, and the FLOP/s of a large bfloat16 product."""
    ratio = min(link.d2h_bytes_per_s, link.h2d_bytes_per_s) / bus.bytes_per_s if bus else None
    # Offloaded in forward, and reloaded in backward, which takes twice as long.
    free = flop_per_s / min(link.d2h_bytes_per_s, 2 * link.h2d_bytes_per_s)
    promised = "unknown: nvidia-smi does not say which bus the device is on"
    if link.device == "cpu":
        promised = "unknown: there is no bus between memory and memory"
    if bus is not None and ratio is not None:
        promised = f"{bus.bytes_per_s / 1e9:.1f} GB/s each way by {bus}; reached {ratio:.0%}"
        promised += ", so copies take another link" if ratio > 1 else ""
    meaning = (
        f"offloading costs no time from {free:,.0f} FLOP of forward per offloaded byte. The bfloat16 output of a "
        "linear layer takes as many FLOP per byte as the layer has inputs. Of activations that take fewer, a part can "
        "be offloaded for free, in that proportion."
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


def _flop_per_s(backend: Backend) -> float:
    side = PRODUCT_SIDE.get(backend.device.type, PRODUCT_SIDE["cuda"])
    left, right = (torch.randn(side, side, device=backend.device).bfloat16() for _ in range(2))
    result = torch.empty_like(left)
    marks = []
    for _ in range(2 * PRODUCTS):
        begin = backend.mark()
        torch.mm(left, right, out=result)
        marks.append((begin, backend.mark()))
    return 2.0 * side**3 / statistics.median(backend.seconds(marks)[PRODUCTS:])


def device_name(device: torch.device) -> str:
    """What a device is, for people."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return "the CPU, whose threads stand for a device and its link" if device.type == "cpu" else str(device)


def pci_address(device: torch.device) -> str | None:
    """Where a CUDA device is on the bus, such as ``"0000:17:00.0"``."""
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def bus_of(address: str | None) -> Bus | None:
    """The bus of the GPU at a PCI address, as ``nvidia-smi`` says; ``None`` where it does not."""
    tool = shutil.which("nvidia-smi")
    if tool is None or address is None:
        return None
    fields = "pcie.link.gen.max,pcie.link.width.max,pcie.link.width.current"
    command = [tool, f"--id={address}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)  # noqa: S603  # as given
        generation, width, now_width = map(int, done.stdout.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Bus(generation, width, now_width) if generation in LANE_BYTES_PER_S else None
