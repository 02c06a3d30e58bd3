"""Each wait of weight streaming is needed: without it, and with bad timing, a number is wrong.

Every scenario sets up the timing that its wait is for. The numbers are right, and wrong once the library forgets that
one wait.
"""

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import in_threads
from lab import Lab
from models import WIDTH, build
from streaming import Linear, assert_moved, backward, forward, gradients
from torch.testing._internal.distributed.fake_pg import FakeStore

from offload import stream_weights
from offload.device.cpu import ComputeStream, CpuStream
from offload.weights import gradients as gradient_writer
from offload.weights.layer import WeightWait

LAYERS = 4
LATE_S = 0.05

Scenario = Callable[[Lab, pytest.MonkeyPatch], bool]


def expected_and_found(lab: Lab, microbatches: int = 1, **delays: float) -> bool:
    layers, x = build(Linear, LAYERS, lab.device)
    expected = [microbatches * gradient for gradient in gradients(layers, x)]
    with stream_weights(layers, lab.device):
        gradients(layers, x)
        lab.drain()
        for parameter in layers.parameters():
            parameter.grad.fill_(float("nan"))  # the memory is used again
        lab.slow(**delays)
        lab.backend.poison = True
        found = gradients(layers, x, lambda layers, x: [backward(layers, x) for _ in range(microbatches)])
        lab.slow()
        lab.drain()
    return all(map(torch.equal, expected, found))


def slow_loads(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Compute is ready long before the weights are."""
    return expected_and_found(lab, h2d_s=LATE_S)


def slow_gradients(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Gradients leave slowly, and what is let go is overwritten at once."""
    return expected_and_found(lab, d2h_s=LATE_S)


def last_gradient_is_late(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Only the copy that no later layer's backward waits for is slow."""
    copy, copied = lab.backend.copy, 0

    def slow_at_last(stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        nonlocal copied
        copied += stream is lab.d2h_stream
        if stream is lab.d2h_stream and copied % LAYERS == 0:
            lab.delay(stream, 4 * LATE_S)
        copy(stream, target, source)

    with monkeypatch.context() as patch:
        patch.setattr(lab.backend, "copy", slow_at_last)
        patch.setattr(lab, "slow", lambda: None)  # on CUDA, it would put the copies back as they were
        return expected_and_found(lab)


def slow_second_microbatch(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The worker has nothing to do but to wait for what it adds."""
    return expected_and_found(lab, 2, d2h_s=LATE_S)


def late_compute(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A layer's forward reads its weight only when the next loads could have begun."""
    seen: list[torch.Tensor] = []

    class Late(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            read_late(lab, self.weight, seen)
            return super().forward(x)

    layers, x = build(Late, LAYERS, lab.device)
    expected = [layer.weight.detach().cpu().clone() for layer in layers]
    with stream_weights(layers, lab.device), torch.no_grad():
        forward(layers, x)
        lab.drain()
    return all(torch.equal(one, other.cpu()) for one, other in zip(expected, seen, strict=True))


def late_gradient(lab: Lab, monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup | None = None) -> bool:
    """Compute writes a gradient only when its copy could have begun."""

    class Late(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ lab.late_gradient(self.weight, 7.0, LATE_S))

    layers, x = build(Late, LAYERS, lab.device)
    with stream_weights(layers, lab.device, process_group=group):
        found = gradients(layers, x)
        lab.drain()
    return all(bool((gradient == (7.0 if group is None else 3.5)).all()) for gradient in found)


def optimizer_in_a_hurry(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The host runs ahead of the device, and steps the weights of a forward that the device has not begun."""
    if lab.device.type == "cpu":
        # There the compute stream is the caller, which a wait blocks: make it a queue, as a GPU's is.
        monkeypatch.setattr(ComputeStream, "wait_event", CpuStream.wait_event)
    seen: list[torch.Tensor] = []

    class Late(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            read_late(lab, self.weight, seen, 0.0)
            return x

    layers, x = build(Late, 2, lab.device)
    expected = [layer.weight.detach().cpu().clone() for layer in layers]
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
    with stream_weights(layers, lab.device):
        for parameter in layers.parameters():
            parameter.grad = torch.ones_like(parameter)
        lab.slow(h2d_s=LATE_S)
        forward(layers, x)
        optimizer.step()
        lab.slow()
        lab.drain()
    return all(torch.equal(one, other.cpu()) for one, other in zip(expected, seen, strict=True))


def read_late(lab: Lab, weight: torch.Tensor, seen: list[torch.Tensor], delay_s: float = LATE_S) -> None:
    """Let the compute stream copy ``weight`` after a while, behind the work queued so far."""
    weight = weight.data
    if lab.device.type == "cpu":
        lab.backend.compute_stream().submit(lambda: (time.sleep(delay_s), seen.append(weight.clone())))
    else:
        torch.cuda._sleep(int(delay_s * 2e9))
        seen.append(weight.clone())


@contextmanager
def two_ranks() -> Iterator[dist.ProcessGroup]:
    """A group whose other rank sends nothing: sums are what this one has."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


class LateWork:
    """A collective that the device runs only after a while: ``change`` is what the other rank does to the result."""

    def __init__(self, lab: Lab, change: Callable[[], object]) -> None:
        self.lab, self.change = lab, change

    def wait(self) -> None:
        if self.lab.device.type == "cpu":
            time.sleep(LATE_S)
        else:
            torch.cuda._sleep(int(LATE_S * 2e9))
        self.change()


def averages_are_late(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The other rank has the same gradients, which come when the copy to the host could have been over."""
    all_reduce = dist.all_reduce

    def late(numbers: torch.Tensor, *options: Any, **named: Any) -> Any:
        same = numbers.is_floating_point()
        return LateWork(lab, lambda: numbers.mul_(2)) if same else all_reduce(numbers, *options, **named)

    layers, x = build(Linear, LAYERS, lab.device)
    expected = gradients(layers, x)
    with two_ranks() as group, stream_weights(layers, lab.device, process_group=group), monkeypatch.context() as patch:
        patch.setattr(dist, "all_reduce", late)
        found = gradients(layers, x)
        lab.drain()
    return all(map(torch.equal, expected, found))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_averages_wait_for_late_gradients(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, what gathers gradients runs in the caller's thread, which is not late."""
    with two_ranks() as group:
        assert late_gradient(lab, monkeypatch, group)


def test_a_gradient_that_another_rank_alone_has_is_no_none(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host decides that, when the ranks have told each other."""
    all_reduce = dist.all_reduce

    def late(numbers: torch.Tensor, *options: Any, **named: Any) -> Any:
        tells = not numbers.is_floating_point()
        return LateWork(lab, lambda: numbers.fill_(1)) if tells else all_reduce(numbers, *options, **named)

    layers, x = build(Linear, LAYERS, lab.device)
    with two_ranks() as group, stream_weights(layers, lab.device, process_group=group):
        monkeypatch.setattr(dist, "all_reduce", late)
        found = gradients(layers, x, lambda layers, x: backward(layers[1:], x))
    assert torch.equal(found[0], torch.zeros(WIDTH, WIDTH))
    assert found[1].count_nonzero() > 0


def test_gradients_of_a_layer_that_microbatches_leave_out(lab: Lab) -> None:
    layers, x = build(Linear, LAYERS, lab.device)
    expected = gradients(layers, x)

    def without_first(layers: Any, x: torch.Tensor) -> None:
        backward(layers[1:], x)

    layers.zero_grad()
    with two_ranks() as group, stream_weights(layers, lab.device, process_group=group):
        backward(layers, x)
        without_first(layers, x)
        lab.drain()
        assert torch.equal(layers[0].weight.grad, expected[0] / 4), "that of the other microbatch, averaged twice"
        layers.zero_grad()
        without_first(layers, x)
        assert layers[0].weight.grad is None


def averaged_with_sums(lab: Lab, prepare: Callable[[], object]) -> bool:
    """The second microbatch's backward brings up what the first has left."""
    layers, x = build(Linear, LAYERS, lab.device)
    expected = [(gradient / 2 + gradient) / 2 for gradient in gradients(layers, x)]
    with two_ranks() as group, stream_weights(layers, lab.device, process_group=group):
        gradients(layers, x)
        before = [parameter.grad for parameter in layers.parameters()]
        prepare()
        backward(layers, x)
        lab.slow()
        lab.drain()
    found = [parameter.grad for parameter in layers.parameters()]
    assert all(one is other for one, other in zip(before, found, strict=True))
    return all(map(torch.equal, expected, found))


def slow_sums(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What gradients are added to is longer on its way than a busy host may stop for before it queues the sum."""
    return averaged_with_sums(lab, lambda: (lab.poison_new(), lab.slow(h2d_s=3 * LATE_S)))


def sums_land_early(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Compute still writes to the memory that a sum lands in."""
    return averaged_with_sums(lab, lambda: lab.fill_new_late(LATE_S))


SCENARIOS: dict[WeightWait, Scenario] = {
    WeightWait.LOADED: slow_loads,
    WeightWait.SLOT: late_compute,
    WeightWait.GRADIENT: late_gradient,
    WeightWait.SUM_LANDING: sums_land_early,
    WeightWait.SUM: slow_sums,
    WeightWait.AVERAGED: averages_are_late,
    WeightWait.RELEASE: slow_gradients,
    WeightWait.STAGED: slow_second_microbatch,
    WeightWait.WRITTEN: last_gradient_is_late,
    WeightWait.SOURCE: optimizer_in_a_hurry,
}


def test_every_wait_has_a_scenario() -> None:
    """That of steps in backward is in ``test_layer_step_waits.py``."""
    assert {*SCENARIOS, WeightWait.UPDATED} == set(WeightWait)


@pytest.mark.parametrize("wait", SCENARIOS, ids=lambda wait: wait.name)
def test_right_with_the_wait(wait: WeightWait, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SCENARIOS[wait](lab, monkeypatch), wait.value


@pytest.mark.slow
@pytest.mark.alone  # the device must be slower than this process, whatever others do on the machine
@pytest.mark.parametrize("wait", SCENARIOS, ids=lambda wait: wait.name)
def test_wrong_without_the_wait(wait: WeightWait, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.drop(wait)
    assert not SCENARIOS[wait](lab, monkeypatch)


def test_nothing_blocks_the_host_before_the_end_of_backward(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = build(Linear, LAYERS, lab.device)
    with stream_weights(layers, lab.device) as handle:
        gradients(layers, x)
        events = lab.record_host_waits()
        lab.slow(d2h_s=0.005)
        x.register_hook(lambda _: events.append("end of backward"))
        gradients(layers, x)
        assert events[0] == "end of backward"
        assert handle.stats().staging_waits == 0


def test_staging_is_bounded(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_writer, "STAGING", 1)
    layers, x = build(Linear, 8, lab.device)
    expected = gradients(layers, x)
    with stream_weights(layers, lab.device) as handle:
        layers.zero_grad()
        lab.slow(d2h_s=0.005)
        for _ in range(2):
            backward(layers, x)
        stats = handle.stats()
        assert stats.staging_bytes == WIDTH * WIDTH * 4
        assert stats.staging_waits > 0
    assert all(torch.equal(2 * one, layer.weight.grad) for one, layer in zip(expected, layers, strict=True))


# What the program may rely on as soon as a forward has failed, or backward has returned or failed.


class Failing(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("stop")


def load_is_over(lab: Lab) -> bool:
    queued = lab.weight_stream.record_event()
    lab.slow()
    lab.settle(lab.weight_stream, patience_s=5 * LATE_S)
    return bool(queued.query())


def test_a_failed_forward_waits_for_the_loads_ahead(lab: Lab) -> None:
    """The program may change weights in its error handling, in a way that leaves no trace."""
    layers, x = build(Linear, 2, lab.device)
    layers[0].__class__ = Failing
    with stream_weights(layers, lab.device) as handle, torch.no_grad():
        lab.slow(h2d_s=10 * LATE_S)
        with pytest.raises(ValueError, match="stop"):
            layers[0](x)
        assert handle.stats().loads == 2
        assert load_is_over(lab), "a load still reads the weights"
        layers[1].weight.data.mul_(2)
        assert torch.equal(layers[1](x), torch.tanh(x @ layers[1].weight.to(lab.device)))


def test_backward_waits_for_loads_that_nobody_needed(lab: Lab) -> None:
    """A layer's input gets no gradient: the weights before it are loaded for a backward that never comes."""

    class Cut(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach())

    layers, x = build(Linear, 4, lab.device)
    layers[2].__class__ = Cut
    with stream_weights(layers, lab.device) as handle:
        loss = forward(layers, x).sum()
        lab.slow(h2d_s=10 * LATE_S)
        loss.backward()
        assert handle.stats().loads == 5
        assert load_is_over(lab), "a load still reads the weights"


def test_the_end_of_an_evaluation_waits_for_loads(lab: Lab) -> None:
    """No backward comes after it, and compute may be late: on a GPU, the host runs ahead of what waits for a load."""
    layers, x = build(Linear, 3, lab.device)
    layers.eval()
    with stream_weights(layers, lab.device) as handle, torch.no_grad():
        lab.drop(WeightWait.LOADED)
        lab.slow(h2d_s=10 * LATE_S)
        forward(layers, x)
        assert handle.stats().loads == 3
        assert load_is_over(lab), "a load still reads the weights"


def test_layers_that_are_dropped_wait_for_their_loads(lab: Lab) -> None:
    """The slots' memory may become something else of compute's."""
    layers, x = build(Linear, 2, lab.device)
    handle = stream_weights(layers, lab.device)
    lab.slow(h2d_s=10 * LATE_S)
    with torch.no_grad():
        layers[0](x)
    assert handle.stats().loads == 2
    del layers, handle
    gc.collect()
    assert load_is_over(lab), "a load still writes into the slots"


def test_a_layer_loaded_ahead_sees_what_the_program_changes_after_backward(lab: Lab) -> None:
    layers, x = build(Linear, 2, lab.device)
    with stream_weights(layers, lab.device):
        layers[0](x).sum().backward()  # layer 1 was loaded ahead
        layers[1].weight.data.mul_(2)
        assert torch.equal(layers[1](x), torch.tanh(x @ layers[1].weight.to(lab.device)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["addition", "copy", "its queueing"])
def test_a_failed_microbatch_gives_its_staging_buffer_back(
    what: str, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a single buffer, backward would wait for it for ever."""
    layers, x = build(Linear, LAYERS, lab.device)
    copy = lab.backend.copy
    says = {"addition": "single memory location", "copy": "a copy has failed: ZeroDivision"}

    def failing_copy(stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        if stream is lab.d2h_stream and what == "copy":
            stream.submit(lambda: 1 / 0)
        elif stream is lab.d2h_stream:
            raise RuntimeError(what)
        else:
            copy(stream, target, source)

    with stream_weights(layers, lab.device) as handle:
        gradients(layers, x)
        with monkeypatch.context() as patch:
            if what == "addition":
                for layer in layers:  # memory that cannot be added to
                    layer.weight.grad = torch.zeros(()).expand_as(layer.weight)
            elif lab.device.type == "cpu" or what == "its queueing":
                patch.setattr(lab.backend, "copy", failing_copy)
            else:
                pytest.skip("a GPU's copies do not fail")
            for _ in range(1 if what == "addition" else gradient_writer.STAGING):  # each may lose one
                with pytest.raises(RuntimeError, match=says.get(what, what)):
                    in_threads(lambda: backward(layers, x), patience_s=10)
        expected = gradients(layers, x)
        backward(layers, x)
        assert handle.stats().added_bytes > 0
        assert all(torch.equal(layer.weight.grad, 2 * one) for layer, one in zip(layers, expected, strict=True))


def test_an_error_at_the_end_of_backward_leaves_nothing_for_later(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is kept: what earlier microbatches have left is in ``p.grad`` before the program drops it there."""
    layers, x = build(Linear, LAYERS, lab.device)
    copy, copies = lab.backend.copy, [0]

    def failing_copy(stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        copies[0] += stream is lab.d2h_stream
        if copies[0] == LAYERS:  # the first layer's gradient
            raise RuntimeError("no copy")
        copy(stream, target, source)

    with stream_weights(layers, lab.device) as handle:
        expected = gradients(layers, x)
        with monkeypatch.context() as patch:
            patch.setattr(lab.backend, "copy", failing_copy)
            with pytest.raises(RuntimeError, match="no copy") as kept:
                backward(layers, x)
        assert all(layer.weight.grad is not None for layer in layers)
        assert all(map(torch.equal, expected, gradients(layers, x)))
        assert_moved(handle)
        del kept


def test_an_idle_worker_holds_no_gradients(lab: Lab) -> None:
    layers, x = build(Linear, 2, lab.device)
    with stream_weights(layers, lab.device) as handle:
        for _ in range(2):
            backward(layers, x)
        assert handle.stats().added_bytes > 0
        held = [weakref.ref(layer.weight.grad) for layer in layers]
        layers.zero_grad()
        assert [one() for one in held] == [None, None]
