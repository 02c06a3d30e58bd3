"""Where the state is, what ``state_dict`` holds, what ``remove`` undoes, and what is refused."""

import copy
import gc
import io
from functools import partial
from typing import Any

import pytest
import torch
from faults import assert_interrupts_are_told
from lab import Lab
from models import assert_same
from torch import nn
from training import (
    OPTIMIZERS,
    Make,
    Training,
    adamw,
    assert_same_training,
    build,
    plain_steps,
    resident,
    stream,
    values,
)

from offload import CaptureError, HostMemoryError, stream_optimizer


def test_the_state_is_pinned_once_and_exactly_sized(lab: Lab) -> None:
    """A frozen parameter has none."""
    run = Training(lab.device, streamed=False)
    run.model[0].bias.requires_grad_(False)
    run.handle = stream(run.optimizer)
    nbytes = sum(2 * parameter.nbytes for parameter in run.model.parameters() if parameter.requires_grad)
    pinned = lab.pool.pinned_bytes
    assert run.handle.stats().host_bytes == lab.pool.used_bytes == nbytes
    assert nbytes <= pinned <= nbytes + 512 * 12 + 4096
    run.steps(range(3))
    assert lab.pool.pinned_bytes == pinned
    stats = run.handle.stats()
    assert stats.written_bytes == 3 * nbytes
    assert stats.loaded_bytes == 2 * nbytes
    assert (stats.steps, (stats - stats).steps) == (3, 0)


def test_a_state_dict_is_on_the_host_and_saves_only_itself(lab: Lab) -> None:
    run = Training(lab.device, OPTIMIZERS["AdamW fused"])
    run.steps(range(2))
    saved = run.optimizer.state_dict()
    tensors = [value for entry in saved["state"].values() for value in entry.values()]
    assert {(type(value), value.device.type) for value in tensors} == {(torch.Tensor, "cpu")}
    assert len(_saved(saved["state"][0]["exp_avg"])) < run.model[0].weight.nbytes + 4096
    again = torch.load(io.BytesIO(_saved(saved)), weights_only=True)
    other = Training(lab.device, OPTIMIZERS["AdamW fused"], streamed=False)
    other.load((run.model.state_dict(), again))
    for each in (run, other):
        each.steps(range(2, 4))
    assert_same(run.values, other.values)


def test_a_checkpoint_in_float32_is_loaded_after_the_call(device: torch.device) -> None:
    """Before the call, PyTorch's optimizer rounds the state to the parameters' dtype: a warning says so."""
    options: dict[str, Any] = {"state_dtype": torch.float32, "master_weights": True}
    model = build(device, torch.bfloat16)
    optimizer = adamw(model.parameters())
    stream(optimizer, **options)
    plain_steps(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    plain_steps(model, optimizer, range(3, 5))
    resumed = build(device, torch.bfloat16)
    resumed_optimizer = adamw(resumed.parameters())
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    with pytest.warns(UserWarning, match=r"rounded to torch\.bfloat16 before, .* call load_state_dict after this call"):
        stream(resumed_optimizer, **options)
    resumed_optimizer.load_state_dict(saved[1])
    plain_steps(resumed, resumed_optimizer, range(3, 5))
    assert_same(values(model, optimizer), values(resumed, resumed_optimizer))


def _saved(what: object) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


def test_remove_brings_the_state_back(lab: Lab) -> None:
    run = Training(lab.device, streamed=False)
    kind = type(run.optimizer.state)
    run.steps(range(2))
    with stream(run.optimizer) as handle:
        assert handle.state == "following"
        run.steps(range(2, 4))
    assert handle.state == "removed"
    assert type(run.optimizer.state) is kind
    for entry in run.optimizer.state.values():
        assert entry["exp_avg"].device == lab.device
        assert list(entry) == ["step", "exp_avg", "exp_avg_sq"]
    run.steps(range(4, 6))
    assert_same(resident(lab.device, range(6)), run.values)
    assert handle.stats().steps == 2
    handle.remove()
    with pytest.raises(RuntimeError, match=r"the handle must be in use, but it was removed; make another one"):
        handle.__enter__()
    gc.collect()
    assert lab.pool.used_bytes == 0
    stream(run.optimizer).remove()


def test_state_that_the_device_has_no_room_for_remains_on_the_host(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the block is the one that the program gets, and nothing is lost."""
    run = Training(lab.device)
    run.steps(range(2))

    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory is left")

    def block() -> None:
        with monkeypatch.context() as patch, run.handle:
            patch.setattr(torch, "empty_like", fail)
            raise ZeroDivisionError

    message = r"the optimizer's state remains in host memory, .* \(no memory is left\)"
    with pytest.warns(UserWarning, match=message), pytest.raises(ZeroDivisionError):
        block()
    assert run.handle.state == "removed"
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.handle = None
    run.steps(range(2, 4))
    assert_same(resident(lab.device, range(4)), run.values)


def test_state_that_the_host_has_no_room_for_remains_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose memory is full the system would kill the process that copies."""
    device = torch.device("cpu")  # to which the state of streamed weights moves on any machine
    run = Training(device)
    run.steps(range(2))
    homes = [entry["exp_avg"].data_ptr() for entry in run.optimizer.state.values()]
    with monkeypatch.context() as patch:
        patch.setattr("offload.host.page_locked.available_bytes", lambda: 8)
        with pytest.warns(UserWarning, match=r"the optimizer's state remains in host memory, .* has 8 B left"):
            run.handle.remove()
    assert homes == [entry["exp_avg"].data_ptr() for entry in run.optimizer.state.values()]
    run.handle = None
    run.steps(range(2, 4))
    assert_same(resident(device, range(4)), run.values)


def test_a_state_dict_that_was_kept_keeps_its_memory(lab: Lab) -> None:
    run = Training(lab.device)
    run.steps(range(2))
    kept = run.optimizer.state_dict()["state"]
    numbers = kept[0]["exp_avg"].clone()
    run.handle.remove()
    gc.collect()
    assert lab.pool.used_bytes > 0
    taken = lab.pool.take_whole([100_000])
    taken[0].pieces[0].fill_(0xFF)
    assert torch.equal(kept[0]["exp_avg"], numbers)
    lab.pool.give(taken.pop())
    del kept
    gc.collect()
    assert lab.pool.used_bytes == 0


def test_a_dropped_optimizer_gives_its_memory_back(lab: Lab) -> None:
    run = Training(lab.device)
    run.steps(range(2))
    pinned = lab.pool.pinned_bytes
    lab.drain()  # on the CPU, a copy that is queued holds its tensors
    run.optimizer = run.handle = None  # without a circle of references: at once
    assert lab.pool.used_bytes == 0
    optimizer = adamw(run.model.parameters())
    handle = stream(optimizer)
    assert lab.pool.pinned_bytes == pinned, "memory is used again"
    del optimizer
    handle.remove()
    assert lab.pool.used_bytes == 0


def test_a_copy_of_the_optimizer_is_an_ordinary_one(lab: Lab) -> None:
    run = Training(lab.device)
    run.steps(range(2))
    other = copy.deepcopy(run.optimizer)
    assert type(other.state).__name__ == "defaultdict"
    assert len(other.state) == len(run.optimizer.state)


def test_hooks_of_the_program_run_once_a_step(lab: Lab) -> None:
    run = Training(lab.device, streamed=False)
    calls: list[str] = []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    stream(run.optimizer)
    run.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run.steps(range(2))
    assert calls == ["before", "after"] * 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_of_the_program_clips_gradients(when: str, lab: Lab) -> None:
    def train(streamed: bool) -> list[torch.Tensor]:
        run = Training(lab.device, streamed=False)
        handle = stream(run.optimizer) if streamed and when == "after" else None

        def clip(*_: object) -> None:
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)

        run.optimizer.register_step_pre_hook(clip)
        handle = stream(run.optimizer) if streamed and when == "before" else handle
        run.steps(range(2))
        if handle is not None:
            handle.remove()
        run.steps(range(2, 4))
        return run.values

    assert_same_training(train)


class Careful(torch.optim.SGD):
    """Halves the learning rate where gradients are large."""

    halvings = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            self.halvings += any(p.grad.abs().max() > 1000 for p in group["params"])
            group["lr"] = 0.1 / 2**self.halvings
        return super().step(closure)


@pytest.mark.parametrize("make", [adamw, partial(Careful, lr=0.1, momentum=0.9)], ids=["AdamW", "with an attribute"])
def test_an_interrupted_step_is_told(make: Make, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parameters have made the step, and others have not."""
    run = Training(lab.device, make)
    run.steps(range(2))
    saved = run.checkpoint
    run.backward(2)
    for parameter in run.model.parameters():
        parameter.grad.mul_(1e9)
    load, calls = run.handle._stepper.load, []

    def interrupted(chunk: Any) -> Any:
        calls.append(chunk)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return load(chunk)

    with monkeypatch.context() as patch:
        patch.setattr(run.handle._stepper, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.optimizer.step()
    message = (
        r"parameters and optimizer state must belong to one step, but optimizer\.step\(\) was cut off; load both from "
        r"a checkpoint, by load_state_dict\."
    )
    for use in (run.optimizer.step, run.optimizer.state_dict):
        with pytest.raises(RuntimeError, match=message):
            use()
    run.load(saved)
    run.steps(range(2, 4))
    assert_same(resident(lab.device, range(4), make), run.values)


class Normalized(torch.optim.SGD):
    """Divides by the norm of a group's gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            norm = torch.tensor([p.grad.norm() for p in parameters]).norm()
            for p in parameters:
                p.data.sub_(p.grad / norm)


class Wrapper(torch.optim.SGD):
    """Steps another optimizer: a trial of it would step the program's parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], lr=0.1)
        self.inner = [inner]


class Special(torch.Tensor):
    """A form of its own."""


class Quantized(torch.optim.SGD):
    """Holds the state of large parameters in another form, as optimizers of 8 bits do."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.numel() >= 4096 and p.grad is not None:
                self.state[p]["codes"] = torch.zeros_like(p).as_subclass(Special)


class Draws(torch.optim.SGD):
    """Draws a number in each step, and does nothing with it."""

    def step(self, closure: Any = None) -> Any:
        torch.rand(1)
        return super().step(closure)


def test_the_trial_leaves_the_generator_as_it_is(device: torch.device) -> None:
    optimizer, before = Draws(build(device).parameters(), lr=0.1), torch.get_rng_state()
    with stream(optimizer):
        assert torch.equal(torch.get_rng_state(), before)


class Paired(torch.optim.SGD):
    """Steps no parameter alone."""

    def step(self, closure: Any = None) -> None:
        if len(self.param_groups[0]["params"]) % 2:
            raise ValueError("one without another")
        super().step(closure)


def test_refused_optimizers() -> None:
    small, large, model = nn.Linear(2, 2), nn.Linear(200, 200), build(torch.device("cpu"))
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got a Linear"):
        stream_optimizer(small)
    with (
        stream(streamed := adamw(small.parameters())),
        pytest.raises(ValueError, match=r"but this AdamW is; remove\(\)"),
    ):
        stream(streamed)
    with pytest.raises(TypeError, match="got Normalized, whose parameters get other bits when they are stepped one by"):
        stream(Normalized(model.parameters(), lr=0.0))
    with pytest.raises(TypeError, match=r"Paired, whose step\(\) fails with fewer parameters \(one without another\)"):
        stream(Paired(small.parameters(), momentum=0.9))
    with pytest.raises(TypeError, match=r"got SparseAdam, whose step\(\) fails with small parameters"):
        stream(torch.optim.SparseAdam(list(model.parameters())))
    with pytest.raises(ValueError, match="must not be differentiable, but this SGD is"):
        stream(torch.optim.SGD(model.parameters(), differentiable=True))
    with pytest.raises(TypeError, match=r"got Wrapper, which has an optimizer .* \(give optimizer\.inner if"):
        stream(Wrapper(adamw(model.parameters())))
    with pytest.raises(TypeError, match="got LBFGS, which has parameters in its attribute _params"):
        stream(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="got Quantized, whose codes is no plain tensor but of type Special"):
        stream(Quantized(large.parameters(), lr=0.1))


def test_refused_options() -> None:
    optimizer = adamw(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"chunk_bytes must be at least 1 byte, got 0; leave it out for 112 MiB\."):
        stream(optimizer, chunk_bytes=0)
    with pytest.raises(TypeError, match="max_host_bytes must be an int"):
        stream(optimizer, max_host_bytes=1.5)
    with pytest.raises(ValueError, match=r"state_dtype must be torch\.float32 or None, got torch\.float16"):
        stream(optimizer, state_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"consume_gradients must be False without in_backward=True, got True"):
        stream(optimizer, consume_gradients=True)


def test_inference_mode(device: torch.device) -> None:
    """No tensor that is made there can be trained: the state is made outside, also where the handle is removed."""
    model, plain = build(device), build(device)
    optimizer, other = adamw(model.parameters()), adamw(plain.parameters())
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"must be held outside of torch\.inference_mode\(\)"),
    ):
        stream(optimizer)
    handle = stream(optimizer)
    for number in range(3):
        for one, its in ((plain, other), (model, optimizer)):
            for parameter in one.parameters():
                parameter.grad = torch.ones_like(parameter)
            its.step()
        if number == 1:
            with torch.inference_mode():
                handle.remove()
    assert_same(list(plain.parameters()), list(model.parameters()))


def test_refused_parameters_and_gradients() -> None:
    devices = [nn.Parameter(torch.zeros(2, device=device)) for device in ("cpu", "meta")]
    with pytest.raises(ValueError, match="have its parameters on one device, got cpu and meta; build an optimizer"):
        stream(torch.optim.SGD(devices))
    with pytest.raises(ValueError, match=r"must have dense parameters, got one of shape \(4, 2\) with gaps in memory"):
        stream(torch.optim.SGD([nn.Parameter(torch.zeros(4, 4)[:, ::2])]))
    embedding, last = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([last, *embedding.parameters()], lr=0.1)
    stream(optimizer)
    (embedding(torch.tensor([1])) * last).sum().backward()
    with pytest.raises(TypeError, match=r"gradients must be dense to be stepped in chunks, got one of layout"):
        optimizer.step()
    assert torch.equal(last, torch.ones(2)), "no parameter has made the step"
    embedding.weight.grad = None
    optimizer.step()
    assert not torch.equal(last, torch.ones(2))


def test_too_little_host_memory_is_refused_before_anything_is_changed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Training(lab.device, streamed=False)
    run.steps(range(1))
    state = run.optimizer.state
    with pytest.raises(HostMemoryError, match=r"but max_host_bytes is 64\.00 KiB"):
        stream(run.optimizer, max_host_bytes="64KiB")
    monkeypatch.setattr("offload.host.page_locked.available_bytes", lambda: 1000)
    with pytest.raises(HostMemoryError, match="the system has 1000 B left"):
        stream(run.optimizer)
    assert run.optimizer.state is state
    assert lab.pool.used_bytes == 0
    run.steps(range(1))


def test_a_step_is_not_captured(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(lab.device)
    run.steps(range(1))
    monkeypatch.setattr(type(lab.backend), "capturing", True)
    with pytest.raises(CaptureError, match=r"optimizer\.step\(\) must run outside of a CUDA graph"):
        run.optimizer.step()


class Momentum(torch.optim.Optimizer):
    """As programs write them: a parameter may have a rate of its own, and ``step`` may assign its data."""

    def __init__(self, parameters: Any, where: str, *, assigns: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.where, self.assigns, self.moments = where, assigns, dict[Any, Any]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            state = self.state[parameter]
            if self.where == "attribute":
                moment = self.moments.setdefault(parameter, torch.zeros_like(parameter))
            elif self.where == "list":
                moment = state.setdefault("moments", [torch.zeros_like(parameter)])[0]
            else:
                moment = state.setdefault("moment", torch.zeros_like(parameter))
            moment.mul_(0.9).add_(parameter.grad)
            new = parameter - 0.1 * getattr(parameter, "scale", 1.0) * moment
            if self.assigns:
                parameter.data = new
            else:
                parameter.copy_(new)


@pytest.mark.parametrize("options", [{}, {"in_backward": True}, {"chunk_bytes": 1024}], ids=str)
@pytest.mark.parametrize("assigns", [False, True])
def test_a_step_that_assigns_data_or_reads_attributes_of_parameters(
    assigns: bool, options: dict[str, Any], lab: Lab
) -> None:
    def train(streamed: bool) -> list[torch.Tensor]:
        run = Training(lab.device, partial(Momentum, where="state", assigns=assigns), streamed=False)
        run.model[0].weight.scale = 0.5
        if streamed:
            run.handle = stream(run.optimizer, **options)
        run.steps(range(3))
        return run.values

    assert_same_training(train)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("attribute", "got Momentum, whose step.. keeps tensors in its attribute moments and not in its state"),
        ("list", "got Momentum, whose moments is no plain tensor but of type list"),
    ],
)
def test_state_that_is_no_tensor_of_a_parameter_is_refused(where: str, message: str, lab: Lab) -> None:
    optimizer = Momentum(build(lab.device).parameters(), where)
    with pytest.raises(TypeError, match=message):
        stream(optimizer)
    assert not optimizer.moments
    assert not optimizer.state


class Logged(torch.optim.SGD):
    """Appends numbers to a list of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.rates = [1.0]

    def step(self, closure: Any = None) -> None:
        self.rates.append(self.param_groups[0]["lr"])
        super().step(closure)


def test_a_list_of_numbers_is_no_state_and_has_none_of_the_trial(lab: Lab) -> None:
    optimizer = Logged(build(lab.device).parameters())
    with stream(optimizer):
        assert optimizer.rates == [1.0]


def test_names() -> None:
    optimizer = adamw(build(torch.device("cpu")).parameters())
    handle = stream_optimizer(optimizer)
    assert repr(handle) == "StreamedOptimizer(AdamW, 148.9 KiB on the host, 0 B in slots on the device)"
    handle.remove()
    assert "removed" in repr(handle)
    assert "host_bytes" in str(handle.stats())


TIMES = 40


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"in_backward": True, "consume_gradients": True},
        {"overlap_forward": True},
        {"in_backward": True, "overlap_forward": True},
    ],
    ids=str,
)
def test_interrupts(options: dict[str, Any], lab: Lab) -> None:
    def make() -> Training:
        return Training(torch.device("cpu"), **options)

    assert_interrupts_are_told(lab, make, lambda steps: resident(torch.device("cpu"), steps), TIMES)
