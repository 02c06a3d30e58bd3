"""Who is told of a layer's events, when, and in which order."""

from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn, compute_device, listeners_on

WEIGHTS, ACTIVATIONS, MEASURING = Turn.WEIGHTS, Turn.ACTIVATIONS, Turn.MEASURING


class Notes(LayerListener):
    """Writes down what it is told, and raises where it shall."""

    def __init__(self, turn: Turn, notes: list[str], error: BaseException | None = None) -> None:
        self.turn = turn  # type: ignore[misc]  # tests have one class for all turns
        self.notes, self.name, self.error = notes, turn.name.lower(), error

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        self.notes.append(f"{self.name} begins")

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        self.notes.append(f"{self.name} {'fails' if failed else 'ends'}")
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_listener_that_cannot_end_keeps_no_other_from_it(error: BaseException) -> None:
    layer = nn.Tanh()
    notes: list[str] = []
    Attachment([layer], [Notes(WEIGHTS, notes)])
    Attachment([layer], [Notes(MEASURING, notes, error)])
    with pytest.raises(type(error)):
        layer(torch.ones(3))
    assert notes == ["weights begins", "measuring begins", "measuring ends", "weights ends"]


def test_listeners_come_and_go() -> None:
    layer = nn.Tanh()
    layer._gradient_checkpointing_func = checkpoint  # as layers of Hugging Face have it
    first, second = Notes(WEIGHTS, notes := []), Notes(ACTIVATIONS, notes)
    second.device = torch.device("meta")
    one, other = Attachment([layer], [first]), Attachment([layer], [second])
    assert listeners_on(layer, Notes) == [first, second]
    assert compute_device([nn.Identity(), layer]) == torch.device("meta")
    one.remove()
    one.remove()
    assert not one
    assert listeners_on(layer, Notes) == [second]
    layer(torch.ones(3))
    assert notes == ["activations begins", "activations ends"]
    other.remove()
    layer.load_state_dict(layer.state_dict())
    layer(torch.ones(3))
    assert notes == ["activations begins", "activations ends"]
    assert layer._gradient_checkpointing_func is checkpoint
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks
    assert not layer._state_dict_pre_hooks
    assert not layer._load_state_dict_pre_hooks


class Layer(nn.Module):
    """Runs what a test puts in."""

    does: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        does, self.does = self.does, lambda: None
        does()
        return x * x


@pytest.mark.parametrize("error", [None, ValueError("no"), KeyboardInterrupt()], ids=["none", "error", "interrupt"])
def test_a_forward_that_nobody_needs_to_know_of_leaves_nothing_behind(error: BaseException | None) -> None:
    layer, listener = Layer(), Notes(WEIGHTS, notes := [])
    listener.passes = iter([True, False, True, True, False]).__next__
    Attachment([layer], [listener])
    if error is not None:
        layer.does = Mock(side_effect=error)
    with nullcontext() if error is None else pytest.raises(type(error)):
        layer(torch.ones(3))
    assert notes == []
    layer(torch.ones(3))
    assert notes == ["weights begins", "weights ends"]
    for _ in range(2):
        layer(torch.ones(3))
    assert notes == ["weights begins", "weights ends"]
    layer.does = Mock(side_effect=ValueError("stop"))
    with pytest.raises(ValueError, match="stop"):
        layer(torch.ones(3))
    assert notes == ["weights begins", "weights ends", "weights begins", "weights fails"]


def test_what_backward_runs_inside_of_such_a_forward_is_told() -> None:
    """The layer runs again while it runs: the program takes a gradient through a checkpoint of it."""
    layer, x, listener = Layer(), torch.ones(3, requires_grad=True), Notes(WEIGHTS, notes := [])
    output = checkpoint(layer, x, use_reentrant=False)
    listener.passes = iter([True, False, False]).__next__
    Attachment([layer], [listener])
    layer.does = output.sum().backward
    layer(torch.ones(3))
    assert notes == ["weights begins", "weights fails"]  # PyTorch stops a checkpoint by an error
    assert x.grad is not None
    layer(torch.ones(3))
    assert notes[2:] == ["weights begins", "weights ends"]
