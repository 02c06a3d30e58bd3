"""The longest sequence that a limited device can train on, found by trying.

A try of a long sequence takes minutes, nearly all of it in attention, whose seconds grow with the square of the length
and whose memory does not. So in the search each token attends to those of its own block: the same kernels, with inputs,
outputs and workspace of the same sizes. What was found is tried with whole attention. Where that takes too long, the
seconds that blocks leave out are measured for one layer, and added for all.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from benchmarks.instruments import Row, timed

BLOCKS = (4096, 1024)  # tokens of a block, the first size that divides the length


class Lengths:
    """Which length to try next. Memory grows by the same for each token, so two that pass tell where it ends.

    The ``first`` length is the first that is tried, and then twice of it; all are multiples of ``grain``.
    """

    def __init__(self, limit_bytes: int, first: int, grain: int, most: int) -> None:
        self.limit_bytes, self.first, self.grain, self.most = limit_bytes, first, grain, most // grain * grain
        self.peaks: dict[int, int] = {}  # of each length that passed
        self.failed: list[int] = []

    @property
    def longest(self) -> int:
        """The longest that passed."""
        return max(self.peaks, default=0)

    def next(self) -> int | None:
        """The length to try now, ``None`` when the longest is known."""
        least = min(self.failed, default=self.most + self.grain)
        if self.longest + self.grain >= least:
            return None
        if not self.peaks:
            return max(self.grain, least // 2 // self.grain * self.grain) if self.failed else self.first
        promised = 2 * self.longest
        if len(self.peaks) > 1:
            (shorter, low), (longer, high) = sorted(self.peaks.items())[-2:]
            per_token = max(1, high - low) / (longer - shorter)
            promised = longer + int((self.limit_bytes - high) / per_token)
        if promised >= least and self.failed:  # something else grows, too
            promised = (self.longest + least) // 2
        promised = min(promised, least - self.grain) // self.grain * self.grain
        return max(promised, self.longest + self.grain)


@contextmanager
def in_blocks() -> Iterator[None]:
    """Let attention run in blocks of tokens; its memory is that of all in one."""
    whole = functional.scaled_dot_product_attention

    def attend(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> torch.Tensor:
        length = query.shape[2]
        block = next((size for size in BLOCKS if length % size == 0), length)
        blocks = (one.unflatten(2, (-1, block)).squeeze(0).transpose(0, 1) for one in (query, key, value))
        output: torch.Tensor = whole(*blocks, *args, **options)
        return output.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    with patch.object(functional, "scaled_dot_product_attention", attend):
        yield


def attention_s(shape: dict[str, Any], tokens: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one layer's attention, forward and backward."""
    heads, key_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head = shape["hidden_size"] // heads
    made = {"device": device, "dtype": torch.bfloat16}
    many = (heads, key_heads, key_heads)
    query, key, value = (torch.randn(1, tokens, one, head, **made).transpose(1, 2).requires_grad_() for one in many)
    found: list[torch.Tensor] = []

    def forward() -> None:
        found[:] = [functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)]

    def backward() -> None:
        found[0].backward(torch.ones_like(found[0]))

    for step in (forward, backward):
        step()  # the first one loads kernels
    return timed(forward, device), timed(backward, device)


def search(attempt: Callable[[int], Row | None], lengths: Lengths, seconds: float) -> Row:
    """Try lengths until the longest is known, or so many seconds are over; the row of the longest.

    ``attempt`` runs a step of so many tokens, and tells what the step took, or ``None`` if it lacked memory.
    """
    begin = time.perf_counter()
    tried: dict[int, float | None] = {}
    row: Row = {"longest_tokens": 0, "tried": tried}
    while (tokens := lengths.next()) and (len(lengths.peaks) < 2 or time.perf_counter() - begin < seconds):
        found = attempt(tokens)
        tried[tokens] = found and found["step_s"]
        if found is None:
            lengths.failed.append(tokens)
        else:
            lengths.peaks[tokens] = found["peak_bytes"]
            if tokens > row["longest_tokens"]:
                row |= found | {"longest_tokens": tokens}
    return row | {"shortest_failed_tokens": min(lengths.failed, default=None)}


def longest_again(attempt: Callable[[int], Row | None], row: Row, grain: int) -> Row:
    """Run the longest once more, in another way than it was found in; a shorter one where that needs more memory."""
    failed = row["shortest_failed_tokens"]
    for tokens in range(row["longest_tokens"], 0, -grain):
        found = attempt(tokens)
        if found is not None:
            return found | {"longest_tokens": tokens, "shortest_failed_tokens": failed}
        failed = tokens
    return {"longest_tokens": 0, "shortest_failed_tokens": failed}
