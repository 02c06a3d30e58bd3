"""Streamed weights give the same gradients as weights on the device, bit for bit, whatever the program does.

Copies are slow, slots are poisoned before each load and gradients when they are let go, so that a number is
right only if every byte was there in time.
"""

import copy
import gc
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lab import Lab
from models import WIDTH, Composed, GptBlock, Recurrent, assert_same, build, loss_of
from streaming import Step, assert_moved, backward, check_step, forward, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import StreamedWeights, stream_weights

LAYERS = 5

Forward = Callable[[Sequence[nn.Module], Any], Any]


pytestmark = pytest.mark.usefixtures("adverse")


def check(
    layers: nn.ModuleList,
    x: torch.Tensor,
    run: Forward = forward,
    *,
    microbatches: int = 1,
    reference: Forward | None = None,
    **options: Any,
) -> StreamedWeights:
    """Compare the gradients of microbatches with and without streaming."""

    def step(run: Forward, layers: nn.ModuleList, x: torch.Tensor) -> None:
        for _ in range(microbatches):
            loss_of(run(layers, x)).backward()

    return check_step(layers, x, partial(step, run), reference=partial(step, reference or run), **options)


@pytest.mark.parametrize(
    ("block", "num_slots", "dtype", "microbatches"),
    [
        ("decoder", 2, torch.bfloat16, 3),
        ("gpt", 3, torch.float32, 1),
        ("gpt", 2, torch.bfloat16, 3),
        ("conv", 2, torch.float32, 1),
        ("conv", 9, torch.float32, 2),
        ("encoder", 9, torch.bfloat16, 1),
        ("encoder", 3, torch.float32, 3),
    ],
)
def test_every_block(block: str, num_slots: int, dtype: torch.dtype, microbatches: int, device: torch.device) -> None:
    layers, x = build(block, LAYERS, device)
    layers, x = layers.to(dtype), x.detach().to(dtype).requires_grad_()
    stats = check(layers, x, num_slots=num_slots, microbatches=microbatches).stats()
    # Each layer twice, but the last ones remain for backward.
    assert stats.loads == 2 * microbatches * (2 * LAYERS - min(num_slots, LAYERS))
    assert stats.late_loads == 2 * microbatches
    assert stats.added_bytes == stats.gradient_bytes // microbatches * (microbatches - 1)
    assert (stats.staging_bytes > 0) == (microbatches > 1)


@pytest.mark.parametrize(("shared", "microbatches"), [(False, 1), (False, 3), (True, 1), (True, 3)])
def test_gradients_in_float32(shared: bool, microbatches: int, device: torch.device) -> None:
    """Microbatches, and the uses of a shared weight in one backward, are added up as autograd does in float32."""
    layers, x = build(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), 3, device)
    if shared:
        layers[2] = nn.Sequential(layers[0][0], nn.Tanh())
    layers, x = layers.to(torch.bfloat16), x.detach().to(torch.bfloat16)
    twin = copy.deepcopy(layers)
    for parameter in (*twin.parameters(), *layers.parameters()):
        parameter.grad_dtype = torch.float32
    with stream_weights(layers, device) as handle:
        for _ in range(2):
            for model in (twin, layers):
                model.zero_grad()
                for scale in range(microbatches):
                    backward(model, x * (scale + 1))
            assert_same([p.grad.cpu() for p in twin.parameters()], [p.grad for p in layers.parameters()])
    assert_moved(handle)
    assert {parameter.grad.dtype for parameter in layers.parameters()} == {torch.float32}
    assert handle.stats().gradient_host_bytes >= 2 * sum(parameter.nbytes for parameter in layers.parameters())


def test_neighbours_may_share_a_module(device: torch.device) -> None:
    """When backward comes to the earlier one, the module holds what the later one has computed with."""
    layers, x = build(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), 3, device)
    layers[1] = nn.Sequential(layers[0][0], nn.Tanh())
    check(layers, x)


def test_gradients_that_were_there_before(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    twin = copy.deepcopy(layers)
    for one, other in zip(layers.parameters(), twin.parameters(), strict=True):
        one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
    layers.eval(), twin.eval()
    backward(twin, x)
    with stream_weights(layers, device) as handle:
        backward(layers, x)
    assert_moved(handle)
    assert_same([p.grad.cpu() for p in twin.parameters()], [p.grad for p in layers.parameters()])


class Unequal(nn.Module):
    """Parameters of several dtypes, strides and sizes, an empty one, one that is never used."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.randn(WIDTH, 7).t())
        self.sliced = nn.Parameter(torch.randn(4, 2 * WIDTH)[:, ::2])
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(3))
        self.table = nn.Parameter(torch.arange(9), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(x)).to(torch.bfloat16)).to(x.dtype)
        y = y + (x @ self.transposed.t()) @ self.transposed + self.sliced.sum(0) + self.empty.sum()
        return x + (y * self.scale).to(x.dtype) * self.table[3]


def test_mixed_dtypes_and_sizes(device: torch.device) -> None:
    layers, x = build(lambda: Unequal(8), 0, device)
    layers.extend(Unequal(inner).to(device) for inner in (8, 40, 3, 17, 1))
    check(layers, x, microbatches=2)
    layers.to(device)
    check(layers, x, microbatches=2, num_slots=3)


def test_layers_without_parameters(device: torch.device) -> None:
    layers, x = build("gpt", 3, device)
    mixed = nn.ModuleList([nn.GELU(), layers[0], nn.Identity(), nn.Dropout(0.1), layers[1], layers[2], nn.Tanh()])
    assert check(mixed, x).stats().late_loads == 2


class InnerCheckpoint(GptBlock):
    """Recomputes a part of itself, where no module hook of the layer runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + checkpoint(self.out, self.norm1(x), use_reentrant=False)
        return x + checkpoint(lambda y: self.mlp(self.norm2(y)), x, use_reentrant=False)


def used_twice() -> nn.Module:
    """Uses a weight in two reentrant checkpoints and once more: three runs of autograd bring its gradient."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda x: torch.tanh(own.linear(x)), x, use_reentrant=True)
        return x + checkpoint(own.linear, torch.tanh(own.linear(y)), use_reentrant=True)

    return Composed(forward, linear=nn.Linear(WIDTH, WIDTH))


def test_several_gradients_of_reentrant_checkpoints_are_refused(device: torch.device) -> None:
    layers, x = build(used_twice, LAYERS, device)
    with stream_weights(layers, device) as handle:
        with pytest.raises(NotImplementedError, match=r"must get one gradient .*use_reentrant=False"):
            backward(layers, x)
        handle.synchronize()
        assert all(parameter.grad is None for parameter in layers.parameters())


def autocast(layers: Sequence[nn.Module], x: Any, **options: Any) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16, **options):
        return forward(layers, x)


def repeated() -> nn.Module:
    """Uses a weight twice."""
    return Composed(lambda own, x: x + own.linear(torch.tanh(own.linear(x))), linear=nn.Linear(WIDTH, WIDTH))


def test_gradients_that_need_gradients_are_added_to(device: torch.device) -> None:
    """Such as a backward with create_graph=True leaves before weights are streamed."""
    layers, x = build("gpt", 2, device)

    def run() -> list[torch.Tensor]:
        for parameter in layers.parameters():
            parameter.grad = torch.ones_like(parameter).requires_grad_()
        torch.manual_seed(0)
        backward(layers, x)
        return [parameter.grad.detach().cpu().clone() for parameter in layers.parameters()]

    expected = run()
    with stream_weights(layers, device):
        assert_same(expected, run())


def test_autocast_of_a_weight_that_is_used_several_times(device: torch.device) -> None:
    """PyTorch casts the weight once and adds in the lower precision; streaming is as without that cache."""
    layers, x = build(repeated, LAYERS, device)
    check(layers, x, autocast, reference=partial(autocast, cache_enabled=False), microbatches=2)
    with pytest.raises(AssertionError, match="differ"):
        check(layers.to(device), x, autocast)


def using(uses: int) -> nn.Module:
    """Uses its weight several times."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(uses):
            x = torch.tanh(x @ own.weight)
        return x

    return Composed(forward, weight=nn.Parameter(torch.randn(WIDTH, WIDTH) / 4))


def may_round_otherwise(uses: int, layers: int, in_loss: bool, reentrant: bool, microbatches: int) -> bool:
    """What the guide says, without autocast."""
    several = layers > 1 or in_loss
    again = reentrant and microbatches > 1
    return several and (again or (uses > 1 if not in_loss else uses * layers > 1))


USES = list(itertools.product((1, 2), (1, 2, 3), (False, True), (False, True), (1, 2)))


@pytest.mark.parametrize("case", [case for case in USES if not may_round_otherwise(*case)], ids=str)
def test_sums_are_made_in_autograds_order(case: tuple[Any, ...], device: torch.device) -> None:
    uses, sharing, in_loss, reentrant, microbatches = case
    torch.manual_seed(0)
    layers = nn.ModuleList(using(uses) for _ in range(LAYERS)).to(device)
    for layer in layers[:sharing]:
        layer.weight = layers[0].weight
    inputs = [torch.randn(4, WIDTH, device=device, requires_grad=True) for _ in range(microbatches)]

    def step(layers: nn.ModuleList, _: torch.Tensor) -> None:
        for x in inputs:
            y = x
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=True) if reentrant else layer(y)
            loss = loss_of(y)
            (loss + layers[0].weight.sum().to(device) if in_loss else loss).backward()

    check_step(layers, inputs[0].detach(), step)


@pytest.mark.slow
# The compiler looks at the weights, which are no leaves here; what it does not show becomes an error in tests.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers(device: torch.device) -> None:
    layers, x = build("mlp", LAYERS, device)
    for layer in layers:
        layer.compile(backend="aot_eager")
    check(layers, x, microbatches=2)


def lora() -> nn.Module:
    adapters = {"a": nn.Linear(WIDTH, 2, bias=False), "b": nn.Linear(2, WIDTH, bias=False)}
    base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return Composed(lambda own, x: F.silu(own.base(x) + own.b(own.a(x))), base=base, **adapters)


def test_lora(device: torch.device) -> None:
    layers, x = build(lora, LAYERS, device)
    stats = check(layers, x, microbatches=2).stats()
    assert stats.gradient_bytes == 4 * LAYERS * 2 * 2 * WIDTH * 4
    assert stats.gradient_host_bytes < stats.weight_bytes / 2
    assert stats.staging_bytes < stats.weight_bytes / 2


def tied_inside() -> nn.Module:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    layer[2].weight = layer[0].weight
    return layer


class Passing(nn.Module):
    """Passes an early layer's output on, as T5 does with its position bias, and adds to a side loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x, passed, losses = state["x"], state["passed"], state["losses"]
        if passed is None:
            passed = torch.tanh(self.bias(x))
        y = torch.tanh(self.inner(x)) + passed
        return {"x": y, "passed": passed, "losses": (*losses, y.square().mean())}


def passed_on(layers: Sequence[nn.Module], x: Any) -> Any:
    state = forward(layers, {"x": x, "passed": None, "losses": ()})
    return state["x"] + sum(state["losses"])


def called(*numbers: int) -> Forward:
    return lambda layers, x: forward([layers[number] for number in numbers], x)


def skipped_at_random(layers: Sequence[nn.Module], x: Any) -> Any:
    return forward([layer for layer in layers if torch.rand(()) < 0.6], x)


def towers(layers: Sequence[nn.Module], x: Any) -> Any:
    return forward(layers[:3], x) * forward(layers[3:], x)


def saved_on_cpu(layers: Sequence[nn.Module], x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return forward(layers, x)


def checkpointed_pairs(layers: Sequence[nn.Module], x: Any, use_reentrant: bool) -> Any:
    for first in range(0, len(layers), 2):
        x = checkpoint(forward, layers[first : first + 2], x, use_reentrant=use_reentrant)
    return x


def checkpointed_twice(layers: Sequence[nn.Module], x: Any) -> Any:
    return checkpoint(forward, layers, checkpoint(forward, layers, x, use_reentrant=True), use_reentrant=True)


WAYS: dict[str, tuple[Any, int, Forward]] = {
    "LSTM": (partial(Recurrent, nn.LSTM), 4, forward),
    "GRU": (partial(Recurrent, nn.GRU), 4, forward),
    "checkpoints inside": (InnerCheckpoint, LAYERS, forward),
    "checkpointed pairs": ("gpt", 6, partial(checkpointed_pairs, use_reentrant=False)),
    "reentrant checkpoints of pairs": ("gpt", 6, partial(checkpointed_pairs, use_reentrant=True)),
    "reentrant checkpoints of layers called twice": ("gpt", 3, checkpointed_twice),
    "saved-tensor hooks of the program": ("decoder", LAYERS, saved_on_cpu),
    "autocast": ("decoder", LAYERS, autocast),
    "weights tied inside a layer": (tied_inside, LAYERS, forward),
    "each layer twice in a row": ("gpt", 3, called(0, 0, 1, 1, 2, 2)),
    "all layers twice": ("gpt", 3, called(0, 1, 2, 0, 1, 2)),
    "another order, and back": ("gpt", 3, called(2, 0, 1, 1, 0)),
    "one layer": ("gpt", 3, called(1)),
    "skipped at random": ("gpt", 8, skipped_at_random),
    "two towers": ("gpt", 6, towers),
    "outputs passed on, and side losses": (Passing, LAYERS, passed_on),
}


@pytest.mark.drawn(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:RNN module weights are not part")
def test_every_way_to_call_layers(way: str, dtype: torch.dtype, device: torch.device) -> None:
    block, number, run = WAYS[way]
    layers, x = build(block, number, device)
    check(layers.to(dtype), x.detach().to(dtype).requires_grad_(), run, microbatches=3)


def together(layers: nn.ModuleList, x: torch.Tensor) -> None:
    sum(loss_of(forward(layers, x * scale)) for scale in (1, 2, 3)).backward()


def in_flight(layers: nn.ModuleList, x: torch.Tensor) -> None:
    for loss in [loss_of(forward(layers, x * scale)) for scale in (1, 2, 3)]:
        loss.backward()


def retained(layers: nn.ModuleList, x: torch.Tensor) -> None:
    loss = loss_of(forward(layers, x))
    loss.backward(retain_graph=True)
    loss.backward()


def in_inference_mode(layers: nn.ModuleList, x: torch.Tensor) -> None:
    loss = loss_of(forward(layers, x))
    with torch.inference_mode():
        loss.backward()


@pytest.mark.parametrize("step", [together, in_flight, retained, in_inference_mode])
def test_every_way_to_call_backward(step: Step, device: torch.device) -> None:
    check_step(*build("gpt", LAYERS, device), step)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_forward_and_backward(mode: Callable[[], Any], device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    layers.eval()
    expected = forward(layers, x).detach()

    def step(layers: nn.ModuleList, x: torch.Tensor) -> None:
        loss = loss_of(forward(layers, x))
        with mode():
            for _ in range(3):
                assert torch.equal(forward(layers, x), expected)
            assert torch.equal(forward(layers[:2], x), forward(layers[:2], x))
        loss.backward()

    check_step(layers, x, step)


def test_weights_are_not_moved_in_inference_mode(device: torch.device) -> None:
    layers, _ = build("gpt", LAYERS, device)
    before = [parameter.data_ptr() for parameter in layers.parameters()]
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"must be held outside of torch\.inference_mode\(\)"),
    ):
        stream_weights(layers, device)
    assert before == [parameter.data_ptr() for parameter in layers.parameters()]


def test_without_room_for_slots_the_devices_error_is_all_that_is_said(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python writes what a finalizer raises, and pytest raises it."""

    def full(_: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory is left")

    layers, x = build("gpt", LAYERS, lab.device)
    expected = gradients(layers, x)
    with monkeypatch.context() as patch:
        patch.setattr(lab.backend, "empty", full)
        with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
            stream_weights(layers, lab.device)
    gc.collect()
    assert_same(expected, gradients(layers.to(lab.device), x))


class Counting(nn.Module):
    """A buffer that forward changes, one that it reads, and one that is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0, persistent=False)
        self.register_buffer("nothing", None)
        self.alias = nn.Module()
        self.alias.register_buffer("calls", self.calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.where(self.mask, self.inner(x), x)


def test_buffers(device: torch.device) -> None:
    layers, x = build(Counting, 3, torch.device("cpu"))
    with stream_weights(layers, device) as handle:
        assert layers[0].calls.device == device
        assert layers[0].calls is layers[0].alias.calls
        forward(layers, x.detach().to(device))
        assert handle.stats().loads == 3
        assert list(layers.state_dict()) == list(build(Counting, 3, torch.device("cpu"))[0].state_dict())
    assert layers[0].calls.device.type == "cpu"
    assert layers[0].calls is layers[0].alias.calls
    assert [layer.calls.item() for layer in layers] == [1, 1, 1]


def test_abandoned_graphs(device: torch.device) -> None:
    def step(layers: nn.ModuleList, x: torch.Tensor) -> None:
        for some in (layers, layers[:2], layers[1:4]):
            forward(some, x)
        torch.manual_seed(1)
        backward(layers, x)

    check_step(*build("gpt", LAYERS, device), step)


def test_graph_outlives_the_handle(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    expected = gradients(layers, x)

    def step(layers: nn.ModuleList, x: torch.Tensor) -> None:
        with stream_weights(layers, device) as handle:
            loss = loss_of(forward(layers, x))
        loss.backward()
        assert_moved(handle)

    assert_same(expected, gradients(layers, x, step))
