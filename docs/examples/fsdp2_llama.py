"""A language model sharded by FSDP2, with the activations of each rank within a memory budget.

torchrun --standalone --nproc-per-node=2 docs/examples/fsdp2_llama.py                        # a small Llama
torchrun --standalone --nproc-per-node=8 docs/examples/fsdp2_llama.py meta-llama/Llama-3.1-8B --max-host-bytes 100GiB

NCCL where each rank has a GPU, gloo on the CPU elsewhere. Without torchrun it starts two ranks itself.
"""

import argparse
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import offload

if "RANK" not in os.environ:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    sys.exit(subprocess.run(command, check=False).returncode)  # noqa: S603  this script, by this interpreter

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
on_cpu = torch.cuda.device_count() < ranks
if on_cpu:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
else:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model", nargs="?", help="a name on Hugging Face's Hub, or a folder; by default a small Llama")
parser.add_argument("--tokens", type=int, default=128 if on_cpu else 8192, help="in one step of one rank")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--memory-budget", default="5MiB" if on_cpu else "auto", help="of each rank, for activations")
parser.add_argument("--max-host-bytes", default="100GiB", help="of each rank: its part of the host's memory")
arguments = parser.parse_args()

torch.manual_seed(0)  # all ranks make the same weights
if arguments.model:  # in float32, on the CPU of each rank
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, use_cache=False)
else:
    width, layers = (128, 4) if on_cpu else (1024, 8)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": width // 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_hidden_layers=layers, use_cache=False, **shape))
model.train()

# Each rank holds its part of the float32 weights on its GPU. A layer is gathered in bfloat16 while it runs.
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=precision)
fully_shard(model, mp_policy=precision)

handle = offload.offload_layers(
    model.model.layers,
    memory_budget=arguments.memory_budget,
    max_host_bytes=arguments.max_host_bytes,
    min_bytes=1 if on_cpu else "2MiB",
)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if arguments.model else 1e-3)
torch.manual_seed(100 + rank)  # each rank has its own tokens
tokens = torch.randint(model.config.vocab_size, (1, arguments.tokens), device=device)
losses = []
for _ in range(arguments.steps):
    with offload.memory_meter(device) as meter:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if rank == 0:
        print(f"loss {losses[-1]:.4f}, the step added {meter.peak_bytes / 2**20:,.0f} MiB", flush=True)

assert losses[-1] < losses[0]
assert handle.plan is not None
if rank == 0:
    print(repr(handle.plan))
dist.destroy_process_group()
