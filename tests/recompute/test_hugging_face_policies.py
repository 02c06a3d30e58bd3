"""Policies of Hugging Face layers: with their own checkpointing (``reentrant`` or not, if any), PEFT, and autocast."""

from typing import Any

import pytest
import torch
from lab import Lab
from models import assert_same, gradients
from torch.nn.attention import SDPBackend, sdpa_kernel

import offload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:a whole round of", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*use_reentrant"
    ),
]

POLICIES = ({"*": "recompute"}, {"*mm": "offload", "*": "recompute"}, {"*": "offload"})


def build(kind: str, lab: Lab, *, adapters: bool, reentrant: bool | None) -> tuple[Any, Any]:
    """A tiny model with dropout, and its layers."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "llama":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
        size = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "use_cache": False,
        }
        model: Any = LlamaForCausalLM(LlamaConfig(**size, **heads))
        layers, targets = model.model.layers, ["q_proj", "v_proj", "up_proj"]
    else:
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(use_cache=False, vocab_size=64, n_embd=32, n_layer=4, n_head=4, **ends))
        layers, targets = model.transformer.h, ["c_attn", "c_proj"]
    if adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(target_modules=targets, lora_dropout=0.1, fan_in_fan_out=kind == "gpt2")
        )
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model.to(lab.device).train(), layers


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("reentrant", "kind", "adapters", "autocast"),  # each pair of values of two of them
    [
        (None, "llama", False, False),
        (None, "gpt2", True, True),
        (False, "llama", True, False),
        (False, "gpt2", False, True),
        (True, "llama", False, True),
        (True, "gpt2", True, False),
    ],
)
def test_hugging_face_layers_with_policies(
    kind: str, reentrant: bool | None, adapters: bool, autocast: bool, lab: Lab
) -> None:
    model, layers = build(kind, lab, adapters=adapters, reentrant=reentrant)
    ids = torch.randint(0, 64, (2, 16), device=lab.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        # On a GPU, flash attention also returns memory that it has not written: other bits each time.
        with sdpa_kernel(SDPBackend.MATH):  # in backward, too: Hugging Face's checkpoints run attention again there
            with torch.autocast(lab.device.type, torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()

    expected = gradients(trained, step)
    lab.adverse()
    for policies in POLICIES:
        options = {"policies": policies}
        with offload.offload_layers(layers, 2, min_bytes=1, device=lab.device, **options) as handle:
            for _ in range(3):
                assert_same(expected, gradients(trained, step))
            assert handle.stats().offloaded_bytes > 0
            assert set(handle.regions(0).values()) == set(policies.values())


def test_adapters_within_a_budget(lab: Lab) -> None:
    """PEFT's adapters train the same while the budget is measured and while its plan is followed."""
    model, layers = build("llama", lab, adapters=True, reentrant=None)
    ids = torch.randint(0, 64, (2, 64), device=lab.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    expected = gradients(trained, step)
    with offload.offload_layers(layers, memory_budget="1GiB", min_bytes=1, device=lab.device) as handle:
        for _ in range(4):
            assert_same(expected, gradients(trained, step))
        assert handle.plan is not None
    profile = offload.profile_layers(layers, step, min_bytes=1, device=lab.device)
    budget = round(0.6 * profile.saved_bytes)
    with offload.offload_layers(layers, memory_budget=budget, min_bytes=1, device=lab.device) as handle:
        for _ in range(4):
            assert_same(expected, gradients(trained, step))
        assert handle.plan.recompute_s > 0 or handle.plan.num_layers > 0
