"""Each place where one stream waits for another is needed, and nothing waits anywhere else.

For each kind of wait there is a scenario that comes out right, and wrong when this one wait is left out.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab import Lab
from models import Offloading, build, loss_of, offloading, save

import offload
from offload import Schedule, get_cpu_offload_context
from offload.activations import activation_set
from offload.device.backend import Wait

LATE_S = 0.1
ELEMENTS = 256
NBYTES = 4 * ELEMENTS


class OneTensor:
    """Three layers, of which the first saves a tensor that is offloaded: released before F2, reloaded before B1."""

    def __init__(self, lab: Lab, before_read: Callable[[], object] = lambda: None) -> None:
        self.lab = lab
        self.before_read = before_read
        self.offloaded: Offloading = offloading(1, 3, lab.device)
        self.found: list[float] = []

    def begin(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The forward of layer 0."""
        x = torch.ones(1, device=self.lab.device, requires_grad=True)
        return self.offloaded.layer(lambda y: save(y, self._receive, make()), x)

    def end(self, y: torch.Tensor) -> torch.Tensor:
        """The forwards of layers 1 and 2."""
        return self.offloaded.forward([torch.neg, torch.neg], y)

    def full(self, value: float) -> torch.Tensor:
        return torch.full((ELEMENTS,), value, device=self.lab.device)

    def _receive(self, saved: tuple[torch.Tensor, ...]) -> None:
        self.before_read()
        self.found += saved[0].clone().unique().tolist()


def copy_before_the_tensor_is_computed(lab: Lab) -> bool:
    case = OneTensor(lab)

    def make() -> torch.Tensor:
        tensor = case.full(0.0)
        lab.write_late(tensor, 3.0, LATE_S)
        return tensor

    case.end(case.begin(make)).sum().backward()
    return case.found == [3.0]


def host_buffer_goes_to_the_next_microbatch(lab: Lab) -> bool:
    case = OneTensor(lab)
    first = case.begin(lambda: case.full(3.0))
    first_end = case.end(first)
    open_gate = lab.hold(lab.h2d_stream)
    torch.autograd.grad(first_end.sum(), first, retain_graph=True)  # its reload is queued, and held up
    second = case.begin(lambda: case.full(5.0))
    lab.settle(lab.d2h_stream)
    open_gate()
    first_end.sum().backward()
    case.end(second).sum().backward()
    assert lab.pool.pinned_bytes <= 4096, "the second microbatch took another buffer"
    return case.found == [3.0, 5.0]


def device_memory_is_reused_during_the_copy(lab: Lab) -> bool:
    lab.backend.poison = True
    lab.slow(d2h_s=LATE_S)
    case = OneTensor(lab)
    case.end(case.begin(lambda: case.full(3.0))).sum().backward()
    return case.found == [3.0]


def reload_lands_where_compute_still_writes(lab: Lab) -> bool:
    case = OneTensor(lab, before_read=lab.drain)
    y = case.end(case.begin(lambda: case.full(3.0)))
    memory = torch.zeros(NBYTES, dtype=torch.uint8, device=lab.device)
    lab.recycle(memory)
    lab.write_late(memory, 255, LATE_S)
    y.sum().backward()
    return case.found == [3.0]


def backward_reads_during_the_reload(lab: Lab) -> bool:
    lab.poison_new()
    lab.slow(h2d_s=LATE_S)
    case = OneTensor(lab)
    case.end(case.begin(lambda: case.full(3.0))).sum().backward()
    return case.found == [3.0]


def memory_of_an_abandoned_reload_is_reused(lab: Lab) -> bool:
    lab.slow(h2d_s=LATE_S)
    case = OneTensor(lab)
    first = case.begin(lambda: case.full(3.0))
    end = case.end(first)
    memory = torch.zeros(NBYTES, dtype=torch.uint8, device=lab.device)
    lab.recycle(memory)
    torch.autograd.grad(end.sum(), first, retain_graph=True)
    del first, end
    memory.fill_(7)
    lab.drain()
    return memory.unique().tolist() == [7]


SCENARIOS: dict[Wait, Callable[[Lab], bool]] = {
    Wait.READY: copy_before_the_tensor_is_computed,
    Wait.HOST_BUFFER: host_buffer_goes_to_the_next_microbatch,
    Wait.RELEASE: device_memory_is_reused_during_the_copy,
    Wait.LANDING: reload_lands_where_compute_still_writes,
    Wait.RELOADED: backward_reads_during_the_reload,
    Wait.UNREAD: memory_of_an_abandoned_reload_is_reused,
}


@pytest.mark.parametrize("wait", list(Wait))
def test_right_with_the_wait(wait: Wait, lab: Lab) -> None:
    made = lab.count_waits()
    assert SCENARIOS[wait](lab)
    assert wait in made


@pytest.mark.alone  # the device must be slower than this process, whatever others do on the machine
@pytest.mark.parametrize("wait", list(Wait))
def test_wrong_without_the_wait(wait: Wait, lab: Lab) -> None:
    x = torch.ones(ELEMENTS, device=lab.device, requires_grad=True)
    save(x, lambda saved: saved[0].clone().unique(), x + 1).sum().backward()  # CUDA loads kernels, for which it waits
    lab.drop(wait)
    assert not SCENARIOS[wait](lab)


def test_a_reload_waits_for_what_allocating_its_memory_queued(lab: Lab) -> None:
    case = OneTensor(lab, before_read=lab.drain)
    y = case.end(case.begin(lambda: case.full(3.0)))
    lab.fill_new_late(LATE_S)
    y.sum().backward()
    assert case.found == [3.0]


def test_release_waits_for_a_copy_that_began_late(lab: Lab) -> None:
    """Layer 1 saves its own tensor, then one that layer 0, which is kept, had saved: its copy is the last."""
    schedule = Schedule.from_synchronization_dict({1: (True, 2, False, 1)}, 3)
    context, sync = get_cpu_offload_context(True, schedule=schedule, min_bytes=NBYTES, device=lab.device)
    found: list[float] = []

    def receive(saved: tuple[torch.Tensor, ...]) -> None:
        found.extend(saved[0].clone().unique().tolist())

    shared = torch.full((ELEMENTS,), 3.0, device=lab.device)
    own = torch.full((ELEMENTS,), 5.0, device=lab.device)
    lab.adverse()
    y = torch.ones(1, device=lab.device, requires_grad=True)
    with context:
        y = save(y, receive, shared)
    y = sync(y)
    lab.slow(d2h_s=LATE_S)
    with context:
        y = save(save(y, receive, own), receive, shared)
    del shared, own
    y = sync(y)
    with context:
        y = torch.neg(y)
    sync(y).sum().backward()
    assert sorted(found) == [3.0, 3.0, 5.0]


def test_forward_goes_on_during_the_copies_until_the_release(lab: Lab) -> None:
    layers, x = build("decoder", 4, lab.device)
    offloaded = offloading(1, 4, lab.device)
    loss_of(offloaded.forward(layers, x)).backward()
    open_gate = lab.hold(lab.d2h_stream)
    made = lab.count_waits()
    y = offloaded.forward(layers[:3], x)
    copied = lab.d2h_stream.record_event()
    lab.finish_compute()
    assert not copied.query()
    assert Wait.RELEASE not in made
    open_gate()
    y = offloaded.forward(layers[3:], y)
    assert made.count(Wait.RELEASE) == 1
    lab.finish_compute()
    assert copied.query()
    loss_of(y).backward()


def test_backward_goes_on_during_the_reload_until_it_reads(lab: Lab) -> None:
    layers, x = build("decoder", 3, lab.device)
    offloaded = offloading(1, 3, lab.device)
    loss_of(offloaded.forward(layers, x)).backward()
    first = offloaded.layer(layers[0], x)
    loss = loss_of(offloaded.forward(layers[1:], first))
    open_gate = lab.hold(lab.h2d_stream)
    made = lab.count_waits()
    torch.autograd.grad(loss, first, retain_graph=True)
    reloaded = lab.h2d_stream.record_event()
    lab.finish_compute()
    assert not reloaded.query()
    assert set(made) == {Wait.LANDING}
    open_gate()
    loss.backward()
    lab.finish_compute()
    assert reloaded.query()


def test_copies_of_the_two_directions_pass_each_other(lab: Lab) -> None:
    """The link is full duplex: a reload does not queue behind copies to the host."""
    case = OneTensor(lab)
    case.end(case.begin(lambda: case.full(1.0))).sum().backward()
    first = case.end(case.begin(lambda: case.full(3.0)))
    open_gate = lab.hold(lab.d2h_stream)
    second = case.begin(lambda: case.full(5.0))
    copied = lab.d2h_stream.record_event()
    first.sum().backward()
    lab.finish_compute()
    assert not copied.query()
    assert case.found == [1.0, 3.0]
    open_gate()
    case.end(second).sum().backward()
    assert case.found == [1.0, 3.0, 5.0]


def test_what_leaves_again_during_its_reload_waits_for_it(lab: Lab) -> None:
    """Layer 0's storage comes back in forward, and leaves with layer 2, which saved it too."""
    lab.backend.poison = True
    lab.poison_new()
    lab.slow(h2d_s=LATE_S)
    taken = [lab.pool.take(NBYTES) for _ in range(4)]  # so that the second case takes another buffer than the first
    for buffer in taken:
        lab.pool.give(buffer, lab.d2h_stream.record_event())
    lab.drain()
    moves = {0: (True, 1, True, 2), 2: (True, 3, False, 3)}
    offloaded = offloading(1, 5, lab.device, schedule=Schedule.from_synchronization_dict(moves, 5))
    shared = [torch.arange(float(ELEMENTS), device=lab.device)]
    expected = shared[0].clone()
    received: list[torch.Tensor] = []

    def receive(saved: tuple[torch.Tensor, ...]) -> None:
        received.append(saved[0].clone())

    def first(y: torch.Tensor) -> torch.Tensor:
        return save(y, receive, shared[0])

    def again(y: torch.Tensor) -> torch.Tensor:
        return save(y, receive, shared.pop())

    x = torch.ones(1, device=lab.device, requires_grad=True)
    offloaded.forward([first, torch.neg, again, torch.neg, torch.neg], x).sum().backward()
    assert all(torch.equal(found, expected) for found in received)
    assert len(received) == 2


def test_compute_waits_for_a_reload_that_fails_in_its_midst(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was queued by then still lands in memory that compute may use for something else. Nothing else is lost."""
    received: list[float] = []

    def layer(y: torch.Tensor) -> torch.Tensor:
        for value in (1.0, 2.0):
            y = save(
                y,
                lambda saved: received.append(saved[0].unique().item()),
                torch.full((ELEMENTS,), value, device=lab.device),
            )
        return y

    offloaded = offloading(1, 3, lab.device)
    first = offloaded.layer(layer, torch.ones(1, device=lab.device, requires_grad=True))
    end = offloaded.forward([torch.neg, torch.neg], first)
    memory = torch.zeros(NBYTES, dtype=torch.uint8, device=lab.device)
    lab.recycle(memory)
    lab.slow(h2d_s=LATE_S)
    left = [lab.backend.to_device]

    def fail_after_the_first(*copy: Any) -> None:
        left.pop()(*copy)

    with monkeypatch.context() as patch:
        patch.setattr(lab.backend, "to_device", fail_after_the_first)
        with pytest.raises(IndexError):
            torch.autograd.grad(end.sum(), first, retain_graph=True)
    memory.fill_(7)
    lab.drain()
    assert memory.unique().tolist() == [7]
    end.sum().backward()
    assert received == [2.0, 1.0]


def test_a_copy_that_fails_in_its_midst_holds_its_host_buffer_until_it_is_over(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, to_host, queued = OneTensor(lab), lab.backend.to_host, list[Any]()

    def fail_at_the_end(*copy: Any) -> None:
        to_host(*copy)
        queued.append(lab.d2h_stream.record_event())
        raise ArithmeticError

    lab.slow(d2h_s=LATE_S)
    with monkeypatch.context() as patch:
        patch.setattr(lab.backend, "to_host", fail_at_the_end)
        with pytest.raises(ArithmeticError):
            case.begin(lambda: case.full(3.0))
    assert offload.empty_host_cache(lab.device) > 0
    assert [event.query() for event in queued] == [True]
    case.end(case.begin(lambda: case.full(5.0))).sum().backward()
    assert case.found == [5.0]


def test_last_saved_comes_back_first_and_only_what_is_read_is_waited_for(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second copy of a reload is held up while backward already works with the first."""
    monkeypatch.setattr(activation_set, "EVENT_BYTES", NBYTES)
    offloaded = offloading(1, 3, lab.device)
    received: list[float] = []
    gates: list[Callable[[], None]] = []
    to_device = lab.backend.to_device

    def hold_the_second(stream: Any, *what: Any) -> None:
        gates.append(lab.hold(stream) if gates else lambda: None)
        to_device(stream, *what)

    def receive(saved: tuple[torch.Tensor, ...]) -> None:
        received.append(saved[0].unique().item())
        gates[1]()

    def layer(y: torch.Tensor) -> torch.Tensor:
        for value in (1.0, 2.0):
            y = save(y, receive, torch.full((ELEMENTS,), value, device=lab.device))
        return y

    x = torch.ones(1, device=lab.device, requires_grad=True)
    y = offloaded.forward([layer, torch.neg, torch.neg], x)
    monkeypatch.setattr(lab.backend, "to_device", hold_the_second)
    y.sum().backward()
    assert received == [2.0, 1.0]


def test_one_wait_per_set_not_per_tensor(lab: Lab) -> None:
    layers, x = build("decoder", 5, lab.device)
    offloaded = offloading(3, 5, lab.device)
    loss_of(offloaded.forward(layers, x)).backward()
    before = offloaded.stats
    made = lab.count_waits()
    loss_of(offloaded.forward(layers, x)).backward()
    storages = offloaded.stats.offloaded_storages - before.offloaded_storages
    assert storages > 3
    assert made.count(Wait.RELEASE) == made.count(Wait.LANDING) == 3
    assert 3 < made.count(Wait.READY) <= storages  # one per operation
    assert made.count(Wait.UNREAD) == 0


def test_copy_waits_for_its_tensor_not_for_the_layer(lab: Lab) -> None:
    """What the layer computes after it has saved a tensor does not hold the tensor's copy up."""
    case = OneTensor(lab)
    case.end(case.begin(lambda: case.full(1.0))).sum().backward()
    copied_bytes = case.offloaded.stats.offloaded_bytes
    copied: list[bool] = []

    def layer(y: torch.Tensor) -> torch.Tensor:
        y = save(y, case._receive, case.full(3.0))
        y = save(y, lambda _: None, case.full(4.0))  # with that, the operation before is over
        assert case.offloaded.stats.offloaded_bytes == copied_bytes + NBYTES
        done = lab.d2h_stream.record_event()
        other = case.full(0.0)
        lab.write_late(other, 1.0, LATE_S)
        computed = lab.backend.compute_stream().record_event()
        lab.settle(lab.d2h_stream)
        copied.append(done.query() and not computed.query())
        return y

    x = torch.ones(1, device=lab.device, requires_grad=True)
    case.offloaded.layer(layer, x)
    assert copied == [True]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_host_never_waits_for_the_device(lab: Lab) -> None:
    """A whole step is queued while the device is still asleep, and no host memory is pinned any more."""
    layers, x = build("decoder", 5, lab.device)
    offloaded = offloading(4, 5, lab.device)
    for _ in range(2):
        loss_of(offloaded.forward(layers, x)).backward()
    lab.drain()
    pinned_bytes = lab.pool.pinned_bytes
    torch.cuda._sleep(4_000_000_000)
    asleep = lab.backend.compute_stream().record_event()
    loss_of(offloaded.forward(layers, x)).backward()
    assert not asleep.query()
    assert lab.pool.pinned_bytes == pinned_bytes
