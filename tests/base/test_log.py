"""Long work says what it did, in the log."""

import logging

import torch
from models import through
from torch import nn

import offload
from offload.device.select import get_backend
from offload.host.pool import HostPool


def test_reserving_says_what_was_pinned(monkeypatch, caplog):
    monkeypatch.setattr("offload.host.pool.RESERVE_BYTES", 1 << 20)
    pool = HostPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    with caplog.at_level(logging.INFO, "offload.host.pool"):
        pool.reserve(4 << 20)
        buffer = pool.take(5 << 20)
    reserved, grown = caplog.messages
    assert reserved.startswith("pinned 4.00 MiB of host memory in ")
    assert reserved.endswith("s; the pool has 4.00 MiB")
    assert grown.endswith(f"s; the pool has {buffer.nbytes >> 20}.00 MiB")


def make_layers():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    x = torch.randn(32, 64)

    def step():
        y = through(layers, x)
        y.sum().backward()

    return layers, step


def test_profiling_and_planning_say_what_they_did(caplog):
    layers, step = make_layers()

    with caplog.at_level(logging.INFO, "offload"):
        profile = offload.profile_layers(layers, step, min_bytes=1, device="cpu", steps=1, regions=True)
        made = offload.plan(profile, "1GiB", offload.Link(1e9, 1e9, 2e9))
    first, last = [line for line in caplog.messages if line.startswith(("profiled", "planned"))]
    assert first.startswith("profiled 4 layers in ")
    assert first.endswith(" KiB")
    assert last.startswith(f"planned for 1.00 GiB: {made.num_layers} of 4 layers are offloaded, with 0 B; in ")


def test_streaming_weights_says_what_moved(caplog):
    layers, _ = make_layers()
    with (
        caplog.at_level(logging.INFO, "offload.weights.streamed"),
        offload.stream_weights(layers, get_backend("cpu").device) as streamed,
    ):
        weight_bytes = streamed.stats().weight_bytes
    [line] = caplog.messages
    assert line.startswith(f"moved {weight_bytes / 1024:.1f} KiB of weights of 4 layers to pinned host memory in ")
