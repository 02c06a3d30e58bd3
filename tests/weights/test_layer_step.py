"""Layers stepped in backward by a streamed optimizer: the bits of the resident run, or an error."""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from faults import assert_interrupts_are_told
from lab import Lab
from models import WIDTH, Composed, Stop, assert_same, loss_of
from streaming import forward
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Make, Training

from offload import StreamedOptimizer, StreamedWeights, memory_meter, offload_layers, stream_optimizer, stream_weights

LAYERS = 4
STEPS = 6
TIMES = 60
CHUNK = "8KiB"
"""A layer has several, and a weight is split."""

OPTIMIZERS: dict[str, Make] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.1),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
    "plain SGD": functools.partial(torch.optim.SGD, lr=0.1),
}
adamw = OPTIMIZERS["AdamW"]


pytestmark = pytest.mark.usefixtures("adverse")


def gated() -> nn.Module:
    """A layer whose gate's gradient is complete before a recomputation, which needs the gate."""
    return Composed(
        lambda own, x: own.linear(x).tanh() * own.gate.sigmoid().detach() + own.gate,
        linear=nn.Linear(WIDTH, WIDTH),
        gate=nn.Parameter(torch.ones(WIDTH)),
    )


class Loop(Training):
    """Layers between two modules outside of them, all in one optimizer; resident, or all streamed."""

    def __init__(
        self,
        device: torch.device,
        make: Make = adamw,
        *,
        streamed: bool = True,
        dtype: torch.dtype = torch.float32,
        shared: bool = False,
        grad_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.layers = nn.ModuleList(gated() for _ in range(LAYERS)).to(dtype)
        for parameter in self.layers.parameters():
            parameter.grad_dtype = grad_dtype or dtype
        if shared:
            self.layers[2].linear.weight = self.layers[0].linear.weight
        self.embed, self.head = (nn.Linear(WIDTH, WIDTH).to(device, dtype) for _ in range(2))
        self.inputs = [torch.randn(4, WIDTH).to(device, dtype) for _ in range(STEPS + 1)]
        self.streamed: StreamedWeights | None = None
        self.handle: StreamedOptimizer | None = None
        if streamed:
            self.streamed = stream_weights(self.layers, device)
        else:
            self.layers.to(device)
        self.model = nn.ModuleList([self.embed, self.layers, self.head])
        self.optimizer = make(self.parameters)
        if streamed:
            options = {"in_backward": True, "consume_gradients": True, "chunk_bytes": CHUNK} | options
            self.handle = stream_optimizer(self.optimizer, **options)
        elif options.get("state_dtype"):
            kept = {key: options[key] for key in ("state_dtype", "master_weights") if key in options}
            stream_optimizer(self.optimizer, resident_bytes="1TiB", chunk_bytes=CHUNK, **kept)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def steps(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.step(self.loss(number))

    def run(self, y: torch.Tensor) -> torch.Tensor:
        return forward(self.layers, y)

    def loss(self, number: int) -> torch.Tensor:
        return loss_of(self.head(self.run(self.embed(self.inputs[number]))))

    def step(self, *losses: torch.Tensor) -> None:
        """A step of several microbatches."""
        for number, loss in enumerate(losses):
            last = number == len(losses) - 1
            with nullcontext() if last or self.handle is None else self.handle.no_step():
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(loop: Loop, steps: int = STEPS) -> None:
    """With a learning rate that changes."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.8)
    for number in range(steps):
        loop.step(loop.loss(number))
        scheduler.step()


def both(lab: Lab, run: Callable[[Loop], None], make: Make = adamw, **options: Any) -> Loop:
    """Run it resident and streamed, compare every bit, and return the streamed one."""
    plain, loop = (Loop(lab.device, make, streamed=streamed, **options) for streamed in (False, True))
    before = [parameter.detach().cpu().clone() for parameter in loop.parameters]
    run(plain)
    run(loop)
    assert_same(plain.values, loop.values)
    assert not any(map(torch.equal, before, loop.values))
    return loop


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_the_resident_run(name: str, lab: Lab) -> None:
    loop = both(lab, train, OPTIMIZERS[name])
    weights, state = loop.streamed.stats(), loop.handle.stats()
    assert weights.early_steps == STEPS * LAYERS
    assert weights.gradient_bytes == weights.gradient_host_bytes == 0
    assert state.steps == STEPS
    assert state.backward_chunks == state.chunks > STEPS * LAYERS
    # The state alone, from the second step on: the weights are in their slots.
    assert state.loaded_bytes == (STEPS - 1) * state.host_bytes
    assert all(parameter.grad is None for parameter in loop.parameters)


def test_nothing_waits_behind_loads_that_wait_for_slots(lab: Lab) -> None:
    """Those of weights and of state are in streams of their own."""
    streams = lab.record_streams()
    loop = Loop(lab.device)
    loop.steps(range(3))
    assert streams.count(lab.weight_stream) == loop.streamed.stats().loads  # a load is one copy
    assert lab.state_stream in streams
    assert lab.h2d_stream not in streams


class Doubles(torch.optim.SGD):
    """Changes the gradients, as optimizers do that centralize them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in [one for group in self.param_groups for one in group["params"] if one.grad is not None]:
            parameter.grad.mul_(2)
        return super().step(closure)


@pytest.mark.parametrize("shared", ["with another parameter", "with the layer before"])
def test_a_gradient_that_autograd_gives_to_others_as_well_is_stepped_alone(shared: str, device: torch.device) -> None:
    def forwarded(own: Any, x: torch.Tensor) -> torch.Tensor:
        y = x + own.one if shared == "with the layer before" else x * (own.one + own.other)
        return y.tanh()

    def train(streamed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.ModuleList(
            Composed(forwarded, **{name: nn.Parameter(torch.randn(4, WIDTH)) for name in ("one", "other")})
            for _ in range(3)
        )
        x = torch.randn(4, WIDTH).to(device)
        handles = [stream_weights(layers, device)] if streamed else [layers.to(device)][:0]
        optimizer = Doubles(layers.parameters(), lr=0.1)
        if streamed:
            handles.append(stream_optimizer(optimizer, in_backward=True, consume_gradients=True, chunk_bytes=CHUNK))
        for _ in range(3):
            loss_of(forward(layers, x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for handle in reversed(handles):
            handle.remove()
        return [one.detach().cpu() for one in layers.parameters()]

    assert_same(train(False), train(True))


def test_clipping_after_the_step_is_refused(lab: Lab) -> None:
    loop = Loop(lab.device)
    loop.loss(0).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"gradients must be final then, but aten\..* that was stepped with"):
            nn.utils.clip_grad_norm_(loop.parameters, 1.0)
    loop.optimizer.step()
    assert all(parameter.grad is None for parameter in loop.parameters)


@pytest.mark.parametrize("master_weights", [False, True])
def test_state_in_float32_for_bfloat16(master_weights: bool, lab: Lab) -> None:
    options = {"dtype": torch.bfloat16, "state_dtype": torch.float32, "master_weights": master_weights}
    loop = both(lab, train, **options)
    entries = [loop.optimizer.state[parameter] for parameter in loop.layers.parameters()]
    assert {entry["exp_avg"].dtype for entry in entries} == {torch.float32}
    assert loop.streamed.stats().gradient_host_bytes == 0


def accumulation(loop: Loop) -> None:
    for number in range(STEPS):
        loop.step(*(loop.loss((number + more) % STEPS) for more in range(1 + number % 3)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16, "state_dtype": torch.float32},
        {"dtype": torch.bfloat16, "grad_dtype": torch.float32, "make": OPTIMIZERS["SGD"]},
    ],
    ids=["float32", "bfloat16", "gradients in float32"],
)
def test_accumulation_adds_what_the_host_has(options: dict[str, Any], lab: Lab) -> None:
    both(lab, accumulation, **options)


def without_a_step(loop: Loop) -> None:
    """``optimizer.step()`` makes it, with gradients from the host."""
    for number in range(4):
        with nullcontext() if loop.handle is None else loop.handle.no_step():
            loop.loss(number).backward()
        loop.step(*[loop.loss(number)] if number % 2 else [])


def with_gradients_of_the_program(loop: Loop) -> None:
    """Of other strides than the weights, and in ordinary memory."""
    for number in range(3):
        for parameter in loop.layers[1].parameters():
            parameter.grad = torch.full((), number + 0.5, device=parameter.device).expand_as(parameter)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.step(loop.loss(number))


def test_pinned_gradients_are_freed_when_steps_in_backward_begin(lab: Lab) -> None:
    loop = Loop(lab.device, in_backward=False, consume_gradients=False)
    loop.step(loop.loss(0))
    assert loop.streamed.stats().gradient_host_bytes > 0
    loop.handle.remove(on_device=False)
    loop.handle = stream_optimizer(loop.optimizer, in_backward=True, consume_gradients=True)
    loop.step(loop.loss(1))
    assert loop.streamed.stats().gradient_host_bytes == 0
    loop.handle.remove(on_device=False)
    loop.handle = stream_optimizer(loop.optimizer)
    loop.step(loop.loss(2))
    gradient_bytes = loop.streamed.stats().gradient_host_bytes
    loop.step(loop.loss(3))
    assert loop.streamed.stats().gradient_host_bytes == gradient_bytes > 0, "no step holds it"
    plain = Loop(lab.device, streamed=False)
    for number in range(4):
        plain.step(plain.loss(number))
    assert_same(plain.values, loop.values)


def checkpointed(loop: Loop, *, reentrant: bool = False, group: int = 1) -> None:
    def run(y: torch.Tensor) -> torch.Tensor:
        for start in range(0, LAYERS, group):
            part = loop.layers[start : start + group]
            y = checkpoint(functools.partial(forward, part), y, use_reentrant=reentrant)
        return y

    loop.run = run
    train(loop, 4)


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_recomputed(reentrant: bool, group: int, lab: Lab) -> None:
    """Groups of layers: recomputation passes through all of them before their backward."""
    loop = both(lab, functools.partial(checkpointed, reentrant=reentrant, group=group))
    assert loop.streamed.stats().early_steps == 4 * LAYERS
    assert loop.streamed.stats().gradient_host_bytes == 0


@pytest.mark.parametrize("policies", [{"*": "recompute"}, {"*": "offload"}, {"*linear*": "keep", "*": "recompute"}])
def test_activations_that_are_recomputed_or_offloaded(policies: dict[str, str], lab: Lab) -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += torch._C._current_graph_task_id() != -1

    def run(loop: Loop) -> None:
        nonlocal calls
        loop.layers[0].linear.register_forward_pre_hook(count)
        with offload_layers(loop.layers, LAYERS - 2, min_bytes=1, policies=policies) as offloaded:
            train(loop, 5)
        assert (calls > 0) == (policies["*"] == "recompute")
        assert offloaded.stats().reloaded_bytes > 0
        calls = 0

    loop = both(lab, run)
    assert loop.streamed.stats().early_steps == 5 * LAYERS
    assert loop.streamed.stats().gradient_host_bytes == 0


def frozen(loop: Loop) -> None:
    for number in range(STEPS):
        loop.layers[number % LAYERS].requires_grad_(False)
        loop.step(loop.loss(number))
        loop.layers.requires_grad_()


def without_gradient(loop: Loop) -> None:
    """Every second step leaves a layer out."""
    for number in range(STEPS):
        kept = loop.layers if number % 2 else loop.layers[:-1]
        loop.run = functools.partial(forward, kept)
        loop.step(loop.loss(number))


def called_again(loop: Loop, order: Sequence[int] = (2, 1, 1, 0, 3, 2)) -> None:
    loop.run = functools.partial(forward, [loop.layers[number] for number in order])
    train(loop)


def skipped(loop: Loop) -> None:
    """A loss that is no number: its backward is not run."""
    for number in range(STEPS):
        if number % 3:
            loop.step(loop.loss(number))
        else:
            loop.loss(number)


WAYS: dict[str, tuple[Callable[[Loop], None], bool]] = {
    "frozen": (frozen, False),
    "without gradient": (without_gradient, False),
    "called again": (called_again, False),
    "other order": (functools.partial(called_again, order=(3, 2, 1, 0)), False),
    "skipped": (skipped, False),
    "tied": (train, True),
    "tied sums": (accumulation, True),
    "tied groups": (functools.partial(checkpointed, group=2), True),
}
"""What runs, and whether two layers share a weight."""


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_through_the_layers(way: str, lab: Lab) -> None:
    run, shared = WAYS[way]
    loop = both(lab, run, shared=shared)
    assert loop.streamed.stats().early_steps > STEPS
    tied = loop.layers[0].linear.weight.nbytes if shared else 0
    assert shared or loop.streamed.stats().gradient_host_bytes == tied


def failing_before_any_step(loop: Loop) -> None:
    for number in range(4):
        y = Stop()(forward(loop.layers[:-1], loop.embed(loop.inputs[number])))
        with pytest.raises(ValueError, match="stop"):
            loss_of(loop.layers[-1](y)).backward()
        loop.optimizer.zero_grad()
        loop.step(loop.loss(number))


@pytest.mark.parametrize("run", [without_a_step, with_gradients_of_the_program, failing_before_any_step])
def test_other_ways_to_make_a_step(run: Callable[[Loop], None], lab: Lab) -> None:
    both(lab, run)


def test_parameters_of_other_optimizers(lab: Lab) -> None:
    def run(loop: Loop) -> None:
        gates = torch.optim.SGD([layer.gate for layer in loop.layers], lr=0.125)
        for number in range(4):
            loop.loss(number).backward()
            loop.optimizer.step()
            gates.step()
            loop.optimizer.zero_grad()
            gates.zero_grad()

    def others(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        gates = {id(p) for p in parameters if p.ndim == 1 and bool((p == 1).all())}
        return adamw([p for p in parameters if id(p) not in gates])

    both(lab, run, others)


def resumed(loop: Loop) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.5)
    for number in range(4):
        loop.step(loop.loss(number))
        saved = loop.checkpoint
        loop.step(loop.loss(number + 1))
        loop.load(saved)
        scheduler.step()


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD", "Adafactor"])
def test_saved_and_loaded(name: str, lab: Lab) -> None:
    both(lab, resumed, OPTIMIZERS[name])


def test_after_remove_the_optimizer_steps_where_the_weights_are(lab: Lab) -> None:
    plain, loop = (Loop(lab.device, OPTIMIZERS["AdamW fused"], streamed=streamed) for streamed in (False, True))
    train(plain, 2)
    train(loop, 2)
    with pytest.raises(RuntimeError, match=r"handle of stream_optimizer must be removed before that of stream_weights"):
        loop.streamed.remove()
    loop.handle.remove()
    layers = set(loop.layers.parameters())
    for parameter, entry in loop.optimizer.state.items():
        assert {value.device.type for value in entry.values()} == {"cpu" if parameter in layers else lab.device.type}
    loop.handle = None
    for one in (plain, loop):
        for number in range(2):
            one.step(one.loss(number))
    if lab.device.type == "cpu":  # a GPU rounds otherwise
        assert_same(plain.values, loop.values)
    loop.streamed.remove()


@pytest.mark.parametrize("how", ["gradient of the next step", "hook", "loss"])
def test_gradients_that_come_too_late_are_refused(how: str, lab: Lab) -> None:
    loop = Loop(lab.device)
    weight = loop.layers[1].linear.weight
    if how == "gradient of the next step":
        loop.loss(0).backward()
        before = loop.values
        with pytest.raises(RuntimeError, match="a parameter must get one gradient in each step if in_backward=True"):
            loop.loss(1).backward()
        loop.streamed.synchronize()
        assert all(map(torch.equal, before[2 : 2 + 3 * LAYERS], [p.detach() for p in loop.layers.parameters()]))
        return
    loss = loop.loss(0)
    if how == "hook":
        weight.register_hook(torch.neg)
    else:
        loss = loss + weight.sum().to(lab.device)
    with pytest.raises(RuntimeError, match=r"layer 1's linear.weight must get its gradient from its layer alone"):
        loss.backward()
    if how == "hook":
        with pytest.warns(UserWarning, match="must belong to one step, but backward was cut off"):
            loop.handle.remove()
        with pytest.raises(ValueError, match=r"in_backward must be False where .* layer 1's linear.weight has one"):
            stream_optimizer(loop.optimizer, in_backward=True)


def test_layers_that_are_checkpointed_twice_are_refused(lab: Lab) -> None:
    """Each checkpoint brings gradients of its own, in one backward."""
    loop = Loop(lab.device)
    x = loop.inputs[0].requires_grad_()
    for layer in (*loop.layers, *loop.layers):
        x = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="do not use in_backward=True with layers that are checkpointed twice"):
        loss_of(x).backward()


def test_a_layer_that_is_left_twice_before_its_step_is_refused(lab: Lab) -> None:
    """Recomputation of another layer, which needs no gradient of its own, comes between its two backwards."""
    loop = Loop(lab.device)
    first, second = loop.layers[1], loop.layers[0]
    x = checkpoint(lambda y: first(second(y)), loop.inputs[0].requires_grad_(), use_reentrant=True)
    x = checkpoint(first, x, use_reentrant=True)
    with pytest.raises(NotImplementedError, match=r"layer 1's .* must get one gradient while backward is in its layer"):
        loss_of(x).backward()


def test_a_second_backward_of_the_same_forward_is_refused(lab: Lab) -> None:
    loop = Loop(lab.device)
    loss = loss_of(loop.run(loop.inputs[0]))
    loss.backward(retain_graph=True)
    loop.optimizer.step()
    stepped = [parameter.detach().clone() for parameter in loop.layers.parameters()]
    with pytest.raises(RuntimeError, match="modified by an inplace operation: the weights of layer 3"):
        loss.backward()
    loop.streamed.synchronize()
    assert all(map(torch.equal, stepped, [parameter.detach() for parameter in loop.layers.parameters()]))


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_backward_that_fails_after_some_steps_is_told(accumulated: bool, lab: Lab) -> None:
    plain, loop = Loop(lab.device, streamed=False), Loop(lab.device)
    train(plain, 2)
    train(loop, 2)
    saved = loop.checkpoint
    if accumulated:
        with loop.handle.no_step():
            loop.loss(2).backward()
    loop.run = lambda y: forward(loop.layers[2:], Stop()(forward(loop.layers[:2], y)))
    with pytest.raises(ValueError, match="stop"):
        loop.loss(2).backward()
    loop.run = functools.partial(forward, loop.layers)
    loop.streamed.synchronize()  # on a GPU autograd's thread, which ends what has failed, may still be at it
    message = "but backward was cut off when some parameters had made their step; load both from a checkpoint"
    for use in (loop.optimizer.step, loop.optimizer.state_dict, lambda: loop.loss(2).backward()):
        with pytest.raises(RuntimeError, match=message):
            use()
    with loop.handle.no_step():
        loop.loss(2).backward()
    with pytest.raises(RuntimeError, match=message):
        loop.optimizer.step()
    loop.load(saved)
    for one in (plain, loop):
        one.step(one.loss(3))
        one.step(one.loss(4))
    assert_same(plain.values, loop.values)


def test_a_recomputation_that_fails_leaves_no_gradient_to_step_with(lab: Lab) -> None:
    """The layer behind has its gradients by then, and would make its step when another one's backward begins."""
    plain, loop = Loop(lab.device, streamed=False), Loop(lab.device)
    train(plain, 2)
    train(loop, 2)
    saved = loop.checkpoint
    y = checkpoint(loop.layers[2], forward(loop.layers[:2], loop.embed(loop.inputs[2])), use_reentrant=True)
    loss = loss_of(loop.head(loop.layers[3](y)))

    def fail(*_: object) -> None:
        raise ValueError("stop")

    with loop.layers[2].linear.register_forward_pre_hook(fail), pytest.raises(ValueError, match="stop"):
        loss.backward()
    loop.streamed.synchronize()  # on a GPU autograd's thread, which ends what has failed, may still be at it
    loop.load(saved)
    for one in (plain, loop):
        one.step(one.loss(3))
    assert_same(plain.values, loop.values)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_failed_backward_waits_for_the_copies_of_its_steps(
    interrupted: bool, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program loads a checkpoint next, which a late copy would overwrite; also of a step that was cut off."""
    loop, copy_one = Loop(lab.device, OPTIMIZERS["plain SGD"], chunk_bytes="1MiB"), lab.backend.copy
    train(loop, 1)
    saved = loop.checkpoint
    loop.run = lambda y: forward(loop.layers, Stop()(y))

    def cut_off(stream: Any, *tensors: torch.Tensor) -> None:
        copy_one(stream, *tensors)
        if stream is lab.state_d2h_stream:
            raise KeyboardInterrupt

    lab.slow(d2h_s=0.05)
    with monkeypatch.context() as patch:
        if interrupted:
            patch.setattr(lab.backend, "copy", cut_off)
        with pytest.raises(KeyboardInterrupt if interrupted else ValueError):
            loop.loss(1).backward()
    loop.streamed.synchronize()  # on a GPU autograd's thread, which ends what has failed, may still be at it
    loop.load(saved)
    lab.slow()
    lab.drain()
    assert_same(saved[0].values(), loop.model.state_dict().values())


def test_the_last_copy_that_fails_is_told(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that the optimizer steps last: all that is left of backward is to wait for that copy."""
    if lab.device.type != "cpu":
        pytest.skip("a GPU's copies do not fail")
    loop = Loop(lab.device)
    for outside in (loop.embed, loop.head):
        outside.requires_grad_(False)
    copy_one, made, last = lab.backend.copy, [0], [-1]

    def failing(stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        made[0] += stream is lab.state_d2h_stream
        if made[0] == last[0]:
            stream.submit(lambda: 1 / 0)
        else:
            copy_one(stream, target, source)

    train(loop, 1)
    monkeypatch.setattr(lab.backend, "copy", failing)
    loop.step(loop.loss(1))
    last[0], made[0] = made[0], 0
    lab.slow(d2h_s=0.01)
    with pytest.raises(RuntimeError, match="a copy has failed: ZeroDivision"):
        loop.loss(2).backward()
    with pytest.raises(RuntimeError, match="belong to one step"):
        loop.optimizer.step()


@pytest.mark.parametrize("good", [0, 6, 15])
def test_a_copy_that_fails_is_told(good: int, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many copies to the host are right before."""
    if lab.device.type != "cpu":
        pytest.skip("a GPU's copies do not fail")
    loop = Loop(lab.device)
    train(loop, 2)
    saved = loop.checkpoint
    copy_one, left = lab.backend.copy, [None] * good

    def failing(stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        if stream is not lab.state_d2h_stream or left:
            copy_one(stream, target, source)
            del left[: stream is lab.state_d2h_stream]
        else:
            stream.submit(lambda: 1 / 0)

    with monkeypatch.context() as patch:
        patch.setattr(lab.backend, "copy", failing)
        with pytest.raises(RuntimeError, match="a copy has failed: ZeroDivision"):
            loop.loss(2).backward()
    with pytest.raises(RuntimeError, match="belong to one step"):
        loop.optimizer.step()
    loop.load(saved)
    loop.step(loop.loss(3))
    plain = Loop(lab.device, streamed=False)
    train(plain, 2)
    plain.step(plain.loss(3))
    assert_same(plain.values, loop.values)


@pytest.mark.slow
@pytest.mark.nightly
def test_interrupts(lab: Lab) -> None:
    def resident(steps: list[int]) -> list[torch.Tensor]:
        plain = Loop(torch.device("cpu"), streamed=False)
        plain.steps(steps)
        return plain.values

    assert_interrupts_are_told(lab, lambda: Loop(torch.device("cpu")), resident, TIMES)


def test_after_the_optimizer_is_dropped_gradients_go_to_the_host(lab: Lab) -> None:
    loop = Loop(lab.device)
    loop.step(loop.loss(0))
    loop.handle = None
    del loop.optimizer
    before = [parameter.detach().clone() for parameter in loop.layers.parameters()]
    weight = loop.layers[1].linear.weight
    weight.register_hook(torch.zeros_like)
    (loop.loss(1) + weight.sum().to(lab.device)).backward()
    assert all(map(torch.equal, before, [parameter.detach() for parameter in loop.layers.parameters()]))
    assert all(parameter.grad is not None for parameter in loop.layers.parameters())
    assert not weight.grad.any()
    loop.streamed.remove()


def test_what_cannot_be_stepped_in_backward_is_refused_before_anything_is_changed(lab: Lab) -> None:
    loop = Loop(lab.device)
    with pytest.raises(ValueError, match="one optimizer of streamed layers, but another one steps these layers"):
        stream_optimizer(adamw(loop.layers[0].parameters()), in_backward=True)
    other = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).to(lab.device)
    optimizer = adamw(other.parameters())
    handle = stream_optimizer(optimizer)
    with pytest.raises(ValueError, match="layers must be streamed before the state of their optimizer"):
        stream_weights(other, lab.device)
    handle.remove()
    stream_weights(other, lab.device).remove()


def test_weights_that_are_read_after_backward_are_the_new_ones(lab: Lab) -> None:
    loop, plain = Loop(lab.device), Loop(lab.device, streamed=False)
    plain.step(plain.loss(0))
    expected = plain.layers.state_dict().values()
    loop.loss(0).backward()
    read = [parameter.detach().clone() for parameter in loop.layers.parameters()]
    saved = copy.deepcopy(loop.layers.state_dict())
    with torch.no_grad():
        evaluated = loop.run(loop.inputs[1])
        assert torch.equal(evaluated, plain.run(plain.inputs[1]))
    for found in (read, saved.values()):
        assert all(torch.equal(one.cpu(), other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize(("streamed", "most"), [(True, 2.5), (False, 4.5)])
def test_no_more_gradients_than_the_steps_beside_backward_need_are_on_the_device(
    streamed: bool, most: float, lab: Lab
) -> None:
    """As compute waits for the oldest step, however many layers there are."""
    layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(12)).to(lab.device)
    x = torch.ones(2, 256, device=lab.device)
    options: dict[str, Any] = {"in_backward": True, "consume_gradients": True, "chunk_bytes": "128KiB"}
    weights = stream_weights(layers, lab.device) if streamed else nullcontext()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    with weights, stream_optimizer(optimizer, **options):
        for _ in range(3):  # the first ones make the state
            loss = loss_of(forward(layers, x))
            with memory_meter(lab.device) as meter:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert meter.peak_bytes <= most * layers[0].weight.nbytes
