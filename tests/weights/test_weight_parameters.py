"""Streamed parameters used in other ways than by their layers: all means what it means without streaming.

By the loss itself, by hooks, by ``torch.autograd.grad`` and ``backward(inputs=...)``; frozen with graphs in flight.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from lab import Lab
from models import assert_same, build, loss_of
from streaming import Step, backward, check_step, forward, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import offload_layers, stream_weights

LAYERS = 4
LATE_S = 0.002


@pytest.fixture
def device(device: torch.device, lab: Lab) -> torch.device:
    lab.adverse()
    lab.slow(d2h_s=LATE_S)
    return device


def penalty(layers: nn.ModuleList) -> torch.Tensor:
    return sum((parameter.square().sum().to("cpu") for parameter in layers.parameters()), torch.zeros(()))


def penalised_first(layers: nn.ModuleList, x: torch.Tensor) -> None:
    extra = penalty(layers)
    (loss_of(forward(layers, x)).cpu() + extra).backward()


def penalised_last(layers: nn.ModuleList, x: torch.Tensor) -> None:
    loss = loss_of(forward(layers, x)).cpu()
    (loss + penalty(layers)).backward()


def penalised_in_between(layers: nn.ModuleList, x: torch.Tensor) -> None:
    y = forward(layers[:2], x)
    extra = penalty(layers)
    (loss_of(forward(layers[2:], y)).cpu() + extra).backward()


def penalised_before(layers: nn.ModuleList, x: torch.Tensor) -> None:
    penalty(layers).backward()
    backward(layers, x)


def penalised_checkpoints(layers: nn.ModuleList, x: torch.Tensor, use_reentrant: bool) -> None:
    extra = penalty(layers)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    (loss_of(x).cpu() + extra).backward()


def some_inputs(layers: nn.ModuleList, x: torch.Tensor) -> None:
    some = list(layers.parameters())[1::3]
    loss_of(forward(layers, x)).backward(inputs=some)
    loss_of(forward(layers, x)).backward(inputs=[*layers[1].parameters(), x])


def frozen_for_a_second_forward(layers: nn.ModuleList, x: torch.Tensor, order: str) -> None:
    real = loss_of(forward(layers, x.detach()))
    layers.requires_grad_(False)
    fake = loss_of(forward(layers, x * 2))
    layers.requires_grad_(True)
    for loss in {"together": [real + fake], "first": [real, fake], "last": [fake, real]}[order]:
        loss.backward()


def frozen_and_thawed(layers: nn.ModuleList, x: torch.Tensor) -> None:
    losses = []
    for number in range(4):
        layers.requires_grad_(number % 2 == 0)
        layers[1].requires_grad_(number == 3)
        losses.append(loss_of(forward(layers, x * (number + 1))))
    layers.requires_grad_(True)
    losses[1].backward()
    (losses[0] + losses[3]).backward()
    losses[2].backward()


def frozen_when_backward_runs(layers: nn.ModuleList, x: torch.Tensor) -> None:
    loss = loss_of(forward(layers, x))
    layers[1].requires_grad_(False)
    loss.backward()
    layers[1].requires_grad_(True)


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("step", "microbatches"),
    [
        (penalised_first, 1),
        (penalised_last, 3),
        (penalised_in_between, 3),
        (penalised_before, 2),
        (partial(penalised_checkpoints, use_reentrant=False), 2),
        (partial(penalised_checkpoints, use_reentrant=True), 1),
        (some_inputs, 2),
        (partial(frozen_for_a_second_forward, order="together"), 1),
        (partial(frozen_for_a_second_forward, order="first"), 1),
        (partial(frozen_for_a_second_forward, order="last"), 2),
        (frozen_and_thawed, 1),
        (frozen_when_backward_runs, 2),
    ],
)
def test_parameters_used_in_other_ways(step: Step, microbatches: int, device: torch.device) -> None:
    check_step(*build("gpt", LAYERS, device), lambda layers, x: [step(layers, x) for _ in range(microbatches)])


def test_gradients_that_stay_the_same_tensor(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    with stream_weights(layers, device):
        gradients(layers, x, penalised_first)
        before = [parameter.grad for parameter in layers.parameters()]
        penalised_first(layers, x)
        assert all(one is parameter.grad for one, parameter in zip(before, layers.parameters(), strict=True))


def hooked(kind: str, layers: nn.ModuleList) -> tuple[list[Any], list[Any]]:
    """Register hooks that note what they get; those of tensors change it, too."""
    seen: list[Any] = []

    def change(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.detach().cpu().clone())
        return gradient.clamp(-1e-3, 1e-3)

    def note(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.cpu().clone())
        parameter.grad.mul_(0.5)

    if kind == "tensor":
        return seen, [parameter.register_hook(change) for parameter in layers.parameters()]
    return seen, [parameter.register_post_accumulate_grad_hook(note) for parameter in layers.parameters()]


@pytest.mark.parametrize(
    ("kind", "when", "step"),
    [
        ("tensor", "before streaming", penalised_first),
        ("tensor", "after", backward),
        ("tensor", "between forward and backward", penalised_first),
        ("accumulated", "before streaming", backward),
        ("accumulated", "after", penalised_first),
        ("accumulated", "between forward and backward", backward),
    ],
)
def test_hooks_on_parameters(kind: str, when: str, step: Step, device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    twin = copy.deepcopy(layers)

    def twice(layers: nn.ModuleList, x: torch.Tensor) -> None:
        step(layers, x)
        step(layers, x)

    expected_seen, _ = hooked(kind, twin)
    expected = gradients(twin, x, twice)
    if when == "before streaming":
        seen, handles = hooked(kind, layers)
    with stream_weights(layers, device):
        if when == "after":
            seen, handles = hooked(kind, layers)
        if when == "between forward and backward":
            loss = loss_of(forward(layers, x))
            seen, handles = hooked(kind, layers)
            loss.backward()
            seen.clear()
        assert_same(expected, gradients(layers, x, twice))
        assert len(seen) == len(expected_seen) == 2 * len(handles)
        assert sum(one.abs().sum().item() for one in seen) == pytest.approx(
            sum(one.abs().sum().item() for one in expected_seen)
        )
        for handle in handles:
            handle.remove()
        seen.clear()
        check_plain(layers, x)
        assert not seen


def check_plain(layers: nn.ModuleList, x: torch.Tensor) -> None:
    plain = copy.deepcopy(layers).to(x.device)
    assert_same(gradients(plain, x), gradients(layers, x))


def test_gradients_by_autograd_grad(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)

    def found(layers: nn.ModuleList) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        found = torch.autograd.grad(loss_of(forward(layers, x)), [x, *layers.parameters()])
        return [gradient.cpu() for gradient in found]

    expected = found(layers)
    with stream_weights(layers, device):
        for _ in range(2):
            assert_same(expected, found(layers))
            assert all(parameter.grad is None for parameter in layers.parameters())
        layers[1].requires_grad_(False)
        torch.manual_seed(1)
        loss = loss_of(forward(layers, x))
        some = [layers[0].out.weight, layers[3].norm1.bias]
        names = [name for name, _ in layers.named_parameters()]
        wanted = [expected[1 + names.index(name)] for name in ("0.out.weight", "3.norm1.bias")]
        assert_same(wanted, [gradient.cpu() for gradient in torch.autograd.grad(loss, some)])
        layers.requires_grad_()
        check_plain(layers, x)


# The copy that autocast makes of a weight is still known to be one.


def test_autocast_and_offloaded_activations(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)

    def skipped() -> int:
        with offload_layers(layers, 2, min_bytes=1) as handle, torch.autocast(device.type, torch.bfloat16):
            backward(layers, x)
            return handle.stats().skipped["parameter"]

    expected = skipped()
    with stream_weights(layers, device):
        assert skipped() == expected > 0


@pytest.mark.gpu
def test_backward_called_on_another_stream() -> None:
    device = torch.device("cuda")
    layers, x = build("gpt", LAYERS, device)
    x = x.detach()

    def step(layers: nn.ModuleList, x: torch.Tensor) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = loss_of(forward(layers, x))

            def late(gradient: torch.Tensor) -> torch.Tensor:
                torch.cuda._sleep(100_000_000)
                return gradient

            loss.register_hook(late)
        loss.backward()

    check_step(layers, x, step)
