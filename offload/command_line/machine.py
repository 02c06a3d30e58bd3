"""The command ``doctor``: how fast the link is, and what keeps offloading from working well on this machine."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.base.checks import format_bytes
from offload.command_line.answer import Answer
from offload.device.backend import Backend
from offload.device.select import get_backend
from offload.host.page_locked import HostMemoryError, available_bytes, own_cores, page_locked
from offload.measuring.measure_link import measure_link
from offload.planning.plan import ranges
from offload.planning.profile import Link

LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.9846e9, 4: 1.9692e9, 5: 3.9385e9, 6: 7.5625e9}
"""Of one lane in one direction, by generation, after line encoding and before packet headers. Source: PCI Express Base
Specification: 8b/10b up to Gen2, 128b/130b up to Gen5, and 242 of 256 bytes in Gen6."""

HEALTHY = 0.6
"""Share of the bus's promise above which a link is healthy: 88% was measured on PCIe Gen5."""

LOCKED_BYTES = 1 << 30
"""So much memory is locked to see whether locking works."""

SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "unset it: the host waits for every kernel and copy, so that none run side by side",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "unset it: every allocation stops the device",
}


class Bus(NamedTuple):
    """The PCIe link of a device: the generation and the lanes that both ends have, and the lanes in use."""

    generation: int
    width: int
    now_width: int

    @property
    def bytes_per_s(self) -> float:
        return LANE_BYTES_PER_S[self.generation] * self.width

    def __str__(self) -> str:
        return f"PCIe Gen{self.generation} x{self.width}"


class MachineCheck(NamedTuple):
    """One check of the machine; it is a warning if there is a remedy."""

    name: str
    found: str
    remedy: str = ""


def answer_doctor(options: argparse.Namespace) -> Answer:
    """Look for what keeps offloading from working well on this machine, and say what to do about it."""
    checks = [*examine(get_backend(options.device))]
    states = ["warning" if check.remedy else "ok" for check in checks]
    wide = max(len(check.name) for check in checks)
    rows: list[tuple[str, str]] = []
    for state, check in zip(states, checks, strict=True):
        rows.append((f"{state:<9}{check.name:<{wide}}", check.found))
        rows += [("", f"To do: {check.remedy}.")] * bool(check.remedy)
    warnings = states.count("warning")
    summary = f"{warnings} warning{'s' if warnings > 1 else ''}" if warnings else "all is well"
    values = [
        {"state": state, "name": check.name, "found": check.found, "remedy": check.remedy}
        for state, check in zip(states, checks, strict=True)
    ]
    return Answer(rows, {"checks": values}, ok=not warnings, below=[summary])


def examine(backend: Backend) -> Iterator[MachineCheck]:
    """All checks of this machine."""
    device, address = backend.device, _pci_address(backend.device)
    build = (
        f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for ROCm" if torch.version.hip else "for the CPU"
    )
    found, remedy = str(device), ""
    if device.type == "cuda":
        found = f"{torch.cuda.get_device_name(device)} ({device}), {format_bytes(_capacity_of(device))}"
    elif device.type == "cpu":
        found = "the CPU: offloading works as on a GPU, but saves no memory"
        if shutil.which("nvidia-smi"):
            remedy = (
                "install PyTorch for CUDA, and see CUDA_VISIBLE_DEVICES and the driver: there is an NVIDIA GPU here"
            )
    yield MachineCheck("torch", f"{torch.__version__}, {build}")
    yield MachineCheck("device", found, remedy)
    yield locked_check(backend)
    yield host_check(available_bytes(), _capacity_of(device))
    yield numa_check(address, own_cores())
    for name, remedy in SLOW_VARIABLES.items():
        if os.environ.get(name, "0") not in ("", "0"):
            yield MachineCheck(name, os.environ[name], remedy)
    try:
        yield link_check(measure_link(device), bus_of(address))
    except HostMemoryError as error:
        yield MachineCheck("link", "not measured", str(error).rstrip("."))


def locked_check(backend: Backend) -> MachineCheck:
    """Whether memory can be page-locked: most drivers ignore the limit of the process."""
    if backend.device.type == "cpu":
        return MachineCheck("locked memory", "the CPU needs none")
    try:
        page_locked(LOCKED_BYTES, backend)
    except HostMemoryError as error:
        remedy = "raise the limit: ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a unit"
        return MachineCheck("locked memory", str(error), remedy)
    return MachineCheck("locked memory", f"{format_bytes(LOCKED_BYTES)} could be locked")


def host_check(available: int | None, device_bytes: int) -> MachineCheck:
    """The host memory that is left to this process, with the limits of its control groups."""
    if available is None:
        return MachineCheck("host memory", "the system does not say how much is left")
    remedy = (
        "free host memory, as less than half of the device's is left; or raise the limit of the control group: docker "
        "run --memory, Kubernetes' resources.limits, Slurm's --mem"
    )
    left = f"{format_bytes(available)} left"
    return MachineCheck("host memory", left, remedy if available < device_bytes / 2 else "")


def numa_check(address: str | None, own: set[int], root: Path = Path("/")) -> MachineCheck:
    """Whether the process runs next to its GPU: pinned memory is allocated on the node that the process runs on."""
    try:
        node = int((root / "sys/bus/pci/devices" / (address or "") / "numa_node").read_text("utf-8"))
        listed = (root / f"sys/devices/system/node/node{node}/cpulist").read_text("utf-8").strip()
    except OSError:  # also for node -1: the machine has one node
        return MachineCheck("NUMA node", "the device has none")
    runs = [run.partition("-") for run in listed.split(",") if run]
    if not runs or own <= {core for first, _, last in runs for core in range(int(first), int(last or first) + 1)}:
        return MachineCheck("NUMA node", f"{node}, and the process runs there")
    start = f"numactl --cpunodebind={node} --preferred={node} python …, or taskset --cpu-list {listed} python …"
    found = f"{node}, but the process may run on cores {ranges(sorted(own))}"
    return MachineCheck("NUMA node", found, f"start it there: {start}")


def link_check(link: Link, bus: Bus | None) -> MachineCheck:
    """The measured link beside the promise of its bus."""
    if bus is None:
        return MachineCheck("link", str(link))
    reached = min(link.d2h_bytes_per_s, link.h2d_bytes_per_s) / bus.bytes_per_s
    text = f"{link}: {reached:.0%} of {bus}, {bus.bytes_per_s / 1e9:.1f} GB/s each way"
    text += ", so copies take another link" if reached > 1 else ""
    if bus.now_width < bus.width:
        return MachineCheck("link", text, f"see to the slot: {bus.now_width} of {bus.width} lanes are in use")
    remedy = "look at the NUMA node, for other processes that copy, and for virtualization of the bus"
    return MachineCheck("link", text, remedy if reached < HEALTHY else "")


def bus_of(address: str | None) -> Bus | None:
    """The bus of the GPU at a PCI address, as ``nvidia-smi`` says; ``None`` where it does not."""
    tool = shutil.which("nvidia-smi")
    if tool is None or address is None:
        return None
    fields = "pcie.link.gen.max,pcie.link.width.max,pcie.link.width.current"
    command = [tool, f"--id={address}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)  # noqa: S603  # as given
        bus = Bus(*map(int, done.stdout.split(",")))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None
    return bus if bus.generation in LANE_BYTES_PER_S else None


def _pci_address(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _capacity_of(device: torch.device) -> int:
    """Bytes of the device's memory; 4 GiB stand for the CPU's."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 4 << 30
