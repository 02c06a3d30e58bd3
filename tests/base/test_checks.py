"""Ints and sizes that users give, everywhere alike."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import offload
import offload.pipelining
from offload.base.checks import is_int, parse_bytes


class TestBytes:
    @pytest.mark.parametrize(
        ("value", "nbytes"),
        [
            ("40GiB", 40 << 30),
            ("40gib", 40 << 30),
            ("40G", 40 << 30),
            ("40 GB", 40 * 10**9),
            ("512 MiB", 512 << 20),
            ("1.5GiB", 3 << 29),
            ("2KB", 2000),
            ("7B", 7),
            ("1TB", 10**12),
            (123, 123),
        ],
    )
    def test_parse(self, value, nbytes):
        assert parse_bytes(value) == nbytes

    @pytest.mark.parametrize("value", ["", "40", "40 gigs", "GiB", "-1GiB", "1,5GiB", "40GiB of memory"])
    def test_refuses_text(self, value):
        with pytest.raises(ValueError, match=r"^budget must be a number and a unit, such as '40GiB', got '"):
            parse_bytes(value, "budget")

    @pytest.mark.parametrize("value", [1.5, None, True, b"1GiB"])
    def test_refuses_type(self, value):
        with pytest.raises(TypeError, match=r"^budget must be an int \(bytes\) or a text such as '40GiB', got "):
            parse_bytes(value, "budget")

    def test_refuses_negative(self):
        with pytest.raises(ValueError, match=r"^budget must be at least 0 bytes, got -1$"):
            parse_bytes(-1, "budget")


@pytest.mark.parametrize(
    ("value", "fits"), [(0, False), (1, True), (3, True), (4, False), (True, False), (2.0, False), (None, False)]
)
def test_ints_within_bounds(value, fits):
    assert is_int(value, 1, 3) is fits


def linears() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(64, 64) for _ in range(3))


def inputs() -> torch.Tensor:
    return torch.randn(32, 64, requires_grad=True) * 1  # the result of an operation, as leaves stay


def drop_in(min_bytes: object) -> int:
    context, sync = offload.get_cpu_offload_context(True, 1, 3, min_bytes=min_bytes, device="cpu")
    x = inputs()
    for layer in linears():
        with context:
            x = layer(x)
        x = sync(x)
    x.sum().backward()
    return context.stats().offloaded_bytes


def by_hooks(min_bytes: object) -> int:
    layers = linears()
    with offload.offload_layers(layers, 1, min_bytes=min_bytes, device="cpu") as handle:
        nn.Sequential(*layers)(inputs()).sum().backward()
    return handle.stats().offloaded_bytes


def profiled(min_bytes: object) -> int:
    layers = linears()

    def step() -> None:
        nn.Sequential(*layers)(inputs()).sum().backward()

    return offload.profile_layers(layers, step, min_bytes=min_bytes, device="cpu", steps=1).layers[0].saved_bytes


@pytest.mark.parametrize("moved_bytes", [drop_in, by_hooks, profiled])
def test_min_bytes(moved_bytes: Callable[[object], int]) -> None:
    assert moved_bytes("8KiB") == moved_bytes(8192) == 32 * 64 * 4
    with pytest.raises(TypeError, match=r"^min_bytes must be an int \(bytes\) or a text such as '40GiB', got None"):
        moved_bytes(None)
    with pytest.raises(ValueError, match=r"^min_bytes must be a number and a unit"):
        moved_bytes("1 apple")
