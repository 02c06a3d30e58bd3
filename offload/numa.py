"""Host memory on the NUMA node that a GPU is attached to: copies need not cross to another socket."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

_log = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, by machine. Source: Linux, arch/x86 and include/uapi/asm-generic/unistd.h."""
_MPOL_PREFERRED = 1
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of(pci_address: str, sysfs: Path = Path("/sys")) -> int | None:
    """The NUMA node next to a PCI device; ``None`` where there is only one, or the system does not say.

    Args:
        pci_address: Domain, bus, device and function, such as ``"0000:ab:00.0"``.
        sysfs: Where the system describes itself.
    """
    try:
        nodes = (sysfs / "devices/system/node/online").read_text().strip()
        node = int((sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError) as error:
        _log.debug("the NUMA node of %s is not known: %s", pci_address, error)
        return None
    return node if node >= 0 and not nodes.isdecimal() else None


def prefer(address: int, nbytes: int, node: int) -> bool:
    """Let the pages of a mapping, not touched yet, come from ``node`` while it has some free.

    Returns:
        Whether the system took the wish: containers often forbid it.
    """
    number = _MBIND.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        return False
    words = node // _BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _BITS] = 1 << (node % _BITS)
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * _BITS + 1),  # one more than the mask has bits: the kernel takes one off
        ctypes.c_ulong(0),
    )
    if failed:
        _log.debug("%d bytes are not placed on NUMA node %d: %s", nbytes, node, os.strerror(ctypes.get_errno()))
    return not failed
