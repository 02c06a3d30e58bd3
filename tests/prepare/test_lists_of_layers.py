"""A model's lists of layers are found without a word on them: each one, in the order in which forward calls them."""

import pytest
import torch
from models import WIDTH, assert_same, build, through
from torch import nn

import offload

CPU = torch.device("cpu")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.slow
def test_an_encoder_and_a_decoder_are_found() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_layers": 3, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": 512}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
    found = []
    for budget in (None, "750KiB"):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(config)
        optimizer = adamw(model)
        prepared = None if budget is None else offload.prepare(model, optimizer, budget, device=CPU, min_bytes=0)
        for number in range(6):
            tokens = torch.full((2, 8), number)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([*model.parameters()])
    assert_same(*found)
    assert prepared is not None
    assert prepared.activations is not None
    assert len(prepared.activations.profile.layers) == 6
    assert prepared.recipe.optimizer == "streamed"
    prepared.remove()
    assert not any(one._forward_pre_hooks for one in model.modules())


class TwoLists(nn.Module):
    """Calls its lists in another order than it has them, and has heads, which are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.later, self.first = (build("mlp", 2, CPU)[0] for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = through(self.later, through(self.first, x))
        return torch.stack([head(y).square().mean() for head in self.heads]).sum()


def test_lists_in_another_order_are_an_error_that_names_the_way_out() -> None:
    model, x = TwoLists(), torch.ones(2, 3, WIDTH)
    said = r"the lists later, first in .*; pass layers=lambda model: \[\*model\.first, \*model\.later\]\."
    with offload.prepare(model, adamw(model), "1GiB", device=CPU), pytest.raises(ValueError, match=said):
        model(x)
    layers = [*model.first, *model.later]
    with offload.prepare(model, adamw(model), "1GiB", min_bytes=0, device=CPU, layers=lambda _: layers) as prepared:
        model(x).backward()
        assert prepared.state == "measuring"
