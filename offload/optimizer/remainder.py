"""A float32 number as a bfloat16 number and a remainder of 16 bits: master weights in 2 bytes beside the weight's 2.

The bfloat16 number is the nearest one; of two that are equally near, the larger in magnitude, so that the remainder,
the difference of the bits, fits int16.
"""

from __future__ import annotations

import torch

REMAINDER = "master_remainder"  # the name of the remainders in the state of a parameter
REMAINDER_BYTES = 2  # of a weight
_TIE = 1 << 15


def join(nearest: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 numbers that :func:`split` was given."""
    bits = nearest.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(remainder).view(torch.float32)


def split(numbers: torch.Tensor, nearest: torch.Tensor) -> torch.Tensor:
    """Write the bfloat16 numbers into ``nearest``; returns the remainders, int16."""
    nearest.copy_(numbers)  # to even where two are equally near; what is not a number remains so
    bits = nearest.view(torch.int16)
    remainder = numbers.view(torch.int32) - bits.to(torch.int32).bitwise_left_shift_(16)
    remainder.masked_fill_(nearest.isnan(), 0)  # else the bits of some would be those of a number
    bits.add_(remainder == _TIE)  # their remainder, -2 ** 15 then, has the same low 16 bits
    return remainder.to(torch.int16)
