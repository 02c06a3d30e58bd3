"""Host memory at its limit: the step completes, exact, and the user chooses how."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lab import Lab, mapped
from models import through
from torch import nn

import offload
from offload.device.select import get_backend
from offload.host import page_locked as pinned
from offload.host import pool as host_pool
from offload.host.pool import get_host_pool

LAYERS, MIN_BYTES = 5, 1024


@pytest.fixture
def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(LAYERS))


@pytest.fixture(autouse=True)
def _empty_pool() -> Iterator[None]:
    offload.empty_host_cache("cpu")
    yield
    offload.empty_host_cache("cpu")


def gradients(layers: nn.ModuleList) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(128, 64, device=next(layers.parameters()).device, requires_grad=True)
    y = through(layers, x * 1)
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
        pytest.warns(UserWarning, match="max_host_bytes is .*Tensors that do not fit are kept on the device") as caught,
    ):
        found = [gradients(layers) for _ in range(3)]
    stats = handle.stats()
    assert len(caught) == 1
    assert all(all(map(torch.equal, expected, step)) for step in found)
    assert stats.skipped["no host memory"] > 0
    assert 0 < stats.pinned_bytes <= limit


def test_a_refusal_is_forgotten_when_host_memory_is_reserved(
    layers: nn.ModuleList, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has freed memory says so by reserving some, however little."""
    expected, left = gradients(layers), [0]
    available = pinned.available_bytes
    monkeypatch.setattr(pinned, "available_bytes", lambda: left[0] or available())
    left[0] = 1
    with offload.offload_layers(layers, 3, min_bytes=MIN_BYTES, device="cpu") as handle:
        with pytest.warns(UserWarning, match="are missing"):
            assert all(map(torch.equal, expected, gradients(layers)))
        assert handle.stats().offloaded_bytes == 0
        left[0] = 0
        gradients(layers)
        assert handle.stats().offloaded_bytes == 0, "the system is not asked again in each step"
        offload.reserve_host_memory("64KiB", "cpu")
        assert all(map(torch.equal, expected, gradients(layers)))
        assert handle.stats().offloaded_bytes > 200_000


def test_reserving_leaves_nothing_to_pin_in_the_first_step(
    layers: nn.ModuleList, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload.reserve_host_memory(needed_bytes(layers), "cpu")
    pool = get_host_pool(get_backend("cpu"))
    monkeypatch.setattr(pool, "_allocate", lambda nbytes: pytest.fail(f"{nbytes} bytes pinned in the step"))
    with offload.offload_layers(layers, 3, min_bytes=MIN_BYTES, device="cpu") as handle:
        gradients(layers)
    assert handle.stats().offloaded_bytes > 0


def test_more_than_the_system_has_left_is_not_reserved_in_part(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "available_bytes", lambda: 2 << 20)  # more than each part, less than all
    monkeypatch.setattr(host_pool, "RESERVE_BYTES", 1 << 20)
    offload.reserve_host_memory("1MiB", lab.device)
    before = lab.pool.pinned_bytes
    with pytest.raises(offload.HostMemoryError, match=r"8.00 MiB of host memory are missing, .* has 2.00 MiB left"):
        offload.reserve_host_memory("9MiB", lab.device)
    assert lab.pool.pinned_bytes == before


def test_the_cache_is_given_back_but_for_what_is_in_use(layers: nn.ModuleList) -> None:
    with offload.offload_layers(layers, 3, min_bytes=MIN_BYTES, device="cpu") as handle:
        x = through(layers, torch.randn(128, 64))
        assert offload.empty_host_cache("cpu") < handle.stats().pinned_bytes + 1
        held = handle.stats().pinned_bytes
        assert held > 0
        x.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert offload.empty_host_cache("cpu") == held
    assert handle.stats().pinned_bytes == 0


def resident_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def test_an_emptied_cache_is_the_system_s_again(lab: Lab) -> None:
    size = 128 << 20
    offload.reserve_host_memory(size, lab.device)
    buffer = lab.pool.take(size)
    middle, before = buffer.pieces[0].data_ptr() + size // 2, resident_bytes()
    lab.pool.give(buffer, lab.d2h_stream.record_event())
    del buffer
    assert mapped(middle)
    assert offload.empty_host_cache(lab.device) == size
    assert not mapped(middle)
    assert before - resident_bytes() > size // 2


MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*of pinned host memory are missing", "ignore:a whole round of")
@pytest.mark.parametrize(
    ("limit", "policies"),
    [
        (0, {"*": "recompute"}),
        (5 * MIB, {"*addmm": "offload", "*": "recompute"}),
        (11 * MIB, None),
        (1 << 30, None),
        (1 << 30, {"*addmm": "offload", "*": "recompute"}),
    ],
)
def test_no_more_is_pinned_than_is_asked(
    limit: int, policies: dict[str, str] | None, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the first step nor later, with inputs of several sizes, and what the pool says is what was locked."""
    locked: dict[int, int] = {}
    lock, unlock = lab.backend.page_lock, lab.backend.page_unlock
    monkeypatch.setattr(lab.backend, "page_lock", lambda *pages: (locked.update([pages]), lock(*pages)))
    monkeypatch.setattr(lab.backend, "page_unlock", lambda address: (locked.pop(address, None), unlock(address)))
    layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 256)) for _ in range(6))
    layers.to(lab.device)
    options = {"policies": policies, "max_host_bytes": limit, "min_bytes": 1 << 12, "device": lab.device}
    with offload.offload_layers(layers, 4, **options) as handle:
        for tokens in (1024, 3000, 700, 3000):
            y = through(layers, torch.randn(tokens, 256, device=lab.device))
            y.square().mean().backward()
            assert sum(locked.values()) == handle.stats().pinned_bytes <= limit
            assert bool(locked) == (limit > 0)
