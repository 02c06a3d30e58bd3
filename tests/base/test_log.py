"""Long work says what it did, in the log."""

import logging

import torch
from models import build, step_gradients

import offload
from offload.base.checks import format_bytes
from offload.host.pool import HostPool


def test_long_work_says_what_it_did(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "offload")
    monkeypatch.setattr("offload.host.pool.RESERVE_BYTES", 1 << 20)
    pool = HostPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    pool.reserve(4 << 20)
    buffer = pool.take(5 << 20)
    reserved, grown = caplog.messages
    assert reserved.startswith("pinned 4.00 MiB of host memory in ")
    assert reserved.endswith("s; the pool has 4.00 MiB")
    assert grown.endswith(f"s; the pool has {buffer.nbytes >> 20}.00 MiB")
    layers, x = build("mlp", 4, torch.device("cpu"))
    with offload.stream_weights(layers, "cpu") as streamed:
        size = format_bytes(streamed.stats().weight_bytes)
    assert caplog.messages[-1].startswith(f"moved {size} of weights of 4 layers to pinned host memory in ")
    profile = offload.profile_layers(layers, lambda: step_gradients(layers, x), min_bytes=1, steps=1, regions=True)
    made = offload.plan(profile, "1GiB", offload.Link(1e9, 1e9, 2e9))
    first, last = [line for line in caplog.messages if line.startswith(("profiled", "planned"))]
    assert first.startswith("profiled 4 layers in ")
    assert first.endswith(" KiB")
    assert last.startswith(f"planned for 1.00 GiB: {made.num_layers} of 4 layers are offloaded, with 0 B; in ")
