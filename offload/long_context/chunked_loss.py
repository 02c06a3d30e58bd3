"""Cross entropy from hidden states: the logits of a few tokens at a time, and gone again in forward.

The logits of all tokens are the largest tensors of a long sequence: of a vocabulary of 128,256 each copy in float32
takes half a MiB per token. Here forward computes the gradients of hidden states and weight beside the loss, so that
backward needs no logits, and only multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from offload.base.checks import check_int

CHUNK_TOKENS = 2048
"""As many logits as fill a GPU: of a vocabulary of 128,256, 1 GiB in float32."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: Tensor | float | None = None,
    shift: bool = False,
    liger: bool | None = None,
) -> Tensor:
    """The cross entropy of ``hidden @ weight.T`` and ``labels``, with logits for ``chunk_tokens`` tokens at a time.

    It is ``F.cross_entropy((hidden @ weight.T).float(), labels)`` up to the order of sums, and nothing waits for the
    device. In bfloat16 it takes six bytes per logit of one chunk for a moment, and for the weight's gradient six per
    element: it is added up in float32, where a sum of many chunks in bfloat16 would lose what the last ones add. A
    frozen weight takes none of that. Under autocast the product is computed in autocast's dtype.

    Args:
        hidden: What the head is given, of shape ``(…, width)``.
        weight: The head's, of shape ``(vocabulary, width)``.
        labels: Class numbers, of the shape of ``hidden`` without its last dimension.
        bias: The head's, of shape ``(vocabulary,)``.
        chunk_tokens: How many tokens have logits at once.
        ignore_index: The label of tokens that do not count.
        reduction: ``"mean"`` over the tokens that count, or their ``"sum"``.
        num_items: What the sum is divided by, in place of ``reduction``: a number or a tensor of one, as Hugging Face's
            trainer passes ``num_items_in_batch``.
        shift: Compare each token with the label of the next one in the last dimension of ``labels``.
        liger: Whether to call Liger's fused kernel for each chunk; by default where ``liger_kernel`` is installed,
            on CUDA. It is faster, computes the gradient of logits in their own dtype, and waits for the device twice.

    Returns:
        A scalar, float32 or more precise. Its graph is differentiable once.

    Raises:
        ValueError: Shapes do not match, or ``reduction`` is another.
    """
    check_int("chunk_tokens", chunk_tokens, least=1)
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels must have shape {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    labels = labels.to(hidden.device)
    if shift:
        labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    labels, hidden = labels.reshape(-1), hidden.reshape(-1, hidden.shape[-1])
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        hidden, weight = _cast(hidden, lower), _cast(weight, lower)
        bias = None if bias is None else _cast(bias, lower)
    with torch.autocast(kind, enabled=False):
        fused = _liger(liger, hidden)
        if fused:
            total = fused(
                hidden, weight, labels, bias, ignore_index=ignore_index, reduction="sum", accum_dtype=torch.float32
            )
        else:
            total = _SumOfChunks.apply(
                hidden, weight, bias, labels, chunk_tokens, ignore_index, torch.is_grad_enabled()
            )
    if num_items is not None:
        return total / (num_items.to(total.device, non_blocking=True) if isinstance(num_items, Tensor) else num_items)
    return total / (labels != ignore_index).sum() if reduction == "mean" else total


class _SumOfChunks(torch.autograd.Function):
    """The sum over all tokens that count."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk_tokens: int,
        ignore_index: int,
        grad_enabled: bool,
    ) -> Tensor:
        hidden_wants, weight_wants, bias_wants = (grad_enabled and wants for wants in ctx.needs_input_grad[:3])
        precise = torch.promote_types(hidden.dtype, torch.float32)
        losses = hidden.new_empty(len(hidden), dtype=precise)
        hidden_grad = torch.empty_like(hidden) if hidden_wants else None
        weight_grad = torch.zeros_like(weight, dtype=precise) if weight_wants else None
        bias_grad = torch.zeros_like(weight[:, 0], dtype=precise) if bias_wants else None
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            counts = labels[chunk] != ignore_index
            label = labels[chunk].where(counts, 0)[:, None]
            logits = F.linear(hidden[chunk], weight, bias).to(precise)  # from here on in place
            logits -= logits.amax(1, keepdim=True)
            of_label = logits.gather(1, label)
            norm = logits.exp_().sum(1, keepdim=True)
            losses[chunk] = (norm.log() - of_label)[:, 0].where(counts, 0)
            if not (hidden_wants or weight_wants or bias_wants):
                continue
            logits *= counts[:, None] / norm
            logits.scatter_(1, label, logits.gather(1, label) - counts[:, None].to(precise))
            gradient = logits.to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(gradient, weight, out=hidden_grad[chunk])
            if weight_grad is not None:
                weight_grad += gradient.T @ hidden[chunk]
            if bias_grad is not None:
                bias_grad += logits.sum(0)
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        ctx.dtype = hidden.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Of one dimension, so that a factor in float32 is not rounded to what it multiplies.
        factor = gradient.reshape(1)
        saved = ctx.saved_tensors
        return *(
            None if one is None else torch.mul(one, factor, out=torch.empty_like(one, dtype=ctx.dtype)) for one in saved
        ), *(None,) * 4


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)  # autocast leaves float64 as it is


def _liger(wanted: bool | None, hidden: Tensor) -> Callable[..., Tensor] | None:
    if wanted is None:
        # Liger computes nothing for a weight whose input wants no gradient.
        wanted = hidden.is_cuda and hidden.requires_grad and find_spec("liger_kernel") is not None
    if not wanted:
        return None
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as fused

    found: Callable[..., Tensor] = fused
    return found
