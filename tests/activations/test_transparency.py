"""The same gradients with and without offloading, bit for bit, whatever the program does in between.

Copies are slow and memory is poisoned when it is let go and when it is handed out, so that a gradient is
right only if every byte came back in time.
"""

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lab import Lab
from models import (
    NOTHING,
    WIDTH,
    Composed,
    DecoderBlock,
    Offloading,
    assert_same,
    build,
    gradients,
    leaves_of,
    loss_of,
    offloading,
    step_gradients,
    through,
)
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

from offload import offload_layers

LAYERS = 5


pytestmark = pytest.mark.usefixtures("adverse")


def assert_on_time(offloaded: Offloading) -> None:
    """Something was offloaded, and no reload waited for backward to ask."""
    stats = offloaded.stats
    assert stats.reloaded_bytes > 0
    assert stats.late_reloads == 0


def assert_same_steps(leaves: list[torch.Tensor], step: Callable[[Offloading], object], offloaded: Offloading) -> None:
    """``step`` leaves the same gradients behind with and without offloading."""
    assert_same(gradients(leaves, lambda: step(NOTHING)), gradients(leaves, lambda: step(offloaded)))


def assert_transparent(leaves: list[torch.Tensor], step: Callable[[Offloading], object], offloaded: Offloading) -> None:
    """The same, and no layer was late."""
    assert_same_steps(leaves, step, offloaded)
    assert_on_time(offloaded)


@pytest.mark.parametrize("k", range(LAYERS))
@pytest.mark.parametrize("block", ["decoder", "gpt", "conv", "encoder"])
def test_every_k(block: str, k: int, device: torch.device) -> None:
    layers, x = build(block, LAYERS, device)
    expected = step_gradients(layers, x)
    offloaded = offloading(k, LAYERS, device)
    for _ in range(2):
        assert_same(expected, step_gradients(layers, x, offloaded, moves=k > 0))
    if k:
        assert_on_time(offloaded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", ["F0 F1 B0 B1", "F0 F1 B1 B0", "F0 F1 B0 F2 B1 B2", "F0 F1 F2 B1 B0 B2", "F0 B0 F1 B1"]
)
@pytest.mark.parametrize("k", [2, LAYERS - 1])
def test_microbatches_in_flight(order: str, k: int, device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    actions = order.split()
    inputs = [x.detach().roll(i, 1).requires_grad_() for i in range(len(actions) // 2)]

    def step(offloaded: Offloading) -> None:
        losses: dict[str, torch.Tensor] = {}
        for action in actions:
            phase, number = action
            if phase == "F":
                losses[number] = loss_of(offloaded.forward(layers, inputs[int(number)]))
            else:
                losses.pop(number).backward()

    assert_transparent(leaves_of(layers, *inputs), step, offloading(k, LAYERS, device))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(mode: Callable[[], Any], device: torch.device) -> None:
    layers, x = build("decoder", LAYERS, device)
    expected = step_gradients(layers, x)
    offloaded = offloading(2, LAYERS, device)
    once = 0
    for _ in range(3):
        before = offloaded.stats
        assert_same(expected, step_gradients(layers, x, offloaded))
        after = offloaded.stats
        once = once or after.offloaded_bytes
        # Were evaluated layers counted, other layers of the next step would be the first two.
        assert after.offloaded_bytes - before.offloaded_bytes == once
        with mode():
            plain = NOTHING.forward(layers, x)
            assert torch.equal(plain, offloaded.forward(layers, x))
            offloaded.forward(layers[:3], x)
        assert offloaded.stats == after
    assert_on_time(offloaded)


def evaluated_in_the_middle(layers: nn.ModuleList, x: torch.Tensor, offloaded: Offloading) -> None:
    y = offloaded.forward(layers[:2], x)
    with torch.no_grad():
        offloaded.forward(layers, x)
    y = offloaded.forward(layers[2:], y)
    with torch.no_grad():
        offloaded.forward(layers, x)
    loss_of(y).backward()


def retained(layers: nn.ModuleList, x: torch.Tensor, offloaded: Offloading) -> None:
    loss = loss_of(offloaded.forward(layers, x))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def in_two_halves(layers: nn.ModuleList, x: torch.Tensor, offloaded: Offloading) -> None:
    """The first backward stops in the middle of the layers, the second reads the graph once more and goes on."""
    middle = offloaded.forward(layers[:2], x)
    loss = loss_of(offloaded.forward(layers[2:], middle))
    torch.autograd.grad(loss, middle, retain_graph=True)
    loss.backward()


def in_inference_mode(layers: nn.ModuleList, x: torch.Tensor, offloaded: Offloading) -> None:
    loss = loss_of(offloaded.forward(layers, x))
    with torch.inference_mode():
        loss.backward()


def twice_differentiated(layers: nn.ModuleList, x: torch.Tensor, offloaded: Offloading) -> None:
    loss = loss_of(offloaded.forward(layers, x))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()


def first_layers_frozen(layers: nn.ModuleList, x: torch.Tensor, offloaded: Offloading) -> None:
    layers[:2].requires_grad_(False)
    loss_of(offloaded.forward(layers, x.detach())).backward()


def under_autocast(layers: nn.ModuleList, x: torch.Tensor, offloaded: Offloading) -> None:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = offloaded.forward(layers, x)
    loss_of(y).backward()


def read_by_several(layers: nn.ModuleList, x: torch.Tensor, offloaded: Offloading) -> None:
    outputs = [x]
    for layer in layers:
        outputs.append(offloaded.layer(layer, outputs[-1]))
    y = outputs[-1] * outputs[1].sigmoid() + outputs[2]
    (loss_of(y) + loss_of(outputs[1])).backward()


@pytest.mark.parametrize(
    ("step", "block", "k"),
    [
        (evaluated_in_the_middle, "decoder", 3),
        (retained, "decoder", 3),
        (in_two_halves, "decoder", 4),
        (in_inference_mode, "gpt", 3),
        (twice_differentiated, "gpt", 2),
        (twice_differentiated, "gpt", LAYERS - 1),
        (read_by_several, "decoder", 3),
        (first_layers_frozen, "decoder", 3),
        (under_autocast, "decoder", 3),
    ],
)
def test_every_way_to_run_a_step(step: Callable[..., None], block: str, k: int, device: torch.device) -> None:
    layers, x = build(block, LAYERS, device)
    assert_transparent(leaves_of(layers, x), partial(step, layers, x), offloading(k, LAYERS, device))


@pytest.mark.slow
def test_context_inside_another(device: torch.device) -> None:
    """An outer layer that runs inner layers with a context of their own: each level moves what it saves itself."""
    inner, x = build("decoder", LAYERS, device)
    outer, _ = build("gpt", LAYERS, device)

    def step(around: Offloading, within: Offloading) -> None:
        y = x
        for layer in outer:
            y = around.layer(lambda y, layer=layer: layer(y) + within.forward(inner, y), y)
        loss_of(y).backward()

    leaves = [x, *inner.parameters(), *outer.parameters()]
    around, within = offloading(2, LAYERS, device), offloading(3, LAYERS, device)
    assert_same(gradients(leaves, lambda: step(NOTHING, NOTHING)), gradients(leaves, lambda: step(around, within)))
    assert_on_time(around)
    assert_on_time(within)


def test_each_layer_has_a_loss_of_its_own(device: torch.device) -> None:
    """Backward of a layer follows its forward at once, so its graph has gone when the next layer begins."""
    layers, x = build("decoder", LAYERS, device)

    def step(offloaded: Offloading) -> None:
        y = x
        for layer in layers:
            y = offloaded.layer(layer, y)
            loss_of(y).backward()
            y = y.detach()

    offloaded = offloading(3, LAYERS, device)
    leaves = leaves_of(layers, x)
    for _ in range(2):
        assert_same_steps(leaves, step, offloaded)
        assert list(offloaded.context._round.sets) == list(range(LAYERS))
    assert offloaded.stats.offloaded_bytes > 0


def measures_itself(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        layer(x).norm().item()  # a graph that goes at once
        return x.view_as(x)

    return forward


@pytest.mark.parametrize("kind", ["checkpoint", "reentrant checkpoint", "measures itself"])
def test_layers_whose_graph_goes_in_forward(kind: str, device: torch.device) -> None:
    """They save something, but what they return does not need it: the round goes on."""
    layers, x = build("decoder", LAYERS, device)
    layers[:2].requires_grad_(kind == "measures itself")
    x = x.detach()
    reentrant = kind == "reentrant checkpoint"
    first = [
        measures_itself(layer) if kind == "measures itself" else partial(checkpoint, layer, use_reentrant=reentrant)
        for layer in layers[:2]
    ]

    def step(offloaded: Offloading) -> None:
        loss_of(offloaded.forward([*first, *layers[2:]], x)).backward()

    leaves = leaves_of(layers[2:])
    offloaded = offloading(3, LAYERS, device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        for _ in range(2):
            assert_same_steps(leaves, step, offloaded)
    assert_on_time(offloaded)
    assert offloaded.context.microbatch == 1


@dataclasses.dataclass
class Hidden:
    states: list[torch.Tensor]
    extra: dict[str, Any]


NESTED: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda y: (None, [(y,), 1.0]), lambda given: given[1][0][0]),
    "dict": (lambda y: {"hidden": {"y": y}, "mask": y > 0}, lambda given: given["hidden"]["y"]),
    "dataclass": (
        lambda y: Hidden(states=[y], extra={"y": 2 * y, "none": None}),
        lambda given: given.states[0] + given.extra["y"],
    ),
}
"""What wraps a layer's output, and what takes it out again."""


@pytest.mark.parametrize(("wrap", "take"), NESTED.values(), ids=list(NESTED))
def test_nested_outputs_of_offloaded_layers(
    wrap: Callable[[torch.Tensor], Any], take: Callable[[Any], torch.Tensor], device: torch.device
) -> None:
    layers, x = build(
        lambda: Composed(lambda own, given: wrap(own.block(take(given))), block=DecoderBlock()), LAYERS, device
    )

    def step() -> None:
        loss_of(take(through(layers, wrap(x)))).backward()

    leaves = leaves_of(layers, x)
    expected = gradients(leaves, step)
    with offload_layers(layers, 3, min_bytes=0) as handle:
        assert_same(expected, gradients(leaves, step))
        stats = handle.stats()
    # Had the outputs not been found in there, backward would have to ask for each layer.
    assert stats.reloaded_bytes > 0
    assert stats.late_reloads == 0


@pytest.mark.slow
def test_hooks_are_not_compiled(device: torch.device, lab: Lab) -> None:
    """The compiler leaves PyTorch's own modules to the interpreter, and looks at all that is called from there."""
    lab.slow()  # else it finds the delays of the tests
    compiled: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled.append(graph)
        return aot_eager(graph, inputs)

    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)).to(device)
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    for layer in layers:
        layer.compile(backend=count, dynamic=False)
    expected = step_gradients(layers, x)
    with offload_layers(layers, 1, min_bytes=0) as handle:
        assert_same(expected, step_gradients(layers, x))
    assert handle.stats().reloaded_bytes > 0
    # With hooks on it, some releases of PyTorch compile the layer once more; its own operations must be all.
    called = {node.target for graph in compiled for node in graph.graph.nodes if node.op == "call_function"}
    assert called <= {torch._C._nn.linear, torch._C._nn.gelu}


@pytest.mark.slow
def test_compiled_layers_with_hooks(device: torch.device) -> None:
    layers, x = build("decoder", 3, device)
    for layer in layers:
        layer.compile(backend="aot_eager", dynamic=False)
    expected = step_gradients(layers, x)
    with offload_layers(layers, 1, min_bytes=0) as handle:
        assert_same(expected, step_gradients(layers, x))
        assert handle.stats().reloaded_bytes > 0
        assert handle.stats().late_reloads == 0
