"""Train LoRA adapters with PEFT, in a loop of your own, with the activations of most layers offloaded.

python docs/examples/peft_lora.py
"""

import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import offload

warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # PEFT 0.21 asks Transformers 5 for it

LAYERS, OFFLOADED, STEPS = 8, 6, 3

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
hidden, tokens = (128, 128) if device.type == "cpu" else (1024, 1024)
config = LlamaConfig(
    vocab_size=1000,
    hidden_size=hidden,
    intermediate_size=2 * hidden,
    num_hidden_layers=LAYERS,
    num_attention_heads=hidden // 64,
    use_cache=False,
    attn_implementation="eager",  # fused attention may add its gradients in any order
)
batch = torch.randint(config.vocab_size, (2, tokens), generator=torch.Generator().manual_seed(0)).to(device)


def make_model():
    """A model in bfloat16 with adapters on its attention."""
    torch.manual_seed(0)
    # Hold the frozen weights in the dtype that you compute in: autocast's copies of them would be offloaded.
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


def train(model):
    """The losses of a few steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


expected = make_model()
expected_losses = train(expected)

found = make_model()
layers = found.get_base_model().model.layers  # inside PEFT's wrappers
# Leave min_bytes out for layers of usual size.
with offload.offload_layers(layers, OFFLOADED, min_bytes="32KiB") as handle:
    found_losses = train(found)

assert found_losses == expected_losses
assert all(map(torch.equal, found.parameters(), expected.parameters()))
assert handle.stats().offloaded_bytes > 0
found.print_trainable_parameters()
print(f"\nthe losses are equal, bit for bit: {found_losses}\n")
print(handle.stats())
