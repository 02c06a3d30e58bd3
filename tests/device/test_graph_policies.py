"""Policies inside CUDA graphs: what is recomputed is captured with backward, and draws no random numbers."""

import gc

import pytest
import torch
from test_cuda_graphs import (
    LAYERS,
    MIN_BYTES,
    _deterministic,  # noqa: F401  a fixture
    assert_replays,
    capture,
    eager_gradients,
    forward,
    gradients,
    make_input,
    make_layers,
)
from torch import nn

import offload

pytestmark = pytest.mark.gpu

POLICIES = {
    "recompute": {"*": "recompute"},
    "products offloaded": {"*mm": "offload", "*": "recompute"},
    "products kept": {"*mm": "keep", "*": "recompute"},
    "some": {"*norm*": "recompute", "mul": "recompute", "silu": "recompute", "mm": "keep", "*": "offload"},
}


@pytest.mark.parametrize(
    ("policies", "num_layers"), list(zip(POLICIES.values(), (0, 3, 0, 3), strict=True)), ids=POLICIES.keys()
)
@pytest.mark.filterwarnings("ignore:a whole round of")
def test_replays_with_other_training_in_between(policies: dict[str, str], num_layers: int) -> None:
    layers, other = make_layers(), make_layers()
    static = make_input(0).clone()
    with offload.offload_layers(layers, num_layers, min_bytes=MIN_BYTES, policies=policies) as handle:
        graph = capture(layers, static)
        assert "recompute" in handle.regions(0).values()
    with offload.offload_layers(other, 2, min_bytes=MIN_BYTES, policies=policies):
        for seed in range(20):
            x = make_input(seed)
            static.copy_(x)
            graph.replay()
            captured = gradients(layers)
            if seed % 5 == 0:
                forward(other, make_input(seed)[: 1 + seed % 2]).backward()
            assert all(map(torch.equal, captured, eager_gradients(layers, x)))


def test_a_captured_step_needs_less_memory() -> None:
    def peak_bytes(policies: dict[str, str]) -> int:
        layers, static = make_layers(), torch.randn(8, 512, 256, device="cuda")
        with offload.offload_layers(layers, 0, min_bytes=MIN_BYTES, policies=policies):
            capture(layers, static)  # warms up, too
            with offload.memory_meter() as meter, torch.cuda.graph(torch.cuda.CUDAGraph()):
                forward(layers, static).backward()
        return meter.peak_bytes

    assert peak_bytes({"*": "recompute"}) < 0.6 * peak_bytes({"*": "keep"})


def make_dropout_layers() -> nn.ModuleList:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.3), nn.Linear(512, 256))
            for _ in range(LAYERS)
        )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_what_draws_random_numbers_is_kept_in_a_capture(compiled: bool) -> None:
    """A graph draws other numbers in each replay, and its backward has to see those of its forward."""
    plain, treated = make_dropout_layers(), make_dropout_layers()
    static = make_input(0).clone()
    if compiled:
        for layer in [*plain, *treated]:
            layer.compile(backend="aot_eager")
    expected = capture(plain, static)
    with offload.offload_layers(treated, 3, min_bytes=MIN_BYTES, policies={"*": "recompute"}):
        found = capture(treated, static)
    before: list[torch.Tensor] = []
    for seed in range(10):
        static.copy_(make_input(seed))
        torch.cuda.manual_seed(seed)
        expected.replay()
        torch.cuda.manual_seed(seed)
        found.replay()
        now = gradients(treated)
        assert all(map(torch.equal, gradients(plain), now))
        assert not before or not all(map(torch.equal, before, now))
        before = now


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_layers() -> None:
    layers, static = make_layers(), make_input(0).clone()
    for layer in layers:
        layer.compile(backend="aot_eager")
    with offload.offload_layers(layers, 3, min_bytes=MIN_BYTES, policies={"*": "recompute"}) as handle:
        graph = capture(layers, static)
        assert handle.regions(0) == {"compiled forward": "recompute"}
    assert_replays(graph, layers, static)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # it fails at its first layer
def test_capture_without_warm_up_says_what_to_do() -> None:
    layers, x = make_layers(), make_input(0)
    expected = eager_gradients(layers, x)
    with offload.offload_layers(layers, 0, min_bytes=MIN_BYTES, policies={"*": "recompute"}):
        refused = pytest.raises(offload.CaptureError, match="warm up with two steps before the capture")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            forward(layers, x)
        gc.collect()  # as the error's traceback holds a graph
        torch.cuda.synchronize()
        assert all(map(torch.equal, expected, eager_gradients(layers, x)))
        graph = capture(layers, x)
        graph.replay()
        assert all(map(torch.equal, expected, gradients(layers)))


def test_a_plan_in_a_graph() -> None:
    layers, static = make_layers(), make_input(0).clone()
    # Attention's seeds have 8 bytes, and are on the GPU only inside of a capture: no warm-up pins memory for them.
    profile = offload.profile_layers(
        layers, lambda: forward(layers, static).backward(), min_bytes=MIN_BYTES, regions=True
    )
    plan = offload.plan(profile, profile.saved_bytes // 2, offload.measure_link(), max_host_bytes="1GiB")
    with offload.offload_layers(layers, plan=plan, min_bytes=MIN_BYTES):
        graph = capture(layers, static)
    assert_replays(graph, layers, static)
