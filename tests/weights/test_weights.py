"""Streamed weights give the same gradients as weights on the device, bit for bit, whatever the program does.

Copies are slow, slots are poisoned before each load and gradients when they are let go, so that a number is
right only if every byte was there in time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lab import Lab
from models import WIDTH, GptBlock, Recurrent, build, loss_of
from streaming import assert_moved, assert_same, gradients_of, plain
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import StreamedWeights, get_cpu_offload_context, offload_layers, stream_weights

LAYERS = 5

Forward = Callable[[Sequence[nn.Module], Any], Any]


@pytest.fixture
def device(device: torch.device, lab: Lab) -> torch.device:
    lab.adverse()
    return device


def assert_same_when_streamed(
    leaves: Sequence[torch.Tensor], step: Callable[[], object], layers: nn.ModuleList, device: torch.device
) -> None:
    """``step`` leaves the same gradients behind with and without streaming."""
    expected = gradients_of(leaves, step)
    with stream_weights(layers, device) as handle:
        for _ in range(2):
            assert_same(expected, gradients_of(leaves, step))
        assert_moved(handle)


def check(
    layers: nn.ModuleList,
    x: torch.Tensor,
    forward: Forward = plain,
    *,
    microbatches: int = 1,
    steps: int = 2,
    reference: Forward | None = None,
    **options: Any,
) -> StreamedWeights:
    """Compare gradients with and without streaming; the handle that it returns is removed already."""
    leaves = [x, *layers.parameters()]

    def step(run: Forward) -> None:
        for _ in range(microbatches):
            loss_of(run(layers, x)).backward()

    expected = gradients_of(leaves, lambda: step(reference or forward))
    with stream_weights(layers, x.device, **options) as handle:
        for _ in range(steps):
            assert_same(expected, gradients_of(leaves, lambda: step(forward)))
            assert all(parameter.device.type == "cpu" for parameter in layers.parameters())
    assert_moved(handle)
    return handle


@pytest.mark.parametrize("num_slots", [2, 3, 9])
@pytest.mark.parametrize("block", ["decoder", "gpt", "conv", "encoder"])
def test_every_block(block: str, num_slots: int, device: torch.device) -> None:
    layers, x = build(block, LAYERS, device)
    stats = check(layers, x, num_slots=num_slots).stats()
    # Each layer twice, but the last ones stay for backward.
    assert stats.loads == 2 * (2 * LAYERS - min(num_slots, LAYERS))
    assert stats.late_loads == 2
    assert stats.staging_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", ["decoder", "gpt", "encoder"])
def test_microbatches(block: str, dtype: torch.dtype, device: torch.device) -> None:
    layers, x = build(block, LAYERS, device)
    layers, x = layers.to(dtype), x.detach().to(dtype).requires_grad_()
    stats = check(layers, x, microbatches=3).stats()
    assert stats.added_bytes == stats.gradient_bytes * 2 // 3
    assert stats.loads == 6 * (2 * LAYERS - 2)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_in_float32(microbatches: int, device: torch.device) -> None:
    layers, x = build("decoder", LAYERS, device)
    layers, x = layers.to(torch.bfloat16), x.detach().to(torch.bfloat16)
    leaves = list(layers.parameters())

    def one(scale: int) -> None:
        loss_of(plain(layers, x * scale)).backward()

    parts = [gradients_of(leaves, lambda: one(scale + 1)) for scale in range(microbatches)]  # noqa: B023
    expected = [sum((part.float() for part in column), torch.zeros(())) for column in zip(*parts, strict=True)]
    with stream_weights(layers, device, grad_dtype=torch.float32) as handle:
        for _ in range(2):
            assert_same(expected, gradients_of(leaves, lambda: [one(scale + 1) for scale in range(microbatches)]))
        assert handle.stats().gradient_host_bytes >= 2 * sum(leaf.numel() * 2 for leaf in leaves)
    assert_moved(handle)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_gradients_in_float32_of_a_shared_weight(microbatches: int, device: torch.device) -> None:
    """What one backward gives is added up in float32, too, as autograd does where ``grad_dtype`` says so."""
    torch.manual_seed(0)
    shared = nn.Linear(WIDTH, WIDTH)
    layers = nn.ModuleList(nn.Sequential(shared, nn.Tanh()) for _ in range(3))
    layers, x = layers.to(torch.bfloat16), torch.randn(32, WIDTH).to(device, torch.bfloat16)
    twin = copy.deepcopy(layers).to(device)
    for parameter in twin.parameters():
        parameter.grad_dtype = torch.float32
    with stream_weights(layers, device, grad_dtype=torch.float32) as handle:
        for model in (twin, layers):
            for scale in range(microbatches):
                loss_of(plain(model, x * (scale + 1))).backward()
    assert_moved(handle)
    assert_same([p.grad.cpu() for p in twin.parameters()], [p.grad for p in layers.parameters()])


def test_gradients_that_were_there_before(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    twin = copy.deepcopy(layers)
    for one, other in zip(layers.parameters(), twin.parameters(), strict=True):
        one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
    torch.manual_seed(1)
    loss_of(plain(twin, x)).backward()
    with stream_weights(layers, device) as handle:
        torch.manual_seed(1)
        loss_of(plain(layers, x)).backward()
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


# Recomputation and activation offload.


def checkpointed(use_reentrant: bool) -> Forward:
    def forward(layers: Sequence[nn.Module], x: Any) -> Any:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x

    return forward


class InnerCheckpoint(GptBlock):
    """Recomputes a part of itself, where no module hook of the layer runs."""

    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + checkpoint(self.out, self.norm1(x), use_reentrant=self.use_reentrant)
        return x + checkpoint(lambda y: self.mlp(self.norm2(y)), x, use_reentrant=self.use_reentrant)


class InnerReentrantCheckpoint(InnerCheckpoint):
    use_reentrant = True


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers(use_reentrant: bool, device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    stats = check(layers, x, checkpointed(use_reentrant), microbatches=2).stats()
    assert stats.loads == 4 * (2 * LAYERS - 2)
    assert stats.late_loads == 4


@pytest.mark.parametrize("block", [InnerCheckpoint, InnerReentrantCheckpoint])
def test_checkpoint_inside_a_layer(block: Callable[[], nn.Module], device: torch.device) -> None:
    stats = check(*build(block, LAYERS, device)).stats()
    assert stats.late_loads == 2


class UsedTwice(nn.Module):
    """Uses a weight in two reentrant checkpoints and once more: three runs of autograd bring its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda x: torch.tanh(self.linear(x)), x, use_reentrant=True)
        return x + checkpoint(self.linear, torch.tanh(self.linear(y)), use_reentrant=True)


@pytest.mark.slow
@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("block", ["decoder", "gpt", "encoder"])
def test_with_offloaded_activations(block: str, weights_first: bool, device: torch.device) -> None:
    layers, x = build(block, LAYERS, device)
    leaves = [x, *layers.parameters()]

    def step() -> None:
        for _ in range(2):
            loss_of(plain(layers, x)).backward()

    expected = gradients_of(leaves, step)
    if weights_first:
        streamed = stream_weights(layers, device)
        offloaded = offload_layers(layers, 3, min_bytes=0)
    else:
        offloaded = offload_layers(layers, 3, min_bytes=0)
        streamed = stream_weights(layers, device)
    with streamed, offloaded:
        for _ in range(2):
            assert_same(expected, gradients_of(leaves, step))
        assert offloaded.stats().offloaded_bytes > 0
        # No view of a slot went along.
        slots = streamed.stats().slot_bytes
        assert offloaded.stats().skipped["parameter"] > 0
        assert slots > 0


def test_with_an_offload_context_around_checkpoints(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    context, sync = get_cpu_offload_context(True, 3, LAYERS, min_bytes=0, device=device)

    def forward(layers: Sequence[nn.Module], x: Any) -> Any:
        for layer in layers:
            with context:
                y = checkpoint(layer, x, use_reentrant=False)
            x = sync(y)
        return x

    check(layers, x, forward, microbatches=2, reference=checkpointed(False))
    assert context.stats().offloaded_bytes > 0


def autocast(layers: Sequence[nn.Module], x: Any, **options: Any) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16, **options):
        return plain(layers, x)


class Repeated(nn.Module):
    """Uses a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(torch.tanh(self.linear(x)))


def test_autocast_of_a_weight_that_is_used_several_times(device: torch.device) -> None:
    """PyTorch casts the weight once and adds in the lower precision; streaming is as without that cache."""
    layers, x = build(Repeated, LAYERS, device)
    check(layers, x, autocast, reference=partial(autocast, cache_enabled=False), microbatches=2)
    with pytest.raises(AssertionError, match="differs"):
        check(layers.to(device), x, autocast)


@pytest.mark.slow
# The compiler looks at the weights, which are no leaves here; what it does not show becomes an error in tests.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers(device: torch.device) -> None:
    layers, x = build("decoder", LAYERS, device)
    for layer in layers:
        layer.compile(backend="aot_eager")
    check(layers, x, microbatches=2)


# Which gradients there are.


def test_frozen_layers(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    layers[1].requires_grad_(False)
    layers[3].mlp.requires_grad_(False)
    stats = check(layers, x, microbatches=2).stats()
    trainable = sum(p.numel() * 4 for p in layers.parameters() if p.requires_grad)
    assert stats.gradient_bytes == 4 * trainable


def test_frozen_from_the_bottom(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    layers[:3].requires_grad_(False)
    leaves = list(layers.parameters())
    x = x.detach()

    def step() -> None:
        loss_of(plain(layers, x)).backward()

    expected = gradients_of(leaves, step)
    with stream_weights(layers, device) as handle:
        assert_same(expected, gradients_of(leaves, step))
        # Backward ends where nothing needs a gradient; one layer was loaded ahead.
        assert handle.stats().loads == LAYERS + 1
    assert_moved(handle)


def test_unfreezing_between_steps(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    twin = copy.deepcopy(layers)
    layers.requires_grad_(False)
    layers[4].requires_grad_()
    with stream_weights(layers, device) as handle:
        loss_of(plain(layers, x)).backward()
        loss_of(plain(layers, x)).backward()
        layers.requires_grad_()
        leaves, twins = [x, *layers.parameters()], [x, *twin.parameters()]
        for microbatches in (1, 2):

            def step(model: nn.ModuleList, microbatches: int = microbatches) -> None:
                for _ in range(microbatches):
                    loss_of(plain(model, x)).backward()

            expected = gradients_of(twins, lambda: step(twin))
            assert_same(expected, gradients_of(leaves, lambda: step(layers)))
    assert_moved(handle)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.base(x) + self.b(self.a(x)))


def test_lora(device: torch.device) -> None:
    layers, x = build(Lora, LAYERS, device)
    stats = check(layers, x, microbatches=2).stats()
    assert stats.gradient_bytes == 4 * LAYERS * 2 * 2 * WIDTH * 4
    assert stats.gradient_host_bytes < stats.weight_bytes / 2
    assert stats.staging_bytes < stats.weight_bytes / 2


class TiedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def shared_layers(device: torch.device) -> tuple[nn.ModuleList, torch.Tensor]:
    """Layers 0, 2 and 4 share a weight, as an embedding and a head do; layers 1 and 3 a whole module."""
    layers, x = build("gpt", LAYERS, device)
    layers[2].out.weight = layers[0].out.weight
    layers[4].out.weight = layers[0].out.weight
    layers[3].mlp = layers[1].mlp
    return layers, x


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_between_layers(dtype: torch.dtype, num_slots: int, device: torch.device) -> None:
    layers, x = shared_layers(device)
    layers, x = layers.to(dtype), x.detach().to(dtype).requires_grad_()
    check(layers, x, microbatches=3, num_slots=num_slots)


# How layers are called.


@pytest.mark.slow
@pytest.mark.parametrize("order", [[0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2], [2, 0, 1], [0, 2], [1], [0, 1, 2, 1, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_order_of_calls(order: list[int], dtype: torch.dtype, device: torch.device) -> None:
    layers, x = build("gpt", 3, device)
    check(layers.to(dtype), x.detach().to(dtype).requires_grad_(), called(*order), microbatches=3)


@pytest.mark.parametrize("together", [True, False])
def test_several_microbatches_in_flight(together: bool, device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    leaves = [x, *layers.parameters()]

    def step() -> None:
        losses = [loss_of(plain(layers, x * scale)) for scale in (1, 2, 3)]
        if together:
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward()

    assert_same_when_streamed(leaves, step, layers, device)


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
    state = plain(layers, {"x": x, "passed": None, "losses": ()})
    return state["x"] + sum(state["losses"])


def called(*numbers: int) -> Forward:
    return lambda layers, x: plain([layers[number] for number in numbers], x)


def skipped_at_random(layers: Sequence[nn.Module], x: Any) -> Any:
    return plain([layer for layer in layers if torch.rand(()) < 0.6], x)


def towers(layers: Sequence[nn.Module], x: Any) -> Any:
    return plain(layers[:3], x) * plain(layers[3:], x)


def saved_on_cpu(layers: Sequence[nn.Module], x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return plain(layers, x)


def checkpointed_pairs(layers: Sequence[nn.Module], x: Any, use_reentrant: bool) -> Any:
    for first in range(0, len(layers), 2):
        x = checkpoint(plain, layers[first : first + 2], x, use_reentrant=use_reentrant)
    return x


def checkpointed_twice(layers: Sequence[nn.Module], x: Any) -> Any:
    return checkpoint(plain, layers, checkpoint(plain, layers, x, use_reentrant=True), use_reentrant=True)


def checkpointed_at_last(layers: Sequence[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = checkpoint(layer, layer(layer(x)), use_reentrant=True)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("block", "number", "forward"),
    [
        pytest.param(partial(Recurrent, nn.LSTM), 4, plain, id="LSTM"),
        pytest.param(partial(Recurrent, nn.GRU), 4, plain, id="GRU"),
        pytest.param("gpt", 6, partial(checkpointed_pairs, use_reentrant=False), id="checkpointed pairs"),
        pytest.param("gpt", 6, partial(checkpointed_pairs, use_reentrant=True), id="reentrant checkpoints of pairs"),
        pytest.param("gpt", 3, checkpointed_twice, id="reentrant checkpoints of layers called twice"),
        pytest.param("gpt", 3, checkpointed_at_last, id="reentrant checkpoint of a layer called in a row"),
        pytest.param(
            InnerReentrantCheckpoint, 3, called(0, 0, 0, 1, 1, 1, 2, 2), id="reentrant checkpoints inside, in a row"
        ),
        pytest.param(UsedTwice, 3, plain, id="reentrant checkpoints that share a weight of their layer"),
        pytest.param("decoder", LAYERS, saved_on_cpu, id="saved-tensor hooks of the user's"),
        pytest.param("decoder", LAYERS, autocast, id="autocast"),
        pytest.param(TiedInside, LAYERS, plain, id="weights tied inside a layer"),
        pytest.param("gpt", 8, skipped_at_random, id="skipped at random"),
        pytest.param("gpt", 6, towers, id="two towers"),
        pytest.param(Passing, LAYERS, passed_on, id="outputs passed on, and side losses"),
    ],
)
@pytest.mark.filterwarnings("ignore:RNN module weights are not part")
def test_every_way_to_call_layers(
    block: Any, number: int, forward: Forward, dtype: torch.dtype, device: torch.device
) -> None:
    layers, x = build(block, number, device)
    check(layers.to(dtype), x.detach().to(dtype).requires_grad_(), forward, microbatches=3)


def test_modules_between_layers(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    between = nn.Linear(WIDTH, WIDTH).to(device)

    def forward(layers: Sequence[nn.Module], x: Any) -> Any:
        for layer in layers:
            x = between(torch.tanh(layer(x)))
        return x

    leaves = [x, *layers.parameters(), *between.parameters()]

    def step() -> None:
        loss_of(forward(layers, x)).backward()

    assert_same_when_streamed(leaves, step, layers, device)
    assert all(parameter.device == device for parameter in between.parameters())


def test_embedding_and_head_as_layers(device: torch.device) -> None:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50, bias=False)
    head.weight = embedding.weight
    layers = nn.ModuleList([embedding, GptBlock(), GptBlock(), head]).to(device)
    tokens = torch.randint(50, (2, 8), device=device)
    leaves = list(layers.parameters())

    def step() -> None:
        for _ in range(2):
            F.cross_entropy(plain(layers, tokens).flatten(0, 1), tokens.flatten()).backward()

    assert_same_when_streamed(leaves, step, layers, device)


# Evaluation, buffers, and what goes on between steps.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_forward_and_backward(mode: Callable[[], Any], device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    leaves = [x, *layers.parameters()]
    layers.eval()
    expected_output = plain(layers, x).detach()
    expected = gradients_of(leaves, lambda: loss_of(plain(layers, x)).backward())
    with stream_weights(layers, device) as handle:

        def step() -> None:
            loss = loss_of(plain(layers, x))
            with mode():
                for _ in range(3):
                    assert torch.equal(plain(layers, x), expected_output)
                assert torch.equal(plain(layers[:2], x), plain(layers[:2], x))
            loss.backward()

        for _ in range(2):
            assert_same(expected, gradients_of(leaves, step))
    assert_moved(handle)


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
        plain(layers, x.detach().to(device))
        assert handle.stats().loads == 3
        assert list(layers.state_dict()) == list(build(Counting, 3, torch.device("cpu"))[0].state_dict())
    assert layers[0].calls.device.type == "cpu"
    assert layers[0].calls is layers[0].alias.calls
    assert [layer.calls.item() for layer in layers] == [1, 1, 1]


def test_retained_graph(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    leaves = [x, *layers.parameters()]

    def step() -> None:
        loss = loss_of(plain(layers, x))
        loss.backward(retain_graph=True)
        loss.backward()

    assert_same_when_streamed(leaves, step, layers, device)


def test_abandoned_graphs(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    leaves = [x, *layers.parameters()]
    expected = gradients_of(leaves, lambda: loss_of(plain(layers, x)).backward())

    def step() -> None:
        torch.manual_seed(1)
        loss_of(plain(layers, x)).backward()

    with stream_weights(layers, device) as handle:
        plain(layers, x)
        plain(layers[:2], x)
        plain(layers[1:4], x)
        assert_same(expected, gradients_of(leaves, step))
    assert_moved(handle)


def test_gradients_of_inputs_alone(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(loss_of(plain(layers, x)), x)
    with stream_weights(layers, device) as handle:
        torch.manual_seed(1)
        (found,) = torch.autograd.grad(loss_of(plain(layers, x)), x)
        assert torch.equal(expected, found)
        assert all(parameter.grad is None for parameter in layers.parameters())
        assert handle.stats().loads == 2 * LAYERS - 2


def test_backward_in_inference_mode(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    leaves = [x, *layers.parameters()]

    def step() -> None:
        loss = loss_of(plain(layers, x))
        with torch.inference_mode():
            loss.backward()

    assert_same_when_streamed(leaves, step, layers, device)


def test_graph_outlives_the_handle(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    leaves = [x, *layers.parameters()]
    expected = gradients_of(leaves, lambda: loss_of(plain(layers, x)).backward())

    def step() -> None:
        with stream_weights(layers, device) as handle:
            loss = loss_of(plain(layers, x))
        loss.backward()
        assert_moved(handle)

    assert_same(expected, gradients_of(leaves, step))


def test_streamed_again_after_remove(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    check(layers, x)
    stats = check(layers.to(device), x, num_slots=3).stats()
    assert stats.loads == 2 * (2 * LAYERS - 3)
