"""The drop-in function and its context: the same interface as Transformer Engine's, errors that say what to do."""

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lab import Lab
from models import Offloading, assert_same, build, gradients, leaves_of, loss_of, offloading, step_gradients
from torch import nn

import offload
from offload import OffloadStateError, Schedule, get_cpu_offload_context

TRANSFORMER_ENGINE = {
    "enabled": False,
    "num_layers": 1,
    "model_layers": 1,
    "offload_activations": True,
    "offload_weights": False,
    "double_buffering": False,
    "manual_synchronization": False,
    "retain_pinned_cpu_buffers": False,
    "offload_stream": None,
}


def make(num_layers: int = 1, model_layers: int = 3, **options: Any) -> tuple[Any, ...]:
    return get_cpu_offload_context(True, num_layers, model_layers, device="cpu", **{"min_bytes": 0, **options})


def test_signature_is_transformer_engines() -> None:
    parameters = list(inspect.signature(get_cpu_offload_context).parameters.values())
    same = parameters[: len(TRANSFORMER_ENGINE)]
    assert {parameter.name: parameter.default for parameter in same} == TRANSFORMER_ENGINE
    assert [parameter.name for parameter in same] == list(TRANSFORMER_ENGINE)
    assert all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in same)
    own = parameters[len(TRANSFORMER_ENGINE) :]
    assert {parameter.kind for parameter in own} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(parameter.default is not inspect.Parameter.empty for parameter in own)


def test_disabled_does_nothing() -> None:
    context, sync = get_cpu_offload_context()
    value = object()
    assert sync(value) is value
    for _ in range(2):
        with context as entered, context:  # nesting is no error, as nothing is entered
            assert entered is context
            assert sync(value) is value
    assert sync(value) is value
    assert context.stats() == context.stats() - context.stats() == offload.OffloadStats()
    context.reset()
    assert context(lambda: 3)() == 3
    context, _, synchronizer = get_cpu_offload_context(enabled=False, model_layers=3, manual_synchronization=True)
    with context:
        synchronizer.start_offload_layer(0)
    synchronizer.release_activation_forward_gpu_memory(0)
    synchronizer.start_reload_layer(0, microbatch=synchronizer.microbatch)
    assert context.stats() == offload.OffloadStats()
    # What an enabled context would refuse.
    assert len(get_cpu_offload_context(False, 30, 20, offload_activations=False, offload_weights=True)) == 2


@pytest.mark.parametrize("enabled", ["no", 0, None])
def test_enabled_is_true_or_false(enabled: Any) -> None:
    with pytest.raises(TypeError, match="enabled must be True or False, got "):
        get_cpu_offload_context(enabled, 1, 3)


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"offload_weights": True},
        ValueError,
        r"offload_weights must be False, got True; weights are streamed by offload\.stream_weights",
    ),
    (
        {"offload_activations": False},
        ValueError,
        r"offload_activations must be True if enabled, got False; pass enabled=False",
    ),
    ({"min_bytes": -1}, ValueError, r"min_bytes must be at least 0 bytes, got -1"),
    ({"min_bytes": 0.5}, TypeError, r"min_bytes must be an int \(bytes\) or a text such as .40GiB., got 0\.5"),
    ({"num_layers": 3}, ValueError, r"num_layers must be at most model_layers - 1 = 2, got 3"),
    ({"num_layers": -1}, ValueError, r"num_layers must be at least 0, got -1"),
    ({"num_layers": None}, ValueError, r"num_layers must be the number of layers to offload, got None"),
    ({"num_layers": "1"}, TypeError, r"num_layers must be an int, got '1'"),
    ({"model_layers": 0}, ValueError, r"model_layers must be at least 1, got 0"),
    ({"manual_synchronization": True, "model_layers": 0}, ValueError, r"model_layers must be at least 1, got 0"),
    (
        {"manual_synchronization": True, "schedule": Schedule(3)},
        ValueError,
        r"manual_synchronization=True takes no schedule",
    ),
    ({"schedule": Schedule(4)}, ValueError, r"model_layers must be the schedule's, 4, got 3"),
    ({"device": "meta"}, ValueError, r"device must be on this machine \(.*\), got 'meta'; leave it out"),
]


@pytest.mark.parametrize(("options", "kind", "text"), ERRORS)
def test_errors_say_what_to_do(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    arguments = {"num_layers": 1, "model_layers": 3, "device": "cpu", **options}
    with pytest.raises(kind, match=text):
        get_cpu_offload_context(True, **arguments)


def test_entering_inside_a_layer() -> None:
    context, _ = make()
    with context:
        pass
    expected = "the offload context was entered inside the forward of layer 1; leave it first, or use one context per"
    with pytest.raises(OffloadStateError, match=expected), context, context:
        pass
    assert_usable(context)


def test_sync_inside_a_layer() -> None:
    context, sync = make()
    expected = "sync function was called inside the forward of layer 0; call it after the with block"
    with pytest.raises(OffloadStateError, match=expected), context:
        sync(torch.ones(1))
    assert_usable(context)


def test_sync_before_any_layer() -> None:
    _, sync = make()
    expected = "called before the offload context was entered; run the layer inside `with context:`"
    with pytest.raises(OffloadStateError, match=expected):
        sync(torch.ones(1))


def assert_usable(context: Any) -> None:
    """After an error the next layer is layer 0, and autograd saves as usual outside."""
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with context:
        assert context._open.layer == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_sync_that_is_left_out_costs_time_only(lab: Lab) -> None:
    lab.adverse()
    layers, x = build("decoder", 5, lab.device)
    offloaded = offloading(3, 5, lab.device)
    offloaded.sync = lambda output: output
    with pytest.warns(UserWarning, match="must be passed to the sync function"):
        assert_same(step_gradients(layers, x), step_gradients(layers, x, offloaded))
    assert offloaded.stats.late_reloads == 3


def test_sync_twice_and_late(lab: Lab) -> None:
    layers, x = build("decoder", 5, lab.device)
    offloaded = offloading(3, 5, lab.device)
    sync = offloaded.sync
    offloaded.sync = lambda output: sync(sync(output))
    assert_same(step_gradients(layers, x), step_gradients(layers, x, offloaded))
    assert offloaded.stats.late_reloads == 0


@pytest.mark.parametrize("used", [True, False])
def test_a_tensor_that_lives_on_holds_no_rounds(used: bool, lab: Lab) -> None:
    """Layers pass a tensor on that was computed once, and whose graph is kept."""
    offloaded = offloading(2, 4, lab.device)
    w = torch.ones(8, device=lab.device, requires_grad=True)
    memory = w * 2
    rounds = []
    for _ in range(5):
        y = torch.ones(8, device=lab.device, requires_grad=True)
        x = y
        for _ in range(4):
            x, memory = offloaded.layer(lambda x, memory: (x.exp() * memory, memory), x, memory)
        torch.autograd.grad(x.sum(), w if used else y, retain_graph=used)
        rounds.append(weakref.ref(offloaded.context._round))
    assert offloaded.stats.reloaded_bytes > 0
    assert offloaded.stats.late_reloads == 0
    del x
    assert [held() is not None for held in rounds] == [False] * 4 + [True]


def test_as_a_decorator(lab: Lab) -> None:
    layers, x = build("decoder", 3, lab.device)
    offloaded = offloading(1, 3, lab.device)
    decorated = [offloaded.context(layer.forward) for layer in layers]

    def step() -> None:
        y = x
        for layer in decorated:
            y = offloaded.sync(layer(y))
        loss_of(y).backward()

    assert_same(step_gradients(layers, x), gradients(leaves_of(layers, x), step))
    assert offloaded.stats.reloaded_bytes > 0
    assert offloaded.stats.late_reloads == 0


def test_reset_begins_a_new_round() -> None:
    context, _ = make()
    with context:
        pass
    context.reset()
    with context:
        assert context._open.layer == 0


def test_repr() -> None:
    assert repr(make(2, 5)[0]) == "OffloadContext(2 of 5 layers, device='cpu')"
    assert repr(make(manual_synchronization=True)[0]) == "OffloadContext(manual, device='cpu')"


def run_round(context: Any, sync: Any, x: torch.Tensor, layers: int = 3) -> None:
    for _ in range(layers):
        with context:
            x = x.exp()
        x = sync(x)


def test_warns_once_when_nothing_moved() -> None:
    context, sync = make(min_bytes=1 << 20)
    x = torch.ones(8, requires_grad=True)
    with pytest.warns(UserWarning, match="nothing was offloaded") as caught:
        run_round(context, sync, x)
    assert str(caught[0].message) == (
        "a whole round of 3 layers was run and nothing was offloaded: saved tensors of the offloaded layers were kept "
        "on the device for these reasons: 1 small. min_bytes is 1048576 and the context's device cpu; see "
        "context.stats().skipped."
    )
    run_round(context, sync, x)  # a second warning would be an error
    with pytest.warns(UserWarning, match="for these reasons: nothing was saved"):
        run_round(*make(), torch.ones(8))


def test_no_warning_where_nothing_was_to_move() -> None:
    x = torch.ones(8, requires_grad=True)
    run_round(*make(0), x)
    run_round(*make(manual_synchronization=True)[:2], x)
    context, sync = make(min_bytes=1 << 20)
    run_round(context, sync, x, layers=2)
    with torch.no_grad():
        run_round(context, sync, x)
    context.reset()
    context.begin_layer(2)  # the round's last layer: the others were skipped
    context.end_layer(failed=False)
    run_round(*make(), x)


def without_sync(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        with offloaded.context:
            x = layer(x)
    return x


def sync_at_the_end(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = offloaded.sync(without_sync(offloaded, layers, x))
    return output


def around_the_loop_without_sync(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    with offloaded.context:
        for layer in layers:
            x = layer(x)
    return x


def evaluates_and_fails(offloaded: Offloading, layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        without_sync(offloaded, layers, x)
    with contextlib.suppress(ZeroDivisionError):
        offloaded.forward([*list(layers)[:3], lambda _: 1 / 0], x)
    return offloaded.forward(layers, x)


@pytest.mark.parametrize(
    ("forward", "num_layers", "warns"),
    [
        (without_sync, 1, True),
        (sync_at_the_end, 3, True),
        (around_the_loop_without_sync, 1, True),
        (evaluates_and_fails, 2, False),
    ],
)
def test_one_warning_if_outputs_are_not_passed_to_sync(
    forward: Callable[..., torch.Tensor], num_layers: int, warns: bool, lab: Lab
) -> None:
    layers, x = build("decoder", 6, lab.device)
    offloaded = offloading(num_layers, 6, lab.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            losses = [loss_of(forward(offloaded, layers, x)) for _ in range(2)]
            for loss in losses:
                loss.backward()
    said = [warning for warning in caught if "freed no device memory" not in str(warning.message)]
    assert len(said) == warns
    for warning in said:
        assert "/tests/" in warning.filename
        message = str(warning.message)
        assert message.startswith("the output of each layer must be passed to the sync function, but that of layer ")
        assert message.endswith("write `output = sync(output)` after the block of each layer.")


def test_layers_after_the_first_that_stays_are_left_to_autograd(lab: Lab) -> None:
    layers, x = build("decoder", 4, lab.device)
    running: list[int] = []
    seen: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.add(running[-1])
        return tensor.detach()

    offloaded = offloading(1, 4, lab.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for number, layer in enumerate(layers):
            running.append(number)
            x = offloaded.layer(layer, x)
    assert seen == {2, 3}


def test_a_forward_that_ends_among_layers_that_stay_does_not_shift_the_next(lab: Lab) -> None:
    layers, x = build("decoder", 5, lab.device)
    offloaded = offloading(1, 5, lab.device)
    offloaded.forward(layers[:4], x)  # and nobody holds its graph
    loss = loss_of(offloaded.forward(layers, x))
    assert [offloaded.context.sets_of(layer).get(1) is not None for layer in range(5)] == [True] * 5
    loss.backward()
    assert offloaded.stats.late_reloads == 0


@pytest.mark.parametrize(
    "make_one",
    [
        lambda: get_cpu_offload_context(True, 2, 3, device="cpu"),
        lambda: offload.offload_layers(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), 2, device="cpu").remove(),
        lambda: Schedule.default(2, 3),
    ],
    ids=["get_cpu_offload_context", "offload_layers", "Schedule.default"],
)
def test_a_warning_points_at_the_programs_line(make_one: Callable[[], object]) -> None:
    with pytest.warns(UserWarning, match="num_layers = model_layers - 1 = 2 keeps one activation set") as caught:
        make_one()
    assert [found.filename for found in caught] == [__file__]
