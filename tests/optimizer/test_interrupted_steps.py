"""An interrupt (Ctrl-C) anywhere in the library: the step is made, or it is not, or the next use says so."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from faults import interrupt
from lab import Lab
from training import assert_same, build, plain_steps, stream, values

TIMES = 40
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


def resident(steps: list[int]) -> list[torch.Tensor]:
    model = build(torch.device("cpu"))
    optimizer = adamw(model.parameters())
    plain_steps(model, optimizer, steps)
    return values(model, optimizer)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("in_backward", [False, True])
def test_interrupts(in_backward: bool, lab: Lab) -> None:
    """The third step is interrupted. It is repeated at first, and then from a checkpoint."""
    once, twice, reloaded = resident([0, 1, 2]), resident([0, 1, 2, 2]), resident([0, 1, 2, 3])
    told, places = 0, 1
    for number in (None, *range(TIMES)):
        model = build(torch.device("cpu"))
        optimizer = adamw(model.parameters())
        stream(optimizer, in_backward=in_backward, consume_gradients=in_backward)
        plain_steps(model, optimizer, range(2))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        try:
            with interrupt(lab, None if number is None else number * places // TIMES) as countdown:
                plain_steps(model, optimizer, [2])
        except KeyboardInterrupt:
            pass
        places = max(places, len(countdown.places))
        optimizer.zero_grad()
        try:
            plain_steps(model, optimizer, [2])
            found = values(model, optimizer)
        except RuntimeError as error:
            if "belong to one step" not in str(error) and "got another after its step" not in str(error):
                raise
            told += 1
        else:
            # The interrupt came before the step or after it.
            assert any(all(map(torch.equal, one, found)) for one in (once, twice)), countdown.places[-1]
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        plain_steps(model, optimizer, [2, 3])
        assert_same(reloaded, values(model, optimizer))
    assert told > TIMES / 2
