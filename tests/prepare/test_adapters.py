"""LoRA within a budget: frozen weights have neither gradients nor optimizer state, and may be streamed."""

import warnings
from typing import Any

import pytest
import torch
from models import assert_same

import offload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:memory_budget = .* was broken"),  # while layers were learned
]

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")


def train(budget: int | str | None, words: int) -> tuple[list[torch.Tensor], list[float], Any]:
    torch.manual_seed(0)
    sizes = {"vocab_size": words, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 5}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's own, from transformers
        whole = transformers.LlamaForCausalLM(config)
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(whole, peft.LoraConfig(r=2, target_modules="all-linear")).train()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    prepared = None if budget is None else offload.prepare(model, optimizer, budget, device=CPU, min_bytes=0)
    losses = []
    for number in range(6):
        tokens = torch.full((2, 64), number)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [one.detach() for one in trained], losses, prepared


def test_the_same_bits() -> None:
    expected, *_ = train(None, 64)
    found, _, prepared = train("1600KiB", 64)
    assert_same(expected, found)
    assert prepared.recipe.weights == "streamed"
    resident = prepared.plan.recipes[0]
    assert sum(resident.state_bytes) == 2 * sum(one.nbytes for one in found)
    assert not prepared.plan.in_pieces


def test_the_loss_in_chunks() -> None:
    """PEFT's wrapper holds the model whose loss it is; the head is frozen."""
    _, expected, _ = train(None, 4096)
    with pytest.warns(UserWarning, match="in_pieces=False"):
        _, found, prepared = train("7MiB", 4096)
    assert found == pytest.approx(expected, rel=1e-2)  # in bfloat16
    assert len(prepared.plan.in_pieces) == 1
