"""The gradient of a large head waits on the host for its step: the same bits, and its memory is free for backward."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lab import Lab
from models import Stop, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import OPTIMIZERS, WIDTH, adamw, assert_same_training, batch, stream, values

from offload import HostMemoryError, memory_meter
from offload.optimizer.chunks import StepWait
from offload.optimizer.early import FreedGradient

LATE_S = 0.05
TOKENS = 2048  # of the head: its gradient is larger than all else


class _Takes(torch.autograd.Function):
    """Backward takes ``nbytes`` of memory for a moment, as a layer does that is recomputed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, nbytes: int) -> torch.Tensor:
        ctx.nbytes = nbytes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.zeros(ctx.nbytes, dtype=torch.uint8, device=gradient.device)
        return gradient, None


class Model(nn.Module):
    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.before_norm: nn.Module = nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.to(device, dtype)

    def loss(self, number: int) -> torch.Tensor:
        hidden = _Takes.apply(self.body(batch(number, self)), self.head.weight.nbytes)
        return self.head(self.norm(self.before_norm(hidden))).float().square().mean()


def trained(device: torch.device, name: str, dtype: torch.dtype, **options: Any) -> tuple[list[torch.Tensor], Any]:
    model = Model(device, dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    handle = stream(optimizer, **options) if options else None
    no_step = nullcontext if handle is None else handle.no_step
    for number in range(6):
        if number % 2:
            with no_step():
                model.loss(10 + number).backward()
        with no_step() if number == 3 else nullcontext():  # optimizer.step() makes all of this step
            model.loss(number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model, optimizer), handle


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD"])
def test_the_same_bits(name: str, lab: Lab) -> None:
    lab.adverse()
    expected, _ = trained(lab.device, name, torch.float32)
    found, handle = trained(lab.device, name, torch.float32, in_backward=True, consume_gradients=True)
    assert_same(expected, found)
    with_gradients = trained(lab.device, name, torch.float32, in_backward=True)[1].stats()
    assert handle.stats().host_bytes == with_gradients.host_bytes + TOKENS * WIDTH * 4


def test_the_same_bits_in_float32_of_bfloat16(lab: Lab) -> None:
    lab.adverse()
    options: dict[str, Any] = {"state_dtype": torch.float32}
    expected, _ = trained(lab.device, "AdamW", torch.bfloat16, **options)
    options |= {"in_backward": True, "consume_gradients": True}
    found, _ = trained(lab.device, "AdamW", torch.bfloat16, **options)
    assert_same(expected, found)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_the_last_large_parameter_is_set_aside_but_for_the_first_that_is_trained(trained: bool, lab: Lab) -> None:
    """Also behind a larger one, as the experts of a layer are."""
    model = Model(lab.device)
    larger = nn.Parameter(torch.ones(2 * TOKENS, WIDTH, device=lab.device), requires_grad=trained)
    parameters = [larger, model.head.weight]
    parameters.insert(0 if trained else 2, model.norm.weight)
    optimizer = adamw(parameters)
    handle = stream(optimizer, in_backward=True, consume_gradients=True)
    state_bytes = sum(2 * one.nbytes for one in parameters if one.requires_grad)
    assert handle.stats().host_bytes == state_bytes + (model.head.weight.nbytes if trained else 0)


def test_a_gradient_that_is_laid_out_otherwise_is_stepped_on_the_device(lab: Lab) -> None:
    """As a hook of the program's may leave it: no copy brings its numbers into the parameter's order."""

    def train(streamed: bool) -> list[torch.Tensor]:
        model = Model(lab.device)

        def turn(weight: torch.Tensor) -> None:
            weight.grad = weight.grad.t().contiguous().t()

        model.head.weight.register_post_accumulate_grad_hook(turn)
        optimizer = adamw(model.parameters())
        handle = stream(optimizer, in_backward=True, consume_gradients=True) if streamed else None
        model.loss(0).backward()
        optimizer.step()
        written = 0 if handle is None else handle.stats().written_bytes
        assert written == (handle.stats().host_bytes - model.head.weight.nbytes if handle else 0)  # the state alone
        return values(model, optimizer)

    assert_same_training(train)


@pytest.mark.parametrize("first", [False, True], ids=["head last", "head first"])
def test_backward_has_the_memory_of_the_gradient(first: bool, lab: Lab) -> None:
    """Unless it is the optimizer's first parameter, whose gradient comes last."""
    model = Model(lab.device)
    parameters = list(model.parameters())
    optimizer = adamw(parameters[::-1] if first else parameters)
    stream(optimizer, in_backward=True, consume_gradients=True)
    for number in range(3):
        loss = model.loss(number)
        with memory_meter(lab.device) as meter:
            loss.backward()
        gradient_bytes = model.head.weight.nbytes
        assert (meter.peak_bytes > 1.7 * gradient_bytes) is first  # and what the forward has left is freed
        optimizer.step()
        optimizer.zero_grad()


def test_a_recomputation_that_reads_the_head_is_refused(lab: Lab) -> None:
    """Some of its chunks may be stepped by then."""
    model = Model(lab.device)
    optimizer = adamw(model.parameters())
    stream(optimizer, in_backward=True, consume_gradients=True)

    def tied(x: torch.Tensor) -> torch.Tensor:
        return model.body(x) * model.head.weight.detach().mean()

    hidden = checkpoint(tied, batch(0, model), use_reentrant=False)
    with pytest.raises(RuntimeError, match="no recomputation must read it after its step"):
        model.head(model.norm(hidden)).square().mean().backward()
    assert type(model.head.weight) is nn.Parameter


def test_chunks_of_the_head_come_between_those_of_layers(lab: Lab) -> None:
    """Else the first layers' gradients would wait behind all of the head's on the link."""
    stepped_numels: list[int] = []

    class Recorded(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            stepped_numels.extend(one.numel() for group in self.param_groups for one in group["params"])
            super().step(closure)

    layers, pieces = 32, 13
    numels = [100, *[2048] * layers, pieces * 1024]  # one chunk of state each, and pieces of state and gradient
    weights = nn.ParameterList(torch.ones(numel, device=lab.device) for numel in numels)
    optimizer = Recorded(weights, lr=1e-2)
    stream(optimizer, in_backward=True, consume_gradients=True, chunk_bytes="16KiB")
    between = ([2048] * 8 + [1024]) * 3 + [2048] * 8
    for _ in range(2):
        stepped_numels.clear()
        sum(weight.square().sum() for weight in weights).backward()
        assert stepped_numels[: len(between)] == between
        assert sorted(stepped_numels[len(between) :]) == [100, *[1024] * (pieces - 3)]
        optimizer.step()


def test_a_backward_that_fails_before_any_step_changes_nothing(lab: Lab) -> None:
    def train(*, streamed: bool) -> list[torch.Tensor]:
        model = Model(lab.device)
        optimizer = adamw(model.parameters())
        if streamed:
            stream(optimizer, in_backward=True, consume_gradients=True)
        for number in range(3):
            model.before_norm = Stop()
            with pytest.raises(ValueError, match="stop"):
                model.loss(number + 1).backward()
            model.before_norm = nn.Identity()
            optimizer.zero_grad()
            model.loss(number).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model, optimizer)

    assert_same(train(streamed=False), train(streamed=True))


def test_a_gradient_that_was_set_aside_is_freed(lab: Lab) -> None:
    """What reads it raises, as of other parameters."""
    model = Model(lab.device)
    optimizer = adamw(model.parameters())
    stream(optimizer, in_backward=True, consume_gradients=True)
    model.loss(0).backward()
    assert type(model.head.weight.grad) is FreedGradient
    optimizer.step()
    assert model.head.weight.grad is None


def test_a_second_gradient_in_the_same_backward_is_refused(lab: Lab) -> None:
    """Reentrant checkpoints give two, each in a backward of its own."""
    model = Model(lab.device)
    optimizer = adamw(model.parameters())
    stream(optimizer, in_backward=True, consume_gradients=True)
    x = torch.ones(4, WIDTH, device=lab.device, requires_grad=True)
    loss = sum(checkpoint(model.head, x, use_reentrant=True).square().mean() for _ in range(2))
    loss = loss + model.norm.weight.square().sum()  # the backward around them has begun to step before
    with pytest.raises(RuntimeError, match="a parameter must get one gradient in each step"):
        loss.backward()


def test_too_little_host_memory_changes_nothing(lab: Lab) -> None:
    model = Model(lab.device)
    optimizer = adamw(model.parameters())
    state_bytes = sum(2 * one.nbytes for one in model.parameters())
    with pytest.raises(HostMemoryError, match="max_host_bytes"):
        stream(optimizer, in_backward=True, consume_gradients=True, max_host_bytes=state_bytes + (64 << 10))
    assert lab.pool.used_bytes == 0
    for _ in range(2):
        model.loss(0).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(values(model, optimizer), stepped(lab, streamed=False))


def stepped(lab: Lab, *, streamed: bool) -> list[torch.Tensor]:
    model = Model(lab.device)
    optimizer = adamw(model.parameters())
    if streamed:
        stream(optimizer, in_backward=True, consume_gradients=True)
    for _ in range(2):
        loss = model.loss(0)
        if streamed:
            lab.delay(lab.state_d2h_stream, LATE_S)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lab.drain()
    return values(model, optimizer)


def late_copy(lab: Lab) -> bool:
    """The copy of the gradient comes late: its load could begin before, and compute could use its memory before."""
    expected = stepped(lab, streamed=False)
    lab.backend.poison = True
    return all(map(torch.equal, expected, stepped(lab, streamed=True)))


def late_gradient(lab: Lab) -> bool:
    """The gradient itself comes late: its copy could begin before."""
    weights = nn.ParameterList([torch.zeros(8), torch.zeros(10_000)]).to(lab.device)
    optimizer = torch.optim.SGD(weights, lr=1.0, momentum=0.5)
    stream(optimizer, in_backward=True, consume_gradients=True, chunk_bytes="1KiB")
    (lab.late_gradient(weights[1], 7.0, LATE_S).sum() + weights[0].sum()).backward()
    optimizer.step()
    lab.drain()
    return bool((weights[1] == -7.0).all())


def test_compute_waits_for_the_copy(lab: Lab) -> None:
    assert late_copy(lab), "wrong with the wait"
    lab.drop(StepWait.RELEASE)
    assert not late_copy(lab)


# On the CPU, compute waits in the thread that queues copies: they begin after it.


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("wait", "scenario"),
    [(StepWait.GRADIENT, late_gradient), (StepWait.WRITTEN, late_copy)],
    ids=["GRADIENT", "WRITTEN"],
)
def test_each_wait_of_copies_is_needed(wait: StepWait, scenario: Any, lab: Lab) -> None:
    if lab.device.type == "cpu":
        return
    assert scenario(lab), "wrong with all waits"
    lab.drop(wait)
    assert not scenario(lab), wait.value
