"""Checks of a machine: each says what was found, and what to do if that keeps offloading from working well."""

from __future__ import annotations

import argparse
import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from offload.base.checks import format_bytes
from offload.command_line.answer import Answer
from offload.command_line.link import Bus, bus_of, device_name, pci_address
from offload.device.backend import Backend
from offload.device.select import get_backend
from offload.host.page_locked import HostMemoryError, available_bytes, memory_groups, own_cores, page_locked
from offload.measuring.measure_link import measure_link
from offload.planning.plan import ranges
from offload.planning.profile import Link

CPU_BYTES = 4 << 30
"""Counts as the device's memory on the CPU."""

LOCKED_BYTES = 1 << 30
"""At most so much memory is locked to see whether that works."""

HEALTHY = 0.6
"""Share of the bus's promise above which a link is healthy: 88% was measured on PCIe Gen5."""

SLOWS = {
    "CUDA_LAUNCH_BLOCKING": "unset it: the host waits for every kernel and copy, so that none run side by side",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "unset it: every allocation stops the device",
}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; it is a warning if there is a remedy."""

    name: str
    found: str
    remedy: str = ""

    @property
    def state(self) -> str:
        """``"ok"`` or ``"warning"``."""
        return "warning" if self.remedy else "ok"


def answer_doctor(options: argparse.Namespace) -> Answer:
    """Look for what keeps offloading from working well on this machine, and say what to do about it."""
    checks = [*examine(get_backend(options.device))]
    warnings = sum(bool(check.remedy) for check in checks)
    wide = max(len(check.name) for check in checks)
    rows: list[tuple[str, str]] = []
    for check in checks:
        rows.append((f"{check.state:<9}{check.name:<{wide}}", check.found))
        if check.remedy:
            rows.append(("", f"To do: {check.remedy}."))
    summary = f"{warnings} warning{'s' if warnings > 1 else ''}" if warnings else "all is well"
    values = {"checks": [{"state": check.state} | asdict(check) for check in checks]}
    return Answer(rows, values, ok=not warnings, below=[summary])


def examine(backend: Backend) -> Iterator[Check]:
    """All checks of this machine."""
    device, address, driver = backend.device, pci_address(backend.device), driver_version()
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else CPU_BYTES
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    build = (
        f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for ROCm" if torch.version.hip else "without CUDA"
    )
    remedy = "install PyTorch for CUDA: this machine has NVIDIA's driver" if driver and build == "without CUDA" else ""
    yield Check("torch", f"{torch.__version__}, {build}", remedy)
    yield device_check(device, memory, has_driver=driver is not None)
    yield Check("driver", driver or "none of NVIDIA's")
    yield locked_check(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], backend)
    yield group_check([*memory_groups()], total, memory)
    yield host_check(available_bytes(), total, memory)
    yield numa_check(address, own_cores())
    yield from variable_checks(os.environ)
    try:
        yield link_check(measure_link(device), bus_of(address))
    except HostMemoryError as error:
        yield Check("link", "not measured", str(error).rstrip("."))


def driver_version(root: Path = Path("/")) -> str | None:
    """The version of NVIDIA's kernel driver, such as ``"580.95.05"``; ``None`` where there is none."""
    text = _text_in(root / "proc/driver/nvidia/version")
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else "of an unknown version" if text else None


def device_check(device: torch.device, memory: int, *, has_driver: bool) -> Check:
    """The device whose memory offloading saves."""
    if device.type != "cpu":
        return Check("device", f"{device_name(device)}, {format_bytes(memory)}")
    remedy = ""
    if has_driver and torch.version.cuda is not None and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except RuntimeError as error:
            remedy = f"see CUDA_VISIBLE_DEVICES and the driver, as PyTorch finds no GPU: {str(error).rstrip('.')}"
    return Check("device", "the CPU: offloading works as on a GPU, but saves no memory", remedy)


def locked_check(limit: int, backend: Backend) -> Check:
    """Whether memory can be page-locked, also beyond the limit of the process."""
    limited = limit != resource.RLIM_INFINITY
    most = f"limit {format_bytes(limit)} (ulimit -l)" if limited else "no limit"
    if backend.device.type == "cpu":
        return Check("locked memory", f"{most}; the CPU needs none")
    tried = min(LOCKED_BYTES, limit + LOCKED_BYTES // 16) if limited else LOCKED_BYTES
    try:
        page_locked(tried, backend)
    except HostMemoryError as error:
        remedy = "raise the limit: ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a unit"
        return Check("locked memory", f"{most}; {error}", remedy)
    beyond = ", so the driver ignores the limit" if limited and tried > limit else ""
    return Check("locked memory", f"{most}; {format_bytes(tried)} could be locked{beyond}")


def group_check(limits: Sequence[tuple[int, int]], total: int, memory: int) -> Check:
    """The control group with the least memory left, of (limit, bytes in use); limits above the machine's are none."""
    limits = [(most, used) for most, used in limits if most < total]
    if not limits:
        return Check("control group", "no limit on memory")
    most, used = min(limits, key=lambda pair: pair[0] - pair[1])
    remedy = "raise it: docker run --memory, Kubernetes' resources.limits, Slurm's --mem; or offload less"
    text = f"limit {format_bytes(most)}, {format_bytes(used)} in use"
    return Check("control group", text, remedy if most - used < memory / 2 else "")


def host_check(available: int | None, total: int, memory: int) -> Check:
    """The host memory that is left."""
    if available is None:
        return Check("host memory", f"{format_bytes(total)}; the system does not say how much is left")
    remedy = "free host memory: what is left is less than half of the device's" if available < memory / 2 else ""
    return Check("host memory", f"{format_bytes(available)} left of {format_bytes(total)}", remedy)


def numa_check(address: str | None, own: set[int], root: Path = Path("/")) -> Check:
    """Whether the process runs next to its GPU: pinned memory is allocated on the node that the process runs on."""
    node = _text_in(root / "sys/bus/pci/devices" / address / "numa_node") if address else ""
    if not node.isdigit():  # -1: the machine has one node
        return Check("NUMA node", "the device has none")
    listed = _text_in(root / f"sys/devices/system/node/node{node}/cpulist")
    runs = [run.partition("-") for run in listed.split(",") if run]
    if not runs or own <= {core for first, _, last in runs for core in range(int(first), int(last or first) + 1)}:
        return Check("NUMA node", f"{node}, and the process runs there")
    start = f"numactl --cpunodebind={node} --preferred={node} python …, or taskset --cpu-list {listed} python …"
    found = f"{node}, but the process may run on cores {ranges(sorted(own))}"
    return Check("NUMA node", found, f"start it there: {start}")


def variable_checks(variables: Mapping[str, str]) -> Iterator[Check]:
    """Environment variables: the settings of the allocator, and those that slow everything down."""
    new, old = variables.get("PYTORCH_ALLOC_CONF"), variables.get("PYTORCH_CUDA_ALLOC_CONF")
    remedy = "unset PYTORCH_CUDA_ALLOC_CONF, the old name of PYTORCH_ALLOC_CONF, which says something else"
    default = "the default; expandable_segments:True loses less memory between blocks"
    found = new if new is not None else old if old is not None else default
    yield Check("allocator", found, remedy if None not in (new, old) and new != old else "")
    for name, slow in SLOWS.items():
        if variables.get(name, "0") not in ("", "0"):
            yield Check(name, variables[name], slow)


def link_check(link: Link, bus: Bus | None) -> Check:
    """The measured link beside the promise of its bus."""
    if bus is None:
        return Check("link", str(link))
    text = f"{link}; {bus} promises {bus.bytes_per_s / 1e9:.1f} GB/s each way"
    if bus.now_width < bus.width:
        return Check("link", text, f"see to the slot: {bus.now_width} of {bus.width} lanes are in use")
    slow = min(link.d2h_bytes_per_s, link.h2d_bytes_per_s) < HEALTHY * bus.bytes_per_s
    remedy = "look at the NUMA node, for other processes that copy, and for virtualization of the bus" if slow else ""
    return Check("link", text, remedy)


def _text_in(path: Path) -> str:
    """The text of a file of the system; empty where there is none."""
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""
