"""``offload_layers``: the same for models whose forward cannot be edited."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults import in_threads
from lab import Lab
from llama import LAYERS
from models import (
    Composed,
    DecoderBlock,
    GptBlock,
    assert_same,
    build,
    gradients,
    leaves_of,
    loss_of,
    step_gradients,
    through,
)
from saving import saved_and_loaded
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import Schedule, offload_layers, stream_weights
from offload.device.backend import Wait

pytestmark = pytest.mark.usefixtures("adverse")


HANDLES: list[tuple[Any, bool]] = []


@pytest.fixture(autouse=True)
def _something_was_offloaded() -> Iterator[None]:
    """By each handle of a test that passes, and in time: the same gradients would also be found without the library."""
    HANDLES.clear()
    yield
    stats = [(handle.stats(), late) for handle, late in HANDLES]
    HANDLES.clear()
    assert all(one.reloaded_bytes > 0 and (late or one.late_reloads == 0) for one, late in stats), stats


def handle_for(
    layers: Any, num_layers: int | None = 3, *, moves: bool = True, late: bool = False, **options: Any
) -> Any:
    """A handle by which something ``moves``, of which backward has to ask for nothing unless layers may be ``late``."""
    handle = offload_layers(layers, num_layers, **{"min_bytes": 0, **options})
    HANDLES.extend([(handle, late)] if moves else [])
    return handle


def hooks_are_gone() -> bool:
    """Whether autograd saves tensors as usual."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_two_handles_in_one_model(device: torch.device) -> None:
    layers, x = build("decoder", 6, device)
    expected = step_gradients(layers, x)
    with handle_for(layers[:3], 1) as first, handle_for(iter(layers[3:]), 1) as second:
        assert_same(expected, step_gradients(layers, x))
        # The very first input is a leaf, which stays.
        assert first.stats().reloaded_bytes == second.stats().reloaded_bytes - x.nbytes > 0


@pytest.mark.parametrize(
    ("options", "hooked"), [({"num_layers": 0}, 0), ({"memory_budget": "1GiB"}, 0), ({"num_layers": 2}, 3)]
)
def test_layers_that_are_kept_have_no_hooks(options: dict[str, Any], hooked: int, device: torch.device) -> None:
    """But for the layer behind the last one that is offloaded, which may save the same tensors."""
    found = list[bool]()

    def noted() -> nn.Module:
        def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
            found.append(not hooks_are_gone())
            return own.block(x)

        return Composed(forward, block=GptBlock())

    layers, x = build(noted, 6, device)
    expected = step_gradients(layers, x)
    with handle_for(layers, **{"num_layers": None, "moves": hooked > 0, **options}):
        for _ in range(4):
            found.clear()
            assert_same(expected, step_gradients(layers, x))
    assert found == [number < hooked for number in range(6)]


def test_schedule_of_ones_own(device: torch.device) -> None:
    layers, x = build("decoder", 3, device)
    schedule = Schedule.from_synchronization_dict({1: (True, 2, False, 1)}, 3)
    expected = step_gradients(layers, x)
    plan = SimpleNamespace(schedule=schedule)
    with pytest.raises(ValueError, match="schedule and plan exclude each other"):
        handle_for(layers, None, plan=plan, schedule=schedule)
    with pytest.raises(TypeError, match=r"plan must be what offload\.plan returns"):
        handle_for(layers, None, plan=plan)
    with handle_for(layers, None, schedule=schedule) as handle:
        assert handle.schedule is schedule
        assert_same(expected, step_gradients(layers, x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_recompute_themselves(reentrant: bool, device: torch.device) -> None:

    def checkpointed() -> nn.Module:
        """Recomputes its own body in backward."""
        return Composed(lambda own, x: x * checkpoint(own.block, x.tanh(), use_reentrant=reentrant), block=GptBlock())

    layers, x = build(checkpointed, LAYERS, device)
    expected = step_gradients(layers, x)
    with handle_for(layers) as handle:
        for _ in range(2):
            assert_same(expected, step_gradients(layers, x))
        # The inputs of the checkpoints are offloaded; what is recomputed is not.
        assert handle._hooks.context.microbatch == 1


@pytest.mark.filterwarnings("ignore:a whole round of")
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_their_caller_recomputes(reentrant: bool, device: torch.device) -> None:
    """The checkpoint decides what is saved, the hooks leave it alone and count no layer twice."""
    layers, x = build("gpt", LAYERS, device)

    def step() -> None:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=reentrant)
        loss_of(y).backward()

    leaves = leaves_of(layers, x)
    expected = gradients(leaves, step)
    assert_same(expected, step_gradients(layers, x))
    with handle_for(layers) as handle:
        for _ in range(2):
            assert_same(expected, gradients(leaves, step))
        assert handle.stats().offloaded_bytes == 0
        assert_same(expected, step_gradients(layers, x))


class ChecksPoint(DecoderBlock):
    """As in older Hugging Face models: each call of the layer, hooks and all, is checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self._gradient_checkpointing_func: Any = partial(checkpoint, use_reentrant=reentrant)

    def __call__(self, *args: Any) -> Any:
        return self._gradient_checkpointing_func(super().__call__, *args)


def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_whose_calls_are_checkpointed(reentrant: bool, streamed: bool, device: torch.device) -> None:
    """What the checkpoint saves is all there is to move: the layers' inputs."""
    layers, x = build(lambda: ChecksPoint(reentrant), LAYERS, device)
    expected = step_gradients(layers, x)
    weights = stream_weights(layers, device) if streamed else nullcontext()
    with weights, handle_for(layers) as handle:
        for _ in range(2):
            before = handle.stats().offloaded_bytes
            assert_same(on_host(expected), on_host(step_gradients(layers, x)))
            # The first one's input is a leaf.
            assert handle.stats().offloaded_bytes - before == 2 * x.nbytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_policies_of_layers_whose_calls_are_checkpointed(reentrant: bool, device: torch.device) -> None:
    """A second run of one ends with what the checkpoint saves, not with the layer inside of it."""
    layers, x = build(lambda: ChecksPoint(reentrant), LAYERS, device)
    expected = step_gradients(layers, x)
    options = {"policies": {"*": "recompute"}, "min_bytes": 0, "device": device}
    with offload_layers(layers, 2, **options) as handle:
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
        assert {*handle.regions(0).values()} == {"recompute"}
        assert handle.stats().wasted_bytes == 0


@pytest.mark.parametrize("weights_first", [False, True])
def test_with_streamed_weights_in_either_order(weights_first: bool, device: torch.device) -> None:
    layers, x = build("decoder", LAYERS, device)
    expected = step_gradients(layers, x)
    streamed = stream_weights(layers, device) if weights_first else None
    with handle_for(layers, device=device) as handle:
        with streamed or stream_weights(layers, device) as weights:
            for _ in range(2):
                assert_same(
                    [tensor.to(device) for tensor in expected], [g.to(device) for g in step_gradients(layers, x)]
                )
            assert weights.stats().loads == 2 * (2 * LAYERS - 2)
        assert handle.stats().skipped["parameter"] > 0  # no view of a slot was offloaded


class Fails(nn.Module):
    """Raises in its forward while ``error`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.block = DecoderBlock()
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        if self.error is not None:
            raise self.error
        return y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "error"),
    [(0, KeyError("failed")), (0, KeyboardInterrupt()), (2, SystemExit()), (LAYERS - 1, KeyError("failed"))],
    ids=["first", "first, interrupted", "middle", "last"],
)
def test_error_in_a_layer(failing: int, error: BaseException, device: torch.device) -> None:
    layers, x = build(Fails, LAYERS, device)
    expected = step_gradients(layers, x)
    with handle_for(layers) as handle:
        assert_same(expected, step_gradients(layers, x))
        per_step = handle.stats().offloaded_bytes
        layers[failing].error = error
        with pytest.raises(type(error)):
            step_gradients(layers, x)
        layers[failing].error = None
        error.__traceback__ = None
        before = handle.stats()
        assert_same(expected, step_gradients(layers, x))
        assert hooks_are_gone()
        assert handle.stats().offloaded_bytes - before.offloaded_bytes == per_step


def test_interrupt_that_ends_the_block(device: torch.device) -> None:
    """The hooks that module calls leave behind on an interrupt go with the handle."""
    layers, x = build(Fails, LAYERS, device)
    expected = step_gradients(layers, x)
    layers[1].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), handle_for(layers, moves=False):
        step_gradients(layers, x)
    assert hooks_are_gone()
    layers[1].error = None
    assert_same(expected, step_gradients(layers, x))


def test_error_that_is_handled_around_a_layer(device: torch.device) -> None:
    """Layers that run while an exception is being handled have not failed."""
    layers, x = build("decoder", LAYERS, device)
    expected = step_gradients(layers, x)
    with handle_for(layers):
        try:
            raise KeyError("out of memory, say")
        except KeyError:
            assert_same(expected, step_gradients(layers, x))


def test_release_point_that_is_skipped(device: torch.device, lab: Lab) -> None:
    """Layer 0 is to be released before layer 2, which does not run: it is before layer 3."""
    layers, x = build("decoder", 4, device)
    with handle_for(layers, 2, late=True):
        made = lab.count_waits()
        y = layers[1](layers[0](x))
        assert made.count(Wait.RELEASE) == 0
        y = layers[3](y)
        assert made.count(Wait.RELEASE) == 2
        loss_of(y).backward()


def test_points_of_last_layers_that_are_skipped(device: torch.device) -> None:
    """What was to be released or reloaded in layers that do not run is so when backward begins; or it stays."""
    layers, x = build("decoder", 6, device)
    moves = {
        0: (True, 5, False, 1),  # released before layer 5, which does not run
        1: (True, 3, False, 4),  # reloaded before backward of layer 4, which does not run
        2: (True, 5, False, 4),  # both of that
    }

    def step() -> list[torch.Tensor]:
        y = through(layers[:4], x)
        return gradients(leaves_of(layers[:4], x), lambda: loss_of(y).backward())

    expected = step()
    with handle_for(layers, None, schedule=Schedule.from_synchronization_dict(moves, 6)) as handle:
        assert_same(expected, step())
        stats = handle.stats()
        assert 0.6 < stats.reloaded_bytes / stats.offloaded_bytes < 0.7  # two of three, that are alike


def test_layers_dropped_at_random_with_two_microbatches_in_flight(device: torch.device) -> None:
    layers, x = build("decoder", 4, device)
    leaves = leaves_of(layers, x)
    moved = 0
    for first, second in [((0, 1), (2, 3)), ((0, 2), (0, 1, 3)), ((3,), (0, 1, 2, 3)), ((1, 2), (1, 2))]:

        def step(chosen: tuple[tuple[int, ...], ...] = (first, second)) -> None:
            losses = []
            for numbers in chosen:
                y = x
                for number in numbers:
                    y = layers[number](y)
                losses.append(loss_of(y))
            for loss in losses:
                loss.backward()

        expected = gradients(leaves, step)
        with handle_for(layers, 2, moves=False) as handle:
            for _ in range(2):
                assert_same(expected, gradients(leaves, step))
            moved += handle.stats().reloaded_bytes
    assert moved


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_not_offloaded(duplicate: Callable[[nn.Module], nn.Module], device: torch.device) -> None:
    layers, x = build("decoder", LAYERS, device)
    expected = step_gradients(layers, x)
    with handle_for(layers) as handle:
        copied = duplicate(layers)
        assert_same(expected, step_gradients(copied, x))
        assert handle.stats().offloaded_bytes == 0
        with handle_for(copied):
            assert_same(expected, step_gradients(copied, x))
        assert handle.stats().offloaded_bytes == 0
        assert_same(expected, step_gradients(layers, x))
    assert_same(expected, step_gradients(copied, x))


def test_remove(device: torch.device) -> None:
    layers, x = build("decoder", LAYERS, device)
    expected = step_gradients(layers, x)
    before = [(dict(layer._forward_hooks), dict(layer._forward_pre_hooks), dict(vars(layer))) for layer in layers]
    handle = handle_for(layers)
    assert_same(expected, step_gradients(layers, x))
    handle.remove()
    handle.remove()
    stats = handle.stats()
    assert_same(expected, step_gradients(layers, x))
    assert handle.stats() == stats
    for layer, (forward_hooks, pre_hooks, attributes) in zip(layers, before, strict=True):
        assert dict(layer._forward_hooks) == forward_hooks
        assert dict(layer._forward_pre_hooks) == pre_hooks
        assert set(vars(layer)) == set(attributes)
    handle_for(layers, moves=False).remove()


@pytest.mark.parametrize("options", [{"num_layers": 2}, {"memory_budget": "1GiB"}, None], ids=str)
def test_a_removed_handle_is_no_context(options: dict[str, Any] | None) -> None:
    layers, _ = build("decoder", LAYERS, torch.device("cpu"))
    made: Any = stream_weights(layers, "cpu") if options is None else offload_layers(layers, **options)
    with made as handle:
        assert handle is made
        assert options is None or handle.state in ("measuring", "following")
    assert options is None or handle.state == "removed"
    with pytest.raises(RuntimeError, match="the handle must be in use, but it was removed"), handle:
        pass


def test_graph_that_is_alive_when_the_hooks_go(device: torch.device) -> None:
    layers, x = build("decoder", LAYERS, device)

    def step(remove: Callable[[], object] = lambda: None) -> None:
        y = through(layers, x)
        remove()
        loss_of(y).backward()

    leaves = leaves_of(layers, x)
    expected = gradients(leaves, step)
    handle = handle_for(layers)
    assert_same(expected, gradients(leaves, lambda: step(handle.remove)))


def test_repr() -> None:
    layers, _ = build("decoder", LAYERS, torch.device("cpu"))
    handle = handle_for(layers, moves=False)
    assert repr(handle) == "OffloadedLayers(DecoderBlock in OffloadContext(3 of 5 layers, device='cpu'))"
    handle.remove()
    assert repr(handle).endswith("device='cpu'), removed)")


def test_repr_within_a_budget() -> None:
    layers, x = build("decoder", LAYERS, torch.device("cpu"))
    with offload_layers(layers, memory_budget="64MiB", min_bytes=1) as handle:
        assert repr(handle) == "OffloadedLayers(DecoderBlock, measuring)"
        for _ in range(3):
            loss_of(through(layers, x)).backward()
        assert repr(handle) == f"OffloadedLayers(DecoderBlock, {handle.plan!r})"
    assert repr(handle).endswith(", removed)")


def test_refuses_to_be_applied_twice(device: torch.device) -> None:
    layers, x = build("decoder", LAYERS, device)
    expected = step_gradients(layers, x)
    with handle_for(layers):
        with pytest.raises(ValueError, match=r"layer 0 \(DecoderBlock\) is offloaded already; call remove\(\)"):
            handle_for(layers)
        with pytest.raises(ValueError, match=r"layer 1 \(DecoderBlock\) is offloaded already"):
            handle_for([nn.Linear(1, 1, device=device), *layers[3:]], 1)
        assert_same(expected, step_gradients(layers, x))
    handle_for(layers, moves=False).remove()


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (list, ValueError, "layers must hold at least one module, got none"),
    (lambda: [nn.Linear(1, 1), torch.exp], TypeError, r"layers must hold modules, got builtin_function\w* at 1"),
    (lambda: nn.Linear(1, 1), TypeError, "layers must be several modules, got one Linear; pass its list of layers"),
    (lambda: [nn.Linear(1, 1)] * 5, ValueError, "layers must hold each module once, got one again at 1; list it"),
    (lambda: [(outer := nn.Sequential(nn.Tanh())), outer[0]], ValueError, "layer 1 is a part of layer 0; list layers"),
    (lambda: [nn.Tanh() for _ in range(3)], ValueError, "num_layers must be at most model_layers - 1 = 2, got 3"),
]


@pytest.mark.parametrize(("layers", "kind", "text"), REFUSED)
def test_refusals(layers: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        handle_for(layers())


SIX = Schedule.default(2, 6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": Schedule(4)}, "the schedule must be over 6 layers, got one over 4"),
        ({"num_layers": 2, "memory_budget": "1GiB"}, "memory_budget excludes num_layers, which it decides"),
        ({"num_layers": 2, "schedule": SIX}, "schedule excludes num_layers, which it decides"),
        ({"num_layers": 2, "plan": SimpleNamespace(schedule=SIX)}, "plan excludes num_layers, which it decides"),
        ({"memory_budget": 0}, "memory_budget must be at least 1.00 KiB and less .*, got 0; write"),
        ({"memory_budget": 24}, "memory_budget must be at least 1.00 KiB and less .*, got 24; write"),
        ({"memory_budget": "0GiB"}, "got '0GiB'; write"),
        ({"memory_budget": 1 << 50}, f"got {1 << 50}; write"),
        ({"num_layers": "40GiB"}, r"got '40GiB'; for device memory, write memory_budget='40GiB'\."),
    ],
)
def test_refused_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        offload_layers([nn.Tanh() for _ in range(6)], **options)


@pytest.mark.filterwarnings("ignore:num_layers = model_layers - 1")
@pytest.mark.parametrize(("model_layers", "offloaded"), [(1, 0), (2, 1), (4, 3), (5, 4), (6, 4)])
def test_the_default_fits_the_number_of_layers(model_layers: int, offloaded: int) -> None:
    with offload_layers([nn.Tanh() for _ in range(model_layers)]) as handle:
        assert handle.schedule == Schedule.default(offloaded, model_layers)


def test_a_thread_goes_on_where_another_one_has_ended(device: torch.device) -> None:
    layers, x = build("decoder", LAYERS, device)
    expected = step_gradients(layers, x)
    with handle_for(layers) as handle:
        leaves = [x, *layers.parameters()]
        torch.manual_seed(1)
        [y] = in_threads(lambda: layers[0](x))
        found = torch.autograd.grad(loss_of(through(layers[1:], y)), leaves)
        assert_same(expected, found)
        assert handle.stats().offloaded_bytes > 0


def test_a_thread_may_run_later_layers_where_another_one_has_dropped_its_graph(device: torch.device) -> None:
    layers, x = build("decoder", LAYERS, device)
    expected = step_gradients(layers[1:], x)
    with handle_for(layers):
        layers[0](x)
        [found] = in_threads(lambda: step_gradients(layers[1:], x))
    assert_same(expected, found)


@pytest.mark.filterwarnings("ignore:num_layers = model_layers - 1")
def test_an_evaluation_in_another_thread_while_a_layer_runs(device: torch.device) -> None:
    """The layer ends as it would alone: what is saved behind it is none of the layer's."""
    layers, x = build("decoder", 4, device)

    def step() -> list[torch.Tensor]:
        def run() -> None:
            y = through(layers, x)
            assert hooks_are_gone()
            loss_of(y).backward()

        return gradients(leaves_of(layers, x), run)

    def evaluate() -> None:
        with torch.no_grad():
            through(layers, x)

    def meanwhile(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            in_threads(evaluate)

    expected = step()
    with handle_for(layers) as handle:
        assert_same(expected, step())
        in_a_step = handle.stats()
        for layer in layers:
            layer.norm1.register_forward_pre_hook(meanwhile)
        assert_same(expected, step())
        assert handle.stats().offloaded_storages == 2 * in_a_step.offloaded_storages
        assert handle.stats().offloaded_bytes == 2 * in_a_step.offloaded_bytes


@pytest.mark.parametrize("inside", [True, False], ids=["inside of a layer", "between layers"])
def test_the_same_layers_in_two_threads_are_refused(inside: bool, device: torch.device) -> None:
    layers, x = build("decoder", LAYERS, device)
    expected = step_gradients(layers, x)
    refused: list[str] = []

    def step() -> None:
        # Not from the first layer on, which begins another microbatch.
        try:
            for layer in layers if inside else layers[2:]:
                layer(x)
        except RuntimeError as error:
            refused.append(str(error))

    def meanwhile(*_: object) -> None:
        if not refused and threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=step, name="other", daemon=True)
            other.start()
            other.join()

    with handle_for(layers) as handle:
        assert_same(expected, step_gradients(layers, x))
        in_a_step = handle.stats().offloaded_bytes
        hook = (layers[1].norm2 if inside else layers[1]).register_forward_hook(meanwhile)
        assert_same(expected, step_gradients(layers, x))
        hook.remove()
        assert len(refused) == 1
        assert handle.stats().offloaded_bytes == 2 * in_a_step
        assert "'MainThread', which is in the forward of the same layers, but runs in 'other'" in refused[0]
        assert "use one copy of the model per thread" in refused[0]
        [found] = in_threads(lambda: step_gradients(layers, x))
        assert_same(expected, found)
        assert_same(expected, step_gradients(layers, x))
        assert handle.stats().offloaded_bytes == 4 * in_a_step
