"""Look for what keeps offloading from working well on this machine, and say what to do about it.

Each check is a line: what was found, and a remedy if that is not as it should be.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from offload.base.checks import format_bytes
from offload.command_line import machine
from offload.command_line.terminal import Answer, add_device
from offload.device.backend import Backend
from offload.device.select import get_backend
from offload.host.page_locked import HostMemoryError, available_bytes, memory_groups, own_cores, page_locked
from offload.measuring.profile_layers import measure_link
from offload.planning.link import Link
from offload.planning.table import ranges

CPU_BYTES = 4 << 30
"""What counts as the device's memory on the CPU."""

LOCKED_BYTES = 1 << 30
"""At most so much memory is locked to see whether it can be."""

REACHED = 0.6
"""Of what the bus promises, a healthy link reaches more: 88% was measured on PCIe Gen5."""

SLOWS = {
    "CUDA_LAUNCH_BLOCKING": "unset it: the host waits for every kernel and copy, so that none run side by side",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "unset it: every allocation stops the device",
}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; all is well if there is no remedy."""

    name: str
    found: str
    remedy: str = ""

    @property
    def state(self) -> str:
        """``"ok"`` or ``"warning"``."""
        return "warning" if self.remedy else "ok"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``doctor``."""
    add_device(parser)


def answer(options: argparse.Namespace) -> Answer:
    """Look at everything."""
    return report(examine(get_backend(options.device)))


def report(checks: Iterable[Check]) -> Answer:
    """The answer to what was found."""
    found = [*checks]
    warnings = sum(bool(check.remedy) for check in found)
    wide = max(len(check.name) for check in found)
    rows: list[tuple[str, str]] = []
    for check in found:
        rows.append((f"{check.state:<9}{check.name:<{wide}}", check.found))
        if check.remedy:
            rows.append(("", f"To do: {check.remedy}."))
    summary = f"{warnings} warning{'s' if warnings != 1 else ''}" if warnings else "all is well"
    values = {"checks": [{"state": check.state} | asdict(check) for check in found]}
    return Answer(rows, values, ok=not warnings, below=[summary])


def examine(backend: Backend) -> Iterator[Check]:
    """All checks, on this machine."""
    device, address = backend.device, machine.pci_address(backend.device)
    cuda = device.type == "cuda"
    version = machine.driver_version()
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else CPU_BYTES
    yield build(torch.__version__, torch.version.cuda, has_driver=version is not None)
    yield used_device(device, memory, torch.version.cuda, has_driver=version is not None)
    yield driver(version, machine.driver_cuda(), torch.version.cuda)
    yield locked(machine.locked_limit(), backend)
    total = machine.memory_total()
    yield groups([*memory_groups()], total, memory)
    yield host(available_bytes(), total, memory)
    yield numa(machine.numa_node(address), own_cores())
    yield from settings(os.environ)
    yield link(backend, machine.bus_of(address))


def build(version: str, cuda: str | None, *, has_driver: bool) -> Check:
    """What PyTorch was built for."""
    if cuda is None and torch.version.hip is None:
        remedy = "install PyTorch for CUDA: this machine has NVIDIA's driver" if has_driver else ""
        return Check("torch", f"{version}, without CUDA", remedy)
    return Check("torch", f"{version}, for CUDA {cuda}" if cuda else version)


def used_device(device: torch.device, memory: int, cuda: str | None, *, has_driver: bool) -> Check:
    """What offloads."""
    if device.type != "cpu":
        return Check("device", f"{machine.name_of(device)}, {format_bytes(memory)}")
    hidden = has_driver and cuda is not None and not torch.cuda.is_available()
    remedy = "see that CUDA_VISIBLE_DEVICES names a GPU, and that the driver is not older than PyTorch's CUDA"
    return Check("device", "the CPU: offloading works as on a GPU, but saves no memory", remedy if hidden else "")


def driver(version: str | None, runs: tuple[int, int] | None, cuda: str | None) -> Check:
    """NVIDIA's driver, which must not be older than the CUDA that PyTorch was built with, in the first number."""
    if version is None and runs is None:
        return Check("driver", "none of NVIDIA's")
    found = version or "of an unknown version"
    if runs is None:
        return Check("driver", found)
    old = cuda is not None and runs[0] < int(cuda.partition(".")[0])
    remedy = f"update the driver to one for CUDA {cuda}, or install PyTorch for CUDA {runs[0]}" if old else ""
    return Check("driver", f"{found}, for CUDA up to {runs[0]}.{runs[1]}", remedy)


def locked(limit: int | None, backend: Backend) -> Check:
    """Whether memory can be page-locked, beyond the limit of the process if it has one."""
    name, most = "locked memory", "no limit" if limit is None else f"limit {format_bytes(limit)} (ulimit -l)"
    if backend.device.type == "cpu":
        return Check(name, f"{most}; the CPU needs none")
    tried = LOCKED_BYTES if limit is None else min(LOCKED_BYTES, limit + LOCKED_BYTES // 16)
    try:
        page_locked(tried, backend)
    except HostMemoryError as error:
        remedy = "raise the limit: ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a unit"
        return Check(name, f"{most}; {error}", remedy)
    beyond = ", so the driver does not keep to it" if limit is not None and tried > limit else ""
    return Check(name, f"{most}; {format_bytes(tried)} could be locked{beyond}")


def groups(limits: list[tuple[int, int]], total: int | None, memory: int) -> Check:
    """The control group that leaves the least. A limit beyond the machine's memory is none."""
    limits = [(most, used) for most, used in limits if total is None or most < total]
    if not limits:
        return Check("control group", "no limit on memory")
    most, used = min(limits, key=lambda pair: pair[0] - pair[1])
    little = most - used < memory / 2
    remedy = (
        "raise it: docker run --memory, Kubernetes' resources.limits, Slurm's --mem; or offload less" if little else ""
    )
    return Check("control group", f"limit {format_bytes(most)}, {format_bytes(used)} in use", remedy)


def host(available: int | None, total: int | None, memory: int) -> Check:
    """What the host has left."""
    if available is None:
        return Check("host memory", "unknown: the system does not say how much is left")
    of = f" of {format_bytes(total)}" if total else ""
    little = available < memory / 2
    remedy = "free host memory: what is left is less than half of the device's" if little else ""
    return Check("host memory", f"{format_bytes(available)} left{of}", remedy)


def numa(node: int | None, own: set[int], root: Path = Path("/")) -> Check:
    """Whether the process runs next to its GPU: pinned memory comes from the node that it runs on."""
    if node is None:
        return Check("NUMA node", "the device has none")
    near = machine.cores_of(node, root)
    if not near or own <= near:
        return Check("NUMA node", f"{node}, and the process runs there")
    remedy = (
        f"start it there: numactl --cpunodebind={node} --preferred={node} python …, or taskset --cpu-list "
        f"{ranges(sorted(near)).replace(' ', '')} python …"
    )
    return Check("NUMA node", f"{node}, but the process may run on cores {ranges(sorted(own))}", remedy)


def settings(variables: Mapping[str, str]) -> Iterator[Check]:
    """What the environment asks of the allocator, and what slows everything down."""
    new, old = variables.get("PYTORCH_ALLOC_CONF"), variables.get("PYTORCH_CUDA_ALLOC_CONF")
    both = new is not None and old is not None and new != old
    remedy = (
        "unset PYTORCH_CUDA_ALLOC_CONF, the old name of PYTORCH_ALLOC_CONF, which says something else" if both else ""
    )
    found = new if new is not None else old
    hint = "the default; expandable_segments:True loses less memory between blocks"
    yield Check("allocator", hint if found is None else found, remedy)
    for name, what in SLOWS.items():
        if variables.get(name, "0") not in ("", "0"):
            yield Check(name, variables[name], what)


def link(backend: Backend, bus: machine.Bus | None) -> Check:
    """The link, measured."""
    try:
        return compare(measure_link(backend.device), bus)
    except HostMemoryError as error:
        return Check("link", "not measured", str(error).rstrip("."))


def compare(found: Link, bus: machine.Bus | None) -> Check:
    """What was measured beside what the bus promises."""
    if bus is None:
        return Check("link", str(found))
    text = f"{found}; {bus} promises {bus.bytes_per_s / 1e9:.1f} GB/s each way"
    if bus.now_width is not None and bus.now_width < bus.width:
        return Check("link", text, f"see to the slot: {bus.now_width} of {bus.width} lanes are in use")
    slow = min(found.d2h_bytes_per_s, found.h2d_bytes_per_s) < REACHED * bus.bytes_per_s
    remedy = "look at the NUMA node, for other processes that copy, and for virtualization of the bus" if slow else ""
    return Check("link", text, remedy)
