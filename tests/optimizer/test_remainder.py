"""A float32 number is a bfloat16 number and 16 bits: every one, to the last bit."""

import torch

from offload.optimizer.remainder import join, split


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
