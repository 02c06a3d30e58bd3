"""What an operation saves is copied when the operation is over, whatever it writes until then."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lab import Lab
from models import NOTHING, Composed, Offloading, assert_same, gradients, leaves_of, loss_of, offloading, save
from saving import finish_copies
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import Schedule
from offload.pipelining.chunk import ChunkParts

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture
def lab(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    finish_copies(lab, monkeypatch)
    lab.backend.poison = True
    return lab


class FillsWhatItSaved(torch.autograd.Function):
    """Multiplies by three, and saves the factor before it is there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        factor = torch.zeros_like(x)
        ctx.save_for_backward(factor)
        factor.fill_(3)
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * ctx.saved_tensors[0]


KINDS: dict[str, Callable[[], nn.Module]] = {
    # Saves its noise before it is drawn, and its running statistics before they are brought up to date.
    "noise": lambda: Composed(lambda own, x: F.rrelu(x * 1.5, training=True)),
    "statistics": lambda: nn.Sequential(nn.BatchNorm1d(4)),
    "function": lambda: Composed(lambda own, x: FillsWhatItSaved.apply(x)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_after_it_was_saved(kind: str, lab: Lab) -> None:
    layers = nn.ModuleList(KINDS[kind]() for _ in range(4)).to(lab.device)
    x = torch.linspace(-1, 1, 64, device=lab.device).view(16, 4).requires_grad_()

    def step(offloaded: Offloading) -> None:
        loss_of(offloaded.forward(layers, x)).backward()

    leaves = leaves_of(layers, x)
    offloaded = offloading(2, 4, lab.device)
    assert_same(gradients(leaves, lambda: step(NOTHING)), gradients(leaves, lambda: step(offloaded)))
    assert offloaded.stats.reloaded_bytes > 0


def test_a_copy_begins_when_the_next_operation_saves(lab: Lab) -> None:
    offloaded = offloading(1, 3, lab.device)
    copied: list[int] = []

    def layer(y: torch.Tensor) -> torch.Tensor:
        for nbytes in (1, 2, 4):
            y = save(y, lambda _: None, torch.zeros(nbytes, dtype=torch.uint8, device=lab.device))
            copied.append(offloaded.stats.offloaded_bytes)
        return y

    y = offloaded.layer(layer, torch.ones(1, device=lab.device, requires_grad=True))
    assert [*copied, offloaded.stats.offloaded_bytes] == [0, 1, 3, 7]
    del y


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoints_input_leaves_while_the_layer_computes(reentrant: bool, lab: Lab) -> None:
    offloaded = offloading(2, 4, lab.device)
    copied: list[int] = []

    def layer(y: torch.Tensor) -> torch.Tensor:
        copied.append(offloaded.stats.offloaded_bytes)
        return y.sin()

    x = torch.ones(8, device=lab.device, requires_grad=True) * 1
    y = offloaded.forward([partial(checkpoint, layer, use_reentrant=reentrant)] * 2 + [torch.neg] * 2, x)
    # One that calls backward anew is itself the operation, and saves when it ends.
    assert copied == ([0, 32] if reentrant else [32, 64])
    y.sum().backward()


@pytest.mark.filterwarnings("ignore:a whole round of")
def test_what_nobody_holds_when_the_operation_is_over_is_not_copied(lab: Lab) -> None:
    offloaded = offloading(1, 3, lab.device)
    x = torch.ones(1, device=lab.device, requires_grad=True)

    def layer(y: torch.Tensor) -> torch.Tensor:
        save(y, lambda _: None, torch.zeros(8, device=lab.device))
        return y * 1

    offloaded.forward([layer, torch.neg, torch.neg], x).sum().backward()
    assert offloaded.stats.offloaded_bytes == 0


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_parts_of_a_chunk_that_one_operation_saves(parts: int, lab: Lab) -> None:
    """Each part is to be released when the next begins, which is in the midst of the operation."""
    x = torch.ones(1, device=lab.device, requires_grad=True)
    received: list[Tensors] = []
    moves = {part: (True, part + 1, False, part + 1) for part in range(parts - 1)}
    offloaded = offloading(1, parts, lab.device, schedule=Schedule.from_synchronization_dict(moves, parts))
    chunk = ChunkParts(offloaded.context._round, number=0, parts=parts, part_bytes=3 * 256 / parts)
    with chunk:
        y = save(x, received.append, *(torch.full((64,), value, device=lab.device) for value in (1.0, 2.0, 3.0)))
        assert offloaded.stats.offloaded_bytes == 0
    resident_bytes = offloaded.context._transfers.resident_bytes
    y.sum().backward()
    assert [tensor.unique().tolist() for tensor in received[0]] == [[1.0], [2.0], [3.0]]
    assert offloaded.stats.offloaded_bytes == offloaded.stats.reloaded_bytes > 0
    assert resident_bytes == 0


@pytest.mark.gpu
def test_what_another_stream_computes_is_ready_when_that_stream_is() -> None:
    """Nothing says that the layer's stream may read it yet, although its operation comes next."""
    device = torch.device("cuda")
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    offloaded = offloading(1, 3, device)
    received: list[Tensors] = []
    x = torch.ones(1, device=device, requires_grad=True)

    def layer(y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            late = torch.zeros(1024, device=device)
            torch.cuda._sleep(100_000_000)
            late.fill_(3.0)
            y = save(y, received.append, late, late + 1)
        return save(y, received.append, torch.zeros(8, device=device))

    y = offloaded.layer(layer, x)
    main.wait_stream(side)
    offloaded.forward([torch.neg, torch.neg], y).sum().backward()
    assert [tensor.unique().tolist() for tensor in received[1]] == [[3.0], [4.0]]
