"""Replay a whole training step, optimizer included, as one CUDA graph, with 4 of 12 layers offloaded.

Each replay trains on a new batch. A copy of the model trains beside it, eagerly and with everything on the device:
all parameters are the same, bit for bit.

python docs/examples/cuda_graphs.py
"""

import copy
import os
import time

import torch
from torch import nn

import offload

REQUIRES = "cuda"
LAYERS, OFFLOADED, WARMUP, REPLAYS = 12, 4, 3, 10
HIDDEN, HEADS, BATCH, TOKENS = 1024, 16, 4, 1024

# To compare bit by bit, kernels must add in the same order each time. Read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch.use_deterministic_algorithms(True)

torch.manual_seed(0)
with torch.device("cuda"):
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(LAYERS)
    ).to(torch.bfloat16)
    batches = torch.randn(WARMUP + REPLAYS, BATCH, TOKENS, HIDDEN, dtype=torch.bfloat16)
reference = copy.deepcopy(layers)

# capturable=True keeps the optimizer's step count on the device, where a replay can advance it.
optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-4, capturable=True)
reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-4, capturable=True)


def train_step(layers, optimizer, x):
    """Forward, backward and update; returns the loss without its graph."""
    optimizer.zero_grad(set_to_none=True)
    y = x
    for layer in layers:
        y = layer(y)
    loss = y.float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


handle = offload.offload_layers(layers, num_layers=OFFLOADED)
static_x = torch.empty_like(batches[0])  # every replay reads its batch here
stream = torch.cuda.Stream()  # a graph cannot be captured on the default stream

# 1. Warm up: host memory gets pinned, the optimizer gets its state, kernels get loaded. These are real steps.
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for x in batches[:WARMUP]:
        static_x.copy_(x)
        train_step(layers, optimizer, static_x)
torch.cuda.current_stream().wait_stream(stream)

# 2. Capture: the step is recorded and not run.
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    static_loss = train_step(layers, optimizer, static_x)

# 3. Replay with new values, and compare.
for x in batches[:WARMUP]:
    train_step(reference, reference_optimizer, x)
for number, x in enumerate(batches[WARMUP:]):
    static_x.copy_(x)
    graph.replay()
    expected = train_step(reference, reference_optimizer, x)
    identical = all(map(torch.equal, layers.parameters(), reference.parameters()))
    print(f"replay {number}: loss {static_loss.item():.6f}, parameters identical to eager training: {identical}")
    assert torch.equal(static_loss, expected)
    assert identical


def milliseconds(run, steps=10):
    """Time of one run, from several in a row."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


eager_ms = milliseconds(lambda: train_step(reference, reference_optimizer, x))
replay_ms = milliseconds(graph.replay)
print(f"\n{'eager, everything on the device':<34}{eager_ms:6.1f} ms per step")
print(f"{f'graph, {OFFLOADED} of {LAYERS} layers offloaded':<34}{replay_ms:6.1f} ms per step\n")
print(handle.stats())  # of the warm-up and the capture: a replay runs no Python
