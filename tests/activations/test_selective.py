"""What PyTorch's selective checkpointing keeps inside of layers is offloaded with them, and reloaded exactly."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_remat as remat
from lab import Lab
from models import (
    BATCH,
    TOKENS,
    WIDTH,
    Composed,
    DecoderBlock,
    GptBlock,
    Seen,
    assert_same,
    build,
    gradients,
    leaves_of,
    loss_of,
    step_gradients,
    through,
)
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import offload

LAYERS = 4
PRODUCTS = [torch.ops.aten.mm.default]
POLICIES = {
    "whole layers": None,
    "offload": {"*": "offload"},
    "recompute": {"*": "recompute"},
    "products are offloaded": {"*mm": "offload", "*": "recompute"},
    "products are recomputed": {"input": "offload", "*mm": "recompute"},
}


def selective(function: Callable[..., torch.Tensor], kept: Any = PRODUCTS, **options: Any) -> Any:
    context = functools.partial(create_selective_checkpoint_contexts, kept, **options)
    return functools.partial(checkpoint, function, use_reentrant=False, context_fn=context)


class Selective(nn.Module):
    """Checkpoints what is in it, and keeps the results of its products."""

    def __init__(self, inner: Callable[..., nn.Module] = DecoderBlock, kept: Any = PRODUCTS) -> None:
        super().__init__()
        self.inner = inner()
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = selective(self.inner, self.kept)(x)
        return result


def offloaded(layers: Any, lab: Lab, num_layers: int = 2, **options: Any) -> Any:
    return offload.offload_layers(layers, num_layers, device=lab.device, **{"min_bytes": 0, **options})


def moved_bytes(layer: Callable[[], nn.Module], lab: Lab, policies: dict[str, str] | None) -> int:
    """Bytes offloaded in a step, whose gradients are those without offloading."""
    layers, x = build(layer, LAYERS, lab.device)
    expected = step_gradients(layers, x)
    lab.adverse()
    with offloaded(layers, lab, policies=policies) as handle:
        moved = before = 0
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
            assert bool(handle.regions(0)) is bool(policies)  # learned in the first step
            moved, before = handle.stats().offloaded_bytes, moved
        assert handle.stats().reloaded_bytes == moved
        assert not handle.stats().late_reloads
    return moved - before


INPUT = 4 * BATCH * TOKENS * WIDTH
"""Bytes; that of the first layer is a leaf."""
PRODUCED = INPUT // WIDTH * (3 * WIDTH + WIDTH + 48 + 48 + WIDTH)
"""Of a layer."""


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES.keys())
def test_kept_results_are_offloaded(policies: dict[str, str] | None, lab: Lab) -> None:
    """What the user's own checkpointing keeps goes with its layer, whatever the policies of regions say."""
    assert moved_bytes(Selective, lab, policies) == INPUT + 2 * PRODUCED


def chain() -> nn.Module:
    """Products one after the other, whose results are all that is there between them."""
    weight = nn.Parameter(torch.eye(256) / 2)
    return Composed(lambda own, x: functools.reduce(torch.matmul, [own.weight] * 8, x), weight=weight)


def test_device_memory(lab: Lab) -> None:
    layers, _ = build(lambda: Selective(chain), 6, lab.device)
    x = torch.rand(1024, 256, device=lab.device, requires_grad=True)
    one = 4 * x.numel()

    def peak_bytes() -> int:
        with offload.memory_meter(lab.device) as meter:
            through(layers, x)
        return meter.peak_bytes

    assert peak_bytes() > 6 * 7 * one
    with offloaded(layers, lab, 4, min_bytes="1MiB"):
        assert peak_bytes() < 4 * 9 * one  # of two layers that stay, and of two whose copies may be on their way


def test_the_layer_itself_is_checkpointed(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    expected = step_gradients(layers, x)

    def step() -> None:
        y = x
        for layer in layers:
            y = selective(layer)(y)
        loss_of(y).backward()

    lab.adverse()
    for policies in POLICIES.values():
        with offloaded(layers, lab, policies=policies) as handle:
            for _ in range(3):
                assert_same(expected, gradients(leaves_of(layers, x), step))
            assert handle.stats().offloaded_bytes > 0


@pytest.mark.parametrize("inside", [False, True])
def test_a_policy_that_asks_for_offloading(inside: bool, lab: Lab) -> None:
    """Eager PyTorch recomputes what is to be offloaded; inside of layers that are offloaded it is offloaded."""
    choices = torch.utils.checkpoint.CheckpointPolicy

    def policy(context: Any, operation: Any, *_: object, **__: object) -> Any:
        return choices.MUST_CPU_OFFLOAD if operation in PRODUCTS else choices.PREFER_RECOMPUTE

    def products(step: Callable[[], list[torch.Tensor]]) -> int:
        with Seen() as seen:
            assert_same(expected, step())
        return seen.times["mm"]

    plain, x = build(DecoderBlock, LAYERS, lab.device)
    expected = step_gradients(plain, x)
    without = products(lambda: step_gradients(plain, x))
    layers, x = build(lambda: Selective(kept=policy), LAYERS, lab.device)
    recomputing = products(lambda: step_gradients(layers, x))
    assert recomputing > without
    lab.adverse()
    if inside:
        with offloaded(layers, lab) as handle:
            assert products(lambda: step_gradients(layers, x)) == without
            assert handle.stats().offloaded_bytes > 2 * x.nbytes
    else:
        assert products(lambda: step_gradients(layers, x)) == recomputing


@pytest.mark.skipif("respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters, reason="torch 2.14")
@pytest.mark.parametrize("respects", [None, False, True])
def test_hooks_that_pytorch_would_call_itself(respects: bool | None, lab: Lab) -> None:
    """The open layer takes what is kept, whatever PyTorch is told to do with hooks on saved tensors; no warning."""

    class Respects(Selective):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = selective(self.inner)(x, respect_saved_tensors_hooks=respects)
            return result

    layers, x = build(Respects, LAYERS, lab.device)
    expected = step_gradients(layers, x)
    moved = []
    lab.adverse()
    for one in (build(Selective, LAYERS, lab.device)[0], layers):
        with offloaded(one, lab) as handle:
            assert_same(expected, step_gradients(one, x))
            moved.append(handle.stats().offloaded_bytes)
    assert moved[0] == moved[1] > 2 * x.nbytes


@pytest.mark.slow
def test_everything_is_kept(lab: Lab) -> None:
    def keep_all(*_: object, **__: object) -> torch.utils.checkpoint.CheckpointPolicy:
        return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE

    layers, x = build(lambda: Selective(functools.partial(GptBlock, 0.0), keep_all), LAYERS, lab.device)
    expected = step_gradients(layers, x)
    lab.adverse()
    for policies in POLICIES.values():
        named = policies and {pattern.replace("mm", "addmm"): policy for pattern, policy in policies.items()}
        with offloaded(layers, lab, policies=named) as handle:
            for _ in range(3):
                assert_same(expected, step_gradients(layers, x))
                assert bool(handle.regions(0)) is bool(policies)


def test_evaluation_and_abandoned_graphs(lab: Lab) -> None:
    layers, x = build(Selective, LAYERS, lab.device)
    expected = step_gradients(layers, x)
    with offloaded(layers, lab) as handle:
        for _ in range(2):
            with torch.no_grad():
                layers[0](x)
            y = layers[0](x)
            del y
            handle._hooks.context.reset()
            assert_same(expected, step_gradients(layers, x))
    assert lab.pool.used_bytes == 0


def changing(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Changes what was kept after it was."""
    y = torch.bmm(x, x.mT)
    z = y.sin()
    with torch.no_grad():
        y.add_(1)
    return F.pad(z, (0, x.shape[-1] - z.shape[-1])) * x


@pytest.mark.parametrize("mutation", [False, True])
def test_what_is_kept_must_not_change(mutation: bool, lab: Lab) -> None:
    """Also where PyTorch would give back whatever is in its memory by then: that may be on the host."""
    layers, x = build(lambda: Composed(changing), LAYERS, lab.device)
    run = selective(layers[0], [torch.ops.aten.bmm.default], allow_cache_entry_mutation=mutation)
    with offloaded(layers, lab):
        loss = loss_of(run(x))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_profile_knows_what_is_kept(lab: Lab) -> None:
    layers, x = build(Selective, LAYERS, lab.device)
    profile = offload.profile_layers(layers, lambda: step_gradients(layers, x), min_bytes=1, device=lab.device)
    assert profile.layers[1].saved_bytes == INPUT + PRODUCED


INSIDE = 48


class Gated(nn.Module):
    """A gated MLP whose ``up`` is a region that is kept; the rest is recomputed."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, INSIDE), nn.Linear(WIDTH, INSIDE)
        self.down = nn.Linear(INSIDE, WIDTH)
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


def by_regions(*, keeps: bool = True) -> nn.Module:
    """Checkpoints what is in it."""
    return Composed(lambda own, x: remat.checkpoint(region_name="layer")(own.inner)(x), inner=Gated(keeps=keeps))


@pytest.mark.parametrize("policies", [*POLICIES.values()][:4], ids=[*POLICIES][:4])
def test_a_region_that_is_kept_is_offloaded(policies: dict[str, str] | None, lab: Lab) -> None:
    assert moved_bytes(functools.partial(by_regions, keeps=False), lab, policies) == INPUT
    if policies == POLICIES["recompute"]:
        # The layer would have to run again while torch_remat runs its part again, which it refuses.
        with pytest.raises(NotImplementedError, match="nested torch_remat"):
            moved_bytes(by_regions, lab, policies)
        return
    assert moved_bytes(by_regions, lab, policies) == INPUT + 2 * INPUT // WIDTH * INSIDE
