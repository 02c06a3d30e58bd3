"""Limits on host memory: how much activations may take, and memory pinned in advance.

Pinning can fail: locked memory and containers have limits, and machines are full. A training step that has begun should
still end. So a storage that does not fit is kept on the device, with one warning.
"""

from __future__ import annotations

import torch

from offload.base.checks import parse_bytes, warn_caller
from offload.device.select import get_backend
from offload.host.buffers import HostBuffer
from offload.host.page_locked import HostMemoryError, check_room
from offload.host.pool import HostPool, get_host_pool

NO_HOST_MEMORY = "no host memory"
"""Why a storage that did not fit is kept on the device, in ``stats().skipped``."""


class HostMemory:
    """A context's share of the pinned memory.

    Args:
        max_bytes: The most pinned memory that the device's pool may have when this context asks for more: bytes, or a
            text such as ``"40GiB"``; no limit by default.
    """

    def __init__(self, max_bytes: int | str | None = None) -> None:
        self.max_bytes = None if max_bytes is None else parse_bytes(max_bytes, "max_host_bytes")
        self._warned = False

    def take(self, pool: HostPool, nbytes: int) -> HostBuffer | None:
        """A buffer; ``None`` where there is no room."""
        try:
            return pool.take(nbytes, self.max_bytes)
        except HostMemoryError as error:
            if not self._warned:
                self._warned = True
                warn_caller(f"{error} Tensors that do not fit are kept on the device.")
            return None


def reserve_host_memory(nbytes: int | str, device: torch.device | str | int | None = None) -> None:
    """Pin host memory now, so that the first step does not have to.

    Args:
        nbytes: How much the device's pool should have in total: bytes, or a text such as ``"40GiB"``. A plan knows
            its own: ``plan.host_bytes``.
        device: The device whose activations will move; the current accelerator by default, and the CPU where there
            is none.

    Raises:
        HostMemoryError: The system has not that much left, or refused; what was pinned before remains usable.
    """
    pool = get_host_pool(get_backend(device))
    total = parse_bytes(nbytes, "nbytes")
    check_room(total - pool.pinned_bytes)  # the pool takes it in parts
    pool.reserve(total)


def empty_host_cache(device: torch.device | str | int | None = None) -> int:
    """Give pinned memory that holds no activations now back to the system. Waits for copies in flight.

    Args:
        device: The device whose pool to empty; the current accelerator by default, and the CPU where there is none.

    Returns:
        The bytes given back.
    """
    return get_host_pool(get_backend(device)).trim()
