"""Offloading inside CUDA graphs: captured once, replayed with new values, exact."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import offload
from benchmarks.workloads import DecoderBlock
from offload.device.select import get_backend
from offload.host.pool import get_host_pool

pytestmark = pytest.mark.gpu

LAYERS, SHAPE = 6, (2, 64, 256)
MIN_BYTES = 16
"""All but attention's seeds, of 8 bytes: on the GPU only in a capture, so that no warm-up pins memory for them."""


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def layers() -> nn.ModuleList:
    return make_layers()


def make_layers() -> nn.ModuleList:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return nn.ModuleList(DecoderBlock(256, 512, 4) for _ in range(LAYERS))


def make_input(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(SHAPE, device="cuda", generator=generator)


def forward(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().mean()


def eager_gradients(layers: nn.ModuleList, x: torch.Tensor) -> list[torch.Tensor]:
    layers.zero_grad(set_to_none=False)
    forward(layers, x).backward()
    return gradients(layers)


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of the step, after two steps as a warm-up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def capture(layers: nn.ModuleList, static: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of one training step on ``static``, gradients set to zero first."""

    def step() -> None:
        for parameter in layers.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.zero_()
        forward(layers, static).backward()

    return captured(step)


def gradients(layers: nn.ModuleList) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in layers.parameters()]


def assert_replays(graph: torch.cuda.CUDAGraph, layers: nn.ModuleList, static: torch.Tensor) -> None:
    """Replays with other inputs have the gradients of eager steps."""
    for seed in range(5):
        x = make_input(seed)
        static.copy_(x)
        graph.replay()
        assert all(map(torch.equal, gradients(layers), eager_gradients(layers, x)))


SCHEDULES = {
    "default k=2": offload.Schedule.default(2, LAYERS),
    "default k=4": offload.Schedule.default(4, LAYERS),
    "declarative": offload.Schedule.from_synchronization_dict(
        {0: (True, 2, False, 2), 2: (True, 4, False, 3), 4: (False, 5, False, 4)}, LAYERS
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_hundred_replays_with_other_training_in_between(layers: nn.ModuleList, schedule: offload.Schedule) -> None:
    other = make_layers()
    static = make_input(0).clone()
    with offload.offload_layers(layers, schedule=schedule, min_bytes=MIN_BYTES) as handle:
        graph = capture(layers, static)
        assert handle.stats().offloaded_bytes > 0
    with offload.offload_layers(other, 4, min_bytes=MIN_BYTES):
        for seed in range(100):
            x = make_input(seed)
            static.copy_(x)
            graph.replay()
            found = gradients(layers)
            if seed % 10 == 0:
                forward(other, torch.randn(1 + seed % 3, *SHAPE[1:], device="cuda")).backward()
            assert all(map(torch.equal, found, eager_gradients(layers, x)))


def test_several_graphs_alive_share_no_host_memory() -> None:
    models = [make_layers() for _ in range(3)]
    statics = [make_input(i).clone() for i in range(3)]
    graphs = []
    for model, static in zip(models, statics, strict=True):
        with offload.offload_layers(model, 3, min_bytes=MIN_BYTES):
            graphs.append(capture(model, static))
    for graph in graphs:
        graph.replay()
    for graph in reversed(graphs):
        graph.replay()
    found = [gradients(model) for model in models]
    for model, static, replayed in zip(models, statics, found, strict=True):
        assert all(map(torch.equal, replayed, eager_gradients(model, static)))


def fail_to_capture(layers: nn.ModuleList, x: torch.Tensor) -> None:
    missing = pytest.raises(offload.CaptureError, match=r"\d+ bytes of pinned host memory are missing.*warm-up")
    with missing, torch.cuda.graph(torch.cuda.CUDAGraph()):
        forward(layers, x)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # it fails at its first copy
def test_capture_without_warm_up_says_what_to_do_and_breaks_nothing(layers: nn.ModuleList) -> None:
    pool = get_host_pool(get_backend("cuda"))
    gc.collect()
    torch.cuda.synchronize()
    pool.trim()
    if free_bytes := sum(piece.nbytes for piece in pool._free):
        pool.take(free_bytes)  # what graphs of other tests leave of their slabs
    x = make_input(0)
    expected = eager_gradients(layers, x)  # also warms up the kernels
    with offload.offload_layers(layers, 3, min_bytes=MIN_BYTES):
        fail_to_capture(layers, x)
        # The error's traceback holds the graph of the forward that failed. With it the parameters would keep the nodes
        # that add up their gradients on the capture's stream, and PyTorch warns when another stream meets them.
        gc.collect()
        torch.cuda.synchronize()
        assert all(map(torch.equal, expected, eager_gradients(layers, x)))
        graph = capture(layers, x)
        graph.replay()
        assert all(map(torch.equal, expected, gradients(layers)))


def test_backward_captured_after_an_eager_forward_is_refused(layers: nn.ModuleList) -> None:
    x = make_input(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with offload.offload_layers(layers, 3, min_bytes=MIN_BYTES):
        with torch.cuda.stream(stream):
            expected = eager_gradients(layers, x)
            loss = forward(layers, x)
        refused = pytest.raises(offload.CaptureError, match="forward ran outside of a capture")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            loss.backward()
        del loss
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            assert all(map(torch.equal, expected, eager_gradients(layers, x)))


class OffloadedModel(nn.Module):
    def __init__(self, layers: nn.ModuleList, k: int) -> None:
        super().__init__()
        self.layers = layers
        self.context, self.sync = offload.get_cpu_offload_context(
            enabled=True, num_layers=k, model_layers=len(layers), retain_pinned_cpu_buffers=True, min_bytes=MIN_BYTES
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with self.context:
                x = layer(x)
            x = self.sync(x)
        return x


# PyTorch's own backward threads say so when they meet cuBLAS for the first time; and the graphs' parameters, used
# here outside of the graphs too, have gradients from two streams.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning", "ignore:The AccumulateGrad node:UserWarning")
def test_make_graphed_callables(layers: nn.ModuleList) -> None:
    model = OffloadedModel(layers, 3)
    graphed = torch.cuda.make_graphed_callables(model, (make_input(0).requires_grad_(),))
    offloaded = model.context.stats().offloaded_bytes
    assert offloaded > 0
    other = make_layers()
    for seed in range(20):
        x = make_input(seed).requires_grad_()
        layers.zero_grad(set_to_none=True)
        graphed(x).square().mean().backward()
        found = gradients(layers)
        with offload.offload_layers(other, 2, min_bytes=MIN_BYTES):
            forward(other, make_input(seed)).backward()
        expected = make_layers()
        forward(expected, x.detach()).backward()
        assert all(map(torch.equal, found, gradients(expected)))
    assert model.context.stats().offloaded_bytes == offloaded, "replays run no Python"


def test_manual_synchronization_in_a_graph(layers: nn.ModuleList) -> None:
    context, sync, synchronizer = offload.get_cpu_offload_context(
        enabled=True, model_layers=LAYERS, manual_synchronization=True, min_bytes=1024
    )
    static = make_input(0).clone()

    def step() -> None:
        x = static
        for number, layer in enumerate(layers):
            with context:
                x = layer(x)
            x = sync(x)
            if number < 4:
                synchronizer.start_offload_layer(number)
        for number in range(4):
            synchronizer.release_activation_forward_gpu_memory(number)
        for number in reversed(range(4)):
            synchronizer.start_reload_layer(number)
        for parameter in layers.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        x.square().mean().backward()

    assert_replays(captured(step), layers, static)


# torch.compile's own imports, its advice on float32, and the empty graph with which it sets up its memory pool.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("what", ["layers", "step"])
def test_reduce_overhead(layers: nn.ModuleList, what: str) -> None:
    x = make_input(0)
    expected = eager_gradients(layers, x)
    compiled = nn.ModuleList(torch.compile(layer, mode="reduce-overhead") for layer in layers)
    model = OffloadedModel(compiled if what == "layers" else layers, 3)
    run = model if what == "layers" else torch.compile(model, mode="reduce-overhead")
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        layers.zero_grad(set_to_none=False)
        run(x).square().mean().backward()
    assert model.context.stats().offloaded_bytes > 0
    for found, right in zip(gradients(layers), expected, strict=True):
        torch.testing.assert_close(found, right)  # fused kernels round differently from eager ones


def test_a_captured_optimizer_step(layers: nn.ModuleList) -> None:
    reference = make_layers()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True) for model in (layers, reference)]
    static = make_input(0).clone()

    def step(model: nn.ModuleList, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        forward(model, static).backward()
        optimizer.step()

    for model in (layers, reference):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    with offload.offload_layers(layers, 3, min_bytes=MIN_BYTES):
        graph = captured(lambda: step(layers, optimizers[0]))
    for _ in range(2):
        step(reference, optimizers[1])
    for seed in range(10):
        static.copy_(make_input(seed))
        graph.replay()
        step(reference, optimizers[1])
        assert all(map(torch.equal, layers.parameters(), reference.parameters()))
