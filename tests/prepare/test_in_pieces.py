"""The loss in chunks and MLPs in tiles: only where nothing fits without, and where the model allows it."""

import copy
import functools
import logging
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.measuring.in_pieces import LOSS, MLP, Pieces

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
STEPS = 6
TOKENS = 1024
WORDS = 2048


def llama(words: int = WORDS, width: int = 64, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": words, "hidden_size": 32, "intermediate_size": width, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **options})).train()


WARNING = "the last bits of losses and gradients differ. Give more to keep them, or pass in_pieces=False"


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def loss_by_parts(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The model itself is not called."""
    logits = model.lm_head(model.model(input_ids=tokens).last_hidden_state)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(model: Any, budget: int | None, loss_of: Any = loss_of, **options: Any) -> tuple[list[float], int, Any]:
    """The losses, the most device memory of the whole training, and the handle."""
    held = sum(one.nbytes for one in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared = None if budget is None else offload.prepare(model, optimizer, budget, device=CPU, min_bytes=0, **options)
    losses = []
    with offload.memory_meter(CPU) as meter:  # from here on: the buffers that measure the link are larger
        for _ in range(STEPS):
            tokens = torch.arange(TOKENS).view(2, -1) % model.config.vocab_size
            loss = loss_of(model, tokens)
            loss.backward()
            losses.append(loss.item())
            del loss
            optimizer.step()
            optimizer.zero_grad()
    return losses, held + meter.peak_bytes, prepared


@functools.cache
def losses_without_a_budget(loss_of: Any = loss_of) -> list[float]:
    return train(llama(), None, loss_of)[0]


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "budget", "said"),
    [((WORDS, 64), 8 << 20, LOSS), ((64, 512), 7 << 20, MLP)],
)
def test_what_breaks_the_budget_is_computed_in_pieces(sizes: tuple[int, int], budget: int, said: str) -> None:
    expected, most_bytes, _ = train(llama(*sizes), None)
    assert most_bytes > budget
    model = llama(*sizes)
    with pytest.warns(UserWarning, match=f"memory_budget fits nothing without {said} of 128 tokens, .*: {WARNING}"):
        found, most_bytes, prepared = train(model, budget)
    assert most_bytes <= budget
    assert found == pytest.approx(expected, rel=1e-5)
    assert [one.partition(" of ")[0] for one in prepared.plan.in_pieces] == [said]
    assert said in str(prepared.plan)
    prepared.remove()
    tokens = torch.ones(1, 8, dtype=torch.long)
    assert model(input_ids=tokens, labels=tokens).logits is not None
    assert not any("forward" in vars(one) for one in model.modules())


@pytest.mark.slow
def test_measured_steps_tell_what_sizes_do_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nobody says of a recipe that its activations do not fit before another one was chosen."""
    caplog.set_level(logging.INFO, "offload.prepared")
    monkeypatch.setattr("offload.measuring.in_pieces.LOGIT_BYTES", 0)
    expected = losses_without_a_budget()
    with pytest.warns(UserWarning, match=WARNING), pytest.warns(UserWarning, match="was broken: a microbatch needed 2"):
        found, _, prepared = train(llama(), 12 << 20)
    assert found == pytest.approx(expected, rel=1e-5)
    assert [one.partition(" of ")[0] for one in prepared.plan.in_pieces] == [LOSS]
    assert any("measured again" in line and "activations need" in line for line in caplog.messages)
    assert prepared.state == "following"
    assert prepared.plan.fits
    prepared.remove()  # it counts memory in a dispatch mode, which the tests behind would see


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_of", "allowed"), [(loss_of, False), (loss_by_parts, True)], ids=["forbidden", "by parts"]
)
def test_what_no_recipe_helps_is_said_once(loss_of: Any, allowed: bool) -> None:
    """Nor is anything measured again where the program calls the model's parts: pieces could not begin."""
    expected = losses_without_a_budget(loss_of)
    with pytest.warns(UserWarning, match="cannot be met") as said:
        found, _, prepared = train(llama(), 12 << 20, loss_of, in_pieces=allowed)
    assert found == expected
    assert len([one for one in said if "cannot be met" in str(one.message)]) == 1
    assert prepared.state == "following"
    assert not prepared.plan.fits
    prepared.remove()


@pytest.mark.filterwarnings("ignore:memory_budget")
def test_mlps_that_the_program_has_tiled_remain_as_they_are() -> None:
    """Also where nothing fits without tiles."""
    model = llama(64, 512)
    with offload.tile_mlp(model.model.layers, 128):
        losses, _, prepared = train(model, 2 << 20)
        assert not any(one.startswith(MLP) for one in prepared.plan.in_pieces)
        prepared.remove()
    expected = train(llama(64, 512), None)[0]
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:memory_budget = .* was broken")  # by the logits of many tokens, said at the end
def test_a_larger_microbatch_and_one_without_labels() -> None:
    """Tokens of which the loss is not computed have no logits in float32; evaluation has its logits in any case."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    few, many = (torch.ones(2, number, dtype=torch.long) for number in (4, 512))
    with offload.prepare(model, optimizer, 8 << 20, device=CPU, min_bytes=0) as prepared:
        model(input_ids=few, labels=few)
        model(input_ids=many)
        assert not prepared.plan.in_pieces
        many = torch.ones(2, 513, dtype=torch.long)
        with torch.no_grad():
            model(input_ids=many, labels=many)
        with pytest.warns(UserWarning, match=WARNING):
            assert model(input_ids=many, labels=many).logits is None
        assert len(prepared.plan.in_pieces) == 1
        with torch.no_grad():
            assert model(input_ids=few, labels=few).logits is not None
        model.eval()
        assert model(input_ids=few, labels=few).logits is not None


def test_few_tokens_that_take_less_memory_than_pieces_are_computed_in_one() -> None:
    pieces = Pieces(llama(), [])
    assert pieces.begin(8, lambda _: False, labelled=True) == 0
    assert not pieces.said


class Block(nn.Module):
    """Some MLPs that are no sums over single tokens, and one that is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        if kind == "dropout":
            self.mlp.append(nn.Dropout(0.1)).eval()
        elif kind == "mixes tokens":
            self.mlp.forward = lambda x: x + x.mean(1, keepdim=True)
        elif kind == "normalizes":
            self.mlp.append(nn.BatchNorm1d(8))
        elif kind == "experts":
            self.mlp.append(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))
            self.mlp.forward = lambda x: x
        elif kind == "none":
            del self.mlp


@pytest.mark.parametrize("kind", ["plain", "dropout", "mixes tokens", "normalizes", "experts", "none"])
def test_only_mlps_that_compute_each_token_by_itself_are_tiled(kind: str) -> None:
    layers = [Block(kind), Block(kind)]
    numbers, modes = torch.get_rng_state(), [one.training for one in layers[0].modules()]
    pieces = Pieces(nn.ModuleList(layers), layers)
    assert [one.name for one in pieces.left] == ([MLP] if kind == "plain" else [])
    assert torch.equal(numbers, torch.get_rng_state())
    assert [one.training for one in layers[0].modules()] == modes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "allowed"), [("GPT2", True), ("Granite", False), ("Gemma2", False), ("Mixtral", True)]
)
def test_only_logits_that_go_into_the_loss_alone_are_left_out(name: str, allowed: bool) -> None:
    """Granite scales its logits, and Gemma 2 caps them."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**sizes))
    before = copy.copy(vars(model))
    pieces = Pieces(model, [])
    assert [one.name for one in pieces.left] == ([LOSS] if allowed else [])
    assert vars(model).keys() == before.keys()
    plain = model.forward

    def forward(**given: Any) -> Any:
        """Of a trainer that leaves logits out itself."""
        output = plain(**given)
        return type(output)(loss=output.loss)

    model.forward = forward
    assert not Pieces(model, []).left
