"""Say how much memory there is: the first two steps measure, the others follow a plan.

python docs/examples/budget.py
"""

import logging

import torch
from torch import nn

import offload

logging.basicConfig(level=logging.INFO, format="%(message)s")
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
layers, width, tokens = (24, 4096, 8192) if device.type != "cpu" else (6, 128, 1024)


class Block(nn.Module):
    """A layer with norm, MLP and residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape that ends in the width."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(*(Block() for _ in range(layers))).to(device, torch.bfloat16 if device.type != "cpu" else None)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(tokens, width, device=device, dtype=next(model.parameters()).dtype)
budget = "9GiB" if device.type != "cpu" else "14MiB"

with offload.offload_layers(model, memory_budget=budget, min_bytes="1MiB" if device.type != "cpu" else 1) as handle:
    for number in range(6):
        with offload.memory_meter(device) as meter:
            loss = model(x).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number}: loss {loss.item():.6f}, peak {meter.peak_bytes / 2**20:,.1f} MiB")
    print(handle.plan)
    assert handle.plan is not None
