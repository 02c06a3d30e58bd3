"""Train a transformer whose weights are in host memory, and check that nothing else changed.

python docs/examples/weight_streaming.py
"""

import copy
import time

import torch
from torch import nn

import offload

LAYERS, STEPS, MICROBATCHES = 12, 5, 2

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
if device.type == "cpu":
    hidden, heads, batch, tokens = 128, 4, 2, 64
else:
    hidden, heads, batch, tokens = 2048, 16, 4, 512
    # Fused attention may add its gradients in any order.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)

torch.manual_seed(0)
on_device = nn.ModuleList(
    nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True)
    for _ in range(LAYERS)
)
streamed = copy.deepcopy(on_device)
on_device.to(device)
batches = [torch.randn(batch, tokens, hidden, device=device) for _ in range(MICROBATCHES)]


def train(layers):
    """Losses of a few steps, and seconds of the last one: a training loop that knows nothing of streaming."""
    # A step size that is a power of two: it makes no difference whether the host or the device rounds the update.
    optimizer = torch.optim.SGD(layers.parameters(), lr=2**-4)
    losses = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        for x in batches:
            y = x
            for layer in layers:
                y = layer(y)
            loss = y.square().mean() / MICROBATCHES
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, time.perf_counter() - begin


expected, expected_s = train(on_device)
with offload.stream_weights(streamed, device) as handle:
    found, found_s = train(streamed)
    print(handle)

stats = handle.stats()
print(f"\n{LAYERS} layers on {device.type}       step    weights on the device   last loss")
print(f"all on the device  {expected_s * 1e3:7.1f} ms   {stats.weight_bytes / 2**20:13.1f} MiB   {expected[-1]:13.6f}")
print(f"streamed           {found_s * 1e3:7.1f} ms   {stats.slot_bytes / 2**20:13.1f} MiB   {found[-1]:13.6f}")

assert found == expected, "the losses differ"
for one, other in zip(on_device.parameters(), streamed.parameters(), strict=True):
    assert torch.equal(one.cpu(), other)
# Twice per microbatch, but the last two layers are still there in backward.
assert stats.loads == STEPS * MICROBATCHES * (2 * LAYERS - 2)
print("\nlosses and weights are bit-identical\n")
print(stats)
