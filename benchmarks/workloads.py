"""Stacks of layers that the benchmarks and GPU tests measure."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import Model


class DecoderBlock(nn.Module):
    """Pre-norm decoder block: fused qkv, causal attention on permuted views, SwiGLU; no biases."""

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.ffn_norm = nn.Parameter(torch.ones(hidden))
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[batch, tokens, hidden]``; the result has the same shape."""
        batch, tokens, hidden = x.shape
        y = F.rms_norm(x, (hidden,), self.attention_norm)
        q, k, v = self.qkv(y).view(batch, tokens, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, hidden))
        y = F.rms_norm(x, (hidden,), self.ffn_norm)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class NormMlpBlock(nn.Module):
    """LayerNorm, Linear to four times the width, GELU, Linear back, residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[batch, tokens, hidden]``; the result has the same shape."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MeanSquare(nn.Module):
    """The loss of a stack."""

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        """``output``: any shape; the result is a scalar."""
        return loss_of(output)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Mean of the squared output, in float32."""
    return output.float().square().mean()


@dataclass(frozen=True)
class Workload:
    """A stack of equal layers and their input.

    The loss is the mean of the squared output in float32, unless told otherwise, the input requires a gradient, and
    gradients of parameters exist before the step, so that a step allocates nothing but activations and workspace.
    """

    make_layer: Callable[[], nn.Module]
    layers: int
    shape: tuple[int, int, int]  # batch, tokens, hidden
    dtype: torch.dtype = torch.bfloat16
    make_loss: Callable[[], nn.Module] = MeanSquare

    def build(self, device: torch.device, *, compiled: str | None = None, loss_is_a_layer: bool = False) -> Model:
        """The layers one after the other, each ``compiled`` by a backend of ``torch.compile`` if there is one.

        The loss may count as one more layer, as a model's head does.
        """
        torch.manual_seed(0)
        with torch.device(device):
            module = nn.ModuleList(self.make_layer() for _ in range(self.layers)).to(self.dtype)
            x = torch.randn(self.shape, dtype=self.dtype).requires_grad_()
            loss_layer = self.make_loss().to(self.dtype)
        called: list[nn.Module] = [torch.compile(one, backend=compiled) if compiled else one for one in module]

        def loss() -> torch.Tensor:
            y = x
            for layer in called:
                y = layer(y)
            found: torch.Tensor = loss_layer(y)
            return found

        model = Model(module, [*called, loss_layer] if loss_is_a_layer else called, loss, (x,))
        model.checkpoints = len(called)
        return model


def reference_decoder(*, small: bool = False) -> Workload:
    """20 decoder blocks of a 7B model, 2 × 4096 tokens, bf16; ``small`` fits a CPU test."""
    if small:
        return Workload(lambda: DecoderBlock(64, 172, 4), 20, (2, 64, 64), torch.float32)
    return Workload(lambda: DecoderBlock(4096, 11008, 32), 20, (2, 4096, 4096))


def norm_mlp(*, small: bool = False) -> Workload:
    """20 LayerNorm-MLP blocks, 2 × 4096 tokens, hidden 4096, bf16; ``small`` fits a CPU test."""
    if small:
        return Workload(lambda: NormMlpBlock(64), 20, (2, 64, 64), torch.float32)
    return Workload(lambda: NormMlpBlock(4096), 20, (2, 4096, 4096))
