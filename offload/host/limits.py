"""Host memory that users pin in advance, and give back."""

from __future__ import annotations

import torch

from offload.base.checks import parse_bytes
from offload.device.select import get_backend
from offload.host.page_locked import check_room
from offload.host.pool import get_host_pool


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
