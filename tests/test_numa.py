"""Which NUMA node a GPU is next to, and whether pages go there."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from offload import numa, pinned

GPU = "0000:ab:00.0"


def sysfs(root: Path, online: str, node: str | None) -> Path:
    """A system with one GPU."""
    (root / "devices/system/node").mkdir(parents=True)
    (root / "devices/system/node/online").write_text(f"{online}\n")
    device = root / "bus/pci/devices" / GPU
    device.mkdir(parents=True)
    if node is not None:
        (device / "numa_node").write_text(f"{node}\n")
    return root


@pytest.mark.parametrize(
    ("online", "node", "expected"),
    [
        ("0-1", "1", 1),
        ("0-1", "0", 0),
        ("0,8", "8", 8),
        ("0", "0", None),
        ("0-1", "-1", None),
        ("0-1", "here", None),
        ("0-1", None, None),
    ],
)
def test_the_node_next_to_a_gpu(tmp_path: Path, online: str, node: str | None, expected: int | None) -> None:
    assert numa.node_of(GPU.upper(), sysfs(tmp_path, online, node)) == expected


def test_a_system_without_a_description_has_no_node(tmp_path: Path) -> None:
    assert numa.node_of(GPU, tmp_path) is None


def policy_of(address: int) -> str | None:
    """What the system says about the mapping that ``address`` is in, if it does."""
    file = Path("/proc/self/numa_maps")
    if not file.exists():
        return None
    lines = [line.split() for line in file.read_text().splitlines()]
    return [words[1] for words in lines if int(words[0], 16) <= address][-1]


def test_pages_are_wished_on_a_node_and_usable_in_any_case() -> None:
    mapping = pinned._map(1 << 20)
    placed = numa.prefer(mapping.address, len(mapping), 0)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    assert int(memory.fill_(3).sum()) == 3 << 20
    if placed:
        assert policy_of(memory.data_ptr()) in {"prefer:0", None}
    else:
        assert ctypes.get_errno() in {0, 1, 38}, os.strerror(ctypes.get_errno())  # EPERM, ENOSYS


def test_a_wish_that_cannot_be_met_does_no_harm() -> None:
    mapping = pinned._map(4096)
    assert not numa.prefer(mapping.address, 4096, 1000)
    assert int(torch.frombuffer(mapping, dtype=torch.uint8).fill_(1).sum()) == 4096


def test_an_unknown_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.platform, "machine", lambda: "abacus")
    assert not numa.prefer(0, 4096, 0)
