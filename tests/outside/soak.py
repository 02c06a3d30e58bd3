"""Many small steps of changing shape: memory and the number of objects have to stay where they are.

Steps in the context, with module hooks and with streamed weights take turns. Now and then one is only a forward, runs
without gradients, or fails.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import statistics
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.device.select import get_backend
from offload.host.pool import get_host_pool

WIDTH, LAYERS, MOST_TOKENS = 64, 5, 96
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

KEYS = ("step", "device_bytes", "pinned_bytes", "used_bytes", "process_bytes", "objects", "blocks")
"""What is measured: memory in use on the device (0 on the CPU), the pool's, what of that is in use, the process's; how
many objects Python's collector knows, and how many pieces of memory Python has handed out."""
Samples = dict[str, "array[int]"]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return y


def soak(device: torch.device, steps: int, samples: int, say: Callable[[dict[str, int]], None]) -> Samples:
    """Run ``steps`` steps, and measure ``samples`` times, at equal distances; ``say`` hears of each."""
    torch.manual_seed(0)
    draw = random.Random(0)
    found = {key: array("q", bytes(8 * samples)) for key in KEYS}  # made at once, so that keeping them takes no memory
    with contextlib.ExitStack() as stack:
        turns = [_context_steps(device), _hook_steps(device), stack.enter_context(_streamed_steps(device))]
        for step in range(1, steps + 1):
            tokens = MOST_TOKENS if step <= len(turns) else draw.randint(1, MOST_TOKENS)
            x = torch.randn(2, tokens, WIDTH, device=device)
            turns[step % len(turns)](x, {7: "forward", 8: "no_grad", 9: "error"}.get(step % 50, "step"))
            del x
            number = step * samples // steps
            if number > (step - 1) * samples // steps:
                now = _measure(device, step)
                for key in KEYS:
                    found[key][number - 1] = now[key]
                say(now)
    return found


def slope(samples: Samples, key: str) -> float:
    """Growth per 1,000 steps over the second half: the median of the slopes between all pairs (Theil and Sen)."""
    steps, values = samples["step"], samples[key]
    later = range(len(steps) // 2, len(steps))
    return statistics.median(
        1000 * (values[b] - values[a]) / (steps[b] - steps[a]) for a in later for b in later if a < b
    )


def _measure(device: torch.device, step: int) -> dict[str, int]:
    gc.collect()
    backend = get_backend(device)
    for stream in (backend.compute_stream(), *backend.copy_streams):
        stream.synchronize()
    pool = get_host_pool(backend)
    for _ in range(2):  # the pool sees that buffers are free again when it is asked for another
        pool.give(pool.take(512), backend.compute_stream().record_event())
    resident_pages = Path("/proc/self/statm").read_text().split()[1]
    return {
        "step": step,
        "device_bytes": torch.cuda.memory_allocated() if device.type == "cuda" else 0,
        "pinned_bytes": pool.pinned_bytes,
        "used_bytes": pool.used_bytes,
        "process_bytes": int(resident_pages) * PAGE_BYTES,
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
    }


Step = Callable[[torch.Tensor, str], None]


class _MeantError(Exception):
    """What a step fails with on purpose."""


def _model(device: torch.device) -> tuple[nn.ModuleList, torch.optim.Optimizer]:
    layers = nn.ModuleList(_Block() for _ in range(LAYERS)).to(device)
    return layers, torch.optim.SGD(layers.parameters(), lr=1e-4)


def _train(
    forward: Callable[[torch.Tensor, bool], torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor, what: str
) -> None:
    optimizer.zero_grad()
    with contextlib.suppress(_MeantError), torch.set_grad_enabled(what != "no_grad"):
        loss = forward(x, what == "error").square().mean()
        if what == "step":
            loss.backward()
            optimizer.step()


def _run_layers(layers: nn.ModuleList, x: torch.Tensor, fail: bool) -> torch.Tensor:
    for number, layer in enumerate(layers):
        x = layer(x)
        if fail and number == 2:
            raise _MeantError
    return x


def _context_steps(device: torch.device) -> Step:
    layers, optimizer = _model(device)
    context, sync = offload.get_cpu_offload_context(True, 2, LAYERS, min_bytes=1, device=device)

    def forward(x: torch.Tensor, fail: bool) -> torch.Tensor:
        for number, layer in enumerate(layers):
            with context:
                x = layer(x)
                if fail and number == 2:
                    raise _MeantError
            x = sync(x)
        return x

    return lambda x, what: _train(forward, optimizer, x, what)


def _hook_steps(device: torch.device) -> Step:
    layers, optimizer = _model(device)

    def step(x: torch.Tensor, what: str) -> None:
        with offload.offload_layers(layers, 2, min_bytes=1):
            _train(lambda x, fail: _run_layers(layers, x, fail), optimizer, x, what)

    return step


@contextlib.contextmanager
def _streamed_steps(device: torch.device) -> Iterator[Step]:
    layers, optimizer = _model(torch.device("cpu"))
    with offload.stream_weights(layers, device):
        yield lambda x, what: _train(lambda x, fail: _run_layers(layers, x, fail), optimizer, x, what)


def record(samples: Samples) -> dict[str, Any]:
    """Values in the middle and at the end, and the growth per 1,000 steps between."""
    keys = KEYS[1:]
    middle = len(samples["step"]) // 2
    return {
        "steps": samples["step"][-1],
        "growth_per_1000_steps": {key: round(slope(samples, key), 2) for key in keys},
        "middle": {key: samples[key][middle] for key in keys},
        "end": {key: samples[key][-1] for key in keys},
    }
