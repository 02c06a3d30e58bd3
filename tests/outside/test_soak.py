"""Hundreds of small steps of changing shape: memory and the number of objects have to stay where they are."""

import contextlib
import gc
import random

import pytest
import torch
from lab import Lab
from models import NOTHING, WIDTH, Offloading, build, loss_of, offloading
from torch import nn

import offload

pytestmark = pytest.mark.slow

LAYERS, MOST_TOKENS = 5, 96
STEPS = 90
"""All that takes turns comes round after 30."""


class _MeantError(Exception):
    """What a step fails with on purpose."""


def train(layers: nn.ModuleList, x: torch.Tensor, offloaded: Offloading, optimizer: torch.optim.SGD, what: str) -> None:
    """A step, or one that fails in the second layer, or has no backward, or no gradients."""
    optimizer.zero_grad()
    with contextlib.suppress(_MeantError), torch.set_grad_enabled(what != "no_grad"):
        y = offloaded.forward(layers[:2], x)
        if what == "error":
            raise _MeantError
        loss = loss_of(offloaded.forward(layers[2:], y))
        if what == "step":
            loss.backward()
            optimizer.step()


def held(lab: Lab) -> dict[str, int]:
    """Bytes on the device and of pinned memory, pinned bytes in use, and how many objects Python's collector knows."""
    gc.collect()
    lab.drain()
    for _ in range(2):  # the pool sees that buffers are free again when it is asked for another
        lab.pool.give(lab.pool.take(512), lab.backend.compute_stream().record_event())
    device_bytes = torch.cuda.memory_allocated() if lab.device.type == "cuda" else 0
    pinned = {"pinned": lab.pool.pinned_bytes, "used": lab.pool.used_bytes}
    return {"device": device_bytes, **pinned, "objects": len(gc.get_objects())}


def test_nothing_grows(lab: Lab) -> None:
    draw, samples = random.Random(0), list[dict[str, int]]()
    models = [build("gpt", LAYERS, lab.device if number < 2 else torch.device("cpu"))[0] for number in range(3)]
    optimizers = [torch.optim.SGD(layers.parameters(), lr=1e-4) for layers in models]
    in_context = offloading(2, LAYERS, lab.device)
    with offload.stream_weights(models[2], lab.device):
        for step in range(1, STEPS + 1):
            if step % (STEPS // 3) == 1:
                draw.seed(0)  # the same sizes in each third, so that the pool has as many pieces at the end of each
            turn, what = step % 3, {7: "forward", 8: "no_grad", 9: "error"}.get(step % 10, "step")
            tokens = MOST_TOKENS if step <= 3 else draw.randint(1, MOST_TOKENS)
            x = torch.randn(2, tokens, WIDTH, device=lab.device)
            hooks = offload.offload_layers(models[1], 2, min_bytes=1) if turn == 1 else contextlib.nullcontext()
            with hooks:
                train(models[turn], x, in_context if turn == 0 else NOTHING, optimizers[turn], what)
            if step % (STEPS // 3) == 0:
                _ = in_context.stats  # reads how long waits took, whose events are held until then
                samples.append(held(lab))
    for what in ("device", "pinned", "used"):
        assert samples[1][what] == samples[2][what], what
    assert samples[2]["objects"] - samples[1]["objects"] < STEPS // 10
