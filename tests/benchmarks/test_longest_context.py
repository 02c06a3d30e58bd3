"""The search for the longest sequence: what it tries, and what attention in blocks is."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.longest_context import BLOCKS, in_blocks


@pytest.mark.parametrize("tokens", [BLOCKS[1] * 3, 48])
def test_each_token_attends_to_its_block(tokens: int) -> None:
    torch.manual_seed(0)
    made: Any = [torch.randn(1, tokens, heads, 8).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]
    block = next((size for size in BLOCKS if tokens % size == 0), tokens)
    with in_blocks():
        found = torch.nn.functional.scaled_dot_product_attention(*made, is_causal=True, enable_gqa=True)
    expected = [
        scaled_dot_product_attention(
            *(one[:, :, begin : begin + block] for one in made), is_causal=True, enable_gqa=True
        )
        for begin in range(0, tokens, block)
    ]
    assert torch.equal(found, torch.cat(expected, dim=2))
    assert found.transpose(1, 2).is_contiguous()  # as the model's projection wants it: nothing is copied
    assert torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention
