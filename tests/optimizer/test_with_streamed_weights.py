"""Optimizers of streamed layers, which step on the host: their state may be in float32, too."""

from __future__ import annotations

import torch
from lab import Lab
from models import build, loss_of
from torch import nn

from offload import stream_optimizer, stream_weights

LAYERS = 3
STEPS = 4


def backward(layers: nn.ModuleList, x: torch.Tensor) -> None:
    for layer in layers:
        x = layer(x)
    loss_of(x).backward()


def in_float32(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Steps on the host, in chunks that are converted."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    stream_optimizer(optimizer, state_dtype=torch.float32, resident_bytes="1TiB", chunk_bytes="64KiB")
    return optimizer


def test_layers_step_in_float32_beside_backward(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    layers, x = layers.to(torch.bfloat16), x.to(torch.bfloat16)
    reference, _ = build("decoder", LAYERS, lab.device)
    reference = reference.to(torch.bfloat16)
    wide = [nn.Parameter(parameter.detach().cpu().float()) for parameter in reference.parameters()]
    optimizer = torch.optim.AdamW(wide, lr=1e-2, fused=True)
    with stream_weights(layers, lab.device, step_in_backward=in_float32) as streamed:
        for _ in range(STEPS):
            backward(layers, x)
        entries = [entry for one in streamed.optimizers for entry in one.state.values()]
        assert {entry["exp_avg"].dtype for entry in entries} == {torch.float32}
        assert streamed.stats().early_steps == LAYERS * STEPS
    for _ in range(STEPS):
        reference.zero_grad()
        backward(reference, x)
        for parameter, copied in zip(reference.parameters(), wide, strict=True):
            copied.data.copy_(parameter)
            copied.grad = parameter.grad.cpu().float()
        optimizer.step()
        for parameter, copied in zip(reference.parameters(), wide, strict=True):
            parameter.data.copy_(copied)
    pairs = zip(reference.parameters(), layers.parameters(), strict=True)
    assert all(torch.equal(one.cpu(), other) for one, other in pairs)
