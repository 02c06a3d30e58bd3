"""Layers that are joined hold one input: the same bits and less memory, whatever comes between them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lab import Lab
from models import BLOCKS, WIDTH, assert_same, build, gradients, leaves_of, loss_of, step_gradients
from test_treatments import ALL, PRODUCTS, Seen, drawn, functions, offloaded
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import offload
from offload.activations import joined
from offload.activations.joined import EarlierLayer

LAYERS = 6
ATTENTION = {"*attention*": "offload", "*": "recompute"}


def grouped(layers: Any, lab: Lab, size: int = 3, treatments: dict[str, str] = ALL, num_layers: int = 0) -> Any:
    return offloaded(layers, lab, treatments, num_layers, layers_per_input=size)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[EarlierLayer]:
    """Who was asked for a layer's input, each time that it was."""
    found: list[EarlierLayer] = []
    ask = EarlierLayer.bytes_on_device

    def noted(earlier: EarlierLayer) -> torch.UntypedStorage:
        if earlier.here() is None:
            found.append(earlier)
        return ask(earlier)

    monkeypatch.setattr(EarlierLayer, "bytes_on_device", noted)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:num_layers = model_layers - 1", "ignore:a whole round of")
@pytest.mark.parametrize("num_layers", [0, 5])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("treatments", [ALL, PRODUCTS, ATTENTION], ids=["all", "products travel", "attention travels"])
@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_are_the_same_bits(
    block: str, treatments: dict[str, str], size: int, num_layers: int, lab: Lab, asked: list[EarlierLayer]
) -> None:
    layers, x = build(block, LAYERS, lab.device)
    expected = step_gradients(layers, x)
    lab.adverse()
    with grouped(layers, lab, size, treatments, num_layers):
        for _ in range(3):
            asked.clear()
            assert_same(expected, step_gradients(layers, x))
            assert asked


def inputs_alive(layers: nn.ModuleList, x: torch.Tensor) -> list[int]:
    """Of which layers the input is still there when forward has ended."""
    y, inputs = (x * 1), []
    for layer in layers:
        inputs.append(StorageWeakRef(y.untyped_storage()))
        y = layer(y)
    gc.collect()
    alive = [number for number, one in enumerate(inputs) if not one.expired()]
    loss_of(y).backward()
    return alive


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_one_input_of_each_group_is_held(block: str, lab: Lab) -> None:
    layers, x = build(block, LAYERS, lab.device)
    for size in (1, 2, 3):
        with grouped(layers, lab, size):
            for _ in range(3):
                assert inputs_alive(layers, x) == list(range(0, LAYERS, size))


@pytest.mark.slow
def test_the_peak_of_a_step_falls(lab: Lab) -> None:
    """By the inputs that are not held, less those of one group, which are there while it runs backward."""
    tokens, count = 1024, 16
    layers, _ = build("decoder", count, lab.device)
    x = torch.randn(1, tokens, WIDTH, device=lab.device, requires_grad=True)

    def peak_bytes(size: int) -> int:
        with grouped(layers, lab, size):
            step_gradients(layers, x)
            with offload.memory_meter(lab.device) as meter:
                step_gradients(layers, x)
        return meter.peak_bytes

    one = tokens * WIDTH * 4
    single, pairs, fours = peak_bytes(1), peak_bytes(2), peak_bytes(4)
    assert single - pairs >= (count // 2 - 2) * one
    assert single - fours >= (count - count // 4 - 4) * one


@pytest.mark.parametrize(("size", "more"), [(1, 0), (2, 3), (3, 4), (LAYERS, 5)])
def test_all_but_the_last_layer_of_a_group_run_once_more(size: int, more: int, lab: Lab) -> None:
    """Five products a layer lead to its output, and of those all but the last are computed again in any case."""
    layers, x = build("decoder", LAYERS, lab.device)

    def products() -> int:
        y = x
        for layer in layers:
            y = layer(y)
        with Seen() as seen:
            loss_of(y).backward()
        return seen.times["mm"]

    with offloaded(layers, lab):
        step_gradients(layers, x)
        alone = products()
    with grouped(layers, lab, size):
        step_gradients(layers, x)
        assert products() - alone == 5 * more


def test_what_travels_of_a_group_is_its_first_input(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    sent = []
    for size in (1, 3):
        with grouped(layers, lab, size, num_layers=3) as handle:
            for _ in range(2):
                y = (x + 1).detach_()
                for layer in layers:
                    y = layer(y)
                loss_of(y).backward()
                del y
            sent.append(handle.stats().offloaded_bytes)
            assert not handle.stats().wasted
    assert sent[0] == 3 * sent[1] > 0


def _scaled(y: torch.Tensor) -> torch.Tensor:
    return y * 1.5


def _in_place(y: torch.Tensor) -> torch.Tensor:
    return y.mul_(1.5)


def _under_another_name(y: torch.Tensor) -> torch.Tensor:
    y.data.mul_(1.5)
    return y


def _in_part(y: torch.Tensor) -> torch.Tensor:
    y.unsafe_chunk(2, -1)[0].mul_(1.5)
    return y


BETWEEN = {"another": _scaled, "in place": _in_place, "data": _under_another_name, "a part": _in_part}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_was_changed_between_two_layers_is_held(
    between: Callable[[torch.Tensor], torch.Tensor], lab: Lab, asked: list[EarlierLayer]
) -> None:
    layers, x = functions(lambda x, w: (x @ w).tanh() * x.sigmoid() + 1, lab)

    def step() -> None:
        y = x
        for layer in layers:
            with torch.no_grad() if between is not _scaled else torch.enable_grad():
                y = between(y) if y is not x else y
            y = layer(y)
        loss_of(y).backward()

    expected = gradients(leaves_of(layers, x), step)
    with grouped(layers, lab, 2):
        for _ in range(3):
            assert_same(expected, gradients(leaves_of(layers, x), step))
        assert not asked
        assert_same(step_gradients(layers, x), step_gradients(layers, x))


def test_a_change_that_comes_after_the_first_step(lab: Lab) -> None:
    """Its version tells."""
    layers, x = build("decoder", LAYERS, lab.device)
    changes = [False]

    def step() -> None:
        y = x
        for layer in layers:
            y = layer(y)
            if changes[0]:
                with torch.no_grad():
                    y.mul_(1.5)
        loss_of(y).backward()

    with grouped(layers, lab, 2):
        gradients(leaves_of(layers, x), step)
        changes[0] = True
        found = [gradients(leaves_of(layers, x), step) for _ in range(2)]
    expected = gradients(leaves_of(layers, x), step)
    for one in found:
        assert_same(expected, one)


def test_a_change_that_nobody_looks_for_gives_other_gradients(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: where neither versions nor the first proof are looked at, it does."""
    monkeypatch.setattr(joined, "same_bits", lambda *_: True)
    with pytest.raises(AssertionError):
        test_what_was_changed_between_two_layers_is_held(_under_another_name, lab, [])


def test_views_of_an_output(lab: Lab, asked: list[EarlierLayer]) -> None:
    layers, _ = functions(lambda x, w: (x.transpose(0, 1).repeat(2, 1, 1) @ w).tanh().transpose(0, 1)[:, ::2], lab)
    x = torch.randn(2, 32, WIDTH, device=lab.device, requires_grad=True)
    expected = step_gradients(layers, x)
    with grouped(layers, lab, 2):
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
        assert asked


def test_a_layer_that_writes_into_its_input(lab: Lab) -> None:
    layers, x = functions(lambda x, w: ((x * 2).tanh() @ w) * x.sin_().sigmoid(), lab)

    def step() -> None:
        y = x * 1
        for layer in layers:
            y = layer(y)
        loss_of(y).backward()

    expected = gradients(leaves_of(layers, x), step)
    with grouped(layers, lab, 2):
        for _ in range(3):
            assert_same(expected, gradients(leaves_of(layers, x), step))


class _Masked(nn.Module):
    """Takes a mask and a position, gives the position back beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, position: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x * mask + position)
        return {"x": F.dropout(y, 0.2).tanh() + x, "position": position}


def test_what_all_layers_are_given_is_no_output(lab: Lab, asked: list[EarlierLayer]) -> None:
    layers, x = build(_Masked, LAYERS, lab.device)
    mask, position = torch.rand_like(x).detach(), torch.rand_like(x).detach().requires_grad_()

    def step() -> None:
        y, shared = x, position
        for layer in layers:
            y, shared = layer(y, mask, position=shared).values()
        loss_of(y).backward()

    leaves = leaves_of(layers, x, position)
    expected = gradients(leaves, step)
    lab.adverse()
    with grouped(layers, lab, 2):
        for _ in range(3):
            asked.clear()
            assert_same(expected, gradients(leaves, step))
            assert len(asked) == LAYERS // 2


def test_below_autocast(lab: Lab, asked: list[EarlierLayer]) -> None:
    layers, x = build("gpt", LAYERS, lab.device)

    def step() -> None:
        with torch.autocast(lab.device.type, torch.bfloat16):
            y = x
            for layer in layers:
                y = layer(y)
        loss_of(y).backward()

    expected = gradients(leaves_of(layers, x), step)
    with grouped(layers, lab):
        for _ in range(3):
            assert_same(expected, gradients(leaves_of(layers, x), step))
        assert asked


def test_microbatches_in_flight(lab: Lab) -> None:
    layers, x = build("gpt", LAYERS, lab.device)
    inputs = [x, (x * 2).detach().requires_grad_(), (x[:1] - 1).detach().requires_grad_()]

    def step() -> None:
        losses = []
        for given in inputs:
            y = given
            for layer in layers:
                y = layer(y)
            losses.append(loss_of(y))
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()

    expected = gradients(leaves_of(layers, *inputs), step)
    lab.adverse()
    with grouped(layers, lab, 2, ATTENTION, 4):
        for _ in range(3):
            assert_same(expected, gradients(leaves_of(layers, *inputs), step))


def test_backward_begins_in_the_midst_of_a_group(lab: Lab) -> None:
    """An early layer's backward comes first, as of a loss of its own; those after it still find its output."""
    layers, x = build("decoder", LAYERS, lab.device)

    def step() -> None:
        y, losses = x, []
        for layer in layers:
            y = layer(y)
            losses.append(loss_of(y))
        for loss in losses:
            loss.backward(retain_graph=True)
        losses[-1].backward()

    expected = gradients(leaves_of(layers, x), step)
    with grouped(layers, lab):
        for _ in range(3):
            assert_same(expected, gradients(leaves_of(layers, x), step))


def test_second_derivative(lab: Lab) -> None:
    layers, x = functions(lambda x, w: (x @ w).tanh() * x, lab)

    def step() -> None:
        y = x
        for layer in layers:
            y = layer(y)
        (first,) = torch.autograd.grad(loss_of(y), x, create_graph=True)
        loss_of(first).backward()

    expected = gradients(leaves_of(layers, x), step)
    with grouped(layers, lab, 2):
        for _ in range(3):
            assert_same(expected, gradients(leaves_of(layers, x), step))


def test_a_declared_schedule(lab: Lab) -> None:
    layers, x = build("decoder", 4, lab.device)
    expected = step_gradients(layers, x)
    entries = {0: (True, 2, False, 1), 1: (True, 3, False, 2)}
    schedule = offload.Schedule.from_synchronization_dict(entries, 4)
    options = {"treatments": ATTENTION, "schedule": schedule, "layers_per_input": 2, "min_bytes": 0}
    lab.adverse()
    with offload.offload_layers(layers, device=lab.device, **options) as handle:
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
        assert handle.stats().offloaded_bytes


def test_what_is_not_the_same_again_is_held(lab: Lab, asked: list[EarlierLayer]) -> None:
    """Random numbers that nobody can draw again are in the output itself, or in what leads to it."""
    for function in (lambda x, w: drawn(x @ w), lambda x, w: drawn(x @ w).tanh() * x):
        layers, x = functions(function, lab)
        expected = step_gradients(layers, x)
        with grouped(layers, lab, 2):
            for _ in range(3):
                assert_same(expected, step_gradients(layers, x))
    assert len(asked) < 3 * 2 * 2  # the second one's may be kept, and then the rest is computed from it


def test_a_layer_called_twice(lab: Lab) -> None:
    layers, x = build("decoder", 4, lab.device)

    def step() -> None:
        y = x
        for number in (0, 1, 1, 2, 3, 2):
            y = layers[number](y)
        loss_of(y).backward()

    expected = gradients(leaves_of(layers, x), step)
    with grouped(layers, lab, 4):
        for _ in range(3):
            assert_same(expected, gradients(leaves_of(layers, x), step))


def test_a_layer_that_is_left_out(lab: Lab, asked: list[EarlierLayer]) -> None:
    layers, x = build("decoder", LAYERS, lab.device)

    def step() -> None:
        y = x
        for number in (0, 2, 3, 5):
            y = layers[number](y)
        loss_of(y).backward()

    expected = gradients(leaves_of(layers, x), step)
    with grouped(layers, lab):
        for _ in range(3):
            assert_same(expected, gradients(leaves_of(layers, x), step))
        assert asked


def test_hooks_of_the_program(lab: Lab) -> None:
    layers, x = build("decoder", 4, lab.device)
    with grouped(layers, lab, 4):
        for layer in layers:
            layer.register_forward_hook(lambda _, args, output: output + args[0])
            layer.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        found = [step_gradients(layers, x) for _ in range(2)]
    expected = step_gradients(layers, x)
    for one in found:
        assert_same(expected, one)


def test_a_checkpoint_inside_and_around(lab: Lab) -> None:
    layers, x = build("gpt", LAYERS, lab.device)

    def step() -> None:
        y = x
        for number, layer in enumerate(layers):
            again = torch.utils.checkpoint.checkpoint
            y = again(layer, y, use_reentrant=False) if number in (1, 4) else layer(y)
        loss_of(y).backward()

    expected = gradients(leaves_of(layers, x), step)
    with grouped(layers, lab):
        for _ in range(3):
            assert_same(expected, gradients(leaves_of(layers, x), step))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_layers_are_not_asked(lab: Lab, asked: list[EarlierLayer]) -> None:
    """What one of them is given, a layer before that is not compiled may compute again."""
    layers, x = build("decoder", LAYERS, lab.device)
    for number in (1, 2, 5):
        layers[number].compile(backend="aot_eager")
    expected = step_gradients(layers, x)
    with grouped(layers, lab, LAYERS, num_layers=2):
        for _ in range(3):
            asked.clear()
            assert_same(expected, step_gradients(layers, x))
            assert len(asked) == 2  # for the inputs of layers 1 and 5, and on the way for that of layer 4


def test_streamed_weights_are_not_asked_for_when_they_are_away(lab: Lab, asked: list[EarlierLayer]) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    expected = [tensor.cpu() for tensor in step_gradients(layers, x)]
    with offload.stream_weights(layers, lab.device), grouped(layers, lab, 2, PRODUCTS, 2):
        lab.adverse()
        for _ in range(3):
            assert_same(expected, [tensor.cpu() for tensor in step_gradients(layers, x)])
        assert not asked


def test_weights_that_are_freed_after_forward(lab: Lab, asked: list[EarlierLayer]) -> None:
    """As sharding does: a layer has its weights while it runs forward and backward, and only then."""
    layers, x = functions(lambda x, w: (x @ w).tanh() * x, lab)
    expected = step_gradients(layers, x)
    full = [layer.weight.detach().clone() for layer in layers]

    def fill(number: int) -> None:
        storage = layers[number].weight.untyped_storage()
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(layers[number].weight):
            storage.resize_(full[number].untyped_storage().nbytes())
            storage.copy_(full[number].untyped_storage())

    with grouped(layers, lab, 2):
        for number, layer in enumerate(layers):
            layer.register_forward_hook(lambda layer, *_: layer.weight.untyped_storage().resize_(0))
            layer.register_forward_pre_hook(lambda *_, number=number: fill(number), prepend=True)
            layer.register_full_backward_pre_hook(lambda *_, number=number: fill(number))
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
        assert not asked


def test_a_forward_that_fails_in_the_midst_of_a_group(lab: Lab, asked: list[EarlierLayer]) -> None:
    broken = [True]

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).tanh()
        if broken[0] and x.requires_grad and len(seen) % LAYERS == 3:
            raise ValueError("broken")
        seen.append(1)
        return y.exp() * x

    seen: list[int] = []
    layers, x = functions(function, lab)
    with grouped(layers, lab, 4):
        for _ in range(2):
            seen.clear()
            with pytest.raises(ValueError, match="broken"):
                step_gradients(layers, x)
        broken[0] = False
        found = [step_gradients(layers, x) for _ in range(3)]
    assert asked
    for one in found:
        assert_same(step_gradients(layers, x), one)


def test_a_backward_that_fails_in_the_midst_of_a_group(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    expected = [gradient.clone() for gradient in step_gradients(layers, x)]
    with grouped(layers, lab):
        for _ in range(2):
            y = x
            for number, layer in enumerate(layers):
                y = layer(y)
                if number == 1:
                    y.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(y).backward()
            del y
            assert_same(expected, step_gradients(layers, x))


def test_what_is_abandoned_is_freed(lab: Lab) -> None:
    """By reference counts: no circle waits for the collector."""
    layers, x = build("decoder", LAYERS, lab.device)
    with grouped(layers, lab):
        step_gradients(layers, x)
        gc.collect()
        gc.disable()
        try:
            y, held = x, []
            for layer in layers:
                y = layer(y)
                held.append(StorageWeakRef(y.untyped_storage()))
            del y
            assert all(one.expired() for one in held)
        finally:
            gc.enable()


def test_inputs_go_one_after_the_other_in_backward(lab: Lab) -> None:
    """An input that was computed again is there until its layer has read it, and no longer."""
    layers, x = build("decoder", LAYERS, lab.device)
    one = x.numel() * 4

    def most_bytes(size: int) -> int:
        with grouped(layers, lab, size):
            step_gradients(layers, x)
            y = x
            for layer in layers:
                y = layer(y)
            loss = loss_of(y)
            del y
            with offload.memory_meter(lab.device) as meter:
                loss.backward()
        return meter.peak_bytes

    assert most_bytes(LAYERS) <= most_bytes(1) + (LAYERS + 1) * one


def test_what_leads_to_an_input_is_let_go_on_the_way(lab: Lab) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x * 0.9  # which saves nothing
        return (x @ w).tanh()

    layers, _ = functions(function, lab)
    x = torch.randn(256, WIDTH, device=lab.device, requires_grad=True)
    with grouped(layers, lab, 4):
        step_gradients(layers, x)
        y = x
        for layer in layers:
            y = layer(y)
        loss = loss_of(y)
        del y
        with offload.memory_meter(lab.device) as meter:
            loss.backward()
    assert meter.peak_bytes < 12 * x.numel() * 4


def test_bad_sizes(lab: Lab) -> None:
    layers, _ = build("decoder", 4, lab.device)
    with pytest.raises(ValueError, match="layers_per_input must be at least 1"):
        grouped(layers, lab, 0)
    with pytest.raises(ValueError, match="layers_per_input must be 1 without treatments"):
        offload.offload_layers(layers, layers_per_input=2)
