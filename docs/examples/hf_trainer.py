"""Fine-tune with Hugging Face's Trainer, with the activations of most layers offloaded.

python docs/examples/hf_trainer.py
"""

import os
import tempfile

if "LOCAL_RANK" not in os.environ:  # without torchrun: one GPU, where Trainer would use nn.DataParallel on all of them
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from offload.callbacks.huggingface import OffloadCallback

LAYERS, OFFLOADED, STEPS = 8, 6, 3

on_gpu = torch.cuda.is_available()
hidden, tokens = (1024, 1024) if on_gpu else (128, 128)
config = LlamaConfig(
    vocab_size=1000,
    hidden_size=hidden,
    intermediate_size=2 * hidden,
    num_hidden_layers=LAYERS,
    num_attention_heads=hidden // 64,
    use_cache=False,
    attn_implementation="eager",  # fused attention may add its gradients in any order
)
generator = torch.Generator().manual_seed(0)
rows = [torch.randint(config.vocab_size, (tokens,), generator=generator) for _ in range(16)]
data = [{"input_ids": row, "labels": row} for row in rows]


def train(callbacks):
    """What Trainer logged with the loss of each step."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)  # in your own script: from_pretrained
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            max_steps=STEPS,
            bf16=on_gpu,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=on_gpu,
        )
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


expected = train([])
callback = OffloadCallback(num_layers=OFFLOADED, min_bytes="128KiB")  # leave min_bytes out for layers of usual size
found = train([callback])

assert [entry["loss"] for entry in found] == [entry["loss"] for entry in expected]
assert [entry["grad_norm"] for entry in found] == [entry["grad_norm"] for entry in expected]
assert found[-1]["offload/offloaded_bytes"] > 0
print(f"\nthe losses are equal, bit for bit: {[entry['loss'] for entry in found]}\n")
print(callback.handle.stats())
