"""Budgets for compiled layers: what their graphs save is planned, and the gradients are those of layers left alone."""

import contextvars
import copy
import functools
import gc
import itertools
import logging
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab import Lab
from models import (
    WIDTH,
    DecoderBlock,
    GptBlock,
    Turned,
    assert_same,
    build,
    compiled_in_place,
    compiled_wrapped,
    step_gradients,
)
from torch import nn

import offload
from offload.base.torch_private import is_compiled
from offload.measuring import follow_compiled
from offload.measuring.layer_times import LayerTimes
from offload.observe.memory import CpuMemoryPeak
from offload.recompute import compiled_levels
from offload.recompute.compiled_levels import Level, with_default_generators

# The compiler's own imports, its advice on float32, and what it does to inputs that are no leaves.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]

LAYERS = 4
EAGER = {"backend": "aot_eager"}
COMPILED = {"compile": EAGER}


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "offload")
    return caplog


@pytest.fixture(autouse=True)
def one_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes most of these tests' time, for each layer and level."""
    monkeypatch.setattr(follow_compiled, "MOST_TIMED", 1)


def built(block: Any, lab: Lab) -> tuple[nn.ModuleList, torch.Tensor]:
    """Layers, and an input of which they save more than the parameters have."""
    layers, _ = build(block, LAYERS, lab.device)
    torch.manual_seed(1)
    return layers, torch.randn(4, 64, WIDTH, device=lab.device).requires_grad_()


def seeded(layers: nn.ModuleList, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(2)
    found = step_gradients(layers, x)
    return [*found, torch.rand(1, device=x.device)]  # what the generator goes on with


def budgeted(layers: Any, budget: int | str, **options: Any) -> offload.OffloadedLayers:
    return offload.offload_layers(layers, memory_budget=budget, min_bytes=4096, **options)


def kept(handle: offload.OffloadedLayers) -> list[tuple[str, ...]]:
    """Of each layer that does not save all, the regions that are not recomputed."""
    found = (handle.regions(number) for number in range(LAYERS))
    return [tuple(name for name, policy in one.items() if policy != "recompute") for one in found if one]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("given", ["one to all", "one to each second", "one to each"])
def test_an_input_that_layers_share_counts_once(given: str, lab: Lab) -> None:
    """And an expanded one as it is."""
    layers, x = built(Turned, lab)

    def tables() -> list[torch.Tensor]:
        every = [torch.ones(1, 64, 4 * WIDTH, device=x.device).sin().expand(4, -1, -1) for _ in layers]
        if given == "one to each":
            return every
        return [every[0], every[0] if given == "one to all" else torch.ones((), device=x.device)] * (LAYERS // 2)

    def step() -> None:
        layers.zero_grad()
        y = x * 1
        for layer, table in zip(layers, tables(), strict=True):
            y = layer(y, table)
        y.square().mean().backward()

    with budgeted(layers, "1GiB", **COMPILED) as handle:
        for _ in range(4):
            step()
        assert handle.plan is not None
        own_bytes = tables()[0].untyped_storage().nbytes() if given == "one to each" else 0
        counted = [layer.regions[0].nbytes for layer in handle.plan.profile.layers]
        assert counted == LAYERS * [x.nbytes + own_bytes]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("host", [0, "1GiB"], ids=["recomputed", "offloaded"])
@pytest.mark.parametrize("block", ["gpt", "decoder"])
def test_budgets_with_the_bits_of_eager_layers(
    block: str, host: int | str, lab: Lab, log: pytest.LogCaptureFixture
) -> None:
    """The GPT block draws random numbers in attention and behind it."""
    layers, x = built(block, lab)
    expected = seeded(layers, x)
    lab.adverse()
    with budgeted(layers, "1GiB", compile=EAGER) as handle:
        for _ in range(2):
            assert_same(expected, seeded(layers, x))
        assert handle.state == "measuring"
        assert_same(expected, seeded(layers, x))
        plan = handle.plan
        assert plan is not None
        names = [region.name for region in plan.profile.layers[0].regions]
        assert names[0] == "input"
        assert names[-1] == "other operations"
        assert "products" in names
        whole = plan.without.peak_bytes
        with pytest.raises(ValueError, match="must be at least") as refused:
            offload.plan(plan.profile, 1, plan.link, max_host_bytes=0)
    # However little time recomputing takes: in less than it needs without the host, by more than plans may be above
    # their budget, something is offloaded.
    budget = int(0.99 * int(str(refused.value).split()[5])) if host else int(0.7 * whole)
    with budgeted(layers, budget, compile=EAGER, max_host_bytes=host) as handle:
        for _ in range(5):
            assert_same(expected, seeded(layers, x))
        assert handle.state == "following"
        assert handle.plan is not None
        assert handle.plan.peak_bytes <= budget
        assert (handle.plan.host_bytes > 0) == (host != 0)
        assert host or kept(handle)
    assert "forward" not in vars(layers[0])
    assert_same(expected, seeded(layers, x))
    assert "is not counted" not in log.text


def test_nothing_of_a_trial_is_left(lab: Lab) -> None:
    """Copies of each layer's input would add up to gigabytes, which no collector frees."""
    layers, x = built("mlp", lab)

    def tensors() -> int:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) is torch.Tensor]  # the compiler's have no memory
        return sum(one.shape == x.shape for one in found)

    step_gradients(layers, x)
    before = tensors()
    with budgeted(layers, "1GiB", compile=EAGER) as handle:
        for _ in range(3):
            step_gradients(layers, x)
        assert handle.state == "following"
        assert tensors() == before


def test_the_host_takes_no_longer_than_in_the_trial(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slow in the microbatch that is timed, right behind the compiler."""
    monkeypatch.setattr(LayerTimes, "host_s", lambda times, _phase: [1e3] * (len(times.ran) - 1) + [4e2])
    layers, x = built("mlp", lab)
    with budgeted(layers, "1GiB", compile=EAGER) as handle:
        for _ in range(3):
            seeded(layers, x)
        assert handle.plan is not None
        assert all(0 < layer.host.kept_s < 1e3 for layer in handle.plan.profile.layers)
        # What else the shortest of those took that are alike, it took for the copies.
        assert all(0 < layer.host.copies_s < 1e3 for layer in handle.plan.profile.layers)


def test_layers_that_are_alike_have_the_same_times(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """By times of its own, a plan would recompute the one that was lucky."""
    monkeypatch.setattr(follow_compiled, "MOST_TIMED", LAYERS)
    squares = (1e-3 * number**2 for number in itertools.count(1))
    monkeypatch.setattr(lab.backend, "seconds", lambda marks: [next(squares) for _ in marks])
    layers, x = built("mlp", lab)
    with budgeted(layers, "1GiB", compile=EAGER) as handle:
        for _ in range(3):
            seeded(layers, x)
        assert handle.plan is not None
        times = {tuple(region.seconds for region in layer.regions) for layer in handle.plan.profile.layers}
    assert len(times) == 1
    assert sum(*times) > 0


def calls_in_a_step(count: int, lab: Lab, **options: Any) -> int:
    """How many functions of the library run in a step of so many layers, of which none is offloaded."""
    layers, _ = build("mlp", count, lab.device)
    x = torch.randn(4, 64, WIDTH, device=lab.device).requires_grad_()
    calls: list[str] = []

    def see(frame: Any, event: str, _: object) -> None:
        calls.extend([frame.f_code.co_name] if event == "call" and "/offload/" in frame.f_code.co_filename else [])

    with budgeted(layers, "1GiB", max_host_bytes=0, **options) as handle:
        for _ in range(10 if lab.device.type == "cpu" else 110):  # plans were compared, which are not on the CPU
            step_gradients(layers, x)
        assert handle.state == "following"
        variables = len(contextvars.copy_context())
        sys.setprofile(see)
        try:
            step_gradients(layers, x)
        finally:
            sys.setprofile(None)
        assert len(contextvars.copy_context()) == variables
    return len(calls)


def test_the_host_does_little_for_a_layer_that_keeps_what_its_graph_saves(lab: Lab) -> None:
    """A few calls more than for a layer that is kept in eager mode."""
    eager, compiled = ((calls_in_a_step(5, lab, **one) - calls_in_a_step(3, lab, **one)) / 2 for one in ({}, COMPILED))
    assert 0 < eager < compiled <= eager + 10


def test_inputs_of_other_sizes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger ones are timed, too, and tried once more, for which the compiler makes code for any size."""
    tries: list[Any] = []
    try_levels = follow_compiled.try_levels
    monkeypatch.setattr(follow_compiled, "try_levels", lambda *given: (tries.append(given), try_levels(*given))[1])
    layers, _ = built("mlp", lab)
    inputs = {tokens: torch.randn(4, tokens, WIDTH, device=lab.device).requires_grad_() for tokens in (32, 16, 64, 96)}
    expected = {tokens: seeded(layers, x) for tokens, x in inputs.items()}
    with budgeted(layers, "1MiB", compile=EAGER) as handle:
        for tokens in (32, 32, 16, 32, 64, 64, 16, 96, 96, 64):
            assert_same(expected[tokens], seeded(layers, inputs[tokens]))
        assert handle.state == "following"
    assert len(tries) == 2 * LAYERS
    assert sum(given[-1] > 0 for given in tries) == 2 * follow_compiled.MOST_TIMED


def test_two_layers_that_are_timed_again_have_hooks(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers nothing is offloaded while they are measured, which would keep the hooks of more."""
    monkeypatch.setattr(CpuMemoryPeak, "costs_time", False)  # as on a GPU
    layers = nn.ModuleList([*built("mlp", lab)[0]][:2])
    with budgeted(layers, "1GiB", compile=EAGER) as handle:
        for tokens, expected in [(32, True)] * 2 + [(32, False)] * 2 + [(64, True)]:
            seeded(layers, torch.randn(4, tokens, WIDTH, device=lab.device).requires_grad_())
            assert bool(layers[1]._forward_hooks) is expected
        assert handle.state == "measuring"


def test_each_level_has_the_same_bits_and_saves_less(lab: Lab) -> None:
    layers, x = built("decoder", lab)
    expected = seeded(layers, x)
    runs, compiles = compiled_levels.Runs(), functools.partial(torch.compile, **EAGER)
    forwards = [compiled_levels.CompiledForward(layer, runs, compiles, asked=True) for layer in layers]
    saved = []
    for level in compiled_levels.Level:
        for forward in forwards:
            forward.level = level
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            assert_same(expected, seeded(layers, x))
        saved.append(sum(sizes.values()))
    for forward in forwards:
        forward.remove()
    assert saved == sorted(set(saved))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("how", [compiled_in_place, compiled_wrapped])
def test_layers_that_the_program_has_compiled(
    how: Callable[[nn.Module], nn.Module], lab: Lab, log: pytest.LogCaptureFixture
) -> None:
    layers, x = built("mlp", lab)
    layers = nn.ModuleList(how(layer) for layer in layers)
    expected = seeded(layers, x)
    forward, call = vars(layers[0]).get("forward"), layers[0]._compiled_call_impl
    with budgeted(layers, "1MiB", max_host_bytes=0) as handle:
        for _ in range(4):
            assert_same(expected, seeded(layers, x))
        assert isinstance(handle._hooks._policies[0], compiled_levels.CompiledPolicies)
    assert vars(layers[0]).get("forward") is forward
    assert layers[0]._compiled_call_impl is call
    assert_same(expected, seeded(layers, x))
    assert "is not counted" not in log.text


def test_copies_of_a_layer_run_without_the_library(lab: Lab) -> None:
    layers, x = built("mlp", lab)
    keys = list(layers.state_dict())
    with budgeted(layers, "1GiB", compile=EAGER):
        y = layers[0](x)
        assert list(layers.state_dict()) == keys
        for twin in (copy.deepcopy(layers[0]), pickle.loads(pickle.dumps(layers[0]))):
            assert twin.forward.__self__ is twin
            with torch.no_grad():
                twin.up.weight.zero_()
                assert not torch.equal(y, twin(x))
        assert torch.equal(y, layers[0](x))


class Breaks(GptBlock):
    """Its way depends on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() < 1e9 else x


def test_a_layer_that_is_not_one_graph_has_the_policies_of_eager_layers(
    lab: Lab, log: pytest.LogCaptureFixture
) -> None:
    layers, x = built(Breaks, lab)
    expected = seeded(layers, x)
    with budgeted(layers, "1MiB", compile=EAGER, max_host_bytes=0) as handle:
        for _ in range(4):
            assert_same(expected, seeded(layers, x))
        assert any("mlp.0: addmm" in handle.regions(number) for number in range(LAYERS))
    assert log.text.count("layer 0 (Breaks) has no compiled regions, so that it is not compiled") == 1
    assert log.text.count("has no compiled regions") == 1


def test_a_layer_that_changes_its_buffers_is_compiled_as_a_whole(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    def run(layers: nn.ModuleList, x: torch.Tensor) -> list[torch.Tensor]:
        return [*seeded(layers, x), *layers.buffers()]

    layers, x = build("conv", LAYERS, lab.device)
    expected = run(nn.ModuleList(map(compiled_in_place, layers)), x)
    layers, x = build("conv", LAYERS, lab.device)
    with budgeted(layers, "1GiB", compile=EAGER) as handle:
        assert_same(expected, run(layers, x))
        assert is_compiled(layers[0])
        for _ in range(3):
            run(layers, x)
        assert handle.state == "following"
    assert not is_compiled(layers[0])
    assert "so that it is recomputed as a whole: forward changes its buffers" in log.text


def test_a_layer_without_memory_for_its_trial_is_compiled_as_a_whole(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    """Eager regions would take more time, and no less memory."""
    (layers, x), backend = built(GptBlock, lab), torch._dynamo.lookup_backend("aot_eager")
    tries = itertools.count()

    def lacks_memory(graph: Any, inputs: Any) -> Any:
        compiled = backend(graph, inputs)

        def run(*given: Any) -> Any:
            if (number := next(tries)) < 2 * LAYERS and number % 2 == 0:
                raise torch.OutOfMemoryError("as a device says it")
            return compiled(*given)

        return run

    expected = seeded(layers, x)
    with budgeted(layers, "1GiB", compile={"backend": lacks_memory}) as handle:
        assert_same(expected, seeded(layers, x))
        assert is_compiled(layers[0])
        for _ in range(3):
            assert_same(expected, seeded(layers, x))
        assert handle.state == "following"
    assert log.text.count("so that it is recomputed as a whole: the device has too little memory to try it") == 1


@torch.library.custom_op("outside::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """An operation that draws and does not say so."""
    return x * torch.rand_like(x)


@noisy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward_of_noisy(context: Any, gradient: torch.Tensor) -> torch.Tensor:
    x, result = context.saved_tensors
    return gradient * result / x


noisy.register_autograd(
    _backward_of_noisy, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output)
)


class Noisy(DecoderBlock):
    """Draws where nobody sees it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noisy(super().forward(x).sin()).sin()


class OnlySigns(nn.Linear):
    """Its gradients depend on no number that it draws, but what is drawn later would be others."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).sigmoid()
        return (noisy(y.detach()) + y).relu()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("block", [Noisy, OnlySigns])
def test_random_numbers_that_would_be_others_are_found(block: Any, lab: Lab, log: pytest.LogCaptureFixture) -> None:
    layers, x = built(block, lab)
    expected = seeded(layers, x)
    with budgeted(layers, "1MiB", compile=EAGER, max_host_bytes=0):
        for _ in range(4):
            assert_same(expected, seeded(layers, x))
    assert "never saves its inputs alone, since the gradients are wrong then" in log.text


def test_operations_that_are_recomputed_draw_from_the_default_generator() -> None:
    """On a GPU, the compiler would give each a generator of its own, with other numbers than without recomputation."""
    config: Any = torch._functorch.config
    before, seen = config.graphsafe_rng_functionalization, list[bool]()

    def backend(graph: Any, _: object) -> Any:
        seen.append(config.graphsafe_rng_functionalization)
        return graph.forward

    for times in range(2):  # the compiler forgets who listens when it is reset
        torch.compiler.reset()
        run = torch.compile(lambda x: x + 1, backend=backend)
        with_default_generators(run, torch.zeros(2 + times))
        torch.compile(lambda x: x - 1, backend=backend)(torch.zeros(2))
        assert config.graphsafe_rng_functionalization is before
    assert seen == [False, before, False, before]


def test_operations_that_draw_are_never_kept() -> None:
    aten, level_of = torch.ops.aten, compiled_levels._level_of
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    x = torch.ones(1)
    assert level_of(attention, (x, x, x), {}) is Level.ATTENTION
    assert level_of(attention, (x, x, x, 0.0, True), {}) is Level.ATTENTION
    assert level_of(attention, (x, x, x, 0.1), {}) is Level.ALL
    assert level_of(attention, (x, x, x), {"dropout_p": 0.1}) is Level.ALL
    assert level_of(aten.mm.default, (x, x), {}) is Level.PRODUCTS
    assert level_of(aten.native_dropout.default, (x, 0.1, True), {}) is Level.ALL


def test_through_prepare(lab: Lab) -> None:
    layers, x = built("mlp", lab)
    found = []
    for options in ({}, {"compile": EAGER}):
        model = nn.Sequential(*copy.deepcopy(layers))
        optimizer = torch.optim.AdamW(model.parameters())
        options["layers"] = list(model)
        with offload.prepare(model, optimizer, "1GiB", device=lab.device, min_bytes=4096, **options) as prepared:
            for _ in range(5):
                torch.manual_seed(3)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert prepared.activations is not None
            names = [region.name for region in prepared.activations.profile.layers[1].regions]
            assert ("products" in names) is ("compile" in options)
        found.append([parameter.detach().cpu().clone() for parameter in model.parameters()])
    assert_same(*found)


@pytest.mark.nightly  # the compiler takes half a minute for it
def test_what_rounds_otherwise_needs_consent(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    layers, x = built("mlp", lab)
    layers, x = layers.to(torch.bfloat16), x.detach().to(torch.bfloat16).requires_grad_()
    layers = nn.ModuleList(torch.compile(layer) for layer in layers)
    expected = seeded(layers, x)
    with budgeted(layers, "1MiB", max_host_bytes=0):
        for _ in range(4):
            assert_same(expected, seeded(layers, x))
    assert "never saves its inputs alone: gradients round otherwise, which compile=True accepts" in log.text
    with budgeted(layers, "100KiB", max_host_bytes=0, compile=True):
        for _ in range(4):
            found = seeded(layers, x)
    assert "rounds gradients otherwise where it saves its inputs alone" in log.text
    assert "is not counted" not in log.text
    for one, other in zip(expected, found, strict=True):
        assert (one - other).norm() <= 0.02 * one.norm()


@pytest.mark.parametrize(
    ("error", "options", "text"),
    [
        (ValueError, {"num_layers": 2, "compile": True}, "compile must be given with memory_budget"),
        (TypeError, {"memory_budget": "1GiB", "compile": "inductor"}, "compile must be True, or arguments of"),
        (ValueError, {"memory_budget": "1GiB", "compile": {"fullgraph": True}}, "compile must hold some of backend"),
        (ValueError, {"memory_budget": "1GiB", "compile": {"mode": "reduce-overhead"}}, "must not capture CUDA graphs"),
    ],
)
def test_arguments(error: type[Exception], options: dict[str, Any], text: str) -> None:
    with pytest.raises(error, match=text):
        offload.offload_layers([nn.Linear(2, 2), nn.Linear(2, 2)], **options)


def test_a_given_plan_whose_first_layer_is_compiled(lab: Lab) -> None:
    """Counting memory in a hook inside of the compiled call left PyTorch without its dispatch modes."""
    layers, x = built("mlp", lab)
    profile = offload.profile_layers(layers, lambda: step_gradients(layers, x), min_bytes=1, device=lab.device)
    plan = offload.plan(profile, "512KiB", offload.Link(1e9, 1e9, 1.5e9))
    layers[0].compile(**EAGER)
    expected = seeded(layers, x)
    with offload.offload_layers(layers, plan=plan, min_bytes=1, device=lab.device) as handle:
        for _ in range(3):
            assert_same(expected, seeded(layers, x))
        assert handle.stats().offloaded_bytes > 0
