"""Who is told of a layer's events, when, and in which order."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.base.layer_events import (
    Attachment,
    LayerCall,
    LayerEndsError,
    LayerListener,
    Turn,
    compute_device,
    listeners_on,
    without_listeners,
)

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


def test_layers_whose_forward_nobody_needs_to_know_of_have_no_hooks() -> None:
    layers = [nn.Tanh(), nn.Tanh()]
    notes: list[str] = []
    listeners = [Notes(WEIGHTS, notes) for _ in layers]
    attachment = Attachment(layers, listeners)
    assert attachment.rest([0, 1]) == 0  # nobody has said who may say so
    for listener in listeners:
        listener.rests_by = attachment
    assert attachment.rest([1]) == 1
    assert [bool(layer._forward_hooks or layer._forward_pre_hooks) for layer in layers] == [True, False]
    assert [bool(layer._state_dict_pre_hooks) for layer in layers] == [True, True]
    layers[1](torch.ones(3))
    assert notes == []
    assert attachment.rest([]) == 0
    layers[1](torch.ones(3))
    assert notes == ["weights begins", "weights ends"]


def test_a_layer_has_its_hooks_again_as_soon_as_somebody_else_listens() -> None:
    layer, listener = nn.Tanh(), Notes(WEIGHTS, notes := [])
    attachment = Attachment([layer], [listener])
    listener.rests_by = attachment
    for _ in range(2):
        assert attachment.rest([0]) == 1
        other = Attachment([layer], [Notes(MEASURING, notes)])
        layer(torch.ones(3))
        assert notes == ["weights begins", "measuring begins", "measuring ends", "weights ends"]
        assert attachment.rest([0]) == 0
        other.remove()
        layer(torch.ones(3))
        assert notes[4:] == ["weights begins", "weights ends"]
        notes.clear()
    attachment.rest([0])
    attachment.remove()
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_hooks_of_the_program_remain_behind_those_that_rested() -> None:
    """They are no part of the layer: what comes behind the library's hook is not run again to recompute the layer."""
    layer, listener = nn.Tanh(), Notes(WEIGHTS, notes := [])
    attachment = Attachment([layer], [listener])
    listener.rests_by = attachment
    earlier = layer.register_forward_hook(lambda *_: notes.append("the program's"))
    assert attachment.rest([0]) == 0  # PyTorch takes its time in any case
    earlier.remove()
    assert attachment.rest([0]) == 1
    layer.register_forward_hook(lambda *_: notes.append("the program's"))
    assert attachment.rest([0]) == 0
    layer(torch.ones(3))
    assert notes == ["weights begins", "weights ends", "the program's"]


def test_a_second_run_ends_with_a_layer_that_rests_since() -> None:
    """It is of a microbatch that had begun before, and has its backward now."""
    layer, listener = nn.Tanh(), Notes(WEIGHTS, notes := [])
    attachment = Attachment([layer], [listener])
    listener.rests_by = attachment
    attachment.rest([0])
    layer.register_forward_hook(lambda *_: notes.append("the program's"))
    with without_listeners(layer), pytest.raises(LayerEndsError):
        layer(torch.ones(3))
    assert notes == []


def test_a_layer_that_compiled_code_calls_keeps_its_hooks() -> None:
    """Code that is compiled while there are none would never call them."""
    model = nn.Sequential(nn.Tanh(), nn.Tanh())
    notes: list[str] = []
    listeners = [Notes(WEIGHTS, notes) for _ in model]
    attachment = Attachment([*model], listeners)
    for listener in listeners:
        listener.rests_by = attachment
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(3))
    assert attachment.rest([0, 1]) == 0
    compiled(torch.ones(3))
    assert notes == ["weights begins", "weights ends"] * 4
