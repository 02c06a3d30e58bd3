"""The snapshot of the counters."""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import models
import pytest
import torch
from faults import in_threads
from lab import Lab
from models import Save, build, loss_of, offloading, save, step_gradients, through
from torch import nn

import offload
from offload import OffloadStats, WeightStats
from offload.activations import copies
from offload.activations.copies import Transfers, operation_name
from offload.activations.what_moves import Rules, decide
from offload.device.backend import Wait

SLOW_S = 0.1
ELEMENTS = 256


def test_shown_with_units() -> None:
    stats = OffloadStats(
        offloaded_bytes=3 << 20, offloaded_tensors=2, skipped={"parameter": 4}, wasted={"Exp": 1 << 20}, stall_s=0.0123
    )
    shown = str(stats)
    lines = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert lines["offloaded_bytes"] == "3.0 MiB"
    assert lines["offloaded_tensors"] == "2"
    assert lines["skipped"] == "{'parameter': 4}"
    assert lines["wasted"] == "{'Exp': '1.0 MiB'}"
    assert lines["stall_s"] == "12.3 ms"


def test_operations_are_named_as_users_know_them() -> None:
    x = torch.ones(2, 3, 4, requires_grad=True)
    named = {
        "Exp": x.exp(),
        "Sin": x.sin().transpose(0, 1)[1:],
        "Mm": nn.Linear(4, 4, bias=False)(x),
        "Addmm": nn.Linear(4, 4)(x[0]),
        "Save": Save.apply(x, lambda _: None),
    }
    rules = Rules(torch.device("cpu"), 0)
    assert {name: operation_name(decide(tensor, rules)) for name, tensor in named.items()} == {
        name: name for name in named
    }
    for given in (torch.ones(3), torch.ones(3)[1:]):
        assert operation_name(decide(given, rules)) == "leaf"


def hoard(lab: Lab, keep: Callable[[torch.Tensor, torch.Tensor], object], rounds: int = 1) -> OffloadStats:
    """Layers save the results of an exponential, a sine and a cosine, and keep what they are told to keep."""

    def hoarder(x: torch.Tensor) -> torch.Tensor:
        exponential, sine = x.exp(), x.sin()
        keep(exponential, sine)
        return (exponential * sine).cos()

    x = torch.rand(ELEMENTS, device=lab.device, requires_grad=True)
    offloaded = offloading(2, 6, lab.device)
    for _ in range(rounds):
        offloaded.forward([hoarder] * 6, x).sum().backward()
    return offloaded.stats


def test_wasted_bytes_are_told_by_operation(lab: Lab) -> None:
    kept: list[torch.Tensor] = []
    stats = hoard(lab, lambda exponential, sine: kept.extend((exponential.detach(), sine.detach()[1:])))
    tensor_bytes = 4 * ELEMENTS
    assert stats.wasted == {"Exp": 2 * tensor_bytes, "Sin": 2 * tensor_bytes}
    assert stats.wasted_bytes == sum(stats.wasted.values()) < stats.offloaded_bytes


def test_warns_once_when_more_than_half_was_wasted(lab: Lab) -> None:
    kept: list[torch.Tensor] = []
    message = (
        r"4\.00 KiB of the 7\.00 KiB that were copied .* by the operation that made them: "
        r"Sin \(2\.00 KiB\), Exp \(2\.00 KiB\)\. Drop them before the layer is released"
    )
    with pytest.warns(UserWarning, match=message) as warned:
        hoard(lab, lambda *tensors: kept.extend(tensors), rounds=4)
    assert len(warned) == 1
    assert warned[0].filename == models.__file__  # where the context was entered


def test_less_than_half_is_no_reason_to_warn(lab: Lab) -> None:
    kept: list[torch.Tensor] = []
    assert hoard(lab, lambda exponential, _: kept.append(exponential), rounds=3).wasted_bytes > 0
    assert hoard(lab, lambda *tensors: kept.extend(tensors)).wasted_bytes > 0  # more than half, in the first round
    assert hoard(lab, lambda *_: None, rounds=3).wasted == {}


def step_that_saves(lab: Lab, in_between: Callable[[], object]) -> OffloadStats:
    """Layer 0 of three saves two tensors; ``in_between`` is before its release, and once its reload has begun."""
    offloaded = offloading(1, 3, lab.device)

    def pause(y: torch.Tensor) -> torch.Tensor:
        in_between()
        return y.neg()

    x = torch.ones((), device=lab.device, requires_grad=True)
    saved = [torch.ones(ELEMENTS, device=lab.device) for _ in range(2)]
    y = offloaded.layer(lambda y: save(y, lambda _: None, saved.pop(), saved.pop()), x)
    y.register_hook(lambda _: in_between())
    offloaded.forward([pause, torch.neg], y).backward()
    lab.drain()
    return offloaded.stats


@pytest.mark.parametrize("slow", ["d2h_s", "h2d_s"], ids=["release", "reload"])
def test_stalls_are_measured(slow: str, lab: Lab) -> None:
    lab.slow(**{slow: SLOW_S})  # each of two copies
    assert step_that_saves(lab, lambda: None).stall_s >= SLOW_S


def test_no_stall_where_the_copies_were_done(lab: Lab) -> None:
    lab.slow(d2h_s=0.01, h2d_s=0.01)
    assert step_that_saves(lab, lab.drain).stall_s == 0.0


def test_stats_do_not_wait_for_a_stall_to_end(lab: Lab) -> None:
    transfers = Transfers(lab.backend, lab.pool)
    lab.drop(Wait.RELEASE)  # the CPU computes in this thread
    open_gate = lab.hold(lab.d2h_stream)
    copied = lab.backend.record_timed(lab.d2h_stream)
    transfers.wait_for_copies(lab.backend.compute_stream(), copied, Wait.RELEASE)
    assert transfers.stats().stall_s == 0.0
    assert not copied.query()
    open_gate()
    lab.drain()
    assert transfers.stats().stall_s > 0.0


class FakeBackend:
    """Events are times; what is not reached by ``now`` is still to come."""

    capturing = False
    now = 0.0
    pinned_bytes = 0
    copy_streams = (0.0, 0.0)

    def record_timed(self, stream: float) -> float:
        return stream

    def elapsed_s(self, begin: float, end: float) -> float | None:
        return end - begin if max(begin, end) <= self.now else None

    def wait(self, *_: object) -> None:
        pass


class Copied(float):
    """When a copy will be done; it is not yet."""

    def query(self) -> bool:
        return False


def test_stalls_are_the_time_from_the_wait_to_the_copys_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MOST_PENDING", 3)
    backend: Any = FakeBackend()
    transfers = Transfers(backend, backend)

    def wait(reached_s: Any, copied: Any) -> None:
        transfers.wait_for_copies(reached_s, copied, Wait.RELEASE)

    copied = Copied(5.0)
    wait(3.0, copied)
    wait(4.0, copied)  # of the stall for an event, this is a part
    wait(7.0, Copied(6.0))  # done before compute got there
    wait(8.0, Copied(12.0))
    wait(0.0, Copied(99.0))  # one too many
    for backend.now, seconds in ((4.0, 0.0), (11.0, 2.0), (12.0, 6.0), (99.0, 6.0)):
        assert transfers.stats().stall_s == seconds
    backend.capturing = True
    wait(99.0, Copied(100.0))
    backend.capturing, backend.now = False, 100.0
    assert transfers.stats().stall_s == 6.0


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_captured_step_is_not_measured(lab: Lab) -> None:
    x = torch.ones(ELEMENTS, device=lab.device, requires_grad=True)
    layers = nn.ModuleList(nn.Linear(ELEMENTS, ELEMENTS, device=lab.device) for _ in range(4))
    with offload.offload_layers(layers, num_layers=2, min_bytes=1) as handle:

        def step() -> None:
            y = x.expand(2, -1)
            for layer in layers:
                y = layer(y).sin()
            y.sum().backward()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        lab.drain()
        before = handle.stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        lab.drain()
        after = handle.stats()
    assert after.offloaded_bytes > before.offloaded_bytes
    assert after.stall_s == before.stall_s


def test_what_was_counted_between_two_moments(lab: Lab) -> None:
    layers, x = build("decoder", 5, lab.device)
    offloaded = offloading(2, 5, lab.device, min_bytes=1 << 8)
    step_gradients(layers, x, offloaded)
    before = offloaded.stats
    for _ in range(2):
        step_gradients(layers, x, offloaded)
    after = offloaded.stats
    moved = after - before
    assert moved.offloaded_bytes == 2 * before.offloaded_bytes == after.offloaded_bytes - before.offloaded_bytes > 0
    assert moved.skipped == {reason: 2 * count for reason, count in before.skipped.items()} != {}
    assert moved.stall_s == after.stall_s - before.stall_s
    # What is held now, and the peak since the beginning.
    assert moved.pinned_bytes == after.pinned_bytes > 0
    assert moved.peak_resident_bytes == after.peak_resident_bytes > 0
    nothing = after - after
    assert nothing.skipped == nothing.wasted == {}
    assert nothing.offloaded_tensors == nothing.reloaded_bytes == 0


def test_stats_of_something_else() -> None:
    with pytest.raises(TypeError, match="stats can be subtracted from OffloadStats only, got a WeightStats"):
        OffloadStats() - WeightStats()


def test_weights_between_two_moments() -> None:
    before = WeightStats(loads=3, loaded_bytes=100, slot_bytes=40, weight_bytes=70)
    after = WeightStats(loads=5, loaded_bytes=300, slot_bytes=50, weight_bytes=70)
    assert after - before == WeightStats(loads=2, loaded_bytes=200, slot_bytes=50, weight_bytes=70)


ROOT = str(Path(offload.__file__).parent)
MOST_CALLS, MOST_FILES = 8, 3


def in_library(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(ROOT)


def test_a_saved_tensor_takes_few_calls_and_files() -> None:
    layers, x = build("decoder", 4, torch.device("cpu"))
    policies = {"*dot_product*": "offload", "*mm*": "keep", "*": "recompute"}
    taken: defaultdict[int, list[str]] = defaultdict(list)
    """Files of the calls that each handle took, by its identity; ``held`` keeps them all."""
    held: list[Any] = []
    at_work: list[tuple[FrameType, list[str]]] = []

    def look(frame: FrameType, event: str, result: object) -> None:
        if event == "call" and in_library(frame):
            if not at_work and not in_library(frame.f_back):
                at_work.append((frame, []))
            if at_work:
                at_work[0][1].append(frame.f_code.co_filename)
        elif event == "return" and at_work and at_work[0][0] is frame:
            _, files = at_work.pop()
            handle = frame.f_locals["self"] if frame.f_code.co_name == "unpack" else result
            if type(handle).__name__.endswith("Handle"):
                held.append(handle)
                taken[id(handle)] += files

    def step() -> None:
        loss_of(through(layers, x)).backward()

    with offload.offload_layers(layers, 2, policies=policies, min_bytes=1, device="cpu"):
        for _ in range(3):
            step()
        sys.setprofile(look)
        try:
            step()
        finally:
            sys.setprofile(None)
    assert len(taken) > 20 * len(layers)
    assert {"KeptHandle", "MovedHandle", "DroppedHandle"} <= {type(handle).__name__ for handle in held}
    assert statistics.median(map(len, taken.values())) <= MOST_CALLS
    assert statistics.median(len(set(files)) for files in taken.values()) <= MOST_FILES


def test_a_stall_counts_once_if_two_threads_ask_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = FakeBackend()
    transfers, elapsed_s = Transfers(backend, backend), backend.elapsed_s
    for begin_s, end_s in ((1.0, 3.0), (4.0, 5.0)):
        transfers.wait_for_copies(begin_s, Copied(end_s), Wait.RELEASE)
    backend.now = 9.0
    monkeypatch.setattr(backend, "elapsed_s", lambda *events: (time.sleep(0.05), elapsed_s(*events))[1])
    in_threads(transfers.stats, transfers.stats)
    assert transfers.stats().stall_s == 3.0
