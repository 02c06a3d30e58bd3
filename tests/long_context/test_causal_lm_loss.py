"""Hugging Face's models compute the same loss without logits, unedited."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from llama import LAYERS, enable_checkpointing, llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import offload
from offload import use_chunked_loss

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "use_cache": False}


def model_and_batch() -> tuple[Any, dict[str, torch.Tensor]]:
    model = llama(transformers, torch.device("cpu")).double()
    tokens = torch.randint(64, (2, 16))
    labels = tokens.clone()
    labels[0, :5] = -100
    return model, {"input_ids": tokens, "labels": labels}


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}


def near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Their loss is rounded to float32."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 11}, {"num_items_in_batch": torch.tensor(11)}])
def test_the_loss_and_its_gradients_are_the_models_own(options: dict[str, Any]) -> None:
    model, batch = model_and_batch()
    plain = model(**batch, **options)
    expected = gradients(model, plain.loss)
    with use_chunked_loss(model, chunk_tokens=5):
        output = model(**batch, **options)
        assert output.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)  # theirs is rounded to float32
        assert output.logits is None
        assert "logits" not in output
        found = gradients(model, output.loss)
    near(found, expected)


def test_labels_may_be_shifted_already_and_another_one_ignored() -> None:
    """The last token has no label: it is padded with the one that is ignored."""
    model, batch = model_and_batch()
    shifted = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    with use_chunked_loss(model):
        assert model(**batch).loss == model(**batch, shift_labels=shifted).loss
    batch["labels"] = batch["labels"].clamp(min=7)
    expected = model(**batch, ignore_index=7).loss
    with use_chunked_loss(model):
        assert model(**batch, ignore_index=7).loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert model(**batch).loss.item() != pytest.approx(expected.item(), rel=1e-3)


def test_without_labels_and_after_remove_logits_are_there() -> None:
    model, batch = model_and_batch()
    expected = model(**batch)
    names = set(vars(model)), set(vars(model.lm_head))
    handle = use_chunked_loss(model)
    assert torch.equal(model(batch["input_ids"]).logits, expected.logits)
    assert model(**batch, return_dict=False)[0].ndim == 0
    assert len(model(**batch, return_dict=False)) == 1
    handle.remove()
    handle.remove()
    assert (set(vars(model)), set(vars(model.lm_head))) == names
    assert torch.equal(model(**batch).logits, expected.logits)


def test_a_forward_that_fails_leaves_nothing_behind_and_a_copy_has_a_loss_of_its_own() -> None:
    model, batch = model_and_batch()
    with use_chunked_loss(model):
        with pytest.raises(ValueError, match="labels must have shape"):
            model(input_ids=batch["input_ids"], labels=batch["labels"][:, 1:])
        assert model.lm_head(torch.zeros(3, 32, dtype=torch.float64)).shape == (3, 64)
        other = copy.deepcopy(model)
        nn.init.zeros_(other.lm_head.weight)
        assert other(**batch).loss.item() == pytest.approx(4.1588831)  # the logarithm of 64


def test_with_offloaded_and_checkpointed_layers() -> None:
    model, batch = model_and_batch()
    with use_chunked_loss(model, chunk_tokens=5):
        expected = gradients(model, model(**batch).loss)
        enable_checkpointing(model, reentrant=False)
        with offload.offload_layers(model.model.layers, LAYERS - 2, min_bytes=1) as handle:
            found = gradients(model, model(**batch).loss)
            assert handle.stats().offloaded_bytes
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.slow
def test_sharded_by_fsdp2() -> None:
    """Without a warning of PyTorch that its output is a view: of the hidden states, which are no output."""
    model, batch = model_and_batch()
    expected = gradients(model, model(**batch).loss)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
        with use_chunked_loss(model, chunk_tokens=5):
            found = gradients(model, model(**batch).loss)
        near({name: cast("DTensor", one).to_local() for name, one in found.items()}, expected)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["GPT2", "Qwen3", "GPTJ"])
def test_other_models_heads(name: str) -> None:
    """GPT-2's is tied, GPT-J's has a bias."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
    if name == "Qwen3":
        sizes = {"num_key_value_heads": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes, "num_attention_heads": 4, "head_dim": 8})
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    tokens = torch.randint(64, (2, 16))
    expected = model(input_ids=tokens, labels=tokens).loss
    with use_chunked_loss(model, chunk_tokens=5):
        assert model(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_models_that_do_more_with_logits_are_refused() -> None:
    config = transformers.GraniteConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(64, (1, 8))
    with (
        use_chunked_loss(model),
        pytest.raises(TypeError, match="logits as the head makes them; call chunked_cross_entropy"),
    ):
        model(input_ids=tokens, labels=tokens)
    with use_chunked_loss(model), pytest.raises(TypeError, match="labels must be given by name"):
        model(tokens, None, None, None, None, tokens)
    assert model(input_ids=tokens, labels=tokens).logits is not None
    with pytest.raises(TypeError, match=r"must have an nn\.Linear as its head and .*, got NoneType and None; call"):
        use_chunked_loss(nn.Linear(2, 2))
    with (
        use_chunked_loss(model),
        pytest.raises(TypeError, match="ForCausalLMLoss as its loss, got Linear and loss; call"),
    ):
        use_chunked_loss(model)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_trainer_counts_items_over_all_its_microbatches(tmp_path: Path, accumulation: int) -> None:
    """Losses, norms of gradients and evaluation are those without: the trainer passes ``num_items_in_batch``."""
    pytest.importorskip("accelerate")
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": row, "labels": row.clone()} for row in torch.randint(64, (24, 16), generator=generator)]
    for number, one in enumerate(data):
        one["labels"][: number % 7] = -100  # so that microbatches weigh differently

    def train(*, chunked: bool) -> list[float]:
        model = llama(transformers, torch.device("cpu"))
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        with use_chunked_loss(model, chunk_tokens=7) if chunked else nullcontext():
            trainer.train()
            evaluated: float = trainer.evaluate()["eval_loss"]
        logs = trainer.state.log_history
        return [log[key] for log in logs for key in ("loss", "grad_norm") if key in log] + [evaluated]

    plain = train(chunked=False)
    assert len(plain) == 7
    assert train(chunked=True) == pytest.approx(plain, rel=1e-5)
