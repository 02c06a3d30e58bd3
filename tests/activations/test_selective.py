"""Layers that use PyTorch's selective checkpointing: right gradients, and what PyTorch hands to hooks is offloaded."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from lab import Lab
from models import DecoderBlock, assert_same, build, step_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import offload

LAYERS = 4
PRODUCTS = [torch.ops.aten.mm.default]
POLICIES = {
    "whole layers": None,
    "offload": {"*": "offload"},
    "recompute": {"*": "recompute"},
    "products are offloaded": {"mm": "offload", "*": "recompute"},
}


class Selective(nn.Module):
    """Checkpoints what is in it, and keeps the results of its products."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = DecoderBlock()
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
        result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts, **self.options)
        return result


# PyTorch 2.14 and later say that hooks around do not see what is kept, and that they will.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES.keys())
def test_the_input_is_offloaded(policies: dict[str, str] | None, lab: Lab) -> None:
    layers, x = build(Selective, LAYERS, lab.device)
    expected = step_gradients(layers, x)
    lab.adverse()
    with offload.offload_layers(layers, 2, device=lab.device, min_bytes=0, policies=policies) as handle:
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
        assert handle.stats().offloaded_bytes > 0
        assert not handle.stats().late_reloads


@pytest.mark.skipif("respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters, reason="torch 2.14")
def test_what_pytorch_hands_to_hooks_is_offloaded(lab: Lab) -> None:
    moved = []
    for respects in (False, True):
        layers, x = build(lambda respects=respects: Selective(respect_saved_tensors_hooks=respects), LAYERS, lab.device)
        expected = step_gradients(layers, x)
        with offload.offload_layers(layers, 2, device=lab.device, min_bytes=0) as handle:
            assert_same(expected, step_gradients(layers, x))
            moved.append(handle.stats().offloaded_bytes)
    assert moved[1] > moved[0]


@pytest.mark.parametrize("kept", [False, True])
def test_changes_are_seen_of_what_was_packed_inside_of_a_dispatch_mode(kept: bool, lab: Lab) -> None:
    """As PyTorch's selective checkpointing packs, from version 2.14 on."""
    packed = []

    class Packs(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function in PRODUCTS:
                with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                    alias = result.detach()
                pack = torch._C._autograd._top_saved_tensors_default_hooks(True)[0]
                packed.append(pack(alias))
            return result

    weight = torch.randn(8, 8, device=lab.device, requires_grad=True)
    context, sync = offload.get_cpu_offload_context(True, 1, 3, min_bytes="1MiB" if kept else 0, device=lab.device)
    with context:
        with Packs():
            product = torch.randn(4, 8, device=lab.device) @ weight
        y = product * 2
    sync(y)
    assert torch.equal(packed[0].unpack(), product)
    with torch.no_grad():
        product.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        packed[0].unpack()
