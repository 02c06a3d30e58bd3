"""Two tensors are compared bit by bit, and in pieces, so that the device needs no memory of their size."""

import math

import pytest
import torch
from lab import Lab

import offload
from offload.base import tensors
from offload.base.tensors import COMPARED_BYTES, same_bits

VIEWS = {
    "one number": lambda x: x[0, 0, 0],
    "nothing": lambda x: x[:, :0],
    "all": lambda x: x,
    "a slice": lambda x: x[:, 1::2],
    "transposed": lambda x: x.mT,
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128, torch.uint8], ids=str)
def test_the_last_bit_is_compared(view: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "COMPARED_BYTES", 16)
    one, other = (torch.arange(3 * 5 * 7).view(3, 5, 7).to(dtype) for _ in range(2))
    assert same_bits(VIEWS[view](one), VIEWS[view](other))
    changed = VIEWS[view](other)
    if changed.numel():
        changed[(-1,) * changed.ndim] += 1
        assert not same_bits(VIEWS[view](one), changed)


def test_numbers_that_are_equal_may_have_other_bits() -> None:
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


@pytest.mark.gpu
def test_a_device_needs_little_memory_to_compare(lab: Lab) -> None:
    one, other = (torch.zeros(1, 8, COMPARED_BYTES, dtype=torch.uint8, device=lab.device) for _ in range(2))
    with offload.memory_meter(lab.device) as meter:
        assert same_bits(one, other)
    assert meter.peak_bytes <= 2 * COMPARED_BYTES
