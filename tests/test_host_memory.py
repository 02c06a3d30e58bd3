"""Host memory at its limit: the step completes, exact, and the user chooses how."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import offload
from offload.backend import get_backend
from offload.host_pool import get_host_pool

LAYERS, MIN_BYTES = 5, 1024


@pytest.fixture
def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(LAYERS))


@pytest.fixture(autouse=True)
def _empty_pool() -> None:
    offload.empty_host_cache("cpu")


def gradients(layers: nn.ModuleList) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(128, 64, requires_grad=True)
    y = x * 1
    for layer in layers:
        y = layer(y)
    found = torch.autograd.grad(y.square().sum(), [x, *layers.parameters()])
    return list(found)


def needed_bytes(layers: nn.ModuleList) -> int:
    """Pinned bytes of an unlimited step."""
    with offload.offload_layers(layers, 3, min_bytes=MIN_BYTES, device="cpu") as handle:
        gradients(layers)
        needed = handle.stats().pinned_bytes
    offload.empty_host_cache("cpu")
    return needed


def test_what_finds_no_room_stays_on_the_device_with_one_warning(layers: nn.ModuleList) -> None:
    expected, limit = gradients(layers), needed_bytes(layers) // 2
    with (
        offload.offload_layers(layers, 3, min_bytes=MIN_BYTES, device="cpu", max_host_bytes=limit) as handle,
        pytest.warns(UserWarning, match="max_host_bytes is .*What finds no room stays on the device") as caught,
    ):
        found = [gradients(layers) for _ in range(3)]
    stats = handle.stats()
    assert len(caught) == 1
    assert all(all(map(torch.equal, expected, step)) for step in found)
    assert stats.skipped["no host memory"] > 0
    assert 0 < stats.pinned_bytes <= limit


def test_pageable_memory_takes_the_rest(layers: nn.ModuleList) -> None:
    expected, limit = gradients(layers), needed_bytes(layers) // 2
    options = {"max_host_bytes": limit, "when_host_full": "pageable"}
    with offload.offload_layers(layers, 3, min_bytes=MIN_BYTES, device="cpu", **options) as handle:
        with pytest.warns(UserWarning, match="goes to pageable memory, which is slow"):
            assert all(map(torch.equal, expected, gradients(layers)))
        assert all(map(torch.equal, expected, gradients(layers)))
    stats = handle.stats()
    assert stats.pinned_bytes <= limit
    assert "no host memory" not in stats.skipped
    assert stats.reloaded_bytes == stats.offloaded_bytes > 2 * limit


def test_an_error_on_request_breaks_nothing(layers: nn.ModuleList) -> None:
    expected, limit = gradients(layers), needed_bytes(layers) // 2
    options = {"max_host_bytes": limit, "when_host_full": "raise"}
    with (
        offload.offload_layers(layers, 3, min_bytes=MIN_BYTES, device="cpu", **options),
        pytest.raises(offload.HostMemoryError, match="offload fewer layers or raise the limit"),
    ):
        gradients(layers)
    with offload.offload_layers(layers, 3, min_bytes=MIN_BYTES, device="cpu"):
        assert all(map(torch.equal, expected, gradients(layers)))


def test_pinning_that_fails_is_treated_alike(layers: nn.ModuleList, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise offload.HostMemoryError(f"cudaHostRegister could not page-lock {nbytes} bytes.")

    expected = gradients(layers)
    monkeypatch.setattr(get_host_pool(get_backend("cpu")), "_allocate", refuse)
    with (
        offload.offload_layers(layers, 3, min_bytes=MIN_BYTES, device="cpu") as handle,
        pytest.warns(UserWarning, match="could not page-lock"),
    ):
        assert all(map(torch.equal, expected, gradients(layers)))
    assert handle.stats().offloaded_bytes == 0


def test_reserving_leaves_nothing_to_pin_in_the_first_step(
    layers: nn.ModuleList, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload.reserve_host_memory(needed_bytes(layers), "cpu")
    pool = get_host_pool(get_backend("cpu"))
    monkeypatch.setattr(pool, "_allocate", lambda nbytes: pytest.fail(f"{nbytes} bytes pinned in the step"))
    with offload.offload_layers(layers, 3, min_bytes=MIN_BYTES, device="cpu") as handle:
        gradients(layers)
    assert handle.stats().offloaded_bytes > 0


def test_the_cache_is_given_back_but_for_what_is_in_use(layers: nn.ModuleList) -> None:
    with offload.offload_layers(layers, 3, min_bytes=MIN_BYTES, device="cpu") as handle:
        x = torch.randn(128, 64)
        for layer in layers:
            x = layer(x)
        assert offload.empty_host_cache("cpu") < handle.stats().pinned_bytes + 1
        held = handle.stats().pinned_bytes
        assert held > 0
        x.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert offload.empty_host_cache("cpu") == held
    assert handle.stats().pinned_bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when_host_full": "wait"}, r"when_host_full must be one of .*'keep'.*got 'wait'"),
        ({"max_host_bytes": -1}, "max_host_bytes must be at least 0 bytes, got -1"),
        ({"max_host_bytes": "3 apples"}, "max_host_bytes must be a number and a unit"),
    ],
)
def test_bad_limits_are_refused(layers: nn.ModuleList, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offload.offload_layers(layers, 3, **options)
    offload.offload_layers(layers, 3).remove()
