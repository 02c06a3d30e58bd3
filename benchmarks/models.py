"""What the benchmarks run a training step of, with the gradients' memory and checkpointing of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks.instruments import deterministic

SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
"""Llama-3.1-8B's."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


class Model:
    """A model on a device."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],  # what forward calls in turn, and a library that offloads is given
        loss: Callable[[], torch.Tensor],  # one forward
        inputs: tuple[torch.Tensor, ...] = (),  # what else requires a gradient
        *,
        has_gradients: bool = True,  # whether the gradients are there before the first step
    ) -> None:
        self.module, self.layers, self.loss = module, list(layers), loss
        self.checkpoints = len(self.layers)  # how many of the layers are checkpointed
        self.leaves = [*inputs, *module.parameters()]
        for leaf in self.leaves if has_gradients else ():
            leaf.grad = torch.zeros_like(leaf)

    def checkpointing(self, *, on_host: bool = False) -> Any:
        """Every layer is recomputed in backward; its input waits on the device, or is saved on the host."""
        return replaced(self.layers, self.checkpoints, on_host=on_host)

    def step(self) -> None:
        """One forward and backward."""
        self.loss().backward()

    def gradients(self, step: Callable[[], object]) -> list[torch.Tensor]:
        """The gradients of one step with deterministic kernels, as the leaves hold them."""
        for leaf in self.leaves:
            if leaf.grad is not None:
                leaf.grad.zero_()
        with deterministic():
            step()
        return [leaf.grad for leaf in self.leaves if leaf.grad is not None]


@contextmanager
def replaced(
    layers: Sequence[nn.Module],
    checkpoints: int = 0,
    context_fn: Any = None,
    backend: str | None = None,
    *,
    on_host: bool = False,
) -> Iterator[None]:
    """PyTorch's checkpointing around the forward of the first layers; each layer's forward compiled by a backend."""
    options = {"use_reentrant": False} | ({} if context_fn is None else {"context_fn": context_fn})

    def run(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    def run_in_checkpoint(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    def run_on_host(forward: Any, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return run_in_checkpoint(forward, *args, **kwargs)

    ways: list[Any] = [run, run_on_host if on_host else run_in_checkpoint]
    if backend is not None:
        ways = [torch.compile(one, backend=backend) for one in ways]
    changed = layers[:checkpoints] if backend is None else layers
    before = [vars(layer).get("forward") for layer in changed]
    for number, layer in enumerate(changed):
        vars(layer)["forward"] = partial(ways[number < checkpoints], layer.forward)
    try:
        yield
    finally:
        for layer, forward in zip(changed, before, strict=True):
            vars(layer)["forward"] = forward
            if forward is None:
                del vars(layer)["forward"]
        if backend is not None:
            torch.compiler.reset()  # few kinds of layers have code at once


class Llama(Model):
    """Hugging Face's Llama with random weights, and one sequence of random tokens; checkpointing is its own.

    ``config`` are arguments of ``LlamaConfig``.
    """

    def __init__(
        self, device: torch.device, *, tokens: int, dtype: torch.dtype, has_gradients: bool = True, **config: Any
    ) -> None:
        self.model, self.device = llama(device, dtype, **config), device
        self.use(tokens)
        super().__init__(self.model, self.model.model.layers, self._loss, has_gradients=has_gradients)

    def use(self, tokens: int) -> None:
        """Train on one sequence of this length from now on."""
        drawn = torch.randint(
            self.model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(tokens)
        )
        self.tokens = drawn.to(self.device)

    def _loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=self.tokens, labels=self.tokens).loss
        return loss

    @contextmanager
    def checkpointing(self, *, on_host: bool = False) -> Iterator[None]:
        checkpointing_method(self.model, "enable")(offload=on_host)
        try:
            yield
        finally:
            checkpointing_method(self.model, "disable")()


class Training(Llama):
    """Llama-8B's shape with its optimizer, and the loss in chunks, since its logits would not fit beside that."""

    def __init__(
        self,
        device: torch.device,
        tokens: int,
        *,
        small: bool,
        shape: dict[str, int] | None = None,
        dtype: torch.dtype | None = None,
        has_gradients: bool = True,
    ) -> None:
        dtype = dtype or (torch.float32 if small else torch.bfloat16)
        shape = shape or (SMALL if small else SHAPE)
        super().__init__(device, tokens=tokens, dtype=dtype, has_gradients=has_gradients, **shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def _loss(self) -> torch.Tensor:
        hidden = self.model.model(input_ids=self.tokens).last_hidden_state[0, :-1]
        labels, chunk = self.tokens[0, 1:], max(16, self.tokens.numel() // 32)
        pairs = zip(hidden.split(chunk), labels.split(chunk), strict=True)
        losses = [checkpoint(self._chunk_loss, *pair, use_reentrant=False) for pair in pairs]
        return torch.stack(losses).sum() / len(labels)

    def _chunk_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model.lm_head(hidden).float(), labels, reduction="sum")

    def step(self) -> None:
        super().step()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # gradients stay where they are, so that a step allocates none


def llama(device: torch.device, dtype: torch.dtype, **config: Any) -> Any:
    """A causal model of ``LlamaConfig``'s arguments on a device, in training mode."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            LlamaConfig(**config, use_cache=False), dtype=dtype, attn_implementation="sdpa"
        ).train()


def checkpointing_method(model: Any, verb: str) -> Callable[..., object]:
    """``activation_checkpointing_enable``, which transformers called ``gradient_checkpointing_enable`` before."""
    method: Callable[..., object] = getattr(model, f"activation_checkpointing_{verb}", None) or getattr(
        model, f"gradient_checkpointing_{verb}"
    )
    return method
