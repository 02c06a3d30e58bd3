"""Each wait of streamed optimizer state is needed: without it, and with bad timing, a number is wrong."""

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lab import Lab
from models import assert_same
from torch import nn
from training import OPTIMIZERS, Training, adamw, resident, stream

from offload import empty_host_cache, memory_meter, offload_layers, stream_optimizer
from offload.optimizer.chunks import StepWait

LATE_S = 0.02

Scenario = Callable[[Lab], bool]

momentum = OPTIMIZERS["SGD"]


def stepped(
    lab: Lab, make: Callable[..., torch.optim.Optimizer], steps: int, *, streamed: bool, **options: Any
) -> list[torch.Tensor]:
    """What is stepped several times in a row, with nothing in between that copies could hide behind."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(1024).to(lab.device)) for _ in range(options.pop("parameters", 6))]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn(1024).to(lab.device)
    if streamed:
        stream(optimizer, **options)
    for _ in range(steps):
        optimizer.step()
    lab.slow()
    lab.drain()
    states = [value for parameter in parameters for _, value in sorted(optimizer.state[parameter].items())]
    return [parameter.detach() for parameter in parameters] + states


def same_bits(lab: Lab, make: Callable[..., torch.optim.Optimizer], steps: int, **options: Any) -> bool:
    delays = {name: options.pop(name) for name in ("h2d_s", "d2h_s") if name in options}
    expected = stepped(lab, make, steps, streamed=False, **options)
    lab.slow(**delays)
    found = stepped(lab, make, steps, streamed=True, **options)
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(expected, found, strict=True))


def slow_loads(lab: Lab) -> bool:
    """Compute is ready long before the state is; a slot has held that of another parameter."""
    return same_bits(lab, adamw, 3, h2d_s=LATE_S, chunk_bytes="8KiB", parameters=8)


def slow_copies(lab: Lab) -> bool:
    """The next chunk's load could begin long before the slot is on the host."""
    return same_bits(lab, adamw, 3, d2h_s=LATE_S, chunk_bytes="8KiB", parameters=12)


def one_chunk(lab: Lab) -> bool:
    """The next step has another slot, but the same state."""
    return same_bits(lab, adamw, 3, d2h_s=LATE_S, parameters=1)


def first_step(lab: Lab) -> bool:
    """The optimizer makes the state itself, and nothing is loaded that could wait for the copies."""
    lab.backend.poison = True
    return same_bits(lab, momentum, 1, d2h_s=LATE_S, chunk_bytes="4KiB")


def late_step(lab: Lab, **options: Any) -> bool:
    """Compute writes the state only when its copy could have begun."""

    class Late(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1.0})
            self.late = False

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    made = self.state[p].setdefault("made", torch.zeros_like(p))
                    if self.late:
                        lab.write_late(made, 7.0, LATE_S)

    parameter = nn.Parameter(torch.zeros(100, device=lab.device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = Late([parameter])
    stream(optimizer, **options)
    optimizer.step()
    optimizer.late = True
    optimizer.step()
    found = optimizer.state[parameter]["made"].clone()
    lab.drain()
    return bool((found == 7.0).all())


def read_at_once(lab: Lab, look: Callable[[Any, Any], Any] = lambda one, _: one.state_dict()["state"][0]) -> bool:
    """The program looks at the state while it is on the way."""
    parameter = nn.Parameter(torch.zeros(100, device=lab.device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=1.0)
    handle = stream(optimizer)
    optimizer.step()
    lab.drain()  # else the host's memory may still hold what the last test has left there
    lab.slow(d2h_s=LATE_S)
    for _ in range(2):
        optimizer.step()
    found = look(optimizer, handle)["momentum_buffer"].clone()
    lab.slow()
    lab.drain()
    return bool((found == 3.0).all())


SCENARIOS: dict[StepWait, Scenario] = {
    StepWait.LOADED: slow_loads,
    StepWait.SLOT: slow_copies,
    StepWait.WRITTEN: one_chunk,
    StepWait.STEPPED: late_step,
    StepWait.RELEASE: first_step,
    StepWait.READ: read_at_once,
}


@pytest.mark.parametrize("wait", SCENARIOS, ids=lambda wait: wait.name)
def test_right_with_the_wait(wait: StepWait, lab: Lab) -> None:
    assert SCENARIOS[wait](lab), wait.value


@pytest.mark.slow
@pytest.mark.alone  # the device must be slower than this process, whatever others do on the machine
@pytest.mark.parametrize("wait", SCENARIOS, ids=lambda wait: wait.name)
def test_wrong_without_the_wait(wait: StepWait, lab: Lab) -> None:
    lab.drop(wait)
    assert not SCENARIOS[wait](lab)


def test_a_step_blocks_nothing_and_allocates_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on: neither the host, nor slots, nor pinned memory."""
    run = Training(lab.device, OPTIMIZERS["AdamW fused"])
    run.steps(range(2))
    made: list[object] = []
    for name in ("empty", "wait_on_host", "synchronize"):
        monkeypatch.setattr(lab.backend, name, lambda *given: made.append(given))
    pinned = lab.pool.pinned_bytes
    run.steps(range(3))
    assert not made
    assert lab.pool.pinned_bytes == pinned


def test_copies_run_beside_each_other(lab: Lab) -> None:
    run = Training(lab.device, chunk_bytes="64KiB")
    run.steps(range(2))
    order: list[str] = []
    load, step_chunk = run.handle._stepper.load, run.handle._stepper.step_chunk
    run.handle._stepper.load = lambda chunk: (order.append("load"), load(chunk))[1]
    run.handle._stepper.step_chunk = lambda loaded: (order.append("step"), step_chunk(loaded))[1]
    run.steps(range(1))
    chunks = order.count("step")
    assert chunks > 6
    assert order[:8] == [*["load"] * 6, "step", "load"]


@pytest.mark.parametrize("make", [adamw, momentum], ids=["AdamW", "SGD"])
def test_no_step_has_all_state_on_the_device(make: Callable[..., torch.optim.Optimizer], lab: Lab) -> None:
    """Neither the first, which makes the state, nor the later ones."""
    parameters = [nn.Parameter(torch.zeros(64, 1024, device=lab.device)) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters)
    chunk = 64 << 10
    handle = stream(optimizer, chunk_bytes=chunk)
    state_bytes = handle.stats().host_bytes
    assert state_bytes >= 64 * chunk
    assert handle.stats().slot_bytes == 0
    for _ in range(3):
        with memory_meter(lab.device) as meter:
            optimizer.step()
            handle.synchronize()
        assert meter.peak_bytes <= 16 * chunk  # six slots, and what AdamW computes with
    assert handle.stats().slot_bytes <= 6 * chunk
    resident = make(parameters)
    with memory_meter(lab.device) as meter:
        resident.step()
    assert meter.peak_bytes >= state_bytes


def test_a_small_model_has_small_slots(lab: Lab) -> None:
    """Slots of the default size would hold three times its state."""
    run = Training(lab.device, streamed=False)
    handle = stream_optimizer(run.optimizer)
    run.steps(range(4))
    stats = handle.stats()
    assert 0 < stats.slot_bytes <= 3 * stats.host_bytes / 8


def parameter_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return optimizer.param_groups[0]["params"][0]


LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "item": lambda optimizer, _: optimizer.state[parameter_of(optimizer)],
    "get": lambda optimizer, _: optimizer.state.get(parameter_of(optimizer)),
    "values": lambda optimizer, _: next(iter(optimizer.state.values())),
    "items": lambda optimizer, _: dict(optimizer.state.items())[parameter_of(optimizer)],
    "dict": lambda optimizer, _: dict(optimizer.state)[parameter_of(optimizer)],
    "copy": lambda optimizer, _: optimizer.state.copy()[parameter_of(optimizer)],
    "or": lambda optimizer, _: ({} | optimizer.state)[parameter_of(optimizer)],
    "pop": lambda optimizer, _: optimizer.state.pop(parameter_of(optimizer)),
    "popitem": lambda optimizer, _: optimizer.state.popitem()[1],
    "setdefault": lambda optimizer, _: optimizer.state.setdefault(parameter_of(optimizer), {}),
    "synchronize": lambda optimizer, handle: (dict.get(optimizer.state, parameter_of(optimizer)), handle.synchronize())[
        0
    ],
    "remove": lambda optimizer, handle: (handle.remove(), optimizer.state[parameter_of(optimizer)])[1],
    "remove, on the host": lambda optimizer, handle: (
        handle.remove(on_device=False),
        optimizer.state[parameter_of(optimizer)],
    )[1],
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_into_the_state_waits_for_its_copies(look: str, lab: Lab) -> None:
    assert read_at_once(lab, LOOKS[look])


def test_a_look_into_state_on_the_device_waits_for_the_step_beside_the_next_forward(lab: Lab) -> None:
    assert late_step(lab, overlap_forward=True, resident_bytes="1MiB")


def test_a_load_waits_for_what_allocating_its_slot_queued(lab: Lab) -> None:
    lab.fill_new_late(LATE_S)
    assert same_bits(lab, adamw, 3)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_checkpoint_is_loaded_behind_the_copies_of_the_last_step(
    interrupted: bool, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, copy = Training(lab.device), lab.backend.copy
    run.steps(range(2))
    saved = run.checkpoint

    def cut_off(stream: Any, *tensors: torch.Tensor) -> None:
        copy(stream, *tensors)
        if stream is lab.state_d2h_stream:
            raise KeyboardInterrupt

    lab.slow(d2h_s=LATE_S)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        if interrupted:
            patch.setattr(lab.backend, "copy", cut_off)
        run.steps([2])
    run.load(saved)
    lab.slow()
    lab.drain()
    assert_same(resident(lab.device, range(2)), run.values)


def test_the_second_step_takes_as_much_memory_as_any_later_one(lab: Lab) -> None:
    """The first step takes what the slots need, whichever of them the largest chunk comes to, and holds nothing else.

    Its last chunks are small, so that what it has made, and gives back, would not hide what slots take.
    """
    parameters = [nn.Parameter(torch.zeros(64, columns, device=lab.device)) for columns in (128, *[96] * 9, 8, 96, 8)]
    optimizer = adamw(parameters)
    handle = stream(optimizer, chunk_bytes=64 << 10)
    slot_bytes, peak_bytes = [], []
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with memory_meter(lab.device) as meter:
            optimizer.step()
        peak_bytes.append(meter.peak_bytes)
        slot_bytes.append(handle.stats().slot_bytes)
    assert slot_bytes[0] > 0
    assert len({*slot_bytes}) == 1
    assert len({*peak_bytes[1:]}) == 1


def test_activations_do_not_wait_behind_state(lab: Lab) -> None:
    """Whose copies wait for slots and for steps: they are in streams of their own."""
    used = lab.record_streams()
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(lab.device)
    optimizer = adamw(model.parameters())
    stream(optimizer)
    with offload_layers(list(model), num_layers=2, min_bytes=1):
        for _ in range(2):
            used.clear()
            model(torch.randn(8, 64, device=lab.device)).square().mean().backward()
            assert {*used} == {lab.d2h_stream, lab.h2d_stream}
            used.clear()
            optimizer.step()
    assert {*used} == {lab.state_d2h_stream, lab.state_stream}


class Failing(torch.optim.SGD):
    """Of which a step fails behind its first chunk."""

    fails = False

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.fails:
            raise ArithmeticError


def after_a_step_that_fails(lab: Lab) -> torch.optim.Optimizer:
    """While the loads of its other chunks still run."""
    weights = [nn.Parameter(torch.ones(1024, device=lab.device)) for _ in range(6)]
    optimizer = Failing(weights, lr=0.1, momentum=0.5)
    stream(optimizer, chunk_bytes="4KiB")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    lab.slow(h2d_s=LATE_S)
    optimizer.fails = True
    with pytest.raises(ArithmeticError):
        optimizer.step()
    lab.slow()
    return optimizer


def test_compute_is_behind_all_loads_of_a_step_that_fails(lab: Lab) -> None:
    """It gets the memory of their slots if the program drops the optimizer."""
    optimizer = after_a_step_that_fails(lab)
    loaded = lab.state_stream.record_event()
    lab.finish_compute()
    assert loaded.query()
    del optimizer


def test_the_state_of_a_dropped_optimizer_is_whole(lab: Lab) -> None:
    """The program may hold it, and what is allocated in the memory of the slots must not be copied there."""
    weights = [nn.Parameter(torch.ones(1024, device=lab.device)) for _ in range(6)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.5)
    stream(optimizer, chunk_bytes="4KiB")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = [optimizer.state[weight]["momentum_buffer"] for weight in weights]
    lab.slow(d2h_s=LATE_S)
    optimizer.step()
    lab.slow()
    copied = lab.state_d2h_stream.record_event()
    del optimizer
    assert copied.query()
    others = [torch.full((1024,), float("nan"), device=lab.device) for _ in range(32)]
    lab.drain()
    assert all(torch.equal(one, torch.full_like(one, 1.5)) for one in held)
    del others


def test_the_system_gets_memory_back_when_no_load_reads_it(lab: Lab) -> None:
    """On a GPU, where a copy does not hold its source; the CPU's do, and there is nothing to give back before."""
    optimizer = after_a_step_that_fails(lab)
    loaded = lab.state_stream.record_event()
    del optimizer
    gc.collect()
    while not empty_host_cache(lab.device):
        time.sleep(LATE_S)
    assert loaded.query()
