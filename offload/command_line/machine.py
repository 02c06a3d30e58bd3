"""What the system says about itself: its GPU and the bus to it, its driver, its memory, which cores are near a GPU."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.base.torch_private import cuda_driver_version

GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""By the transfers of one lane, in 1e9 per second, as Linux lists them."""

LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.9846e9, 4: 1.9692e9, 5: 3.9385e9, 6: 7.5625e9}
"""Of one lane in one direction, by generation, after line encoding and before packet headers. Source: PCI Express Base
Specification: 8b/10b up to Gen2, 128b/130b up to Gen5, and 242 of 256 bytes in Gen6."""

Ask = Callable[[str, str], list[str] | None]
"""Asks NVIDIA's tool about the GPU at a PCI address; ``None`` where there is no answer."""


@dataclass(frozen=True)
class Bus:
    """The PCIe link of a device.

    Args:
        generation: The highest that both ends can.
        width: Lanes that both ends have.
        now_width: Lanes in use.
    """

    generation: int
    width: int
    now_width: int | None = None

    @property
    def bytes_per_s(self) -> float:
        """What it promises in each direction."""
        return LANE_BYTES_PER_S[self.generation] * self.width

    def __str__(self) -> str:
        return f"PCIe Gen{self.generation} x{self.width}"


def pci_address(device: torch.device) -> str | None:
    """Where a CUDA device is on the bus, such as ``"0000:17:00.0"``; ``None`` where PyTorch does not say."""
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    try:
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:
        return None


def ask_nvidia(address: str, fields: str) -> list[str] | None:
    """What ``nvidia-smi`` says about the GPU at this address, a text for each of the fields."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--id={address}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)  # noqa: S603  # as given
    except (OSError, subprocess.SubprocessError):
        return None
    return [text.strip() for text in done.stdout.strip().split(",")]


def bus_of(address: str | None, root: Path = Path("/"), ask: Ask = ask_nvidia) -> Bus | None:
    """The bus of the device at this address; ``None`` where nobody says."""
    if address is None:
        return None
    # The driver knows both ends of the link; Linux each by itself.
    found = ask(address, "pcie.link.gen.max,pcie.link.width.max,pcie.link.width.current")
    if found is not None and all(text.isdigit() for text in found) and int(found[0]) in LANE_BYTES_PER_S:
        return Bus(*map(int, found))
    device = (root / "sys/bus/pci/devices" / address).resolve()
    ends = [end for end in (device, device.parent) if (end / "max_link_speed").is_file()]
    speeds = [GENERATIONS.get(_number(end / "max_link_speed") or 0.0) for end in ends]
    widths = [int(_number(end / "max_link_width") or 0) for end in ends]
    known = [speed for speed in speeds if speed]
    if not known or not all(0 < width < 255 for width in widths):  # 255: unknown
        return None
    now_width = int(_number(device / "current_link_width") or 0)
    return Bus(min(known), min(widths), now_width or None)


def numa_node(address: str | None, root: Path = Path("/")) -> int | None:
    """The NUMA node that the device at this address is next to; ``None`` where there is one node, or nobody says."""
    node = _number(root / "sys/bus/pci/devices" / address / "numa_node") if address else None
    return None if node is None or node < 0 else int(node)


def name_of(device: torch.device) -> str:
    """What a device is, for people."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return "the CPU, whose threads stand for a device and its link" if device.type == "cpu" else str(device)


def driver_version(root: Path = Path("/")) -> str | None:
    """The version of NVIDIA's kernel driver, such as ``"580.95.05"``; ``None`` where there is none."""
    text = _read(root / "proc/driver/nvidia/version")
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else "of an unknown version" if text else None


def driver_cuda() -> tuple[int, int] | None:
    """The highest CUDA version that the driver runs; ``None`` without PyTorch for CUDA, or a driver."""
    number = cuda_driver_version()
    return (number // 1000, number % 1000 // 10) if number else None


def locked_limit() -> int | None:
    """Bytes that this process may lock in memory (``ulimit -l``); ``None`` if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def memory_total(root: Path = Path("/")) -> int | None:
    """Bytes of memory that the machine has."""
    found = re.search(r"MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"))
    return int(found[1]) * 1024 if found else None


def cores_of(node: int, root: Path = Path("/")) -> set[int]:
    """The cores of a NUMA node, empty where the system does not say."""
    text = _read(root / f"sys/devices/system/node/node{node}/cpulist")
    runs = [run.partition("-") for run in text.split(",") if run]
    return {core for first, _, last in runs for core in range(int(first), int(last or first) + 1)}


def _read(path: Path) -> str:
    """What a file of the system says; nothing where there is none."""
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    """The number that a file begins with."""
    found = re.match(r"-?\d+(?:\.\d+)?", _read(path))
    return float(found[0]) if found else None
