"""Who is told of a layer's events, when, and in which order."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.base import torch_private
from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn, compute_device, listeners_on

WEIGHTS, ACTIVATIONS, MEASURING = Turn.WEIGHTS, Turn.ACTIVATIONS, Turn.MEASURING


class Notes(LayerListener):
    """Writes down what it is told, and raises where it shall."""

    def __init__(self, turn: Turn, notes: list[str], name: str = "", **errors: BaseException) -> None:
        self.turn = turn  # type: ignore[misc]  # tests have one class for all turns
        self.notes = notes
        self.name = name or turn.name.lower()
        self.errors = errors

    def note(self, what: str) -> None:
        self.notes.append(f"{self.name} {what}")

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        self.note("begins again" if call.recomputes else "begins")
        if "begin" in self.errors:
            raise self.errors["begin"]

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        self.note("fails" if failed else "ends")
        if "end" in self.errors:
            raise self.errors["end"]

    def forward_returned(self, call: LayerCall, output: object) -> None:
        torch_private.before_backward([output], call.first_node, lambda _: self.note("goes back"))


class Stops(nn.Module):
    """Raises in its forward while ``error`` is set."""

    error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return x.exp()


def inputs() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


@pytest.mark.parametrize("turns", [tuple(Turn), tuple(reversed(Turn))])
def test_turns(turns: tuple[Turn, ...]) -> None:
    """Whoever was attached first, weights come first on the way in and last on the way out."""
    layer = Stops()
    notes: list[str] = []
    for turn in turns:
        Attachment([layer], [Notes(turn, notes)])
    y = layer(inputs())
    assert notes == [
        *("weights begins", "compiling begins", "activations begins", "measuring begins"),
        *("measuring ends", "activations ends", "compiling ends", "weights ends"),
    ]
    notes.clear()
    y.sum().backward()
    assert notes == [f"{turn.name.lower()} goes back" for turn in Turn]


@pytest.mark.parametrize("turn", Turn)
def test_a_listener_that_cannot_begin(turn: Turn) -> None:
    """It ends, too, and so do those that had begun; the others hear nothing."""
    layer = Stops()
    notes: list[str] = []
    for one in Turn:
        Attachment([layer], [Notes(one, notes, **({"begin": ValueError("no")} if one is turn else {}))])
    with pytest.raises(ValueError, match="no"):
        layer(inputs())
    names = [one.name.lower() for one in Turn if one <= turn]
    assert notes == [*(f"{name} begins" for name in names), *(f"{name} fails" for name in reversed(names))]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_listener_that_cannot_end_keeps_no_other_from_it(error: BaseException) -> None:
    layer = Stops()
    notes: list[str] = []
    Attachment([layer], [Notes(WEIGHTS, notes)])
    Attachment([layer], [Notes(MEASURING, notes, end=error)])
    with pytest.raises(type(error)):
        layer(inputs())
    assert notes == ["weights begins", "measuring begins", "measuring ends", "weights ends"]


def test_listeners_come_and_go() -> None:
    layer = Stops()
    first, second = Notes(WEIGHTS, notes := []), Notes(ACTIVATIONS, notes)
    second.device = torch.device("meta")
    one, other = Attachment([layer], [first]), Attachment([layer], [second])
    assert listeners_on(layer, Notes) == [first, second]
    assert compute_device([nn.Identity(), layer]) == torch.device("meta")
    one.remove()
    one.remove()
    assert not one
    assert listeners_on(layer, Notes) == [second]
    layer(inputs())
    assert notes == ["activations begins", "activations ends"]
    other.remove()
    layer.load_state_dict(layer.state_dict())
    layer(inputs())
    assert notes == ["activations begins", "activations ends"]
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks
    assert not layer._state_dict_pre_hooks
    assert not layer._load_state_dict_pre_hooks


# Layers that checkpoint their whole call, hooks and all, as those of older Hugging Face models


class ChecksPoint(Stops):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self._gradient_checkpointing_func: Any = partial(checkpoint, use_reentrant=reentrant)

    def __call__(self, *args: Any) -> Any:
        return self._gradient_checkpointing_func(super().__call__, *args) if self.training else super().__call__(*args)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_call_begins_and_ends_around_the_checkpoint(reentrant: bool) -> None:
    layer = ChecksPoint(reentrant)
    function = layer._gradient_checkpointing_func
    notes: list[str] = []
    with Attachment([layer], [Notes(WEIGHTS, notes)]):
        for _ in range(2):
            notes.clear()
            y = layer(inputs())
            assert notes == ["weights begins", "weights ends"]
            notes.clear()
            y.sum().backward()
            assert notes[:2] == ["weights goes back", "weights begins again"]
            assert "weights begins" not in notes
        layer.eval()
        notes.clear()
        layer(inputs())
        assert notes == ["weights begins", "weights ends"]
    assert layer._gradient_checkpointing_func is function


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_checkpointed_call_that_fails(error: type[BaseException]) -> None:
    """The error is made here and gone at the end: under torch 2.11 the checkpoint's hooks live as long as the error."""
    layer = ChecksPoint()
    notes: list[str] = []
    with Attachment([layer], [Notes(WEIGHTS, notes)]):
        layer.error = error()
        with pytest.raises(error):
            layer(inputs())
        layer.error = None
        layer(inputs())
    assert notes == ["weights begins", "weights fails", "weights begins", "weights ends"]
