"""What the system says about itself: its driver, its memory, which cores are near a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import torch


def driver_version(root: Path = Path("/")) -> str | None:
    """The version of NVIDIA's kernel driver, such as ``"580.95.05"``; ``None`` where there is none."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text("utf-8")
    except OSError:
        return None
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else "of an unknown version"


def driver_cuda() -> tuple[int, int] | None:
    """The highest CUDA version that the driver runs; ``None`` without PyTorch for CUDA, or a driver."""
    ask: Callable[[], int] = getattr(torch._C, "_cuda_getDriverVersion", int)
    number = ask()
    return (number // 1000, number % 1000 // 10) if number else None


def locked_limit() -> int | None:
    """Bytes that this process may lock in memory (``ulimit -l``); ``None`` if there is no limit."""
    try:
        import resource
    except ImportError:  # not of this system
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def memory_total(root: Path = Path("/")) -> int | None:
    """Bytes of memory that the machine has."""
    try:
        found = re.search(r"MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text("utf-8"))
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def cores_of(node: int, root: Path = Path("/")) -> set[int]:
    """The cores of a NUMA node, empty where the system does not say."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text("utf-8").strip()
    except OSError:
        return set()
    runs = [run.partition("-") for run in text.split(",") if run]
    return {core for first, _, last in runs for core in range(int(first), int(last or first) + 1)}


def own_cores() -> set[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
