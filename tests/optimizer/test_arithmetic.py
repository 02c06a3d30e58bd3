"""How long the device takes for an optimizer's arithmetic: measured, and nothing is left of it."""

import copy

import pytest
import torch
from lab import Lab
from models import assert_same
from torch import nn
from training import build, plain_steps, values

from offload.optimizer.arithmetic import seconds_per_element
from offload.optimizer.state import join, split


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.Muon])
@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_seconds_of_an_element(kind: type, state_dtype: torch.dtype | None, lab: Lab) -> None:
    """A time, and neither the optimizer nor its parameters are changed by it."""
    model = build(lab.device, torch.bfloat16)
    parameters = [one for one in model.parameters() if one.ndim == 2 or kind is not torch.optim.Muon]
    optimizer = kind(parameters, lr=1e-2)
    plain_steps(model, optimizer, range(2))
    before = copy.deepcopy(values(model, optimizer))
    numbers = torch.get_rng_state()
    seconds = seconds_per_element(optimizer, state_dtype, lab.device, 1 << 14)
    assert 0 < seconds < 1
    assert_same(before, values(model, optimizer))
    assert torch.equal(numbers, torch.get_rng_state())
    assert lab.pool.used_bytes == 0
    plain_steps(model, optimizer, range(2))


def test_where_nothing_is_trained() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.AdamW(frozen.parameters())
    assert seconds_per_element(optimizer, None, torch.device("cpu"), 1 << 14) == 0


def numbers(count: int = 1 << 20) -> torch.Tensor:
    """Of all magnitudes, with those that are halfway between two bfloat16 numbers, and the special ones."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64)
    halfway = (bits[: count // 2] & ~0xFFFF) | 0x8000
    halfway -= (halfway >= 2**31).to(torch.int64) << 32
    ends = torch.tensor([0, -(2**31), 0x7F7FFFFF, 0x7F800000, 0x00000001, -(2**31) + 1, 0x7F7F8000, 0x7F7F7FFF])
    return torch.cat([bits, halfway, ends]).to(torch.int32).view(torch.float32)


def test_every_number_is_joined_again() -> None:
    given = numbers()
    given = given[given.isfinite()]
    nearest = torch.empty_like(given, dtype=torch.bfloat16)
    remainder = split(given, nearest)
    assert remainder.dtype is torch.int16
    assert torch.equal(join(nearest, remainder).view(torch.int32), given.view(torch.int32))


def test_the_number_is_the_nearest() -> None:
    given = numbers()
    given = given[given.isfinite()]
    nearest = torch.empty_like(given, dtype=torch.bfloat16)
    split(given, nearest)
    even = given.to(torch.bfloat16)
    apart = (nearest.view(torch.int16) != even.view(torch.int16)) & (nearest != even)
    ties = given.view(torch.int32) & 0xFFFF == 0x8000
    assert bool((apart <= ties).all())
    assert bool((nearest[apart].float().abs() > given[apart].abs()).all())


def test_what_is_not_finite_remains_so() -> None:
    given = numbers()
    given = torch.cat([given[given.isnan()], torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)])
    assert len(given) > 1000
    nearest = torch.empty_like(given, dtype=torch.bfloat16)
    remainder = split(given, nearest)
    assert bool(nearest.isnan().all())
    assert bool(join(nearest, remainder).isnan().all())
