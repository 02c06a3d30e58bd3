"""Data parallelism with the weights of most of the model in host memory: DistributedDataParallel wraps the rest.

torchrun --standalone --nproc-per-node=2 docs/examples/weights_ddp.py

NCCL where each rank has a GPU, gloo on the CPU elsewhere. Without torchrun it starts two ranks itself.
"""

import os
import subprocess
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offload

LAYERS, STEPS, MICROBATCHES = 8, 3, 2

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
batches = [torch.randn(rows, hidden, device=device) for _ in range(MICROBATCHES)]  # each rank has its own


class Model(nn.Module):
    """Feed-forward layers between two modules that are on the device."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
            for _ in range(LAYERS)
        )

    def forward(self, x):
        """``x`` through all of them."""
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def train(model):
    """The losses of a few steps on this rank: a training loop that knows nothing of streaming."""
    # A step size that is a power of two: it makes no difference whether the host or the device rounds the update.
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)
    losses = []
    for _ in range(STEPS):
        for number, x in enumerate(batches):
            # Ranks have to agree only on the sum of all microbatches.
            with nullcontext() if number == MICROBATCHES - 1 else model.no_sync():
                loss = (model(x) - x).square().mean() / MICROBATCHES
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


torch.manual_seed(0)
expected = DistributedDataParallel(Model().to(device))
expected_losses = train(expected)

torch.manual_seed(0)
model = Model()  # on the CPU: it never has to fit on the device
model.embed.to(device), model.head.to(device)
with offload.stream_weights(model.layers, device, process_group=dist.group.WORLD) as streamed:
    found = DistributedDataParallel(streamed.prepare_ddp(model))
    found_losses = train(found)

assert found_losses == expected_losses
for one, other in zip(found.parameters(), expected.parameters(), strict=True):
    assert torch.equal(one.cpu(), other.cpu())
for speaker in range(ranks):
    dist.barrier()
    if speaker == rank:
        print(f"rank {rank}: the losses are equal, bit for bit: {found_losses}\n{streamed.stats()}\n", flush=True)
dist.destroy_process_group()
