"""Train on long sequences: a loss without logits, MLPs in tiles, and layers that keep, offload and recompute.

python docs/examples/long_context.py
python docs/examples/long_context.py --model meta-llama/Llama-3.1-8B --tokens 131072 --memory-budget 60GiB
"""

import argparse
import time
from contextlib import ExitStack

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import offload

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
on_cpu = device.type == "cpu"

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="the name or folder of a model of Hugging Face; by default a small Llama")
parser.add_argument("--tokens", type=int, default=512 if on_cpu else 65536)
parser.add_argument("--tile", type=int, default=128 if on_cpu else 32768, help="tokens in a tile of the MLPs")
parser.add_argument("--memory-budget", default="4MiB" if on_cpu else "16GiB", help="for activations, on the device")
parser.add_argument("--max-host", default="100GiB", help="the most pinned host memory")
parser.add_argument("--stream-weights", action="store_true", help="hold the layers' weights on the host, too")
parser.add_argument("--steps", type=int, default=5)
arguments = parser.parse_args()

if arguments.model:
    config = AutoConfig.from_pretrained(arguments.model)
else:
    width, layers = (64, 6) if on_cpu else (2048, 16)
    config = LlamaConfig(
        vocab_size=1024 if on_cpu else 128256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16 if on_cpu else width // 128,
        max_position_embeddings=arguments.tokens,
    )
torch.manual_seed(0)
with torch.device(device):  # random weights, of which this example needs no others
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if on_cpu else torch.bfloat16).train()
model.config.use_cache = False
batch = torch.randint(config.vocab_size, (1, arguments.tokens), device=device)
decoder_layers = model.model.layers

with ExitStack() as stack:
    stack.enter_context(offload.use_chunked_loss(model, chunk_tokens=128 if on_cpu else 2048))
    stack.enter_context(offload.tile_mlp(decoder_layers, arguments.tile))
    if arguments.stream_weights:
        stack.enter_context(offload.stream_weights(decoder_layers, device))
    handle = stack.enter_context(
        offload.offload_layers(
            decoder_layers,
            memory_budget=arguments.memory_budget,
            max_host_bytes=arguments.max_host,
            min_bytes=1 if on_cpu else "2MiB",
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(arguments.steps):
        begin = time.perf_counter()
        with offload.memory_meter(device) as meter:
            output = model(input_ids=batch, labels=batch)
            output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
        seconds = time.perf_counter() - begin
        print(
            f"step {step}: loss {losses[-1]:.4f}, {arguments.tokens / seconds:,.0f} tokens/s, "
            f"peak {meter.peak_bytes / 2**20:,.1f} MiB above what was there"
        )
    print(handle.plan)
    print(handle.stats())

assert output.logits is None  # they were never made
assert losses[-1] < losses[0]
