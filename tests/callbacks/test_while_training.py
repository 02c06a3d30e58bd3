"""What both callbacks do, without a trainer."""

from typing import Any

import pytest
import torch
from models import MlpBlock
from torch import nn

from offload.callbacks.base import WhileTraining


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MlpBlock() for _ in range(4))


def test_a_second_training_begins_where_the_first_one_raised() -> None:
    model = Model()
    with WhileTraining(2) as callback:
        callback.attach(model)
        first = callback.handle
        callback.attach(model)
        assert (first.state, callback.handle.state) == ("removed", "following")
    assert callback.handle.state == "removed"


@pytest.mark.parametrize(
    ("optimizers", "given", "said"),
    [
        (2, {}, "memory_budget needs a model with one optimizer, got 2"),
        (1, {"clips_at": 1.0}, "step_in_backward must be False where the trainer clips gradients, got both, at 1.0"),
    ],
)
def test_what_a_trainer_must_not_do(optimizers: int, given: dict[str, Any], said: str) -> None:
    model = Model()
    callback = WhileTraining(memory_budget="1GiB", step_in_backward=True)
    with pytest.raises(ValueError, match=said):
        callback.attach(model, *(torch.optim.SGD(model.parameters()) for _ in range(optimizers)), **given)
    assert callback.handle is None
