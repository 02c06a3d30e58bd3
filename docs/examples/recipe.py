"""A full fine-tune under one budget: weights, gradients, optimizer state and activations.

python docs/examples/recipe.py
"""

import torch
from torch import nn

import offload

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
width, depth, words = (2048, 16, 32000) if device.type != "cpu" else (64, 6, 16384)


class Block(nn.Module):
    """A layer with norm, MLP and residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape that ends in the width."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: ``[batch, length]``; the result is the loss."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), tokens.flatten())


model = Model()  # on the CPU: prepare() moves what belongs on the device
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
weights = sum(parameter.nbytes for parameter in model.parameters())
tokens = torch.randint(words, (1, 8), device=device)

# Weights, gradients and AdamW's state take 4 times the weights; here is less.
with offload.prepare(model, optimizer, memory_budget=3 * weights, device=device, min_bytes=0) as prepared:
    for number in range(6):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number}: loss {loss.item():.4f}, {prepared.state}")
    print(prepared.plan)
    assert prepared.state == "following"
    assert prepared.recipe.optimizer != "resident"
