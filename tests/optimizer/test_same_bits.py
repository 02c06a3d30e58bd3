"""Twenty steps of an optimizer whose state is streamed: the bits of the resident optimizer, in every kind of loop."""

import copy
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lab import Lab
from models import assert_same
from torch import nn
from training import Make, assert_same_training, batch, build, loss_of, plain_steps, stream, values

from offload import StreamedOptimizer
from offload.optimizer.state import join

STEPS = 20

OPTIMIZERS: dict[str, Make] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5),
}
FUSED: dict[str, Make] = {
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "SGD fused": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
}


class RescalesLater(torch.optim.Optimizer):
    """Divides each parameter's gradient by its norm, from the fifth step on."""

    def __init__(self, parameters: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in [one for one in group["params"] if one.grad is not None]:
                state = self.state[parameter]
                state["steps"], state["last"] = state.get("steps", 0) + 1, parameter.grad.clone()
                scale = parameter.grad.norm() if state["steps"] >= 5 else 1.0
                parameter.sub_(parameter.grad / scale, alpha=group["lr"])


class ScalesALittle(RescalesLater):
    """Scales each parameter by what differs between its pieces in the last bits."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in [one for group in self.param_groups for one in group["params"]]:
            parameter.mul_(1 - 1e-10 * parameter.numel())


MORE: dict[str, Make] = FUSED | {
    "another rule later": RescalesLater,
    "pieces that differ in the last bits": ScalesALittle,
    "AdamW foreach, amsgrad": functools.partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    "AdamW one by one": functools.partial(torch.optim.AdamW, foreach=False),
    "SGD without state": functools.partial(torch.optim.SGD, lr=1e-2),
    **{
        name: getattr(torch.optim, name)
        for name in ("Adam", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop")
    },
}

Loop = Callable[[nn.Module, Make, bool], torch.optim.Optimizer]


def start(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
    optimizer = make(model.parameters())
    if streamed:
        stream(optimizer)
    return optimizer


def plain(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
    optimizer = start(model, make, streamed)
    plain_steps(model, optimizer, range(STEPS))
    return optimizer


def clipping(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
    optimizer = start(model, make, streamed)
    for number in range(STEPS):
        loss_of(model, number).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    return optimizer


def accumulation(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
    optimizer = start(model, make, streamed)
    for number in range(STEPS):
        for microbatch in range(3):
            loss_of(model, 3 * number + microbatch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def scheduler(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
    """Schedulers wrap ``optimizer.step``: one before it is streamed, one after."""
    optimizer = make(model.parameters())
    before = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    if streamed:
        stream(optimizer)
    after = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    for number in range(STEPS):
        plain_steps(model, optimizer, [number])
        before.step()
        after.step()
    return optimizer


def skipped(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
    """A gradient that is not finite lets the scaler skip every fourth step."""
    optimizer = start(model, make, streamed)
    device = next(model.parameters()).device.type
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)
    for number in range(STEPS):
        scaler.scale(loss_of(model, number)).backward()
        if number % 4 == 2:
            next(model.parameters()).grad[0, 0] = float("inf")
        if number % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return optimizer


def resumed(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
    """Checkpoints of both kinds go into optimizers of both kinds."""
    optimizer = start(model, make, streamed)
    for part in range(4):
        plain_steps(model, optimizer, range(part * 5, part * 5 + 5))
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = make(model.parameters())
        if streamed and part % 2 == 0:
            stream(optimizer)
            optimizer.load_state_dict(saved)
        elif streamed:
            optimizer.load_state_dict(saved)
            handle = stream(optimizer)
        else:
            optimizer.load_state_dict(saved)
        if streamed and part == 1:
            handle.remove()
    return optimizer


def failing(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
    optimizer = start(model, make, streamed)

    def stop(_: torch.Tensor) -> None:
        raise ValueError("stop")

    for number in range(STEPS):
        if number % 3 == 0:
            hidden = model[0](batch(number, model))
            hidden.register_hook(stop)
            with pytest.raises(ValueError, match="stop"):
                model[1:](hidden).sum().backward()
            optimizer.zero_grad()
        plain_steps(model, optimizer, [number])
    return optimizer


def closure(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
    optimizer = start(model, make, streamed)

    def again(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        return loss

    for number in range(STEPS):
        with torch.no_grad():
            loss = optimizer.step(functools.partial(again, number))
        assert isinstance(loss, torch.Tensor)
        assert loss.requires_grad
    return optimizer


LOOPS: dict[str, Loop] = {
    loop.__name__: loop for loop in (plain, clipping, accumulation, scheduler, skipped, resumed, failing, closure)
}


def compare(loop: Loop, make: Make, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    models = [build(device, dtype) for _ in range(2)]
    assert_same_training(lambda streamed: values(models[streamed], loop(models[streamed], make, streamed)))


# Stepped in pieces, by parameters, and by a kernel that the scaler tells what to skip: others are stepped as these are.
EACH_WAY = ("AdamW", "Adafactor", "AdamW fused")


@pytest.mark.drawn(12)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", OPTIMIZERS | FUSED)
def test_twenty_steps(name: str, loop: str, device: torch.device) -> None:
    compare(LOOPS[loop], (OPTIMIZERS | FUSED)[name], device)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", EACH_WAY)
def test_steps_beside_the_next_forward(name: str, loop: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()  # with compiled code, steps wait
    handles, streamed = list[StreamedOptimizer](), stream

    def overlapping(optimizer: torch.optim.Optimizer) -> StreamedOptimizer:
        handles.append(streamed(optimizer, overlap_forward=True))
        return handles[-1]

    monkeypatch.setitem(globals(), "stream", overlapping)
    lab.adverse()
    compare(LOOPS[loop], (OPTIMIZERS | FUSED)[name], lab.device)
    told_by_tensors = name == "AdamW fused" and loop == "skipped"  # which the scaler changes
    assert any(handle.stats().forward_parameters for handle in handles) != told_by_tensors


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", MORE)
def test_more_optimizers(name: str, device: torch.device) -> None:
    if name == "Adagrad" and 'state["sum"] =' not in inspect.getsource(torch.optim.Adagrad._init_group):
        # PyTorch 2.11 makes its state with the optimizer, and not in the first step.
        with pytest.raises(TypeError, match=r"got Adagrad, whose step\(\) fails with small parameters"):
            compare(plain, MORE[name], device)
        return
    compare(plain, MORE[name], device)


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "Adafactor"])
def test_parameters_of_sixteen_bits(name: str, device: torch.device) -> None:
    compare(plain, (OPTIMIZERS | FUSED)[name], device, torch.bfloat16)


def test_several_groups_with_options_of_their_own(device: torch.device) -> None:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        groups = [{"params": [first], "weight_decay": 0.1}, {"params": others, "lr": 1e-3, "amsgrad": True}]
        return torch.optim.AdamW(groups, lr=1e-2)

    compare(plain, grouped, device)


def test_parameters_without_gradients_frozen_later_and_added(device: torch.device) -> None:
    def changing(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        parameters[0].requires_grad_(False)
        optimizer = make(parameters[:-1])
        if streamed:
            stream(optimizer)
        plain_steps(model, optimizer, range(3))
        parameters[0].requires_grad_(True)
        parameters[1].requires_grad_(False)
        plain_steps(model, optimizer, range(3, 6))
        optimizer.add_param_group({"params": parameters[-1:]})
        plain_steps(model, optimizer, range(6, 9))
        return optimizer

    compare(changing, OPTIMIZERS["AdamW"], device)


@pytest.mark.parametrize("options", [{}, {"in_backward": True}, {"resident_bytes": "1GiB"}], ids=str)
def test_state_that_the_program_changes(options: dict[str, Any], device: torch.device) -> None:
    """In place, by another tensor or dictionary, by a part of a checkpoint; ``state_dict`` is at once right."""

    def changing(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
        optimizer = make(model.parameters())
        if streamed:
            stream(optimizer, **options)
        plain_steps(model, optimizer, range(3))
        first, second, *_ = model.parameters()
        optimizer.state[first]["exp_avg"].zero_()
        optimizer.state[second]["exp_avg_sq"] = torch.ones_like(second)
        kept = optimizer.state_dict()["state"][1]["exp_avg_sq"]
        assert torch.equal(kept.cpu(), torch.ones(second.shape))
        plain_steps(model, optimizer, range(3, 5))
        del optimizer.state[second]
        plain_steps(model, optimizer, range(5, 7))
        optimizer.state = defaultdict(dict, {first: optimizer.state[first]})
        plain_steps(model, optimizer, range(7, 9))
        saved = optimizer.state_dict()
        optimizer.load_state_dict({**saved, "state": {1: saved["state"][1]}})  # the others begin anew
        plain_steps(model, optimizer, range(9, 11))
        optimizer.state = defaultdict(dict)
        plain_steps(model, optimizer, range(11, 13))
        return optimizer

    compare(changing, OPTIMIZERS["AdamW"], device)


def test_tied_and_two_optimizers(device: torch.device) -> None:
    found = []
    for streamed in (False, True):
        model = build(device)
        model[0].bias = model[2].weight
        parameters = list(model.parameters())
        optimizers = [torch.optim.AdamW(parameters[::2]), torch.optim.SGD(parameters[1::2], lr=0.1, momentum=0.9)]
        for optimizer in optimizers if streamed else ():
            stream(optimizer)
        for number in range(5):
            loss_of(model, number).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append([each for optimizer in optimizers for each in values(model, optimizer)])
    assert_same(*found)


def test_another_order_of_dimensions(device: torch.device) -> None:
    """A convolution in channels-last: the parameter's memory is in another order than its indices."""

    def convolved(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        conv = nn.Conv2d(8, 32, 5).to(device).to(memory_format=torch.channels_last)
        optimizer = start(conv, make, streamed)
        for number in range(4):
            conv.weight.grad = torch.randn(conv.weight.shape, generator=torch.Generator().manual_seed(number)).to(
                device
            )
            optimizer.step()
        assert conv.weight.stride()[1] == 1
        model.append(conv)
        return optimizer

    compare(convolved, OPTIMIZERS["AdamW"], device)


@pytest.mark.slow
def test_a_step_that_is_compiled_is_run_by_the_interpreter(device: torch.device) -> None:
    """The compiler leaves the library's code alone, and what the library runs."""

    def compiled(model: nn.Module, make: Make, streamed: bool) -> torch.optim.Optimizer:
        optimizer = start(model, make, streamed)
        step = torch.compile(optimizer.step, backend="eager") if streamed else optimizer.step
        for number in range(3):
            loss_of(model, number).backward()
            step()
            optimizer.zero_grad()
        return optimizer

    compare(compiled, OPTIMIZERS["AdamW"], device)


SIZES = ((), (1,), (1, 1), (0, 4), (3, 5))


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD", "RMSprop", "Adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_one_number_and_of_none(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Resumed from a checkpoint after three steps; in bfloat16, with state in float32 that nothing rounds."""

    def steps(optimizer: torch.optim.Optimizer, count: range) -> None:
        for number in count:
            numbers = torch.Generator().manual_seed(number)
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=numbers).to(device, parameter.dtype)
            optimizer.step()

    found = []
    for resumed in (False, True):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(size).to(device, dtype)) for size in SIZES]
        if name == "Adafactor":  # it divides by the number of numbers
            parameters = [parameter for parameter in parameters if parameter.numel()]
        optimizer = (OPTIMIZERS | FUSED)[name](parameters)
        options = {} if dtype is torch.float32 else {"state_dtype": torch.float32}
        if resumed or options:
            handle = stream(optimizer, **options)
        steps(optimizer, range(3))
        if resumed:
            saved = copy.deepcopy(optimizer.state_dict())
            handle.remove()
            optimizer = (OPTIMIZERS | FUSED)[name](parameters)
            stream(optimizer, **options)
            optimizer.load_state_dict(saved)
        steps(optimizer, range(3, 6))
        state = [torch.as_tensor(v) for p in parameters for _, v in sorted(optimizer.state[p].items())]
        found.append([value.detach().cpu() for value in parameters + state])
    assert_same(*found)


class Lion(torch.optim.Optimizer):
    """As of another package: counts in its groups, has attributes, and makes new tensors in each step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "count": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.get("momentum", torch.zeros_like(p))
                p.sub_(torch.sign(0.9 * momentum + 0.1 * p.grad) * group["lr"] / group["count"])
                state["momentum"] = 0.99 * momentum + 0.01 * p.grad


def test_an_optimizer_of_another_package(device: torch.device) -> None:
    compare(plain, Lion, device)
    model = build(device)
    optimizer = plain(model, Lion, True)
    assert optimizer.calls == STEPS
    assert [group["count"] for group in optimizer.param_groups] == [STEPS]


def test_steps_in_float32(device: torch.device) -> None:
    """Parameters in bfloat16, state and arithmetic in float32: as a loop that converts, steps and rounds."""
    model = build(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    stream(optimizer, state_dtype=torch.float32)
    plain_steps(model, optimizer, range(5))
    resident = build(device, torch.bfloat16)
    wide = [nn.Parameter(parameter.detach().float()) for parameter in resident.parameters()]
    reference = torch.optim.AdamW(wide, lr=1e-2, fused=True)
    for number in range(5):
        loss_of(resident, number).backward()
        for parameter, copied in zip(resident.parameters(), wide, strict=True):
            copied.data.copy_(parameter)
            copied.grad = parameter.grad.float()
        reference.step()
        for parameter, copied in zip(resident.parameters(), wide, strict=True):
            parameter.data.copy_(copied)
        resident.zero_grad()
    assert_same(values(resident, reference), values(model, optimizer))


def rounded(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16 numbers; of two, the larger in magnitude."""
    bits = (numbers.detach().view(torch.int32).to(torch.int64) + 0x8000) & ~0xFFFF
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("options", [{}, {"resident_bytes": "1GiB"}], ids=["streamed", "resident"])
def test_master_weights(options: dict[str, Any], device: torch.device) -> None:
    """Parameters in bfloat16 are the nearest numbers of those that an optimizer in float32 steps."""
    model = build(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    handle = stream(optimizer, state_dtype=torch.float32, master_weights=True, **options)
    reference = build(device, torch.bfloat16)
    wide = [nn.Parameter(parameter.detach().float()) for parameter in reference.parameters()]
    expected = torch.optim.AdamW(wide, lr=1e-4, fused=True)
    for number in range(STEPS):
        plain_steps(model, optimizer, [number])
        if number == 10:
            saved = copy.deepcopy(optimizer.state_dict())
            handle.remove()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            handle = stream(optimizer, state_dtype=torch.float32, master_weights=True, **options)
            optimizer.load_state_dict(saved)
        loss_of(reference, number).backward()
        for parameter, master in zip(reference.parameters(), wide, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        expected.step()
        for parameter, master in zip(reference.parameters(), wide, strict=True):
            parameter.data.copy_(rounded(master))
    assert_same([p.detach() for p in reference.parameters()], [p.detach() for p in model.parameters()])
    for parameter, master in zip(model.parameters(), wide, strict=True):
        entry = optimizer.state[parameter]
        found = join(parameter.detach().cpu(), entry["master_remainder"].cpu())
        assert torch.equal(found, master.detach().cpu())
        assert torch.equal(entry["exp_avg"].cpu(), expected.state[master]["exp_avg"].cpu())
    saved = copy.deepcopy(optimizer.state_dict())
    handle.remove()
    assert "master_remainder" not in optimizer.state[parameter]
    stream(optimizer, **options)
    optimizer.load_state_dict(saved)
    assert "master_remainder" not in optimizer.state[parameter]
