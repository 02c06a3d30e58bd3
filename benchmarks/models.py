"""What the suite runs a training step of: stacks of layers, and a Hugging Face model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks.instruments import deterministic
from benchmarks.workloads import Workload, loss_of


class Model:
    """A model on a device.

    Args:
        module: Holds the parameters.
        inputs: What else requires a gradient.
    """

    has_gradients = True
    """Whether the gradients are there before the first step."""

    def __init__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...] = ()) -> None:
        self.module = module
        self.leaves = [*inputs, *module.parameters()]
        for leaf in self.leaves if self.has_gradients else ():
            leaf.grad = torch.zeros_like(leaf)

    @property
    def layers(self) -> list[nn.Module]:
        """What forward calls in turn, and a library that offloads is given."""
        raise NotImplementedError

    def loss(self) -> torch.Tensor:
        """One forward."""
        raise NotImplementedError

    @contextmanager
    def checkpointing(self, *, on_host: bool = False) -> Iterator[None]:
        """Every layer is recomputed in backward; its input waits on the device, or is saved on the host."""
        raise NotImplementedError
        yield

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


class Stack(Model):
    """A workload's layers, called one after the other, and its loss.

    Args:
        workload: The layers and their input.
        device: Where they are.
        compiled: Compile each layer by this backend of ``torch.compile``.
        loss_is_a_layer: The loss counts as one more layer, as a model's head does.
    """

    def __init__(
        self, workload: Workload, device: torch.device, *, compiled: str | None = None, loss_is_a_layer: bool = False
    ) -> None:
        layers, self._x = workload.build(device)
        super().__init__(layers, (self._x,))
        self._called: list[nn.Module] = list(layers)
        if compiled:
            self._called = [torch.compile(layer, backend=compiled) for layer in layers]
        self._loss = MeanSquare()
        self._loss_is_a_layer = loss_is_a_layer

    @property
    def layers(self) -> list[nn.Module]:
        return [*self._called, self._loss] if self._loss_is_a_layer else self._called

    def loss(self) -> torch.Tensor:
        y = self._x
        for layer in self._called:
            y = layer(y)
        loss: torch.Tensor = self._loss(y)
        return loss

    @contextmanager
    def checkpointing(self, *, on_host: bool = False) -> Iterator[None]:
        called = self._called
        self._called = [Checkpointed(layer, on_host=on_host) for layer in called]
        try:
            yield
        finally:
            self._called = called


class MeanSquare(nn.Module):
    """The loss of a stack."""

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        """``output``: any shape; the result is a scalar."""
        return loss_of(output)


class Checkpointed(nn.Module):
    """A layer that saves only its input, which an offload context around it can move."""

    def __init__(self, layer: nn.Module, *, on_host: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self._on_host = on_host

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: what the layer takes; the result is the layer's."""
        if not self._on_host:
            return self._checkpoint(x)
        with save_on_cpu(pin_memory=True):
            return self._checkpoint(x)

    def _checkpoint(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return output


class Llama(Model):
    """Hugging Face's Llama with random weights, and random tokens; checkpointing is its own.

    Args:
        device: Where it is.
        tokens: Length of the one sequence.
        dtype: Of the weights.
        config: Arguments of ``LlamaConfig``.
    """

    def __init__(self, device: torch.device, *, tokens: int, dtype: torch.dtype, **config: Any) -> None:
        self._model = llama(device, dtype, **config)
        self._tokens = torch.randint(config["vocab_size"], (1, tokens), device=device)
        super().__init__(self._model)

    @property
    def layers(self) -> list[nn.Module]:
        return list(self._model.model.layers)

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self._model(input_ids=self._tokens, labels=self._tokens).loss
        return loss

    @contextmanager
    def checkpointing(self, *, on_host: bool = False) -> Iterator[None]:
        checkpointing_method(self._model, "enable")(offload=on_host)
        try:
            yield
        finally:
            checkpointing_method(self._model, "disable")()


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
