"""Kernels that no dispatch mode sees; only for a GPU, as PyTorch for the CPU comes without Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def _scale(target, source, factor, columns, stride, block: tl.constexpr):
    at = tl.arange(0, block)
    place = tl.program_id(0) * stride + at
    value = tl.load(source + place, at < columns)
    tl.store(target + place, tl.where(factor == 0, 0.0, value * factor), at < columns)


def scale(target: torch.Tensor, source: torch.Tensor, factor: float) -> None:
    """Write ``source`` times ``factor`` into ``target``, row by row; both have the same strides.

    A factor of 0 gives 0 whatever the source holds.
    """
    rows, columns = target.shape[:-1].numel(), target.shape[-1]
    _scale[(rows,)](target, source, float(factor), columns, target.stride(-2), block=triton.next_power_of_2(columns))
