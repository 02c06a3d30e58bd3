"""Long work says what it does: lines in the log, and a bar in a terminal or a notebook."""

import io
import logging
import sys
import time
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import offload
from offload.base import progress
from offload.base.progress import progress_bar
from offload.device.select import get_backend
from offload.host.page_locked import HostMemoryError
from offload.host.pool import HostPool


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal, of the test's body alone: pytest has its own before and after."""
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    return Terminal()


def text_of(file, total=4 << 30, **options):
    """What a bar of four parts writes to standard error."""
    with redirect_stderr(file), progress_bar("pinning host memory", total, **options) as advance:
        for _ in range(4):
            time.sleep(0.11)  # tqdm draws ten times a second
            advance(total // 4)
    return file.getvalue() if file else ""


def test_shows_a_bar_in_a_terminal(terminal):
    text = text_of(terminal)
    assert "pinning host memory:  25%" in text
    assert "1.00G/4.00G" in text
    assert text.endswith("\r")  # the bar is cleared


def test_shows_a_bar_in_a_notebook(monkeypatch):
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", SimpleNamespace())
    assert "1/4" in text_of(io.StringIO(), 4, unit=" steps")


def test_shows_nothing_before_the_delay_without_a_terminal_or_tqdm(terminal, monkeypatch):
    assert not text_of(io.StringIO())
    assert not text_of(None)
    with monkeypatch.context() as patch:
        patch.setattr(progress, "DELAY_S", 2.0)
        assert not text_of(terminal)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert not text_of(terminal)


# What it is used for.


def test_reserving_shows_and_says_what_was_pinned(terminal, monkeypatch, caplog):
    monkeypatch.setattr("offload.host.pool.RESERVE_BYTES", 1 << 20)
    pool = HostPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    with caplog.at_level(logging.INFO, "offload.host.pool"), redirect_stderr(terminal):
        pool.reserve(4 << 20)
        buffer = pool.take(5 << 20)
    assert "/4.00M" in terminal.getvalue()
    reserved, grown = caplog.messages
    assert reserved.startswith("pinned 4.00 MiB of host memory in ")
    assert reserved.endswith("s; the pool has 4.00 MiB")
    assert grown.endswith(f"s; the pool has {buffer.nbytes >> 20}.00 MiB")


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


def test_profiling_and_planning_say_what_they_did(terminal, caplog):
    layers, step = make_layers()
    steps = 0

    def counted():
        nonlocal steps
        steps += 1
        step()

    with caplog.at_level(logging.INFO, "offload"), redirect_stderr(terminal):
        profile = offload.profile_layers(layers, counted, min_bytes=1, device="cpu", steps=1, regions=True)
        made = offload.plan(profile, "1GiB", offload.Link(1e9, 1e9, 2e9))
    assert f"/{steps}" in terminal.getvalue()
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
