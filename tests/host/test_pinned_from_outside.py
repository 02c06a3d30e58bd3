"""Pinned memory at most what is asked, as another process sees it: by the pages for which huge ones were asked."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from lab import Lab
from torch import nn

import offload

MIB = 1 << 20
READER = """
import sys
resident, size, there = 0, 0, []
for line in open(f"/proc/{sys.argv[1]}/smaps"):
    name, _, rest = line.partition(":")
    if name == "Size":
        size = int(rest.split()[0])
    elif name == "Rss":
        resident = int(rest.split()[0])
    elif name == "VmFlags" and "hg" in rest.split():
        there.append((size, resident))
print(sum(size for size, _ in there) * 1024, sum(resident for _, resident in there) * 1024)
"""


def seen_from_outside() -> tuple[int, int]:
    """Bytes that this process has mapped and asked huge pages for, as only the pool does; how many are in memory."""
    asked = [sys.executable, "-S", "-c", READER, str(os.getpid())]
    size, resident = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
    return int(size), int(resident)


@pytest.fixture(autouse=True)
def _empty_pool(lab: Lab) -> Iterator[None]:
    offload.empty_host_cache(lab.device)
    yield
    offload.empty_host_cache(lab.device)


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
def test_no_more_is_pinned_than_is_asked(limit: int, policies: dict[str, str] | None, lab: Lab) -> None:
    """Neither in the first step nor later, with inputs of several sizes, and what the pool says is what there is."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 256)) for _ in range(6))
    layers.to(lab.device)
    before = seen_from_outside()
    options = {"policies": policies, "max_host_bytes": limit, "min_bytes": 1 << 12, "device": lab.device}
    with offload.offload_layers(layers, 4, **options) as handle:
        for tokens in (1024, 3000, 700, 3000):
            y = torch.randn(tokens, 256, device=lab.device)
            for layer in layers:
                y = layer(y)
            y.square().mean().backward()
            size, resident = (now - then for now, then in zip(seen_from_outside(), before, strict=True))
            assert size == handle.stats().pinned_bytes <= limit
            assert resident <= limit
        if limit:
            assert resident > min(limit, handle.stats().pinned_bytes) // 2 > 0
