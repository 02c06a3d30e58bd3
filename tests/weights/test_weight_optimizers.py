"""The optimizer sees ordinary host parameters: every optimizer of torch.optim gives the same bits as ever.

Also its step beside backward, layer by layer.
"""

from __future__ import annotations

import copy
import inspect
import io
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lab import Lab
from models import WIDTH, build, loss_of
from torch import nn

from offload import StreamedWeights, stream_weights

LAYERS = 4
STEPS = 3

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

Layers = tuple[str | Callable[[], nn.Module], int]
"""Of which kind, and how many."""

GPT: Layers = ("gpt", LAYERS)
SMALL: Layers = (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), 2)

ADAM: MakeOptimizer = torch.optim.Adam


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)


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


@pytest.fixture
def device(device: torch.device, lab: Lab) -> torch.device:
    lab.adverse()
    return device


def forward(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def inputs(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 8, WIDTH, generator=generator).to(device) for _ in range(STEPS)]


Finish = Callable[[torch.optim.Optimizer, list[nn.Parameter]], None]


def just_step(optimizer: torch.optim.Optimizer, _: list[nn.Parameter]) -> None:
    optimizer.step()


def reference(
    make: MakeOptimizer, device: torch.device, finish: Finish = just_step, microbatches: int = 1, layers: Layers = GPT
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters after some steps and the losses, with all weights on the device and the optimizer on the host."""
    model, _ = build(*layers, torch.device("cpu"))
    model.eval()
    optimizer = make(model.parameters())
    losses = []
    for x in inputs(device):
        computing = copy.deepcopy(model).to(device)
        for _ in range(microbatches):
            loss = loss_of(forward(computing, x))
            loss.backward()
        losses.append(loss.detach().cpu())
        for parameter, computed in zip(model.parameters(), computing.parameters(), strict=True):
            assert computed.grad is not None
            parameter.grad = computed.grad.cpu()
        finish(optimizer, list(model.parameters()))
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], losses


def streamed(
    make: MakeOptimizer,
    device: torch.device,
    finish: Finish = just_step,
    microbatches: int = 1,
    *,
    layers: Layers = GPT,
    in_backward: bool = False,
    set_to_none: bool = True,
) -> tuple[list[torch.Tensor], list[torch.Tensor], StreamedWeights]:
    """The same, streamed."""
    model, _ = build(*layers, torch.device("cpu"))
    model.eval()
    losses = []
    with stream_weights(model, device) as handle:
        optimizer = make(model.parameters())
        if in_backward:
            handle.step_in_backward(optimizer)
        for x in inputs(device):
            with handle.no_step():
                for _ in range(microbatches - 1):
                    loss_of(forward(model, x)).backward()
            loss = loss_of(forward(model, x))
            loss.backward()
            losses.append(loss.detach().cpu())
            finish(optimizer, list(model.parameters()))
            optimizer.zero_grad(set_to_none=set_to_none)
    assert handle.stats().loads > 0
    assert handle.stats().gradient_bytes > 0
    return [parameter.detach() for parameter in model.parameters()], losses, handle


def assert_same(expected: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    for one, other in zip(expected[0], found[0], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(expected[1], found[1], strict=True):
        assert torch.equal(one, other)
    assert len({loss.item() for loss in expected[1]}) == STEPS


def outcome(train: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...] | Exception:
    try:
        return train()
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        return error


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_optimizer(name: str, device: torch.device) -> None:
    kind, options = VARIANTS[name]

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if kind is torch.optim.Muon:
            params = [parameter for parameter in params if parameter.ndim == 2]
        return kind(params, **copy.deepcopy(options))

    expected = outcome(lambda: reference(make, device, layers=SMALL))
    after = outcome(lambda: streamed(make, device, layers=SMALL))
    beside = outcome(lambda: streamed(make, device, layers=SMALL, in_backward=True))
    if isinstance(expected, Exception):
        # What PyTorch refuses is refused with its own words: an option on this device, or a step without a closure.
        assert options or kind in (torch.optim.LBFGS, torch.optim.SparseAdam)
        assert (type(after), str(after)) == (type(expected), str(expected))
        if kind in (torch.optim.LBFGS, torch.optim.SparseAdam) and "must step each parameter" in str(beside):
            return
        assert (type(beside), str(beside)) == (type(expected), str(expected))
        return
    assert isinstance(after, tuple)
    assert isinstance(beside, tuple)
    assert_same(expected, after)
    assert_same(expected, beside)
    assert beside[2].stats().early_steps == STEPS * SMALL[1]


@pytest.mark.slow
@pytest.mark.parametrize("in_backward", [False, True])
def test_microbatches(in_backward: bool, device: torch.device) -> None:
    make = ADAM
    expected = reference(make, device, microbatches=3)
    found = streamed(make, device, microbatches=3, in_backward=in_backward)
    assert_same(expected, found)
    assert found[2].stats().early_steps == in_backward * STEPS * LAYERS


def test_gradients_set_to_zero(device: torch.device) -> None:
    expected = reference(sgd, device)
    assert_same(expected, streamed(sgd, device, set_to_none=False))


def clip(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.01)
    optimizer.step()


def test_clipping(device: torch.device) -> None:
    expected = reference(sgd, device, clip)
    assert_same(expected, streamed(sgd, device, clip))


def test_clipping_is_refused_with_steps_in_backward(device: torch.device) -> None:
    def clip_twice(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        with pytest.raises(RuntimeError, match="a global norm needs every gradient before the first step"):
            clip(optimizer, parameters)
        stepped = [parameter.detach().clone() for parameter in parameters]
        with pytest.raises(RuntimeError, match="a global norm needs every gradient before the first step"):
            optimizer.step()  # to try it again does not help
        assert all(map(torch.equal, stepped, parameters))

    streamed(sgd, device, clip_twice, in_backward=True)


@pytest.mark.parametrize("in_backward", [False, True])
def test_scheduler(in_backward: bool, device: torch.device) -> None:
    schedulers: dict[int, Any] = {}

    def step_both(optimizer: torch.optim.Optimizer, _: list[nn.Parameter]) -> None:
        scheduler = schedulers.setdefault(id(optimizer), schedulers.get(id(optimizer)))
        optimizer.step()
        scheduler.step()

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(params, lr=0.1)
        schedulers[id(optimizer)] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.3)
        return optimizer

    expected = reference(make, device, step_both)
    assert_same(expected, streamed(make, device, step_both, in_backward=in_backward))


def test_lbfgs(device: torch.device) -> None:
    def run(layers: nn.ModuleList) -> list[torch.Tensor]:
        optimizer = torch.optim.LBFGS(layers.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        x = inputs(device)[0]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(forward(layers, x))
            loss.backward()
            return loss

        optimizer.step(closure)
        return [parameter.detach().cpu() for parameter in layers.parameters()]

    layers, _ = build("gpt", 2, device)
    twin = copy.deepcopy(layers)
    expected = run(twin.eval())
    with stream_weights(layers.eval(), device) as handle:
        found = run(layers)
        with pytest.raises(TypeError, match="got LBFGS, which steps all at once"):
            handle.step_in_backward(torch.optim.LBFGS(layers.parameters()))
    torch.testing.assert_close(found, expected, **({"rtol": 0, "atol": 0} if device.type == "cpu" else {}))


def test_parameters_outside_the_layers_are_stepped_too(device: torch.device) -> None:
    def train(in_backward: bool | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        before = nn.Linear(WIDTH, WIDTH).to(device)
        layers, x = build("gpt", LAYERS, device)
        layers.eval()
        handle = stream_weights(layers, device) if in_backward is not None else None
        optimizer = torch.optim.SGD([*before.parameters(), *layers.parameters()], lr=0.125)
        if handle is not None and in_backward:
            handle.step_in_backward(optimizer)
        for x in inputs(device):
            loss_of(forward(layers, before(x))).backward()
            optimizer.step()
            assert all(parameter.grad is not None for parameter in layers.parameters())
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in [*before.parameters(), *layers.parameters()]]

    # A learning rate that is a power of two: then it makes no difference where the step is computed.
    expected = train(None)
    for in_backward in (False, True):
        assert all(map(torch.equal, expected, train(in_backward)))


def test_gradients_can_be_read_after_steps_in_backward(device: torch.device) -> None:
    layers, _ = build("gpt", LAYERS, device)
    layers.eval()
    x = inputs(device)[0]
    loss_of(forward(layers, x)).backward()
    expected = [parameter.grad.cpu() for parameter in layers.parameters()]
    layers.zero_grad()
    with stream_weights(layers, device) as handle:
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        handle.step_in_backward(optimizer)
        loss_of(forward(layers, x)).backward()
        assert all(map(torch.equal, expected, [parameter.grad for parameter in layers.parameters()]))
        stepped = [parameter.detach().clone() for parameter in layers.parameters()]
        optimizer.step()
        assert all(map(torch.equal, stepped, layers.parameters()))
        assert all(map(torch.equal, expected, [parameter.grad for parameter in layers.parameters()]))


def test_shared_and_repeated_layers_wait_for_the_whole_step(device: torch.device) -> None:
    def train(in_backward: bool) -> list[torch.Tensor]:
        layers, _ = build("gpt", LAYERS, device)
        layers[3].out.weight = layers[0].out.weight
        with stream_weights(layers.eval(), device) as handle:
            optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
            if in_backward:
                handle.step_in_backward(optimizer)
            for x in inputs(device):
                loss_of(layers[1](forward(layers, x))).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in layers.parameters()]

    assert all(map(torch.equal, train(False), train(True)))


@pytest.mark.parametrize("first", ["step", "recomputation"])
def test_a_step_with_a_part_of_the_gradient_is_refused(device: torch.device, first: str) -> None:
    now, stepped = threading.Event(), threading.Event()

    class Held(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            now.wait(0.2)
            super().step(closure)
            stepped.set()

    def let_layer_1_step() -> None:
        now.set()
        assert stepped.wait(10)

    passes = iter(["forward", "forward", "recomputed", "recomputed after the step was queued"])

    def group(x: torch.Tensor) -> torch.Tensor:
        again = next(passes) == "recomputed after the step was queued"
        if again and first == "step":
            let_layer_1_step()
        x = forward(layers, x)
        if again and first == "recomputation":
            let_layer_1_step()
        return x

    layers, _ = build("gpt", 2, device)
    x = inputs(device)[0].requires_grad_()
    with stream_weights(layers.eval(), device) as handle:
        handle.step_in_backward(Held(layers.parameters(), lr=0.1))
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(group, x, use_reentrant=True)
        with pytest.raises(RuntimeError, match="do not use step_in_backward with layers that are checkpointed twice"):
            loss_of(x).backward()


def test_a_layer_is_stepped_after_the_recomputation_of_its_group(device: torch.device) -> None:
    class Gated(nn.Module):
        """Its gate's gradient is complete before the recomputation, which needs the gate."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.gate = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.gate.sigmoid().detach() + self.gate

    def group(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            time.sleep(0.05)  # enough for a step that should not be made yet
        return forward(layers, x)

    def train(in_backward: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        layers = nn.ModuleList(Gated() for _ in range(LAYERS))
        with stream_weights(layers, device) as handle:
            optimizer = torch.optim.SGD(layers.parameters(), lr=0.125)
            if in_backward:
                handle.step_in_backward(optimizer)
            for x in inputs(device):
                y = x
                for first in range(0, LAYERS, 2):
                    y = torch.utils.checkpoint.checkpoint(group, layers[first : first + 2], y, use_reentrant=False)
                loss_of(y).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [parameter.detach() for parameter in layers.parameters()], handle.stats().early_steps

    expected, _ = train(in_backward=False)
    found, early_steps = train(in_backward=True)
    assert all(map(torch.equal, expected, found))
    assert early_steps == STEPS * LAYERS


def test_a_closure_is_refused_with_steps_in_backward(device: torch.device) -> None:
    layers, _ = build("gpt", 2, device)
    with stream_weights(layers, device) as handle:
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        handle.step_in_backward(optimizer)
        with pytest.raises(RuntimeError, match="must be called without a closure"):
            optimizer.step(lambda: 0.0)


def test_what_step_in_backward_refuses(device: torch.device) -> None:
    layers, _ = build("gpt", 2, device)
    handle = stream_weights(layers, device)
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got str"):
        handle.step_in_backward("sgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got none of them; build it from the same model"):
        handle.step_in_backward(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    optimizer = torch.optim.SGD(layers.parameters())
    handle.step_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="must be called once"):
        handle.step_in_backward(optimizer)
    handle.remove()
    with pytest.raises(RuntimeError, match="must be in use, but it was removed"):
        handle.step_in_backward(optimizer)
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: 0.0)  # as before


class Failing(torch.optim.SGD):
    """Fails when it is told to."""

    fail = False

    def step(self, closure: Any = None) -> None:
        if self.fail:
            raise ArithmeticError("no step")
        super().step(closure)


def test_a_failing_step_comes_out_of_backward(device: torch.device) -> None:
    layers, _ = build("gpt", 2, device)
    with stream_weights(layers, device) as handle:
        optimizer = Failing(layers.parameters())
        handle.step_in_backward(optimizer)
        optimizer.fail = True
        with pytest.raises(ArithmeticError, match="no step"):
            loss_of(forward(layers, inputs(device)[0])).backward()


def test_a_step_that_calls_that_of_its_base_class(device: torch.device) -> None:
    class Decayed(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    if parameter.grad is not None:
                        parameter.mul_(0.5)

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Decayed(parameters, lr=0.1)

    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # from here on, the step of the base class runs hooks too
    expected = streamed(make, device)
    assert_same(expected, streamed(make, device, in_backward=True))


def test_a_step_that_failed_can_be_made_again(device: torch.device) -> None:
    layers, _ = build("gpt", 2, device)
    outside = nn.Linear(WIDTH, WIDTH).to(device)
    with stream_weights(layers.eval(), device) as handle:
        optimizer = Failing([*outside.parameters(), *layers.parameters()], lr=0.1)
        handle.step_in_backward(optimizer)
        for x in inputs(device):
            loss_of(forward(layers, outside(x))).backward()
            stepped = [parameter.detach().clone() for parameter in layers.parameters()]
            left = outside.weight.detach().clone()
            optimizer.fail = True
            with pytest.raises(ArithmeticError, match="no step"):
                optimizer.step()
            optimizer.fail = False
            optimizer.step()
            assert all(map(torch.equal, stepped, layers.parameters()))
            assert not torch.equal(left, outside.weight)
            assert all(parameter.grad is not None for parameter in layers.parameters())
            optimizer.zero_grad()


def test_a_failed_step_does_not_keep_the_next_backward_from_being_stepped(device: torch.device) -> None:
    layers, _ = build("gpt", 2, device)
    x = inputs(device)[0]
    with stream_weights(layers.eval(), device) as handle:
        optimizer = Failing(layers.parameters(), lr=0.1)
        handle.step_in_backward(optimizer)
        loss_of(forward(layers, x)).backward()
        optimizer.fail = True
        with pytest.raises(ArithmeticError, match="no step"):
            optimizer.step()
        optimizer.fail = False
        optimizer.zero_grad()
        loss_of(forward(layers, x)).backward()
        gradients = [parameter.grad for parameter in layers.parameters()]
        stepped = [parameter.detach().clone() for parameter in layers.parameters()]
        optimizer.step()
        assert all(map(torch.equal, stepped, layers.parameters()))
        assert all(one is parameter.grad for one, parameter in zip(gradients, layers.parameters(), strict=True))


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
    ordinary, _ = build("gpt", LAYERS, torch.device("cpu"))
    ordinary.load_state_dict(saved["model"])
    assert torch.equal(forward(ordinary.eval().to(device), x), expected)


def test_saving_one_parameter_saves_its_bytes_alone(device: torch.device) -> None:
    layers, _ = build("gpt", LAYERS, torch.device("cpu"))
    with stream_weights(layers, device):
        file = io.BytesIO()
        torch.save(layers[0].norm1.weight, file)
        assert file.tell() < 4096
        assert torch.equal(
            torch.load(file, weights_only=False) if file.seek(0) else layers[0].norm1.weight, layers[0].norm1.weight
        )


@pytest.mark.parametrize("number_of_layers", [1, LAYERS])
def test_weights_changed_by_hand_between_steps(number_of_layers: int, device: torch.device) -> None:
    layers, _ = build("gpt", number_of_layers, device)
    layers.eval()
    twin = copy.deepcopy(layers)
    x = inputs(device)[0]
    with stream_weights(layers, device):
        for change in ("in place", "data", "copy"):
            for model in (layers, twin):
                for parameter in model.parameters():
                    if change == "in place":
                        with torch.no_grad():
                            parameter.mul_(0.5)
                    elif change == "data":
                        parameter.data.add_(0.25)
                    else:
                        parameter.data.copy_(parameter * 2)
            assert torch.equal(forward(layers, x), forward(twin, x))
