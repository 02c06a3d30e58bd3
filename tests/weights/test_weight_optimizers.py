"""The optimizer sees ordinary host parameters: every optimizer of torch.optim gives the same bits as ever."""

import copy
import inspect
import io
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from models import WIDTH, assert_same, build, loss_of
from streaming import assert_moved, forward
from torch import nn

from offload import stream_optimizer, stream_weights
from offload.weights.streamed import warn_of_fused_sgd

LAYERS = 4
STEPS = 3

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Trained = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The parameters after some steps, and the losses."""


def variants() -> dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
    """Every optimizer that this PyTorch has, as it is and with each option that its signature offers."""
    found = {}
    for name, kind in sorted(vars(torch.optim).items()):
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
            continue
        taken = inspect.signature(kind).parameters
        values = {"momentum": 0.9, "weight_decay": 0.1, "lr": torch.tensor(0.01)}
        values |= {option: True for option in taken if taken[option].default in (False, None) and option not in values}
        options = [{}, *({option: values[option]} for option in taken if option in values)]
        for chosen in options:
            if "nesterov" in chosen:
                chosen |= {"momentum": 0.9}
            found[" ".join([name, *(option for option in chosen)])] = (kind, chosen)
    return found


VARIANTS = variants()


pytestmark = pytest.mark.usefixtures("adverse")


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


def inputs(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 8, WIDTH, generator=generator).to(device) for _ in range(STEPS)]


def reference(make: MakeOptimizer, device: torch.device) -> Trained:
    """Training with all weights on the device and the optimizer on the host."""
    model, _ = build(small, 2, torch.device("cpu"))
    optimizer = make(model.parameters())
    losses = []
    for x in inputs(device):
        computing = copy.deepcopy(model).to(device)
        loss = loss_of(forward(computing, x))
        loss.backward()
        losses.append(loss.detach().cpu())
        for parameter, computed in zip(model.parameters(), computing.parameters(), strict=True):
            parameter.grad = computed.grad.cpu()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], losses


def streamed(make: MakeOptimizer, device: torch.device) -> Trained:
    """The same with streamed weights."""
    model, _ = build(small, 2, torch.device("cpu"))
    losses = []
    with stream_weights(model, device) as handle:
        optimizer = make(model.parameters())
        for x in inputs(device):
            loss = loss_of(forward(model, x))
            loss.backward()
            losses.append(loss.detach().cpu())
            optimizer.step()
            optimizer.zero_grad(set_to_none=len(losses) == 1)
    assert_moved(handle)
    return [parameter.detach() for parameter in model.parameters()], losses


def outcome(train: Callable[[], tuple[Any, ...]]) -> Any:
    try:
        return train()
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        return error


@pytest.mark.drawn(35)
@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_optimizer(name: str, device: torch.device) -> None:
    kind, options = VARIANTS[name]

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if kind is torch.optim.Muon:
            params = [parameter for parameter in params if parameter.ndim == 2]
        return kind(params, **copy.deepcopy(options))

    expected = outcome(lambda: reference(make, device))
    after = outcome(lambda: streamed(make, device))
    if isinstance(expected, Exception):
        # What PyTorch refuses is refused with its own words: an option on this device, or a step without a closure.
        assert options or kind in (torch.optim.LBFGS, torch.optim.SparseAdam)
        assert (type(after), str(after)) == (type(expected), str(expected))
        return
    assert_same([*expected[0], *expected[1]], [*after[0], *after[1]])
    assert len({loss.item() for loss in expected[1]}) == STEPS


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="mended in PyTorch 2.14")
def test_a_fused_step_that_skips_updates_is_warned_of_once() -> None:
    warn_of_fused_sgd.cache_clear()
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(2))

    with stream_weights(layers, "cpu"):
        loss = loss_of(forward(layers, torch.ones(2, WIDTH, dtype=torch.bfloat16)))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            loss.backward()
            for _ in range(2):
                torch.optim.SGD(layers.parameters(), fused=True).step()
    assert len(seen) == 1
    assert "SGD with fused=True skips updates of bfloat16" in str(seen[0].message)


def test_state_dict_save_and_load(device: torch.device) -> None:
    layers, _ = build("gpt", LAYERS, torch.device("cpu"))
    layers.eval()
    keys = list(layers.state_dict())
    parameters = list(layers.parameters())
    x = inputs(device)[0]
    with stream_weights(layers, device):
        assert list(layers.state_dict()) == keys
        assert all(one is other for one, other in zip(layers.parameters(), parameters, strict=True))
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
        loss_of(forward(layers, x)).backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save({"model": layers.state_dict(), "optimizer": optimizer.state_dict()}, file)
        expected = forward(layers, x).detach()
        for _ in range(2):
            loss_of(forward(layers, x)).backward()
            optimizer.step()
        assert not torch.equal(forward(layers, x), expected)
        file.seek(0)
        saved = torch.load(file)
        layers.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert torch.equal(forward(layers, x), expected)
        one = io.BytesIO()
        torch.save(layers[0].norm1.weight, one)
        assert one.tell() < 4096, "other parameters were saved with this one"
    ordinary, _ = build("gpt", LAYERS, torch.device("cpu"))
    ordinary.load_state_dict(saved["model"])
    assert torch.equal(forward(ordinary.eval().to(device), x), expected)


@pytest.mark.parametrize("in_backward", [False, True])
def test_host_memory_is_on_the_host_whatever_the_default_device_is(in_backward: bool, device: torch.device) -> None:
    def train(streams: bool) -> list[torch.Tensor]:
        model, _ = build(small, 2, device)
        # AdamW's own counters are on the default device in PyTorch 2.11, where it raises then.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = inputs(device)
        with torch.device("meta"), ExitStack() as stack:
            if streams:
                stack.enter_context(stream_weights(model, device))
                stack.enter_context(stream_optimizer(optimizer, in_backward=in_backward, consume_gradients=in_backward))
                model.to(torch.float32)  # what they are
            for x in batches:
                loss_of(forward(model, x)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert_same(train(False), train(True))
