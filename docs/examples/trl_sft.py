"""Supervised fine-tuning with TRL's SFTTrainer, with the activations of most layers offloaded.

python docs/examples/trl_sft.py
"""

import os
import tempfile

if "LOCAL_RANK" not in os.environ:  # without torchrun: one GPU, where Trainer would use nn.DataParallel on all of them
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from offload.callbacks.huggingface import OffloadCallback

LAYERS, OFFLOADED, STEPS = 8, 6, 3

on_gpu = torch.cuda.is_available()
hidden, words = (1024, 1000) if on_gpu else (128, 120)

# In your own script: AutoTokenizer.from_pretrained and AutoModelForCausalLM.from_pretrained.
vocabulary = {name: number for number, name in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
word_level = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106  a token of text
word_level.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, pad_token="<pad>", eos_token="<eos>")  # noqa: S106
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=hidden,
    intermediate_size=2 * hidden,
    num_hidden_layers=LAYERS,
    num_attention_heads=hidden // 64,
    attn_implementation="eager",  # fused attention may add its gradients in any order
)
data = Dataset.from_dict({"text": [" ".join("abcdefgh"[(row + i * i) % 8] for i in range(words)) for row in range(8)]})


def train(callbacks):
    """What SFTTrainer logged with the loss of each step."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    checkpointing = f"{'activation' if hasattr(SFTConfig, 'activation_checkpointing') else 'gradient'}_checkpointing"
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            per_device_train_batch_size=2,
            max_steps=STEPS,
            max_length=words,
            # With TRL's default, only each layer's input would be offloaded.
            **{checkpointing: False},
            bf16=on_gpu,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=on_gpu,
        )
        trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)
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
