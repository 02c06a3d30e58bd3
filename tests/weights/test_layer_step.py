"""``step_in_backward``: a loop gives the bits that it gives without, or an error that names what differs."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lab import Lab
from models import WIDTH
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import stream_weights

LAYERS = 3
STEPS = 4

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@pytest.fixture
def device(device: torch.device, lab: Lab) -> torch.device:
    lab.adverse()
    return device


class Loop:
    """Streamed layers, a layer outside of them, their optimizer and its data.

    Args:
        device: Where the layers compute.
        make: What makes the optimizer.
        in_backward: Whether layers are stepped in backward.
    """

    def __init__(self, device: torch.device, make: Make, *, in_backward: bool) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.outside = nn.Linear(WIDTH, WIDTH).to(device)
        self.inputs = [torch.randn(4, WIDTH).to(device) for _ in range(STEPS)]
        self.streamed = stream_weights(self.layers, device)
        self.optimizer = make([*self.layers.parameters(), *self.outside.parameters()])
        if in_backward:
            self.streamed.step_in_backward(self.optimizer)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.layers.parameters(), *self.outside.parameters()]

    @property
    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def loss(self, number: int) -> torch.Tensor:
        return self.outside(self.layers(self.inputs[number])).square().mean()

    def backward(self, number: int) -> None:
        self.loss(number).backward()

    def step(self, number: int) -> None:
        self.backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def adam_with_tensor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(0.1))


def fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, fused=True)


# What differs between a backward that steps and optimizer.step(). Each is in a plain loop what it says.


def second_backward(loop: Loop) -> None:
    loop.backward(1)


def evaluation(loop: Loop) -> None:
    with torch.no_grad():
        loop.loss(1)


def skipped_loss(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.backward(1)


def zero_grad(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.optimizer.step()


def zero_grad_in_place(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)
    loop.optimizer.step()


def learning_rate(loop: Loop) -> None:
    loop.group["lr"] = 0.05
    loop.optimizer.step()


def betas(loop: Loop) -> None:
    loop.group["betas"] = (0.5, 0.9)
    loop.optimizer.step()


def tensor_learning_rate(loop: Loop) -> None:
    loop.group["lr"].fill_(0.05)
    loop.optimizer.step()


def scheduler(loop: Loop) -> None:
    optimizer = loop.optimizer
    optimizer._opt_called = True  # else it warns that this is the wrong order
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()
    optimizer.step()


def new_hyperparameter(loop: Loop) -> None:
    loop.group["clip"] = 1.0
    loop.optimizer.step()


def clip_norm(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.layers.parameters(), 1e-3)
    loop.optimizer.step()


def clip_value(loop: Loop) -> None:
    nn.utils.clip_grad_value_(loop.layers.parameters(), 1e-3)
    loop.optimizer.step()


def clip_data(loop: Loop) -> None:
    for parameter in loop.parameters:
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-1e-3, 1e-3)
    loop.optimizer.step()


def new_gradient(loop: Loop) -> None:
    for parameter in loop.parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2
    loop.optimizer.step()


def weight_decay_by_hand(loop: Loop) -> None:
    with torch.no_grad():
        for parameter in loop.parameters:
            parameter.mul_(0.5)
    loop.optimizer.step()


def weight_decay_by_data(loop: Loop) -> None:
    for parameter in loop.parameters:
        parameter.data.mul_(0.5)
    loop.optimizer.step()


def loaded_weights(loop: Loop) -> None:
    loop.layers.load_state_dict({name: value * 2 for name, value in loop.layers.named_parameters()})
    loop.optimizer.step()


def loaded_optimizer(loop: Loop) -> None:
    with pytest.warns(UserWarning, match="before and others after their step"):
        state = loop.optimizer.state_dict()
    loop.optimizer.load_state_dict(state)
    loop.optimizer.step()


def scaled_step_of_a_fused_optimizer(loop: Loop) -> None:
    loop.optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]  # as GradScaler.step does
    try:
        loop.optimizer.step()
    finally:
        del loop.optimizer.grad_scale


FORWARD = "must not run between a backward that has stepped layers"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("differ", "make", "message"),
    [
        (second_backward, sgd, rf"layer 0 \(Linear\) {FORWARD}.*inside no_step\(\)"),
        (evaluation, sgd, FORWARD),
        (skipped_loss, sgd, f"{FORWARD}.*skip a bad loss before its backward"),
        (zero_grad, sgd, r"layer \d's (weight|bias) with its gradient must stay as it was"),
        (zero_grad_in_place, sgd, "with its gradient must stay as it was"),
        (learning_rate, sgd, r"^lr of param_groups\[0\] must stay as it was when backward made the step"),
        (betas, adam, r"^betas of param_groups\[0\] must stay"),
        (tensor_learning_rate, adam_with_tensor, r"^lr of param_groups\[0\]"),
        (scheduler, sgd, r"lr of param_groups\[0\] .*Set hyperparameters before backward"),
        (new_hyperparameter, sgd, r"^clip of param_groups\[0\]"),
        (clip_norm, sgd, "with its gradient .*a global norm needs every gradient before the first step"),
        (clip_value, sgd, "with its gradient must stay"),
        (clip_data, sgd, "with its gradient must stay"),
        (new_gradient, sgd, "with its gradient must stay"),
        (weight_decay_by_hand, sgd, "with its gradient must stay"),
        (weight_decay_by_data, sgd, "with its gradient must stay"),
        (loaded_weights, sgd, "with its gradient must stay"),
        (loaded_optimizer, adam, "^the optimizer's state must stay"),
        (scaled_step_of_a_fused_optimizer, fused, "^the gradients' scale must stay.*a GradScaler"),
    ],
)
def test_what_differs_is_refused_and_breaks_nothing(
    differ: Callable[[Loop], None], make: Make, message: str, device: torch.device
) -> None:
    loop = Loop(device, make, in_backward=True)
    loop.step(0)
    loop.backward(0)
    stepped = loop.values
    with pytest.raises(RuntimeError, match=message):
        differ(loop)
    if differ not in (weight_decay_by_hand, weight_decay_by_data, loaded_weights):
        assert all(map(torch.equal, stepped, loop.values))
    with contextlib.suppress(RuntimeError):
        loop.optimizer.step()
    # From here on it is like any other training from these weights and this state.
    loop.optimizer.zero_grad()
    other = Loop(device, make, in_backward=False)
    with torch.no_grad():
        for parameter, value in zip(other.parameters, loop.values, strict=True):
            parameter.copy_(value)
    other.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    for number in range(1, STEPS):
        loop.step(number)
        other.step(number)
    assert all(map(torch.equal, other.values, loop.values))
    assert not any(map(torch.equal, stepped, loop.values))


# Loops that are right.


def accumulation(loop: Loop) -> None:
    for number in range(STEPS):
        with loop.streamed.no_step():
            loop.backward(number)
            loop.backward(number)
        loop.step(number)


def accumulation_without_zero_grad(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(number)
        loop.optimizer.step()


def clipped_accumulation(loop: Loop) -> None:
    """With ``no_step`` around all backwards, everything is left to ``optimizer.step()``."""
    for number in range(STEPS):
        with loop.streamed.no_step():
            loop.backward(number)
        nn.utils.clip_grad_norm_(loop.parameters, 1e-3)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def two_steps(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(number)
        loop.optimizer.step(None)
        loop.step(number - 1)


def schedulers(loop: Loop) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, 0.5, total_steps=STEPS)
    for number in range(STEPS):
        loop.step(number)
        scheduler.step()


def two_steps_with_the_same_gradient(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(number)
        loop.optimizer.step()
        loop.step(number)


def saved_and_loaded(loop: Loop) -> None:
    for number in range(STEPS):
        loop.step(number)
        saved = copy.deepcopy((loop.layers.state_dict(), loop.optimizer.state_dict()))
        loop.step(number)
        loop.layers.load_state_dict(saved[0])
        loop.optimizer.load_state_dict(saved[1])


def added_group(loop: Loop) -> None:
    """Between a backward and the step, with parameters that the optimizer has not had so far."""
    last = loop.group["params"][:2]
    del loop.group["params"][:2]
    for number in range(STEPS):
        loop.backward(number)
        if number == 1:
            loop.optimizer.add_param_group({"params": last, "lr": 0.3})
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def frozen(loop: Loop) -> None:
    for number in range(STEPS):
        loop.layers[number % LAYERS].requires_grad_(False)
        loop.step(number)
        loop.layers.requires_grad_()


def checkpoints(loop: Loop) -> None:
    for number in range(STEPS):
        x = loop.inputs[number].requires_grad_()
        for layer in loop.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        loop.outside(x).square().mean().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def removed_before_the_step(loop: Loop) -> None:
    loop.step(0)
    loop.backward(1)
    loop.streamed.remove()
    loop.optimizer.step()


def hooks_of_the_step(loop: Loop) -> None:
    """They run once, and see every parameter and its gradient."""
    seen = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append(sum(p.grad is not None for group in optimizer.param_groups for p in group["params"]))

    for where in ("pre", "post"):
        getattr(loop.optimizer, f"register_step_{where}_hook")(look)
    loop.step(0)
    loop.step(1)
    assert seen == 4 * [len(loop.parameters)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "make"),
    [
        (accumulation, adam),
        (accumulation_without_zero_grad, sgd),
        (clipped_accumulation, sgd),
        (two_steps, adam),
        (schedulers, sgd),
        (schedulers, adam_with_tensor),
        (two_steps_with_the_same_gradient, adam),
        (saved_and_loaded, adam),
        (added_group, sgd),
        (frozen, adam),
        (checkpoints, adam),
        (removed_before_the_step, adam),
        (hooks_of_the_step, sgd),
    ],
)
def test_loops(run: Callable[[Loop], None], make: Make, device: torch.device) -> None:
    plain, loop = (Loop(device, make, in_backward=in_backward) for in_backward in (False, True))
    before = loop.values
    run(plain)
    run(loop)
    assert all(map(torch.equal, plain.values, loop.values))
    assert not any(map(torch.equal, before, loop.values))
    assert (run is clipped_accumulation) == (loop.streamed.stats().early_steps == 0)


class Counting(torch.optim.SGD):
    """Counts its steps, in a group and for itself, and lets the count decide how far it goes."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"] / self.steps
        super().step(closure)


def test_what_a_step_counts_is_counted_once(device: torch.device) -> None:
    plain, loop = (Loop(device, Counting, in_backward=in_backward) for in_backward in (False, True))
    for number in range(STEPS):
        plain.step(number)
        loop.step(number)
    assert loop.group["count"] == loop.optimizer.steps == STEPS
    assert all(map(torch.equal, plain.values, loop.values))


def test_what_is_left_is_stepped_in_the_way_of_the_whole(device: torch.device) -> None:
    """Left to itself, PyTorch steps one by one where some are on the host, and all at once where all are on a GPU."""
    ways = []

    class Telling(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            ways.append([group["foreach"] for group in self.param_groups])
            super().step(closure)

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        *streamed, weight, bias = parameters
        return Telling([{"params": [*streamed, weight]}, {"params": [bias]}], lr=0.01)

    loop = Loop(device, make, in_backward=True)
    loop.step(0)
    assert ways == [*(LAYERS * [[None]]), [False, None]]
    assert [group["foreach"] for group in loop.optimizer.param_groups] == [None, None]


def test_one_optimizer_of_two_streams(device: torch.device) -> None:
    def run(in_backward: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        parameters = [parameter for model in models for parameter in model.parameters()]
        handles = [stream_weights(model, device) for model in models]
        optimizer = adam(parameters)
        if in_backward:
            for handle in handles:
                handle.step_in_backward(optimizer)
        for _ in range(STEPS):
            models[1](models[0](torch.randn(4, WIDTH).to(device))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(handle.stats().early_steps == in_backward * 2 * STEPS for handle in handles)
        return [parameter.detach() for parameter in parameters]

    assert all(map(torch.equal, run(in_backward=False), run(in_backward=True)))


@pytest.mark.parametrize("again", ["second forward", "retained graph"])
def test_a_second_backward_is_refused_before_it_adds_to_gradients(again: str, device: torch.device) -> None:
    loop = Loop(device, sgd, in_backward=True)
    first = loop.loss(0)
    second = loop.loss(1) if again == "second forward" else first
    first.backward(retain_graph=True)
    stepped = loop.values
    gradients = [p.grad.clone() for p in loop.layers.parameters() if p.grad is not None]
    with pytest.raises(RuntimeError, match=FORWARD):
        second.backward()
    assert all(map(torch.equal, stepped, loop.values))
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, loop.layers.parameters(), strict=True))


@pytest.mark.parametrize("make", [sgd, fused])
@pytest.mark.parametrize("bad", [False, True])
def test_a_grad_scaler_is_refused(make: Make, bad: bool, device: torch.device) -> None:
    loop = Loop(device, make, in_backward=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0)
    loss = loop.loss(0) * (float("nan") if bad else 1)
    scaler.scale(loss).backward()

    def go_on() -> None:
        scaler.step(loop.optimizer)  # makes no step if it finds a gradient that is not finite
        scaler.update()
        loop.optimizer.zero_grad()
        loop.backward(1)

    with pytest.raises(RuntimeError, match=FORWARD if bad and make is sgd else "GradScaler"):
        go_on()


def test_clipping_in_a_hook_of_the_step_is_refused(device: torch.device) -> None:
    loop = Loop(device, sgd, in_backward=True)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(loop.parameters, 1e-3)

    loop.optimizer.register_step_pre_hook(clip)
    loop.backward(0)
    with pytest.raises(RuntimeError, match="a global norm needs every gradient"):
        loop.optimizer.step()


def test_a_learning_rate_can_be_set_back(device: torch.device) -> None:
    plain, loop = (Loop(device, sgd, in_backward=in_backward) for in_backward in (False, True))
    plain.step(0)
    loop.backward(0)
    with pytest.raises(RuntimeError, match="lr of param_groups"):
        learning_rate(loop)
    loop.group["lr"] = 0.1
    loop.optimizer.step()
    assert all(map(torch.equal, plain.values, loop.values))


def test_a_backward_that_failed_is_ended_by_the_step(device: torch.device) -> None:
    loop = Loop(device, sgd, in_backward=True)

    def fail(_: Any) -> None:
        raise ArithmeticError("no gradient")

    x = loop.layers[0](loop.inputs[0])
    x.register_hook(fail)
    before = loop.values
    with pytest.raises(ArithmeticError, match="no gradient"):
        loop.outside(loop.layers[1:](x)).square().mean().backward()
    loop.streamed.synchronize()  # on a GPU autograd's thread, which ends what has failed, may still be at it
    stepped = loop.values
    assert not any(map(torch.equal, before[4:6], stepped[4:6]))  # the last layer
    with pytest.raises(RuntimeError, match=f"{FORWARD}.*after a backward that failed too"):
        loop.backward(1)
    loop.optimizer.step()
    assert all(map(torch.equal, stepped[4:6], loop.values[4:6]))
    assert all(map(torch.equal, before[:2], loop.values[:2]))  # the first, which has no gradient
    loop.optimizer.zero_grad()
    loop.step(1)
    assert not any(map(torch.equal, stepped, loop.values))


def test_a_step_that_fails_in_backward_is_made_by_the_optimizers_step(device: torch.device) -> None:
    class Failing(torch.optim.SGD):
        failing: object = None

        def step(self, closure: Any = None) -> None:
            if any(parameter is self.failing for group in self.param_groups for parameter in group["params"]):
                raise ArithmeticError("no step")
            super().step(closure)

    plain, loop = (
        Loop(device, lambda parameters: Failing(parameters, lr=0.1), in_backward=in_backward)
        for in_backward in (False, True)
    )
    plain.step(0)
    loop.optimizer.failing = loop.layers[1].bias
    with pytest.raises(ArithmeticError, match="no step") as caught:
        loop.backward(0)
    assert "layer 1's bias, layer 1's weight. optimizer.step() makes it again" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match=FORWARD):
        loop.backward(1)
    loop.optimizer.failing = None
    loop.optimizer.step()
    assert all(map(torch.equal, plain.values, loop.values))


def test_a_model_saved_between_backward_and_step_is_warned_of(device: torch.device) -> None:
    loop = Loop(device, sgd, in_backward=True)
    loop.layers.state_dict()
    loop.backward(0)
    with pytest.warns(UserWarning, match=r"call optimizer.step\(\) first"):
        loop.layers.state_dict()
    loop.optimizer.step()
    loop.layers.state_dict()


def test_optimizers_that_hold_another_are_refused(device: torch.device) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__([nn.Parameter(torch.ones(1))], {})
            self.inner = inner
            self.param_groups = inner.param_groups

        def step(self, closure: Any = None) -> None:
            self.inner.step(closure)

    loop = Loop(device, sgd, in_backward=False)
    with pytest.raises(TypeError, match="got Wrapper, which holds another optimizer"):
        loop.streamed.step_in_backward(Wrapper(loop.optimizer))


class Call(torch.autograd.Function):
    """Calls a function when backward comes by, before the gradient goes on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[], object]) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.function()
        return gradient, None


def backward_with_penalty(loop: Loop, before: Callable[[], object], after: Callable[[], object]) -> None:
    """Let the loss use a weight of the last layer by itself: its gradient arrives between the two functions' calls."""
    # Made before forward, so that backward comes to it last, and the first to the last; it saves nothing, so that
    # autograd sees no harm when the weight is stepped.
    last = Call.apply(torch.zeros((), requires_grad=True), after)
    penalty = Call.apply(loop.layers[LAYERS - 1].weight.sum(), before)
    (loop.loss(0) + (last + penalty).to(loop.inputs[0].device)).backward()


LATE = "layer 2's weight with its gradient must stay as it was"


@pytest.mark.parametrize("arrives", ["as the step begins", "during the step", "after the step"])
def test_a_gradient_that_comes_too_late_for_the_step_is_refused(arrives: str, device: torch.device) -> None:
    begins, steps, stepped, arrived = (threading.Event() for _ in range(4))

    class Telling(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            if not steps.is_set():
                steps.set()
                assert arrives != "during the step" or arrived.wait(10)
            else:
                stepped.set()  # the step of another layer

    class Gated(nn.Parameter):
        """Holds the worker where it has read ``grad`` and has not yet written the sum, for as long as that can help."""

        @property
        def grad(self) -> torch.Tensor | None:
            value: torch.Tensor | None = torch.Tensor.grad.__get__(self)
            if threading.current_thread().name == "offload::host" and not begins.is_set():
                begins.set()
                arrived.wait(0.5)  # in vain where the gradient has to wait for the worker
            return value

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            torch.Tensor.grad.__set__(self, value)

    loop = Loop(device, Telling, in_backward=True)
    if arrives == "as the step begins":
        loop.layers[LAYERS - 1].weight.__class__ = Gated
    moment = {"as the step begins": begins, "during the step": steps, "after the step": stepped}[arrives]

    def wait() -> None:
        assert moment.wait(10)

    backward_with_penalty(loop, wait, arrived.set)
    with pytest.raises(RuntimeError, match=LATE):
        loop.optimizer.step()


def test_a_gradient_that_comes_just_in_time_for_the_step_counts(device: torch.device) -> None:
    """The worker is busy with something else until then."""
    plain, loop = (Loop(device, adam, in_backward=in_backward) for in_backward in (False, True))
    for one in (plain, loop):
        arrived = threading.Event()
        writer: Any = one.streamed._alive()._writer
        writer._worker.submit(arrived.wait, [])
        backward_with_penalty(one, lambda: None, arrived.set)
        one.optimizer.step()
    assert all(map(torch.equal, plain.values, loop.values))
    assert loop.streamed.stats().early_steps == LAYERS


# What a loop may do, in any order.


def a_backward(loop: Loop, choice: random.Random) -> None:
    loop.backward(choice.randrange(STEPS))


def a_backward_through_some_layers(loop: Loop, choice: random.Random) -> None:
    loop.layers[choice.randrange(LAYERS) :](loop.inputs[0]).square().mean().backward()


def a_backward_without_a_step(loop: Loop, choice: random.Random) -> None:
    with loop.streamed.no_step():
        a_backward(loop, choice)


def a_backward_that_fails(loop: Loop, choice: random.Random) -> None:
    def fail(_: Any) -> None:
        raise ArithmeticError

    first = choice.randrange(1, LAYERS)
    x = loop.layers[:first](loop.inputs[0])
    if x.requires_grad:
        x.register_hook(fail)
    with contextlib.suppress(ArithmeticError):
        loop.layers[first:](x).square().mean().backward()


def a_step(loop: Loop, _: random.Random) -> None:
    loop.optimizer.step()


def no_gradients(loop: Loop, choice: random.Random) -> None:
    loop.optimizer.zero_grad(set_to_none=choice.random() < 0.5)


def another_learning_rate(loop: Loop, choice: random.Random) -> None:
    loop.group["lr"] = choice.choice((0.1, 0.05, 0.2))


def clipping(loop: Loop, _: random.Random) -> None:
    nn.utils.clip_grad_norm_(loop.parameters, 0.01)


def halved_data(loop: Loop, _: random.Random) -> None:
    for parameter in loop.parameters:
        if parameter.grad is not None:
            parameter.grad.data.mul_(0.5)


def halved_weights(loop: Loop, _: random.Random) -> None:
    with torch.no_grad():
        for parameter in loop.parameters:
            parameter.mul_(0.5)


def loading(loop: Loop, choice: random.Random) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = copy.deepcopy((loop.layers.state_dict(), loop.optimizer.state_dict()))
    if choice.random() < 0.5:
        a_step(loop, choice)
    if choice.random() < 0.7:
        loop.layers.load_state_dict(saved[0])
    if choice.random() < 0.7:
        loop.optimizer.load_state_dict(saved[1])


def freezing(loop: Loop, choice: random.Random) -> None:
    loop.layers[choice.randrange(LAYERS)].requires_grad_(choice.random() < 0.5)


def an_evaluation(loop: Loop, _: random.Random) -> None:
    evaluation(loop)


ROUND = [a_backward_without_a_step, a_backward, a_step, no_gradients]
DISTURBANCES = [
    *(a_backward, a_backward_through_some_layers, a_backward_without_a_step, a_backward_that_fails, a_step),
    *(no_gradients, another_learning_rate, clipping, halved_data, halved_weights, loading, freezing, an_evaluation),
]


def random_loop(choice: random.Random) -> list[Callable[[Loop, random.Random], None]]:
    """Three rounds of an ordinary loop, and two things more anywhere."""
    actions = 3 * ROUND
    for _ in range(2):
        actions.insert(choice.randrange(len(actions)), choice.choice(DISTURBANCES))
    return actions


@pytest.mark.slow
@pytest.mark.parametrize("make", [sgd, adam, fused, Counting])
def test_any_loop_is_the_same_or_refused(make: Make, device: torch.device) -> None:
    ended = 0
    for seed in range(20):
        actions = random_loop(random.Random(seed))
        refused = None
        values = []
        for in_backward in (False, True):
            loop = Loop(device, make, in_backward=in_backward)
            choice = random.Random(seed)
            for action in actions:
                try:
                    action(loop, choice)
                except RuntimeError as error:
                    refused = str(error)
                    assert in_backward, (seed, refused)
                    assert FORWARD in refused or "must stay as it was" in refused, (seed, refused)
                    break
            values.append(loop.values)
        last = [action for action in actions if action is a_step or "backward" in action.__name__][-1:]
        if refused is None and last == [a_step]:  # else the weights are those after a step in backward
            ended += 1
            names = [action.__name__ for action in actions]
            assert all(map(torch.equal, *values)), f"seed {seed}: {names}"
    assert 3 < ended < 18  # something is refused in the others
