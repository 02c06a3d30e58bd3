"""A model that is compiled as a whole, around the layers' hooks."""

import pytest
import torch
from models import WIDTH, Composed, MlpBlock, through
from torch import nn

import offload


@pytest.mark.filterwarnings("ignore:.*freed no device memory", "ignore:The .grad attribute of a Tensor")
def test_it_trains_on_after_the_plan_was_watched(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch puts back the dispatch keys of before a compiled call: no mode may be entered or left inside.

    So nothing is counted there, which is said once.
    """
    losses: list[list[float]] = []
    tokens = torch.arange(32).view(2, 16) % 16
    for prepares in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Composed(
            lambda own, tokens: through(own.layers, own.embed(tokens)).square().mean(),
            embed=nn.Embedding(16, WIDTH),
            layers=nn.ModuleList(MlpBlock() for _ in range(4)),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if prepares:
            offload.prepare(model, optimizer, 1 << 30, device="cpu", min_bytes=1)
        compiled = torch.compile(model, backend="aot_eager")
        losses.append([])
        for _ in range(10):
            loss = compiled(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert caplog.text.count("may break its budget: nothing is counted on the CPU") == 1
    assert torch.ones(1).add(1).item() == 2  # as after any failure in such a call, nothing would run
