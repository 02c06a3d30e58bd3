"""Look for what keeps offloading from working well on this machine, and say what to do about it.

Each check is a line: what was found, and a remedy if that is not as it should be.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import torch

from offload.command_line import checks, machine
from offload.command_line.answer import Answer, entries
from offload.command_line.checks import Check
from offload.command_line.options import add_device
from offload.command_line.pcie import bus_of, numa_node, pci_address
from offload.device.backend import Backend
from offload.device.select import get_backend
from offload.host.page_locked import available_bytes, memory_groups

CPU_BYTES = 4 << 30
"""What counts as the device's memory on the CPU."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``doctor``."""
    add_device(parser)


def answer(options: argparse.Namespace) -> Answer:
    """Look at everything."""
    backend = get_backend(options.device)
    return report(examine(backend))


def report(checks: Iterable[Check]) -> Answer:
    """The answer to what was found."""
    found = [*checks]
    warnings = sum(bool(check.remedy) for check in found)
    wide = max(len(check.name) for check in found)
    pairs: list[tuple[str, str]] = []
    for check in found:
        pairs.append((f"{check.state:<9}{check.name:<{wide}}", check.found))
        if check.remedy:
            pairs.append(("", f"To do: {check.remedy}."))
    lines = [*entries(pairs), f"{warnings} warning{'s' if warnings != 1 else ''}" if warnings else "all is well"]
    values = {"checks": [{"state": check.state} | asdict(check) for check in found]}
    return Answer("doctor", lines, values, ok=not warnings)


def examine(backend: Backend) -> Iterator[Check]:
    """All checks, on this machine."""
    device, address = backend.device, pci_address(backend.device)
    cuda = device.type == "cuda"
    has_driver = machine.driver_version() is not None
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else CPU_BYTES
    yield checks.build(torch.__version__, torch.version.cuda, has_driver=has_driver)
    yield checks.used_device(device, memory, torch.version.cuda, has_driver=has_driver)
    yield checks.driver(machine.driver_version(), machine.driver_cuda(), torch.version.cuda)
    yield checks.locked(machine.locked_limit(), backend)
    total = machine.memory_total()
    yield checks.groups([*memory_groups()], total, memory)
    yield checks.host(available_bytes(), total, memory)
    yield checks.numa(numa_node(address), machine.own_cores())
    yield from checks.settings(os.environ)
    yield checks.link(backend, bus_of(address))
