"""Long work says what it did, in the log."""

import logging

import pytest
import torch
from torch import nn

import offload
from offload.device.select import get_backend
from offload.host.page_locked import HostMemoryError
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


def test_pinning_that_takes_long_says_how_far_it_is(monkeypatch, caplog):
    monkeypatch.setattr("offload.host.pool.RESERVE_BYTES", 1 << 20)
    monkeypatch.setattr("offload.host.pool.PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO, "offload.host.pool"):
        HostPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)).reserve(3 << 20)
    *so_far, _ = caplog.messages
    assert so_far == [f"pinning host memory: the pool has {done}.00 MiB so far" for done in (1, 2, 3)]


def test_what_could_not_be_pinned_is_not_said_to_be(caplog):
    def refuse(nbytes):
        raise HostMemoryError("no")

    with caplog.at_level(logging.INFO, "offload.host.pool"):
        for ask in (HostPool(refuse).reserve, HostPool(refuse).take):
            with pytest.raises(HostMemoryError):
                ask(1 << 20)
    assert not caplog.messages


def make_layers():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    x = torch.randn(32, 64)

    def step():
        y = x
        for layer in layers:
            y = layer(y)
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
