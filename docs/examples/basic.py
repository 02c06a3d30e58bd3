"""Train a transformer with 4 of its 12 layers offloaded, and check that nothing else changed.

python docs/examples/basic.py
"""

import os
import statistics
import time

import torch
from torch import nn

import offload

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for reproducible gradients; read when CUDA starts
LAYERS, OFFLOADED = 12, 4

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
if device.type == "cpu":
    hidden, heads, batch, tokens, dtype = 64, 4, 4, 128, torch.float32
else:
    hidden, heads, batch, tokens, dtype = 2048, 16, 4, 4096, torch.bfloat16

torch.manual_seed(0)
with torch.device(device):
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, dropout=0.0, batch_first=True) for _ in range(LAYERS)
    ).to(dtype)
    x = torch.randn(batch, tokens, hidden, dtype=dtype)


def step():
    """Forward and backward, everything on the device."""
    y = x
    for layer in layers:
        y = layer(y)
    y.float().square().mean().backward()


context, sync = offload.get_cpu_offload_context(
    enabled=True,
    num_layers=OFFLOADED,
    model_layers=LAYERS,
    min_bytes=1 << 17,  # smaller tensors are kept on the device
)


def offloaded_step():
    """The same, with activations offloaded and reloaded meanwhile."""
    y = x
    for layer in layers:
        with context:  # what autograd saves in here moves to the host
            y = layer(y)
        y = sync(y)  # tells the library when this layer's backward begins
    y.float().square().mean().backward()


def measure(step):
    """Median seconds of a step, and its peak of device memory in bytes."""
    step()  # gives every parameter its gradient, and pins host memory
    with offload.memory_meter(device) as meter:
        step()
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        step()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), meter.peak_bytes


def gradients(step):
    """All gradients of one step."""
    # Fused attention may add its gradients in any order otherwise.
    torch.use_deterministic_algorithms(True)
    for parameter in layers.parameters():
        parameter.grad.zero_()
    step()
    torch.use_deterministic_algorithms(False)
    return [parameter.grad.clone() for parameter in layers.parameters()]


kept_s, kept_bytes = measure(step)
offloaded_s, offloaded_bytes = measure(offloaded_step)
print(f"{LAYERS} layers on {device.type}        step    activation peak")
print(f"all on the device   {kept_s * 1e3:7.1f} ms   {kept_bytes / 2**20:9.1f} MiB")
print(f"{OFFLOADED} of them offloaded {offloaded_s * 1e3:7.1f} ms   {offloaded_bytes / 2**20:9.1f} MiB")

assert offloaded_bytes < 0.8 * kept_bytes
assert all(map(torch.equal, gradients(step), gradients(offloaded_step)))
print("\ngradients are bit-identical\n")
print(context.stats())
