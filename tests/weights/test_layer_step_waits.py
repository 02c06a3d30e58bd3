"""Each wait of layers that are stepped in backward is needed: without it, and with bad timing, a weight is wrong."""

from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from typing import Any

import pytest
import torch
from lab import Lab, LateOptimizer
from models import WIDTH, loss_of
from streaming import Linear, forward
from torch import nn

from offload import stream_optimizer, stream_weights
from offload.optimizer.chunks import StepWait
from offload.weights.layer import WeightWait

LAYERS = 4
LATE_S = 0.05

Scenario = Callable[[Lab], bool]


def built(layers: int = LAYERS) -> tuple[nn.ModuleList, torch.Tensor]:
    torch.manual_seed(0)
    return nn.ModuleList(Linear() for _ in range(layers)), torch.randn(4, WIDTH)


def same_bits(
    lab: Lab,
    steps: int = 2,
    *,
    layers: int = LAYERS,
    on_host: bool = False,
    delays: dict[str, float],
    read: Callable[[nn.ModuleList], list[torch.Tensor]] | None = None,
    **options: Any,
) -> bool:
    """Whether weights are those of the resident run; ``on_host`` steps with gradients from the host."""
    found = []
    for streamed in (False, True):
        modules, x = built(layers)
        x = x.to(lab.device)
        if not streamed:
            modules.to(lab.device)
        weights = stream_weights(modules, lab.device) if streamed else None
        optimizer = torch.optim.SGD(modules.parameters(), lr=0.5)
        handle = stream_optimizer(optimizer, in_backward=not on_host, **options) if streamed else None
        lab.slow(**(delays if streamed else {}))
        for _ in range(steps):
            loss_of(forward(modules, x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        # At once: while copies may still run.
        found.append([parameter.detach().to("cpu", copy=True) for parameter in modules.parameters()])
        lab.slow()
        lab.drain()
        if handle is not None and weights is not None:
            handle.remove()
            weights.remove()
    return all(map(torch.equal, *found))


def slow_write_back(lab: Lab) -> bool:
    """The next layer's load could begin long before the stepped weights are out of the slot."""
    return same_bits(lab, delays={"d2h_s": LATE_S})


def read_at_once(lab: Lab) -> bool:
    """The program reads the last layer's weights while they are on the way; the layers need all slots."""
    return same_bits(lab, 1, delays={"d2h_s": LATE_S})


def slow_loads_of_weights(lab: Lab) -> bool:
    """Compute is ready long before weights and gradients are."""
    return same_bits(lab, on_host=True, delays={"h2d_s": LATE_S})


def slow_copies_of_chunks(lab: Lab, layers: int = LAYERS) -> bool:
    """The program reads weights while they are on the way."""
    return same_bits(lab, layers=layers, on_host=True, delays={"d2h_s": LATE_S}, chunk_bytes="8KiB")


def slow_copies_of_more_chunks_than_slots(lab: Lab) -> bool:
    """The next chunk's load could begin long before the slot's weights are on the host."""
    return slow_copies_of_chunks(lab, 2 * LAYERS)


def late_step(lab: Lab) -> bool:
    """Compute writes the weights only when their copy could have begun."""

    layers, x = built()
    weights = stream_weights(layers, lab.device)
    optimizer = LateOptimizer(lab, layers.parameters(), LATE_S)
    handle = stream_optimizer(optimizer, in_backward=True)
    optimizer.late = True
    loss_of(forward(layers, x.to(lab.device))).backward()
    optimizer.late = False
    optimizer.step()
    found = [bool((weight == 7.0).all()) for weight in layers.parameters()]
    lab.drain()
    handle.remove()
    weights.remove()
    return all(found)


SCENARIOS: list[tuple[Enum, Scenario]] = [
    (WeightWait.SLOT, slow_write_back),
    (WeightWait.UPDATED, read_at_once),
    (StepWait.LOADED, slow_loads_of_weights),
    (StepWait.SLOT, slow_copies_of_more_chunks_than_slots),
    (StepWait.READ, slow_copies_of_chunks),
    (StepWait.STEPPED, late_step),
]


@pytest.mark.parametrize("scenario", dict.fromkeys(scenario for _, scenario in SCENARIOS))
def test_right_with_the_waits(scenario: Scenario, lab: Lab) -> None:
    assert scenario(lab)


@pytest.mark.slow
@pytest.mark.alone  # the device must be slower than this process, whatever others do on the machine
@pytest.mark.parametrize(("wait", "scenario"), SCENARIOS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_wrong_without_the_wait(wait: Enum, scenario: Scenario, lab: Lab) -> None:
    lab.drop(wait)
    assert not scenario(lab)


def late_gradient(lab: Lab) -> bool:
    layers, x = built()
    expected = [weight.detach() - 0.5 for weight in layers.parameters()]
    for layer in layers:
        layer.forward = lambda x, layer=layer: torch.tanh(x @ lab.late_gradient(layer.weight, 1.0, LATE_S))
    weights = stream_weights(layers, lab.device)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    handle = stream_optimizer(optimizer, in_backward=True)
    loss_of(forward(layers, x.to(lab.device))).backward()
    lab.drain()
    found = [weight.detach().clone() for weight in layers.parameters()]
    optimizer.step()
    handle.remove()
    weights.remove()
    return all(map(torch.equal, expected, found))


def late_reader(lab: Lab) -> bool:
    """The step reads gradients only when compute could have used their memory for something else."""

    class LateSGD(torch.optim.SGD):
        late = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            if self.late:
                torch.cuda._sleep(int(LATE_S * 2e9))
            for weight in (one for group in self.param_groups for one in group["params"]):
                weight.sub_(weight.grad)

    found = []
    lab.backend.poison = True  # overwrites gradients when they are let go
    for streamed in (False, True):
        layers, x = built()
        weights = stream_weights(layers, lab.device) if streamed else layers.to(lab.device)
        optimizer = LateSGD(layers.parameters(), lr=1.0)
        handle = stream_optimizer(optimizer, in_backward=True) if streamed else None
        optimizer.late = streamed
        loss_of(forward(layers, x.to(lab.device))).backward()
        optimizer.late = False
        optimizer.step()
        lab.drain()
        found.append([weight.detach().to("cpu", copy=True) for weight in layers.parameters()])
        if handle is not None:
            handle.remove()
            weights.remove()
    return all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone
def test_backward_does_not_reuse_state_that_a_step_beside_it_frees(lab: Lab) -> None:
    """State that ``optimizer.step()`` has made is memory of the compute stream, which does not wait for the step."""
    if lab.device.type == "cpu":
        return

    class LateSGD(torch.optim.SGD):
        late = False

        def step(self, closure: Any = None) -> None:
            if self.late:
                torch.cuda._sleep(int(LATE_S * 2e9))
            super().step()

    found = []
    lab.backend.poison = True
    for streamed in (False, True):
        layers, x = built()
        layers.to(lab.device)
        optimizer = LateSGD(layers.parameters(), lr=1.0, momentum=0.5)
        handle = stream_optimizer(optimizer, in_backward=True, chunk_bytes="4KiB") if streamed else None
        for step in range(2):
            optimizer.late = streamed and step == 1
            with handle.no_step() if handle is not None and step == 0 else nullcontext():
                loss_of(forward(layers, x.to(lab.device))).backward()
            optimizer.late = False
            optimizer.step()
            optimizer.zero_grad()
        lab.drain()
        found.append([weight.detach().cpu() for weight in layers.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("wait", "scenario"),
    [(StepWait.GRADIENT, late_gradient), (StepWait.JOINED, late_reader)],
    ids=["GRADIENT", "JOINED"],
)
def test_the_waits_beside_compute_are_needed(wait: Enum, scenario: Scenario, lab: Lab) -> None:
    """On the CPU, steps run in the caller's thread, and cannot be early or late."""
    if lab.device.type == "cpu":
        return
    assert scenario(lab), "wrong with all waits"
    lab.drop(wait)
    assert not scenario(lab), wait.value


def test_nothing_blocks_the_host_before_the_end_of_backward_and_nothing_is_allocated(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, x = built()
    x = x.to(lab.device).requires_grad_()
    with stream_weights(layers, lab.device) as weights:
        optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
        with stream_optimizer(optimizer, in_backward=True) as handle:

            def step() -> None:
                loss_of(forward(layers, x)).backward()
                optimizer.step()

            for _ in range(2):
                step()
            pinned, before = lab.pool.pinned_bytes, weights.stats()
            events = lab.record_host_waits()
            monkeypatch.setattr(lab.backend, "empty", lambda nbytes: events.append("allocated"))
            x.register_hook(lambda _: events.append("end of backward"))
            lab.slow(d2h_s=0.005)
            step()
            assert events[0] == "end of backward"
            assert set(events[1:]) <= {WeightWait.UPDATED, WeightWait.SOURCE}
            assert lab.pool.pinned_bytes == pinned
            assert weights.stats().gradient_host_bytes == before.gradient_host_bytes == 0
            assert handle.stats().slot_bytes > 0
