"""An interrupt (Ctrl-C) anywhere in the library: the step is made, or it is not, or the next use says so."""

import pytest
import torch
from faults import interrupt
from lab import Lab
from training import Training, assert_same, resident

TIMES = 40


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("in_backward", [False, True])
def test_interrupts(in_backward: bool, lab: Lab) -> None:
    device = torch.device("cpu")
    once, twice, reloaded = (resident(device, steps) for steps in ([0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 3]))
    told, places = 0, 1
    for number in (None, *range(TIMES)):
        run = Training(device, in_backward=in_backward, consume_gradients=in_backward)
        run.steps(range(2))
        saved = run.checkpoint
        try:
            with interrupt(lab, None if number is None else number * places // TIMES) as countdown:
                run.steps([2])
        except KeyboardInterrupt:
            pass
        places = max(places, len(countdown.places))
        run.optimizer.zero_grad()
        try:
            run.steps([2])
            found = run.values
        except RuntimeError as error:
            if "belong to one step" not in str(error) and "got another after its step" not in str(error):
                raise
            told += 1
        else:
            # The interrupt came before the step or after it.
            assert any(all(map(torch.equal, one, found)) for one in (once, twice)), countdown.places[-1]
        run.load(saved)
        run.steps([2, 3])
        assert_same(reloaded, run.values)
    assert told > TIMES / 2
