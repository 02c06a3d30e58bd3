"""Which device is meant, and the one backend that serves it."""

from __future__ import annotations

import torch

from offload.device.backend import Backend
from offload.device.cpu import CpuBackend
from offload.device.cuda import CudaBackend

_backends: dict[torch.device, Backend] = {}


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The device with its index; ``None`` is the current accelerator, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = accelerator or torch.device("cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device must be one of this machine's, such as 'cpu' or 'cuda:0', got {device!r}; leave it out to use the "
            "best"
        ) from None
    if resolved.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or resolved.type != accelerator.type:
        here = accelerator.type if accelerator else "cpu only"
        raise ValueError(f"device must be on this machine ({here}), got {str(device)!r}; leave it out to use the best")
    index = torch.accelerator.current_device_index() if resolved.index is None else resolved.index
    if index >= torch.accelerator.device_count():
        last = torch.accelerator.device_count() - 1
        raise ValueError(f"device must be on this machine, whose last one is '{resolved.type}:{last}', got {device!r}")
    return torch.device(resolved.type, index)


def get_backend(device: torch.device | str | int | None = None) -> Backend:
    """The backend of ``device``, one per device and process."""
    resolved = resolve_device(device)
    if resolved not in _backends:
        kinds: dict[str, type[Backend]] = {"cpu": CpuBackend}
        if torch.version.cuda is not None:  # AMD's devices are of type "cuda" too
            kinds["cuda"] = CudaBackend
        _backends.setdefault(resolved, kinds.get(resolved.type, Backend)(resolved))  # another thread's, if it is first
    return _backends[resolved]
