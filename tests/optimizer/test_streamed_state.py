"""Where the state is, what ``state_dict`` holds, what ``remove`` undoes, and what is refused."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from lab import Lab
from torch import nn
from training import assert_same, build, loss_of, plain_steps, stream, values

import offload
from offload import CaptureError, HostMemoryError, stream_optimizer


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def test_the_state_is_pinned_once_and_exactly_sized(lab: Lab) -> None:
    model = build(lab.device)
    optimizer = adamw(model)
    handle = stream(optimizer)
    nbytes = sum(2 * parameter.nbytes for parameter in model.parameters())
    pinned = lab.pool.pinned_bytes
    assert handle.stats().host_bytes == lab.pool.used_bytes == nbytes
    assert nbytes <= pinned <= nbytes + 512 * 12 + 4096
    plain_steps(model, optimizer, range(3))
    assert lab.pool.pinned_bytes == pinned
    stats = handle.stats()
    assert stats.written_bytes == 3 * nbytes
    assert stats.loaded_bytes == 2 * nbytes
    assert (stats.steps, (stats - stats).steps) == (3, 0)


def test_a_state_dict_is_on_the_host_and_saves_only_itself(lab: Lab) -> None:
    model = build(lab.device)
    optimizer = adamw(model, fused=True)
    stream(optimizer)
    plain_steps(model, optimizer, range(2))
    saved = optimizer.state_dict()
    tensors = [value for entry in saved["state"].values() for value in entry.values()]
    assert {(type(value), value.device.type) for value in tensors} == {(torch.Tensor, "cpu")}
    file = io.BytesIO()
    torch.save(saved["state"][0]["exp_avg"], file)
    assert file.tell() < model[0].weight.nbytes + 4096
    again = torch.load(io.BytesIO(_saved(saved)), weights_only=True)
    model_2 = copy.deepcopy(model)
    optimizer_2 = adamw(model_2, fused=True)
    optimizer_2.load_state_dict(again)
    for each in ((model, optimizer), (model_2, optimizer_2)):
        plain_steps(*each, range(2, 4))
    assert_same(values(model, optimizer), values(model_2, optimizer_2))


def _saved(what: object) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


def test_state_in_float32_is_loaded_as_it_is(lab: Lab) -> None:
    """PyTorch's own ``load_state_dict`` would round it to the parameter's dtype."""
    found = []
    for resumed in (False, True):
        model = build(lab.device, torch.bfloat16)
        optimizer = adamw(model)
        stream(optimizer, state_dtype=torch.float32)
        plain_steps(model, optimizer, range(3))
        if resumed:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = adamw(model)
            stream(optimizer, state_dtype=torch.float32)
            optimizer.load_state_dict(saved)
        plain_steps(model, optimizer, range(3, 6))
        assert optimizer.state[model[0].weight]["exp_avg"].dtype is torch.float32
        found.append(values(model, optimizer))
    assert_same(*found)


def test_remove_brings_the_state_back(lab: Lab) -> None:
    model = build(lab.device)
    optimizer = adamw(model)
    expected_model = build(lab.device)
    expected = adamw(expected_model)
    plain_steps(expected_model, expected, range(6))
    plain_steps(model, optimizer, range(2))
    with stream(optimizer) as handle:
        assert handle.state == "following"
        plain_steps(model, optimizer, range(2, 4))
    assert handle.state == "removed"
    assert type(optimizer.state) is type(expected.state)
    for entry in optimizer.state.values():
        assert entry["exp_avg"].device == lab.device
        assert list(entry) == ["step", "exp_avg", "exp_avg_sq"]
    plain_steps(model, optimizer, range(4, 6))
    assert_same(values(expected_model, expected), values(model, optimizer))
    assert handle.stats().steps == 2
    handle.remove()
    with pytest.raises(
        RuntimeError, match=r"the handle must be in use, but it was removed; stream the optimizer again"
    ):
        handle.__enter__()
    gc.collect()
    assert lab.pool.used_bytes == 0
    stream(optimizer).remove()


def test_a_state_dict_that_was_kept_keeps_its_memory(lab: Lab) -> None:
    model = build(lab.device)
    optimizer = adamw(model)
    handle = stream(optimizer)
    plain_steps(model, optimizer, range(2))
    kept = optimizer.state_dict()["state"]
    numbers = kept[0]["exp_avg"].clone()
    handle.remove()
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
    model = build(lab.device)
    optimizer = adamw(model)
    stream(optimizer)
    plain_steps(model, optimizer, range(2))
    pinned = lab.pool.pinned_bytes
    lab.drain()  # on the CPU, a copy that is queued holds its tensors
    del optimizer  # without a circle of references: at once
    assert lab.pool.used_bytes == 0
    optimizer = adamw(model)
    stream(optimizer)
    assert lab.pool.pinned_bytes == pinned, "memory is used again"


def test_a_copy_of_the_optimizer_is_an_ordinary_one(lab: Lab) -> None:
    model = build(lab.device)
    optimizer = adamw(model)
    stream(optimizer)
    plain_steps(model, optimizer, range(2))
    other = copy.deepcopy(optimizer)
    assert type(other.state).__name__ == "defaultdict"
    assert len(other.state) == len(optimizer.state)


def test_hooks_of_the_program_run_once_a_step(lab: Lab) -> None:
    model = build(lab.device)
    optimizer = adamw(model)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    stream(optimizer)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    plain_steps(model, optimizer, range(2))
    assert calls == ["before", "after"] * 2


def test_an_interrupted_step_is_told(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parameters have made the step, and others have not."""
    model = build(lab.device)
    optimizer = adamw(model)
    handle = stream(optimizer)
    plain_steps(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    loss_of(model, 2).backward()
    load, calls = handle._stepper.load, []

    def interrupted(chunk: Any) -> Any:
        calls.append(chunk)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return load(chunk)

    with monkeypatch.context() as patch:
        patch.setattr(handle._stepper, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    message = (
        r"parameters and optimizer state must belong to one step, but optimizer\.step\(\) was cut off; load both from "
        r"a checkpoint, by load_state_dict\."
    )
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=message):
            use()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    plain_steps(model, optimizer, range(2, 4))
    expected = build(lab.device)
    resident = adamw(expected)
    plain_steps(expected, resident, range(4))
    assert_same(values(expected, resident), values(model, optimizer))


# What is refused.


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got a Linear"):
        stream_optimizer(nn.Linear(2, 2))


def test_options_are_checked() -> None:
    optimizer = adamw(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"chunk_bytes must be at least 1 byte, got 0; leave it out for 512 MiB\."):
        stream_optimizer(optimizer, chunk_bytes=0)
    with pytest.raises(TypeError, match="max_host_bytes must be an int"):
        stream_optimizer(optimizer, max_host_bytes=1.5)
    with pytest.raises(ValueError, match=r"state_dtype must be torch\.float32 or None, got torch\.float16"):
        stream_optimizer(optimizer, state_dtype=torch.float16)


def test_an_optimizer_is_streamed_once() -> None:
    optimizer = adamw(nn.Linear(2, 2))
    with stream(optimizer), pytest.raises(ValueError, match=r"but this AdamW is; remove\(\) its handle first"):
        stream(optimizer)


def test_parameters_on_several_devices_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(2, device=device)) for device in ("cpu", "meta")]
    with pytest.raises(
        ValueError, match=r"must have its parameters on one device, got cpu and meta; build an optimizer"
    ):
        stream(torch.optim.SGD(parameters))


def test_optimizers_whose_parameters_depend_on_each_other_are_refused() -> None:
    class Normalized(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            parameters = self.param_groups[0]["params"]
            norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
            for p in parameters:
                p.data.sub_(p.grad / norm)

    model = build(torch.device("cpu"))
    with pytest.raises(TypeError, match="got Normalized, whose parameters get other bits when they are stepped one by"):
        stream(Normalized(model.parameters(), lr=0.0))
    with pytest.raises(TypeError, match=r"got SparseAdam, whose step\(\) fails with small parameters"):
        stream(torch.optim.SparseAdam(list(model.parameters())))
    with pytest.raises(ValueError, match="must not be differentiable, but this SGD is"):
        stream(torch.optim.SGD(model.parameters(), differentiable=True))


class Wrapper(torch.optim.SGD):
    """Steps another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], lr=0.1)
        self.inner = [inner]


def test_optimizers_that_have_another_one_are_refused() -> None:
    """A trial of theirs would step the program's parameters."""
    model = build(torch.device("cpu"))
    with pytest.raises(TypeError, match="by itself, got Wrapper, which has an optimizer in its attribute inner"):
        stream(Wrapper(adamw(model)))
    with pytest.raises(TypeError, match="got LBFGS, which has parameters in its attribute _params"):
        stream(torch.optim.LBFGS(model.parameters()))


def test_state_that_is_not_made_of_plain_tensors_is_refused() -> None:
    class Special(torch.Tensor):
        pass

    class Quantized(torch.optim.SGD):
        """Holds the state of large parameters in another form, as optimizers of 8 bits do."""

        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if p.numel() >= 4096 and p.grad is not None:
                    self.state[p]["codes"] = torch.zeros_like(p).as_subclass(Special)

    with pytest.raises(TypeError, match="got Quantized, whose codes is no plain tensor but of type Special"):
        stream(Quantized(nn.Linear(200, 200).parameters(), lr=0.1))


def test_parameters_with_gaps_and_sparse_gradients_are_refused() -> None:
    gaps = nn.Parameter(torch.zeros(4, 4)[:, ::2])
    with pytest.raises(ValueError, match=r"must have dense parameters, got one of shape \(4, 2\) with gaps in memory"):
        stream(torch.optim.SGD([gaps]))
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    stream(optimizer)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"gradients must be dense to be stepped in chunks, got one of layout"):
        optimizer.step()


def test_too_little_host_memory_is_refused_before_anything_is_changed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(lab.device)
    optimizer = adamw(model)
    plain_steps(model, optimizer, range(1))
    state = optimizer.state
    with pytest.raises(HostMemoryError, match=r"but max_host_bytes is 64\.00 KiB"):
        stream(optimizer, max_host_bytes="64KiB")
    monkeypatch.setattr("offload.host.page_locked.available_bytes", lambda: 1000)
    with pytest.raises(HostMemoryError, match="the system has 1000 B left"):
        stream(optimizer)
    assert optimizer.state is state
    assert lab.pool.used_bytes == 0
    plain_steps(model, optimizer, range(1))


def test_a_step_is_not_captured(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(lab.device)
    optimizer = adamw(model)
    stream(optimizer)
    plain_steps(model, optimizer, range(1))
    monkeypatch.setattr(type(lab.backend), "capturing", True)
    with pytest.raises(CaptureError, match=r"optimizer\.step\(\) must run outside of a CUDA graph"):
        optimizer.step()


def test_names() -> None:
    optimizer = adamw(build(torch.device("cpu")))
    handle = offload.stream_optimizer(optimizer)
    assert repr(handle) == "StreamedOptimizer(AdamW, 148.9 KiB on the host, 0 B in slots on the device)"
    handle.remove()
    assert "removed" in repr(handle)
    assert "host_bytes" in str(handle.stats())
