"""Layers that are compiled, wholly or in part, with treatments: the same bits as compiled layers without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lab import Lab
from models import GptBlock, assert_same, build, step_gradients
from torch import nn

import offload

# The compiler's own imports, its advice on float32, and what it does to inputs that are no leaves.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

LAYERS = 3
TREATMENTS: dict[str, dict[str, str]] = {
    "keep": {"*": "keep"},
    "offload": {"*": "offload"},
    "recompute": {"*": "recompute"},
    "recompute, the input travels": {"input": "offload", "*": "recompute"},
}


def offloaded(layers: Any, lab: Lab, treatments: dict[str, str], **options: Any) -> Any:
    return offload.offload_layers(layers, 1, treatments=treatments, min_bytes=1, device=lab.device, **options)


class PartCompiled(nn.Module):
    """A layer of which a submodule is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.block = GptBlock()
        self.mlp = torch.compile(self.block.mlp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(self.block(x))
        return y.sin() * x


def test_compiled_submodules(lab: Lab) -> None:
    layers, x = build(PartCompiled, LAYERS, lab.device)
    expected = step_gradients(layers, x)
    lab.adverse()
    for treatments in (TREATMENTS["offload"], TREATMENTS["recompute"]):
        with offloaded(layers, lab, treatments) as handle:
            for _ in range(3):
                assert_same(expected, step_gradients(layers, x))
            assert "block.qkv: addmm" in handle.regions(0)
