"""Layers that save what a test asks for, and whether it comes back as it was."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab import Lab
from models import Offloading, assert_moved, offloading, save
from torch import nn

from offload.activations.saved_storage import SavedStorage

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values as integers, for dtypes that have no comparison on some device."""
    if tensor.dtype in FLOAT8:
        return tensor.view(torch.uint8)
    return tensor.view(torch.int16) if tensor.dtype is torch.uint16 else tensor


def assert_identical(expected: torch.Tensor, found: torch.Tensor) -> None:
    for name in ("dtype", "device", "shape"):
        assert getattr(found, name) == getattr(expected, name)
    for name in ("stride", "storage_offset", "is_conj", "is_neg"):
        assert getattr(found, name)() == getattr(expected, name)()
    assert torch.equal(bits(found), bits(expected))


def run(
    offloaded: Offloading, x: torch.Tensor, saved: list[Callable[[], tuple[torch.Tensor, ...]]]
) -> list[tuple[torch.Tensor, ...]]:
    """One layer per item of ``saved``, whose tensors it makes and saves; what backward gets, layer by layer.

    The tensors are let go as soon as their layer has run.
    """
    received: list[tuple[torch.Tensor, ...]] = []
    for tensors in saved:
        x = offloaded.layer(lambda y, tensors=tensors: save(y, received.append, *tensors()), x)
    x.sum().backward()
    return received[::-1]


def nothing() -> tuple[torch.Tensor, ...]:
    return ()


def round_trip(
    make: Callable[[], torch.Tensor], x: torch.Tensor, *, moves: bool = True, **options: Any
) -> tuple[torch.Tensor, Offloading]:
    """What backward gets for a tensor that the first of three layers saves; it is on the host during the third.

    If it does not ``move``, it must not have been copied at all.
    """
    offloaded = offloading(1, 3, x.device, **options)
    received = run(offloaded, x, [lambda: (make(),), nothing, nothing])
    assert_moved((0, 0), offloaded, moves=moves)
    return received[0][0], offloaded


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "itself": lambda t: t.add_(1),
    "a view": lambda t: t[:2].zero_(),
    "its detached alias": lambda t: t.detach().mul_(2),
}


WHERE = {"nowhere": 0, "offloaded": 0, "small": 0, "first that stays": 1, "a later one": 2}
"""Where a tensor is saved that is changed then → in which layer."""


def finish_copies(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the host are over before the program goes on: what changes later has not been copied."""
    start = SavedStorage.start_offload

    def start_and_finish(storage: SavedStorage) -> None:
        start(storage)
        lab.drain()

    monkeypatch.setattr(SavedStorage, "start_offload", start_and_finish)


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded
