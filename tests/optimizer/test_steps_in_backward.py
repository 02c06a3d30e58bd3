"""Steps beside backward: the same bits, one gradient a step, and an error where gradients were not final."""

import copy
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import Lab, LateOptimizer
from models import Stop, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import (
    OPTIMIZERS,
    WIDTH,
    Make,
    Training,
    adamw,
    assert_same_training,
    batch,
    build,
    loss_of,
    plain_steps,
    resident,
    stream,
    values,
)

from offload import offload_layers
from offload.measuring.memory_left import new_gradients
from offload.optimizer.chunks import StepWait
from offload.optimizer.early import FreedGradient

STEPS = 10
LATE_S = 0.05


def trained(device: torch.device, make: Make, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """With a scheduler; three microbatches in every second step."""
    model = build(device)
    optimizer = make(model.parameters())
    handle = stream(optimizer, **options) if options else None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    for number in range(STEPS):
        microbatches = 3 if number % 2 else 1
        for microbatch in range(microbatches):
            if handle is not None and microbatch < microbatches - 1:
                with handle.no_step():
                    loss_of(model, 3 * number + microbatch).backward()
            else:
                loss_of(model, 3 * number + microbatch).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return values(model, optimizer), handle


@pytest.mark.slow
@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits(name: str, consume: bool, lab: Lab) -> None:
    lab.adverse()
    expected, _ = trained(lab.device, OPTIMIZERS[name])
    found, handle = trained(lab.device, OPTIMIZERS[name], in_backward=True, consume_gradients=consume)
    assert_same(expected, found)
    stats = handle.stats()
    assert stats.backward_chunks == stats.chunks > STEPS
    assert stats.steps == STEPS


class _Passes(torch.autograd.Function):
    """Passes the gradient on, and has none for ``weight``. Backward takes memory of the size of ``weight``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.held = [torch.full_like(ctx.weight, 7.0) for _ in range(64)]
        return gradient, None


def test_a_parameter_that_gets_no_gradient_is_not_stepped(lab: Lab) -> None:
    """Autograd calls the hook of such a parameter all the same."""

    def train(streamed: bool) -> list[torch.Tensor]:
        weights = nn.ParameterList(torch.ones(1000, device=lab.device) for _ in range(2))
        optimizer = adamw(weights)
        if streamed:
            stream(optimizer, in_backward=True, chunk_bytes="1KiB")
        for _ in range(3):
            _Passes.apply(*weights).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(weights, optimizer)

    assert_same_training(train)


def test_a_parameter_that_was_taken_out_of_the_optimizer_is_not_stepped(lab: Lab) -> None:
    def train(streamed: bool) -> list[torch.Tensor]:
        model = build(lab.device)
        optimizer = adamw(model.parameters())
        if streamed:
            stream(optimizer, in_backward=True, consume_gradients=True)
        for number in range(3):
            if number == 1:
                optimizer.state.pop(optimizer.param_groups[0]["params"].pop())
            loss_of(model, number).backward()
            optimizer.step()
            model.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    assert_same(*map(train, (False, True)))


def test_consumed_gradients_are_gone(lab: Lab) -> None:
    run = Training(lab.device, in_backward=True, consume_gradients=True)
    for number in range(3):
        run.backward(number)
        assert {type(one.grad) for one in run.model.parameters()} == {FreedGradient}
        run.optimizer.step()
        assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.parametrize("how", ["load", "remove"])
def test_consumed_gradients_leave_nothing_where_no_step_follows(how: str, lab: Lab) -> None:
    run = Training(lab.device, in_backward=True, consume_gradients=True)
    run.steps(range(2))
    saved = run.checkpoint
    run.backward(2)
    if how == "load":
        run.model.load_state_dict(saved[0])
        run.optimizer.load_state_dict(saved[1])
    else:
        run.handle.remove()
    assert all(parameter.grad is None for parameter in run.model.parameters())
    if how == "load":
        run.steps(range(2, 4))
        assert_same(resident(lab.device, range(4)), run.values)


@pytest.mark.parametrize("consume", [False, True])
def test_gradients_that_are_dropped_after_the_steps_are_told(consume: bool, lab: Lab) -> None:
    """Without steps in backward, ``optimizer.step()`` would pass over the parameter."""
    run = Training(lab.device, in_backward=True, consume_gradients=consume)
    run.steps(range(2))
    saved = run.checkpoint
    run.backward(2)
    run.model[3].weight.grad = None
    with pytest.raises(
        RuntimeError, match=r"must be final .* but that of a parameter of shape \(48, 192\) has been changed"
    ):
        run.optimizer.step()
    run.load(saved)
    run.steps(range(2, 4))
    assert_same(resident(lab.device, range(4)), run.values)


CHANGES = {
    "in place": lambda gradient: gradient.data.clamp_(-1e-4, 1e-4),
    "replaced": lambda gradient: setattr(gradient, "data", gradient.data.clamp(-1e-4, 1e-4)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_gradients_that_change_through_data_after_the_steps_are_told(change: Any, lab: Lab) -> None:
    """PyTorch counts no such changes; loops that clip each gradient make them."""
    run = Training(lab.device, in_backward=True)
    run.steps(range(2))
    run.backward(2)
    change(run.model[0].weight.grad)
    with pytest.raises(RuntimeError, match=r"must be final .* has been changed since"):
        run.optimizer.step()


def test_gradients_that_were_stepped_with_are_read_and_copied_as_others(lab: Lab, tmp_path: Path) -> None:
    run = Training(lab.device, in_backward=True)
    expected = Training(lab.device)
    for one in (run, expected):
        one.backward(0)
    gradients = [one.grad for one in run.model.parameters()]
    wanted = [one.grad for one in expected.model.parameters()]
    torch.save(gradients, tmp_path / "gradients.pt")
    assert_same(wanted, torch.load(tmp_path / "gradients.pt"))
    assert_same(wanted, copy.deepcopy(gradients))
    assert_same([one.data.norm() for one in wanted], [one.data.norm() for one in gradients])
    assert {type(one.clone()) for one in gradients} == {torch.Tensor}
    run.optimizer.step()
    assert {type(one) for one in gradients} == {torch.Tensor}


@pytest.mark.parametrize("consume", [False, True])
def test_parameters_that_change_after_the_steps_are_told(consume: bool, lab: Lab) -> None:
    """As of a loop that computes gradients at noisy weights, and restores the weights before the step."""
    run = Training(lab.device, in_backward=True, consume_gradients=consume)
    run.steps(range(2))
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.backward(2)
    with torch.no_grad():
        for parameter, value in zip(run.model.parameters(), before, strict=True):
            parameter.copy_(value)
    with pytest.raises(RuntimeError, match=r"must be final .* but a parameter of shape \(48,\) has been changed since"):
        run.optimizer.step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_that_change_gradients_once_they_are_there(when: str, lab: Lab) -> None:
    """One that is called behind the step would find no gradient, and may pass over it."""

    def halve(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)

    def train(streamed: bool) -> list[torch.Tensor]:
        run = Training(lab.device, streamed=False)
        options = {"in_backward": True, "consume_gradients": True}
        if streamed and when == "after":
            stream(run.optimizer, **options)
        for parameter in run.model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        if streamed and when == "before":
            stream(run.optimizer, **options)
        run.steps(range(3))
        return run.values

    if when == "before":
        assert_same_training(train)
    else:
        with pytest.raises(RuntimeError, match="hooks on a parameter must be registered before its gradient is consu"):
            train(True)


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_options_that_change_after_the_steps_are_told(kind: Any, consume: bool, lab: Lab) -> None:
    """Also if another backward then steps other parameters."""
    make = partial(torch.optim.SGD, lr=kind(0.1), momentum=0.9, foreach=False)
    run = Training(lab.device, make, in_backward=True, consume_gradients=consume)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    for number in range(2):
        run.steps([number])
        scheduler.step()
    y = run.model[:3](batch(2, run.model))
    y.square().mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()  # too early
    run.model[3](y.detach()).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"must be final .* but lr of a group has been changed"):
        run.optimizer.step()


@pytest.mark.parametrize("consume", [False, True])
def test_a_step_after_the_end_is_not_made_again(consume: bool, lab: Lab) -> None:
    run = Training(lab.device, in_backward=True, consume_gradients=consume)
    run.steps(range(2))
    run.backward(2)
    run.handle.remove()
    run.optimizer.step()
    run.optimizer.zero_grad()
    # Gradients are ordinary ones again, also for who counts them.
    assert new_gradients(run.model) == sum(parameter.nbytes for parameter in run.model.parameters())
    plain_steps(run.model, run.optimizer, [3])
    assert_same(resident(lab.device, range(4)), run.values)


def test_the_handle_is_not_removed_while_backward_steps(lab: Lab) -> None:
    run = Training(lab.device, in_backward=True)
    run.steps(range(2))
    run.model[2].register_full_backward_hook(lambda *_: run.handle.remove())
    with pytest.raises(RuntimeError, match="the handle must be removed outside of backward"):
        run.backward(2)


def test_a_scaler_that_is_disabled_scales_nothing(lab: Lab) -> None:
    run, scaler = Training(lab.device, in_backward=True), torch.amp.GradScaler(lab.device.type, enabled=False)
    for number in range(3):
        scaler.scale(loss_of(run.model, number)).backward()
        scaler.step(run.optimizer)
        run.optimizer.zero_grad()
    assert_same(resident(lab.device, range(3)), run.values)


def test_a_gradient_that_the_program_gives_in_place_of_a_consumed_one_is_refused(lab: Lab) -> None:
    run = Training(lab.device, in_backward=True, consume_gradients=True, chunk_bytes="1KiB")
    run.steps(range(2))
    first, *others = run.model
    weight = next(others[-1].parameters())

    def replace(_: torch.Tensor) -> None:
        weight.grad = torch.ones_like(weight)

    y = first(batch(2, run.model))
    y.register_hook(replace)
    nn.Sequential(*others)(y).square().mean().backward()
    with pytest.raises(RuntimeError, match="has been changed since"):
        run.optimizer.step()


def test_a_second_gradient_is_refused(lab: Lab) -> None:
    run = Training(lab.device, in_backward=True)
    run.backward(0)
    with pytest.raises(RuntimeError, match=r"one of shape \(48,\) got another after its step; call optimizer"):
        run.backward(1)
    run = Training(lab.device, in_backward=True, consume_gradients=True)
    run.backward(0)
    with pytest.raises(RuntimeError, match=r"one gradient in each step .* aten\.add_\..* freed; .* run all micro"):
        run.backward(1)


class Gated(nn.Module):
    """Its gate's gradient is complete before the recomputation, which ``reads`` something of the gate."""

    def __init__(self, reads: Callable[[torch.Tensor], torch.Tensor | float]) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(lambda x: self.reads(self.gate) * self.linear(x).tanh(), x, use_reentrant=False)
        return y + self.gate


def gated(lab: Lab, reads: Callable[[torch.Tensor], Any], streamed: bool, **options: Any) -> list[torch.Tensor]:
    """The parameters after three steps, each beside backward as soon as its gradient is complete."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated(reads) for _ in range(3))).to(lab.device)
    optimizer = adamw(model.parameters())
    if streamed:
        stream(optimizer, in_backward=True, chunk_bytes=64, **options)
    for _ in range(3):
        model(torch.randn(4, WIDTH, device=lab.device)).square().mean().backward()
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"consume_gradients": True}], ids=["kept", "consumed"])
def test_a_recomputation_that_reads_a_stepped_parameter_is_refused(options: dict[str, Any], lab: Lab) -> None:
    """It would compute with the new numbers; autograd sees only what it has saved."""
    with pytest.raises(
        RuntimeError, match=r"no recomputation must read it after its step.* leave what reads it out of"
    ):
        gated(lab, lambda gate: gate.detach().sigmoid(), streamed=True, **options)
    kept = [
        gated(lab, lambda gate: 1 / gate.numel() / gate.shape[0], streamed, **options) for streamed in (True, False)
    ]
    assert_same(*kept)


def test_parameters_can_be_read_after_a_backward_that_was_refused(lab: Lab) -> None:
    model = nn.Sequential(*(Gated(torch.Tensor.detach) for _ in range(3))).to(lab.device)
    optimizer = adamw(model.parameters())
    handle = stream(optimizer, in_backward=True, chunk_bytes=64)
    loss = model(torch.randn(4, WIDTH, device=lab.device)).square().mean()
    with pytest.raises(RuntimeError, match="no recomputation must read it"):
        loss.backward()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    begin_s = time.monotonic()
    while lab.device.type != "cpu" and {type(one) for one in model.parameters()} != {nn.Parameter}:
        assert time.monotonic() - begin_s < 60  # autograd's thread for a GPU may free a backward after its error
        time.sleep(0.01)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    with pytest.raises(RuntimeError, match="load both from a checkpoint"):
        optimizer.step()
    with pytest.warns(UserWarning, match="load both from a checkpoint"):
        handle.remove()


def test_other_threads_read_stepped_parameters(lab: Lab) -> None:
    """Such as one that logs weights."""
    model = build(lab.device)
    optimizer = adamw(model.parameters())
    stream(optimizer, in_backward=True, chunk_bytes=64)
    first, *others = model
    last = [*others[-1].parameters()]
    found = list[float]()

    def log(_: torch.Tensor) -> None:
        assert {type(one) for one in last} != {nn.Parameter}
        thread = threading.Thread(target=lambda: found.extend(one.sum().item() for one in last))
        thread.start()
        thread.join()

    y = first(batch(0, model))
    y.register_hook(log)
    nn.Sequential(*others)(y).square().mean().backward()
    assert len(found) == len(last)
    optimizer.step()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model, 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler(next(model.parameters()).device.type)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize(("how", "fused"), [(clipped, False), (scaled, False), (scaled, True)])
def test_gradients_that_are_changed_after_backward_are_refused(how: Any, fused: bool, consume: bool, lab: Lab) -> None:
    run = Training(lab.device, partial(adamw, fused=fused), in_backward=True, consume_gradients=consume)
    with pytest.raises(RuntimeError, match=r"must be final (at the end of backward|then)"):
        how(run.model, run.optimizer)
    if consume:
        assert "FreedGradient" in repr(run.model[0].weight.grad)
        return  # it was refused before anything was changed
    with pytest.raises(RuntimeError, match=r"must belong to one step, but .*, after a step in backward; load both"):
        run.optimizer.state_dict()


@pytest.mark.parametrize("where", ["in one run", "in a nested run", "in a nested run alone"])
def test_a_backward_that_fails_after_some_steps_is_told(where: str, lab: Lab) -> None:
    """Reentrant checkpoints run parts of backward in nested runs, beside which the outer one may have no gradient."""
    run = Training(lab.device, in_backward=True, chunk_bytes="4KiB")
    run.steps(range(2))
    saved = run.checkpoint
    message = "but backward was cut off when some parameters had made their step; load both from a checkpoint"
    first, *middle, last = run.model
    steps_first = nn.Sequential(*middle)
    inside = (lambda x: checkpoint(steps_first, x, use_reentrant=True)) if "nested" in where else steps_first
    last = nn.Identity() if "alone" in where else last
    with pytest.raises(ValueError, match="stop"):
        last(inside(Stop()(first(batch(2, run.model))))).square().mean().backward()
    for use in (run.optimizer.step, run.optimizer.state_dict, lambda: run.backward(2)):
        with pytest.raises(RuntimeError, match=message):
            use()
    run.load(saved)
    run.steps(range(2, 5))
    assert_same(resident(lab.device, range(5)), run.values)


@pytest.mark.parametrize("loads", [False, True])
def test_some_steps_are_told_when_the_handle_is_removed(loads: bool, lab: Lab) -> None:
    """Another handle would train on with parameters of two steps, unless a checkpoint was loaded before."""
    run = Training(lab.device, in_backward=True, chunk_bytes="4KiB")
    run.steps(range(2))
    saved = run.checkpoint
    with pytest.raises(ValueError, match="stop"):
        run.model[1:](Stop()(run.model[:1](batch(2, run.model)))).square().mean().backward()
    message = r"must belong to one step, but backward was cut off when some parameters had made their step; load both"
    if loads:
        run.load(saved)
    with nullcontext() if loads else pytest.warns(UserWarning, match=message):
        run.handle.remove()
    assert run.handle.state == "removed"


def test_runs_that_are_nested_in_one_without_a_gradient(lab: Lab) -> None:
    def train(streamed: bool) -> list[torch.Tensor]:
        model = build(lab.device)
        optimizer = adamw(model.parameters())
        if streamed:
            stream(optimizer, in_backward=True, consume_gradients=True, chunk_bytes="4KiB")
        for number in range(3):
            y = batch(number, model).requires_grad_()
            for layer in model:
                y = checkpoint(layer, y, use_reentrant=True)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model, optimizer)

    assert_same_training(train)


def test_a_backward_that_fails_before_any_step_changes_nothing(lab: Lab) -> None:
    def train(streamed: bool) -> list[torch.Tensor]:
        model = build(lab.device).append(nn.LayerNorm(WIDTH, device=lab.device))  # it fills no chunk
        optimizer = adamw(model.parameters())
        handle = stream(optimizer, in_backward=True, consume_gradients=True) if streamed else None
        for number in range(3):
            stopping = nn.Sequential(*model[:-1], Stop(), model[-1])
            with pytest.raises(ValueError, match="stop"):
                loss_of(stopping, number + 1).backward()
            optimizer.zero_grad()
            with handle.no_step() if handle is not None and number == 1 else nullcontext():
                loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model, optimizer)

    assert_same_training(train)


@pytest.mark.parametrize("how", ["remove", "drop"])
def test_after_its_end_backward_steps_nothing(how: str, lab: Lab) -> None:
    run = Training(lab.device, in_backward=True)
    run.steps(range(2))
    if how == "remove":
        run.handle.remove()
    else:
        del run.handle, run.optimizer
        end = time.monotonic() + 10
        while any(p._post_accumulate_grad_hooks for p in run.model.parameters()) and time.monotonic() < end:
            time.sleep(0.001)  # on a GPU autograd's thread, which ends the last backward, may still hold them
        assert not [hooked for p in run.model.parameters() for hooked in p._post_accumulate_grad_hooks]
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.backward(2)
    assert_same(before, [parameter.detach() for parameter in run.model.parameters()])


@pytest.mark.parametrize("consume", [False, True])
def test_compute_waits_for_each_step_whose_gradients_are_freed(consume: bool, lab: Lab) -> None:
    """Before their memory is used again; for steps whose gradients the program has, it waits at the end alone."""
    run = Training(lab.device, in_backward=True, consume_gradients=consume, chunk_bytes="1KiB")
    run.steps(range(1))
    waits = lab.count_waits()
    run.backward(1)
    assert (waits.count(StepWait.JOINED) > 1) is consume


# On the CPU, steps run in the caller's thread, and cannot be early or late.


def late_gradient(lab: Lab) -> bool:
    weight = nn.Parameter(torch.zeros(1000, device=lab.device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    stream(optimizer, in_backward=True)
    lab.late_gradient(weight, 7.0, LATE_S).sum().backward()
    optimizer.step()
    lab.drain()
    return bool((weight == -7.0).all())


def late_step(lab: Lab) -> bool:
    weight = nn.Parameter(torch.zeros(1000, device=lab.device))
    optimizer = LateOptimizer(lab, [weight], LATE_S)
    stream(optimizer, in_backward=True)
    optimizer.late = True
    weight.sum().backward()
    seen = weight.detach().clone()
    lab.drain()
    return bool((seen == 7.0).all())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("wait", "scenario"), [(StepWait.GRADIENT, late_gradient), (StepWait.JOINED, late_step)], ids=["GRADIENT", "JOINED"]
)
def test_each_wait_beside_backward_is_needed(wait: Any, scenario: Any, lab: Lab) -> None:
    if lab.device.type == "cpu":
        return
    assert scenario(lab), "wrong with all waits"
    lab.drop(wait)
    assert not scenario(lab), wait.value


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone
def test_backward_does_not_reuse_a_slot_that_grows_beside_it(lab: Lab) -> None:
    """A slot of ``optimizer.step()`` is memory of the compute stream, which does not wait for the slot's copies."""
    found = []
    for streams in (False, True):
        small = [nn.Parameter(torch.ones(256, device=lab.device)) for _ in range(3)]
        large = nn.Parameter(torch.ones(4096, device=lab.device))
        optimizer = torch.optim.SGD([*small, large], lr=0.1, momentum=0.5)
        handle = stream(optimizer, in_backward=True, chunk_bytes="1KiB") if streams else None
        x = torch.ones(4096, device=lab.device, requires_grad=True)
        for weights in ([*small, large], small):
            with handle.no_step() if handle is not None else nullcontext():
                sum(weight.square().sum() for weight in weights).backward()
            lab.slow(d2h_s=LATE_S if streams and weights is small else 0.0)
            optimizer.step()
            optimizer.zero_grad()
        (_Passes.apply(x, small[0]) * large).sum().backward()
        optimizer.step()
        lab.slow()
        lab.drain()
        found.append(values(nn.ParameterList([*small, large]), optimizer))
    assert_same(*found)


class Undecorated(torch.optim.Optimizer):
    """A class of the program's own, whose step the program calls without grad mode."""

    def step(self, closure: Any = None) -> None:
        for weight in [weight for group in self.param_groups for weight in group["params"]]:
            sums = self.state[weight].setdefault("sums", torch.zeros_like(weight))
            weight.add_(sums.mul_(0.9).add_(weight.grad), alpha=-0.1)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("create_graph", [False, True])  # autograd switches grad mode off, or on
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_without_a_decorator(in_backward: bool, create_graph: bool, lab: Lab) -> None:
    found = []
    for streams in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(WIDTH, WIDTH).to(lab.device)
        optimizer = Undecorated(layer.parameters(), {})
        handle = stream(optimizer, in_backward=in_backward) if streams else None
        for _ in range(3):
            loss = layer(torch.ones(2, WIDTH, device=lab.device)).square().sum()
            loss.backward(create_graph=create_graph)
            with torch.no_grad():
                optimizer.step()
            optimizer.zero_grad()
        found.append([weight.detach().clone() for weight in layer.parameters()])
    assert handle is not None
    assert (handle.stats().backward_chunks > 0) == in_backward
    assert all(map(torch.equal, *found))


def test_an_optimizer_that_is_gone_makes_no_first_step(lab: Lab) -> None:
    """Its handle may be left, while other layers are timed in a microbatch that makes no optimizer's first step."""
    gone, model = build(lab.device), build(lab.device)
    left = stream(adamw(gone.parameters()), in_backward=True)
    with offload_layers([*model], memory_budget="1GiB", min_bytes=1, device=lab.device) as handle:
        for number in range(4):
            loss_of(model, number).backward()
        assert handle.state == "following"
    assert left is not None
