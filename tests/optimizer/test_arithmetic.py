"""How long the device takes for an optimizer's arithmetic: measured, and nothing is left of it."""

import copy

import pytest
import torch
from lab import Lab
from torch import nn
from training import assert_same, build, plain_steps, values

from offload.optimizer.arithmetic import seconds_per_element


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.Muon])
@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_seconds_of_an_element(kind: type, state_dtype: torch.dtype | None, lab: Lab) -> None:
    """A time, and neither the optimizer nor its parameters are changed by it."""
    model = build(lab.device, torch.bfloat16)
    parameters = [one for one in model.parameters() if one.ndim == 2 or kind is not torch.optim.Muon]
    optimizer = kind(parameters, lr=1e-2)
    plain_steps(model, optimizer, range(2))
    before = copy.deepcopy(values(model, optimizer))
    numbers = torch.get_rng_state()
    seconds = seconds_per_element(optimizer, state_dtype, lab.device, 1 << 14)
    assert 0 < seconds < 1
    assert_same(before, values(model, optimizer))
    assert torch.equal(numbers, torch.get_rng_state())
    assert lab.pool.used_bytes == 0
    plain_steps(model, optimizer, range(2))


def test_where_nothing_is_trained() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.AdamW(frozen.parameters())
    assert seconds_per_element(optimizer, None, torch.device("cpu"), 1 << 14) == 0
