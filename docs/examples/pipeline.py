"""Two pipeline ranks under 1F1B, with and without derived offloading.

torchrun --standalone --nproc-per-node=2 docs/examples/pipeline.py

NCCL where each rank has a GPU, gloo on the CPU elsewhere. Without torchrun it starts two ranks itself.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import offload.pipelining

MICROBATCHES, LAYERS_PER_STAGE, STEPS = 8, 4, 4

if "RANK" not in os.environ:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    sys.exit(subprocess.run(command, check=False).returncode)  # noqa: S603  this script, by this interpreter

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if torch.cuda.device_count() >= ranks:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    hidden, rows, dtype = 8192, 4096, torch.bfloat16
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
    hidden, rows, dtype = 64, 256, torch.float32

torch.manual_seed(rank)
with device:
    stage_module = nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
            for _ in range(LAYERS_PER_STAGE)
        )
    ).to(dtype)
    batch = torch.randn(MICROBATCHES * rows, hidden, dtype=dtype)
    target = torch.randn(MICROBATCHES * rows, hidden, dtype=dtype)


def loss_of(output, target):
    """The loss of one microbatch."""
    return (output.float() - target.float()).square().mean()


stage = PipelineStage(stage_module, rank, ranks, device)
schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)


def step():
    """One training step without its optimizer; returns the gradients and the peak of device memory in bytes."""
    for parameter in stage_module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with offload.memory_meter(device) as meter:
        if stage.is_first:
            schedule.step(batch)
        else:
            schedule.step(**({"target": target} if stage.is_last else {}), return_outputs=False)
    return [parameter.grad for parameter in stage_module.parameters()], meter.peak_bytes


step()
expected, kept_bytes = step()
budget = "3GiB" if device.type == "cuda" else "2MiB"  # for the activations of this rank
with offload.pipelining.attach(schedule, memory_budget=budget, min_bytes=1 << 18) as handle:
    for _ in range(STEPS):  # the first one is measured, the others follow the plan
        found, offloaded_bytes = step()

assert all(map(torch.equal, found, expected))
for speaker in range(ranks):
    dist.barrier()
    if speaker == rank:
        print(f"rank {rank}: activation peak {kept_bytes >> 20} MiB, with offloading {offloaded_bytes >> 20} MiB")
        print(f"{handle.plan}\n{handle.stats()}\n", flush=True)
dist.barrier()
if rank == 0:
    assert handle.stats().offloaded_bytes > 0
    assert offloaded_bytes < 0.8 * kept_bytes
    print("gradients are bit-identical")
dist.destroy_process_group()
