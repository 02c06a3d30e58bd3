"""``step_in_backward``: the bits of one optimizer that steps after backward, or an error."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from lab import Lab
from models import WIDTH, loss_of
from streaming import backward, forward
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import StreamedWeights, stream_weights

LAYERS = 3
STEPS = 3

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@pytest.fixture
def device(device: torch.device, lab: Lab) -> torch.device:
    lab.adverse()
    return device


class Undecorated(torch.optim.Optimizer):
    """As users write them: the program calls its step under ``no_grad``."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5, weight_decay=0.1)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


class Gated(nn.Module):
    """Its gate's gradient is complete before a recomputation, which needs the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() * self.gate.sigmoid().detach() + self.gate


class Loop:
    """Streamed layers, whose weights step after backward or in it, and their data."""

    def __init__(self, device: torch.device, make: Make, *, in_backward: bool = True, shared: bool = False) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Gated() for _ in range(LAYERS))
        if shared:
            self.layers[2].linear.weight = self.layers[0].linear.weight
        self.inputs = [torch.randn(4, WIDTH).to(device) for _ in range(STEPS)]
        self.streamed: StreamedWeights = stream_weights(
            self.layers, device, step_in_backward=make if in_backward else None
        )
        self.optimizers = self.streamed.optimizers if in_backward else [make(self.layers.parameters())]

    @property
    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.layers.parameters()]

    def loss(self, number: int, first: int = 0) -> torch.Tensor:
        return loss_of(forward(self.layers[first:], self.inputs[number]))

    def step(self, loss: torch.Tensor) -> None:
        """Backward and the step, in it or after it."""
        loss.backward()
        if not self.streamed.optimizers:
            with torch.no_grad():
                self.optimizers[0].step()
            self.optimizers[0].zero_grad()
        assert all(parameter.grad is None for parameter in self.layers.parameters())


def steps(loop: Loop) -> None:
    for number in range(STEPS):
        loop.step(loop.loss(number))


def accumulation(loop: Loop) -> None:
    for number in range(STEPS):
        with loop.streamed.no_step():
            loop.loss(number).backward()
            loop.loss(number).backward()
        torch.autograd.grad(loop.loss(number), loop.layers[1].linear.weight)
        # In the second step, the first layer's gradients come from other microbatches than the last.
        loop.step(loop.loss(number - 1, first=number % 2))


def schedulers_and_saved_state(loop: Loop) -> None:
    made = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in loop.optimizers]
    for number in range(STEPS):
        loop.step(loop.loss(number))
        saved = copy.deepcopy((loop.layers.state_dict(), [each.state_dict() for each in loop.optimizers]))
        loop.step(loop.loss(number - 1))
        loop.layers.load_state_dict(saved[0])
        for optimizer, state, scheduler in zip(loop.optimizers, saved[1], made, strict=True):
            optimizer.load_state_dict(state)
            scheduler.step()


def frozen(loop: Loop) -> None:
    for number in range(STEPS):
        loop.layers[number].requires_grad_(False)
        loop.step(loop.loss(number))
        loop.layers.requires_grad_()


def layers_called_again(loop: Loop, order: Sequence[int] = (2, 1, 1, 0, 2)) -> None:
    for x in loop.inputs:
        loop.step(loss_of(forward([loop.layers[index] for index in order], x)))


def layers_in_another_order(loop: Loop) -> None:
    layers_called_again(loop, (2, 1, 0))


def checkpointed_groups(loop: Loop) -> None:
    """Backward passes through several layers again before it has the gradients of the first."""

    def group(x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            time.sleep(0.02)  # enough for a step that must not be made yet
        return loop.layers[1](loop.layers[0](x))

    for number in range(STEPS):
        x = checkpoint(group, loop.inputs[number].requires_grad_(), use_reentrant=number == 1)
        loop.step(loss_of(loop.layers[2](x)))


@pytest.mark.parametrize(
    ("run", "make", "shared"),
    [
        (accumulation, adam, False),
        (schedulers_and_saved_state, adam, False),
        (frozen, adam, False),
        (layers_called_again, adam, False),
        (checkpointed_groups, adam, False),
        (steps, sgd, True),
        (accumulation, sgd, True),
        (layers_in_another_order, sgd, True),
        (checkpointed_groups, sgd, True),
        (steps, Undecorated, False),
    ],
)
def test_the_bits_of_a_step_after_backward(
    run: Callable[[Loop], None], make: Make, shared: bool, device: torch.device
) -> None:
    plain, loop = (Loop(device, make, in_backward=in_backward, shared=shared) for in_backward in (False, True))
    before = loop.values
    run(plain)
    run(loop)
    assert all(map(torch.equal, plain.values, loop.values))
    assert not any(map(torch.equal, before, loop.values))
    assert loop.streamed.stats().early_steps >= STEPS * (LAYERS - 1)
    assert plain.streamed.stats().early_steps == 0


def test_the_programs_optimizer_steps_what_is_outside(device: torch.device) -> None:
    """Also the streamed parameters that the function leaves out."""

    def train(in_backward: bool) -> list[torch.Tensor]:
        def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.SGD([parameter for parameter in parameters if parameter.ndim == 2], lr=0.125)

        loop = Loop(device, make if in_backward else sgd, in_backward=in_backward)
        outside = nn.Linear(WIDTH, WIDTH).to(device)
        rest = [p for p in loop.layers.parameters() if p.ndim == 1 or not in_backward]
        optimizer = torch.optim.SGD([*outside.parameters(), *rest], lr=0.125)
        for x in loop.inputs:
            backward(loop.layers, outside(x))
            optimizer.step()
            optimizer.zero_grad()
        return [*loop.values, *(parameter.detach().cpu() for parameter in outside.parameters())]

    # A learning rate that is a power of two: then it makes no difference where the step is computed.
    assert all(map(torch.equal, train(False), train(True)))


def test_an_optimizer_that_would_step_twice_is_refused(device: torch.device) -> None:
    loop = Loop(device, adam)
    optimizer = sgd(loop.layers.parameters())
    loop.loss(0).backward()
    with pytest.raises(RuntimeError, match=r"must leave layer 0's gate alone, which is stepped in backward"):
        optimizer.step()
    loop.streamed.remove()
    optimizer.step()
    with pytest.raises(RuntimeError, match="must be in use, but it was removed"):
        _ = loop.streamed.optimizers


def test_a_second_backward_of_the_same_forward_is_refused(device: torch.device) -> None:
    loop = Loop(device, sgd)
    loss = loop.loss(0)
    loss.backward(retain_graph=True)
    stepped = loop.values
    with pytest.raises(RuntimeError, match="modified by an inplace operation: the weights of layer 2"):
        loss.backward()
    loop.streamed.synchronize()  # on a GPU, the failed backward may be at work as long as its error lives
    assert all(map(torch.equal, stepped, loop.values))


def test_layers_that_are_checkpointed_twice_are_refused(device: torch.device) -> None:
    """Each checkpoint brings gradients of its own, in one backward."""
    loop = Loop(device, sgd)
    x = loop.inputs[0].requires_grad_()
    for layer in (*loop.layers, *loop.layers):
        x = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="do not use step_in_backward with layers that are checkpointed twice"):
        loss_of(x).backward()


@pytest.mark.parametrize("how", ["loss", "hook"])
def test_gradients_from_outside_the_layer_are_refused(how: str, device: torch.device) -> None:
    loop = Loop(device, sgd)
    weight = loop.layers[1].linear.weight
    hook = weight.register_hook(torch.neg) if how == "hook" else None
    loss = loop.loss(0) if hook else loop.loss(0) + weight.sum().to(device)
    with pytest.raises(RuntimeError, match=r"layer 1's linear.weight must get its gradient from its layer alone"):
        loss.backward()
    loop.streamed.remove()
    weight.sum().backward()


def test_a_backward_that_failed_may_have_stepped_some_layers(device: torch.device) -> None:
    loop = Loop(device, sgd)

    def fail(_: Any) -> None:
        raise ArithmeticError("no gradient")

    x = loop.layers[0](loop.inputs[0])
    x.register_hook(fail)
    before = loop.values
    with pytest.raises(ArithmeticError, match="no gradient"):
        loss_of(loop.layers[2](loop.layers[1](x))).backward()
    loop.streamed.synchronize()  # on a GPU autograd's thread, which ends what has failed, may still be at it
    assert [torch.equal(*pair) for pair in zip(before, loop.values, strict=True)] == [True] * 6 + [False] * 3
    assert_goes_on(loop)


def assert_goes_on(loop: Loop) -> None:
    """The next steps are those of training that begins with these weights and this state."""
    loop.layers.zero_grad()
    plain = Loop(loop.inputs[0].device, sgd, in_backward=False)
    plain.layers.load_state_dict(loop.layers.state_dict())
    for optimizer in loop.optimizers:
        for parameter, state in optimizer.state.items():
            names = [name for name, each in loop.layers.named_parameters() if each is parameter]
            plain.optimizers[0].state[plain.layers.get_parameter(names[0])] = copy.deepcopy(state)
    steps(plain)
    steps(loop)
    assert all(map(torch.equal, plain.values, loop.values))


def test_a_step_that_fails_comes_out_of_backward(device: torch.device) -> None:
    failing = []

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if self in failing:
                raise ArithmeticError("no step")
            super().step(closure)

    loop = Loop(device, lambda parameters: Failing(parameters, lr=0.1, momentum=0.5, weight_decay=0.1))
    before = loop.values
    failing.append(loop.optimizers[1])
    with pytest.raises(ArithmeticError, match="no step") as caught:
        loop.loss(0).backward()
    assert caught.value.__notes__ == ["In the step in backward of layer 1 (Gated)."]
    assert [torch.equal(*pair) for pair in zip(before, loop.values, strict=True)] == [True] * 6 + [False] * 3
    failing.clear()
    assert_goes_on(loop)


def test_a_layer_whose_gradient_is_wrong_is_not_stepped(device: torch.device) -> None:
    loop = Loop(device, sgd)
    with loop.streamed.no_step():
        loop.loss(0).backward()
    weight = loop.layers[2].linear.weight
    weight.grad = torch.zeros(()).expand_as(weight)  # memory that cannot be added to
    before = loop.values
    with pytest.raises(RuntimeError, match="single memory location"):
        loop.loss(0).backward()
    assert all(map(torch.equal, before, loop.values))
    assert_goes_on(loop)


def other_parameters(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return sgd(nn.Linear(2, 2).parameters())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        ("sgd", TypeError, "must be a function that makes the optimizer of one layer's parameters, got 'sgd'; write"),
        (sgd([nn.Parameter(torch.ones(1))]), TypeError, "must be a function .* got a SGD; write step_in"),
        (list, TypeError, "must return a torch.optim.Optimizer, got list; write step_in_backward=lambda"),
        (other_parameters, ValueError, r"of the parameters that it is given, .* that of layer 0 \(Linear\) has others"),
    ],
)
def test_what_makes_no_optimizer_is_refused(make: Any, error: type[Exception], message: str) -> None:
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    with pytest.raises(error, match=message):
        stream_weights(layers, "cpu", step_in_backward=make)
    stream_weights(layers, "cpu").remove()
