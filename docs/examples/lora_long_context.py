"""Train LoRA adapters on a long sequence on a small GPU: PEFT, streamed weights, a chunked loss, tiled MLPs, a budget.

python docs/examples/lora_long_context.py                          # a small model from a config, on a GPU or on the CPU
python docs/examples/lora_long_context.py MODEL --tokens 32768     # a model of Hugging Face's Hub, or a folder
"""

import argparse
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import offload

warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # PEFT 0.21 asks Transformers 5 for it

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
on_cpu = device.type == "cpu"
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model", nargs="?", help="by default, a small Llama with random weights")
parser.add_argument("--tokens", type=int, default=512 if on_cpu else 32768)
parser.add_argument("--memory-budget", default="24MiB" if on_cpu else "16GiB", help="for activations")
parser.add_argument("--max-host-bytes", default="64MiB" if on_cpu else "32GiB", help="pinned memory for activations")
arguments = parser.parse_args()

torch.manual_seed(0)
if arguments.model:
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16, use_cache=False)
else:
    width = 128 if on_cpu else 2048
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    size = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 8, "vocab_size": 2048}
    model = LlamaForCausalLM(LlamaConfig(use_cache=False, **size, **heads)).to(torch.bfloat16)
model.train()

# 1. Adapters. The frozen weights have the dtype that the model computes in.
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
layers = model.get_base_model().model.layers

# 2. The layers' weights are in host memory; embedding and head are on the device.
streamed = offload.stream_weights(layers, device)
model.to(device)

# 3. No logits of the whole sequence, and no MLP of the whole sequence.
offload.use_chunked_loss(model.get_base_model())
offload.tile_mlp(layers, tokens=128 if on_cpu else 2048)

# 4. Activations within a budget.
limits = {"memory_budget": arguments.memory_budget, "max_host_bytes": arguments.max_host_bytes}
handle = offload.offload_layers(layers, **limits, min_bytes=1 if on_cpu else "2MiB")

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
tokens = torch.randint(2048, (1, arguments.tokens), device=device)
losses = []
for _ in range(5):  # the first ones are measured, then the plan is followed
    with offload.memory_meter(device) as meter:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    print(f"loss {losses[-1]:.4f}, peak of the step {meter.peak_bytes / 2**20:,.0f} MiB")

print(repr(handle.plan))
assert handle.plan is not None
assert losses[-1] < losses[0]
