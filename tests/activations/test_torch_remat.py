"""What Meta's ``torch_remat`` keeps of a layer is offloaded with the layer, and reloaded exactly."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_remat as remat
from lab import Lab
from models import BATCH, TOKENS, WIDTH, assert_same, build, step_gradients
from torch import nn

import offload

INNER = 48
LAYERS = 4
POLICIES = {
    "whole layers": None,
    "offload": {"*": "offload"},
    "recompute": {"*": "recompute"},
    "products are offloaded": {"*mm": "offload", "*": "recompute"},
}


class Inner(nn.Module):
    """A gated MLP whose ``up`` is a region that is kept; the rest is recomputed."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.keeps = keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        up = self.up
        if self.keeps:
            up = remat.region(self.up, "up", recompute=False)
        wide = up(y)
        if self.keeps:
            remat.recompute_needs_tensor(wide)
        result: torch.Tensor = x + self.down(F.silu(self.gate(y)) * wide)
        return result


class Layer(nn.Module):
    """Checkpoints what is in it."""

    def __init__(self, *, keeps: bool = True) -> None:
        super().__init__()
        self.inner = Inner(keeps=keeps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = remat.checkpoint(region_name="layer")(self.inner)(x)
        return result


def moved_bytes(layer: Callable[[], nn.Module], lab: Lab, policies: dict[str, str] | None) -> int:
    """Bytes offloaded in a step, whose gradients are those without offloading."""
    layers, x = build(layer, LAYERS, lab.device)
    expected = step_gradients(layers, x)
    lab.adverse()
    with offload.offload_layers(layers, 2, policies=policies, min_bytes=0, device=lab.device) as handle:
        moved = before = 0
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
            moved, before = handle.stats().offloaded_bytes, moved
        assert handle.stats().reloaded_bytes == moved
        assert not handle.stats().late_reloads
    return moved - before


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES.keys())
def test_a_region_that_is_kept_is_offloaded(policies: dict[str, str] | None, lab: Lab) -> None:
    tokens = BATCH * TOKENS
    inputs = 4 * tokens * WIDTH  # that of the first layer is a leaf
    kept = 4 * tokens * INNER
    assert moved_bytes(functools.partial(Layer, keeps=False), lab, policies) == inputs
    if policies == POLICIES["recompute"]:
        # The layer would have to run again while torch_remat runs its part again, which it refuses.
        with pytest.raises(NotImplementedError, match="nested torch_remat"):
            moved_bytes(Layer, lab, policies)
        return
    assert moved_bytes(Layer, lab, policies) == inputs + 2 * kept
