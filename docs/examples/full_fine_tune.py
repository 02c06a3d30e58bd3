"""Full fine-tune of a language model under one budget for weights, gradients, optimizer state and activations.

python docs/examples/full_fine_tune.py                                        # a small Llama, on a GPU or on the CPU
python docs/examples/full_fine_tune.py meta-llama/Llama-3.1-8B --text data.txt --steps 1000 --out tuned
"""

import argparse
from itertools import cycle, islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import offload

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
on_cpu = device.type == "cpu"
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model", nargs="?", help="a name on Hugging Face's Hub, or a folder; by default a small Llama")
parser.add_argument("--text", type=Path, help="what to train on; by default random tokens")
parser.add_argument("--tokens", type=int, default=64 if on_cpu else 8192, help="in one step")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--memory-budget", default="20MiB" if on_cpu else "auto", help="all GPU memory of the training")
parser.add_argument("--max-host-bytes", default="100GiB", help="all pinned host memory")
parser.add_argument("--out", help="a folder for the trained model")
arguments = parser.parse_args()

torch.manual_seed(0)
if arguments.model:  # it is loaded on the CPU: prepare() moves what belongs on the GPU
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16, use_cache=False)
else:
    width, words = (128, 4096) if on_cpu else (2048, 32000)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": width // 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=words, num_hidden_layers=8, use_cache=False, **shape))
model.to(torch.bfloat16).train()

if arguments.text:
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokens = tokenizer(arguments.text.read_text("utf-8"), return_tensors="pt").input_ids[0]
else:
    tokens = torch.randint(model.config.vocab_size, (arguments.tokens,))
batches = [batch[None] for batch in tokens.to(device).split(arguments.tokens) if len(batch) > 1]

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if arguments.model else 1e-3, fused=True)
offload.use_chunked_loss(model)  # the logits of all tokens would take more memory than a layer
prepared = offload.prepare(
    model,
    optimizer,
    memory_budget=arguments.memory_budget,
    max_host_bytes=arguments.max_host_bytes,
    state_dtype=torch.float32,  # AdamW's moments, of weights in bfloat16
    step_in_backward=True,  # leave it out to clip; to accumulate, use prepared.no_step()
    min_bytes=1 if on_cpu else "2MiB",
)

losses = []
for batch in islice(cycle(batches), arguments.steps):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    print(f"step {len(losses)}: loss {losses[-1]:.4f}, {prepared.state}")

print(prepared.plan)
if arguments.out:
    model.save_pretrained(arguments.out)
assert arguments.text or losses[-1] < losses[0]
