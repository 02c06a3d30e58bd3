"""State of which a part remains on the device: the same bits, no copies of that part, and its place when it changes."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from lab import Lab
from models import assert_same
from torch import nn
from training import OPTIMIZERS, WIDTH, adamw, build, loss_of, stream, values

from offload import OptimizerStats

STEPS = 8
FIRST = 2 * 4 * (4 * WIDTH) * WIDTH
"""The state of the first parameter, AdamW's in float32."""


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any, *, clip: bool = False) -> None:
    """With two microbatches a step where gradients are clipped."""
    for number in steps:
        for microbatch in range(1 + clip):
            loss_of(model, 2 * number + microbatch).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "options",
    [{"clip": True}, {"in_backward": True}, {"in_backward": True, "consume_gradients": True}],
    ids=["clipped", "in backward", "consumed"],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits(name: str, options: dict[str, bool], lab: Lab) -> None:
    lab.adverse()
    clip = options.get("clip", False)
    found = []
    for streamed in (False, True):
        model = build(lab.device)
        optimizer = OPTIMIZERS[name](model.parameters())
        if streamed:
            kept = {key: value for key, value in options.items() if key != "clip"}
            handle = stream(optimizer, resident_bytes=1000 if name == "Adafactor" else FIRST, **kept)
        train(model, optimizer, range(STEPS), clip=clip)
        found.append(values(model, optimizer))
    assert_same(*found)
    stats = handle.stats()
    assert stats.resident_bytes
    assert stats.host_bytes
    assert stats.written_bytes == STEPS * stats.host_bytes


def test_that_of_the_first_parameter_is_resident_before_others(lab: Lab) -> None:
    """Backward comes to it last; the others have too much for what is left."""
    model = build(lab.device)
    optimizer = adamw(model.parameters())
    handle = stream(optimizer, resident_bytes=FIRST + 100)
    train(model, optimizer, range(2))
    stats = handle.stats()
    first = optimizer.state[model[0].weight]["exp_avg"]
    assert first.device == lab.device
    assert stats.resident_bytes == FIRST
    assert stats.host_bytes == sum(2 * parameter.nbytes for parameter in model.parameters()) - FIRST
    assert stats.loaded_bytes == stats.host_bytes  # in the second step


@pytest.mark.parametrize("resident", [(0, FIRST, 1 << 40, FIRST, 0), (1 << 40, 0, FIRST)], ids=str)
def test_state_that_is_in_its_place_already_remains_there(resident: tuple[int, ...], lab: Lab) -> None:
    """Where more of the state is resident than before, or less: what keeps its side is not even copied."""
    expected, model = build(lab.device), build(lab.device)
    plain, optimizer = (adamw(one.parameters()) for one in (expected, model))
    train(expected, plain, range(2 * len(resident)))
    seen: list[tuple[OptimizerStats, list[int]]] = []
    everything = sum(2 * parameter.nbytes for parameter in model.parameters())
    for number, nbytes in enumerate(resident):
        handle = stream(optimizer, resident_bytes=nbytes)
        train(model, optimizer, range(2 * number, 2 * number + 2))
        addresses = [optimizer.state[parameter]["exp_avg"].data_ptr() for parameter in model.parameters()]
        seen.append((handle.stats(), addresses))
        handle.remove(on_device=False)
        assert seen[-1][0].resident_bytes + seen[-1][0].host_bytes == everything
    assert_same(values(expected, plain), values(model, optimizer))
    for (before, old), (after, new) in pairwise(seen):
        remained = [one == other for one, other in zip(old, new, strict=True)]
        if {before.resident_bytes, after.resident_bytes} == {0, everything}:
            assert not any(remained)
        elif everything in (before.resident_bytes, after.resident_bytes):
            assert remained[0]
            assert not any(remained[1:])
        else:
            assert not remained[0]
            assert all(remained[1:])


@pytest.mark.parametrize("frozen", [False, True])
def test_state_of_the_optimizer_itself_is_not_copied(frozen: bool, lab: Lab) -> None:
    """As it is on the device when a resident optimizer is streamed in part; and when it is resident again."""
    model = build(lab.device)
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(2))
    model[0].weight.requires_grad_(not frozen)
    before = optimizer.state[model[0].weight]["exp_avg"].data_ptr()
    with stream(optimizer, resident_bytes=FIRST):
        assert optimizer.state[model[0].weight]["exp_avg"].data_ptr() == before
        train(model, optimizer, range(2, 4))
    assert optimizer.state[model[0].weight]["exp_avg"].data_ptr() == before


@pytest.mark.parametrize(("saved_with", "loaded_with"), [(0, FIRST), (FIRST, 0), (FIRST, None), (None, FIRST)], ids=str)
def test_a_state_dict_goes_into_a_run_with_another_part(saved_with: Any, loaded_with: Any, lab: Lab) -> None:
    model = build(lab.device)
    optimizer = adamw(model.parameters())
    if saved_with is not None:
        stream(optimizer, resident_bytes=saved_with)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    optimizer_2 = adamw(other.parameters())
    if loaded_with is not None:
        stream(optimizer_2, resident_bytes=loaded_with)
    optimizer_2.load_state_dict(saved)
    for each in ((model, optimizer), (other, optimizer_2)):
        train(*each, range(3, 6))
    assert_same(values(model, optimizer), values(other, optimizer_2))


class GrowingState(torch.optim.Optimizer):
    """Has a small state tensor more from the tenth step on, which the trial of the class does not reach."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                state["total"] = state.get("total", 0) + gradient.double()
                if state["steps"] >= 10:
                    state["last"] = state.get("last", 0) + gradient.bfloat16()
                parameter.sub_(state["total"] + state.get("last", 0), alpha=group["lr"])


def test_state_that_comes_later_is_beside_that_of_its_parameter(lab: Lab) -> None:
    """On the host, although the small new part alone would find room on the device."""
    found = []
    for streamed in (False, True):
        model = build(lab.device)
        optimizer = GrowingState(model.parameters())
        if streamed:
            handle = stream(optimizer, resident_bytes=4 * WIDTH)
        train(model, optimizer, range(12))
        found.append(values(model, optimizer))
    assert_same(*found)
    assert handle.stats().resident_bytes == 0
    assert handle.stats().host_bytes == sum(10 * parameter.numel() for parameter in model.parameters())
