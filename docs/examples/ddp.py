"""Data parallelism with DistributedDataParallel, with the activations of most layers offloaded.

torchrun --standalone --nproc-per-node=2 docs/examples/ddp.py

NCCL where each rank has a GPU, gloo on the CPU elsewhere. Without torchrun it starts two ranks itself.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offload

LAYERS, OFFLOADED, STEPS = 8, 6, 3

if "RANK" not in os.environ:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    sys.exit(subprocess.run(command, check=False).returncode)  # noqa: S603  this script, by this interpreter

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if torch.cuda.device_count() >= ranks:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    hidden, rows = 2048, 8192
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
    hidden, rows = 128, 256

torch.manual_seed(100 + rank)
batches = [torch.randn(rows, hidden, device=device) for _ in range(STEPS)]  # each rank has its own


class Block(nn.Module):
    """The feed-forward half of a decoder layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x):
        """``x`` and what the block adds to it."""
        return x + self.body(x)


def make_layers():
    """The same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)


def train(model):
    """The losses of a few steps on this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for x in batches:
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


expected = DistributedDataParallel(make_layers())
expected_losses = train(expected)

layers = make_layers()
found = DistributedDataParallel(layers)
# The layers themselves, before or after wrapping. Leave min_bytes out for layers of usual size.
with offload.offload_layers(layers, OFFLOADED, min_bytes="128KiB") as handle:
    found_losses = train(found)

assert found_losses == expected_losses
assert all(map(torch.equal, found.parameters(), expected.parameters()))
assert handle.stats().offloaded_bytes > 0
for speaker in range(ranks):
    dist.barrier()
    if speaker == rank:
        print(f"rank {rank}: the losses are equal, bit for bit: {found_losses}\n{handle.stats()}\n", flush=True)
dist.destroy_process_group()
