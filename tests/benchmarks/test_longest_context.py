"""The search for the longest sequence: what it tries, and what attention in blocks is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.longest_context import BLOCKS, Lengths, in_blocks, search


@pytest.mark.parametrize(("most", "first"), [(0, 4), (1, 1), (7, 4), (13, 4), (14, 1)])
def test_the_search_goes_on_until_a_length_fails(most: int, first: int) -> None:
    """In a device that holds 13 grains by the arithmetic of memory, and more or less of them in fact."""
    grain = 64

    def attempt(tokens: int) -> dict[str, Any] | None:
        return {"peak_bytes": 1000 + tokens, "step_s": 0.01} if tokens <= most * grain else None

    lengths = Lengths(1000 + 13 * grain + 5, first * grain, grain, most=32 * grain)
    row = search(attempt, lengths, seconds=60)
    assert row["longest_tokens"] == most * grain == lengths.longest
    assert row["shortest_failed_tokens"] == (most + 1) * grain
    assert len(row["tried"]) <= 9


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
