"""What recording and recomputing take of the host's time, beside PyTorch's checkpointing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import offload
from benchmarks.instruments import timed


def host_cost(device: torch.device, operations: int = 100, repeats: int = 50) -> dict[str, dict[str, float]]:
    """Host seconds per operation of a layer of small tensors, forward and backward; the least of many runs."""
    x = torch.rand(64, device=device, requires_grad=True)

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(operations // 2):
                x = torch.tanh(x) * x
            return x

    def policy(_context: object, _operation: object, *_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    layer = Layer()
    selective = partial(create_selective_checkpoint_contexts, policy)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "nothing": lambda: layer(x),
        "checkpoint": lambda: checkpoint(layer, x, use_reentrant=False),
        "selective checkpoint": lambda: checkpoint(layer, x, use_reentrant=False, context_fn=selective),
        "regions": lambda: layer(x),
    }
    found = {}
    for name, forward in ways.items():
        with ExitStack() as stack:
            if name == "regions":
                everything = {"*": "recompute"}
                stack.enter_context(
                    offload.offload_layers(
                        [layer, torch.nn.Identity()], 0, policies=everything, min_bytes=1, device=device
                    )
                )
            least = [math.inf, math.inf]
            for _ in range(repeats):
                timed(lambda: None, device)
                begin = time.perf_counter()
                y = forward()
                least[0] = min(least[0], time.perf_counter() - begin)
                loss = y.sum()
                timed(lambda: None, device)
                begin = time.perf_counter()
                loss.backward()
                least[1] = min(least[1], time.perf_counter() - begin)
        found[name] = {"forward_s": least[0] / operations, "backward_s": least[1] / operations}
        print(f"{name:22s} {1e6 * least[0] / operations:6.1f} {1e6 * least[1] / operations:6.1f} us per operation")
    return found
