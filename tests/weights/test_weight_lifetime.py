"""Streamed weights after errors, interrupts and remove(); the memory they hold; what is refused; threads."""

import copy
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import in_threads, slowly
from lab import Lab
from models import WIDTH, GptBlock, assert_same, build, loss_of
from saving import saved_and_loaded
from streaming import Linear, backward, forward, gradients, gradients_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune

from offload import HostMemoryError, StreamedWeights, record_timeline, stream_optimizer, stream_weights
from offload.base.tensors import aligned
from offload.device.select import get_backend
from offload.host import page_locked as pinned
from offload.weights.gradients import GradientWriter
from offload.weights.layer import missing_bytes
from offload.weights.stream import WeightStream

LAYERS = 4


pytestmark = pytest.mark.usefixtures("adverse")


def assert_as_before(
    handle: StreamedWeights, layers: nn.ModuleList, x: torch.Tensor, expected: list[torch.Tensor | None]
) -> None:
    """Two steps give these gradients, which came from the device."""
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in layers.parameters())
    before = handle.stats()
    for _ in range(2):
        assert_same(expected, gradients(layers, x))
    assert (handle.stats() - before).gradient_bytes == 2 * sum(gradient.nbytes for gradient in expected)


class Failing(GptBlock):
    """Raises ``error`` in forward, before or after it has used its weights, or in backward."""

    error: BaseException = ValueError("stop")
    where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "before":
            raise self.error
        y = super().forward(x)
        if self.where == "after":
            raise self.error
        if self.where == "backward":
            y.register_hook(self.fail)
        if self.where == "backward inside":
            inside = self.mlp(y)
            inside.register_hook(self.fail)
            y = y + inside
        return y

    def fail(self, _: torch.Tensor) -> None:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize(
    ("where", "number"),
    [("before", 0), ("after", 1), ("after", 3), ("backward", 0), ("backward", 3), ("backward inside", 1)],
)
def test_failing_layers(where: str, number: int, error: BaseException, device: torch.device) -> None:
    layers, x = build(Failing, LAYERS, device)
    expected = gradients(layers, x)
    values = {key: value.cpu().clone() for key, value in layers.state_dict().items()}
    with stream_weights(layers, device) as handle:
        layers[number].error, layers[number].where = error, where
        with pytest.raises(type(error)):
            loss_of(forward(layers, x)).backward()
        layers[number].where = ""
        # What a user saves after an interrupt.
        saved = layers.state_dict()
        assert all(torch.equal(values[key], saved[key]) for key in values)
        assert all(value.device.type == "cpu" for value in saved.values())
        assert_as_before(handle, layers, x, expected)
        assert torch.equal(forward(layers.eval(), x), forward(layers, x))
    assert handle.stats().loads > 0


def test_a_forward_right_after_one_that_was_interrupted(device: torch.device) -> None:
    """Nothing has looked at the weights in between."""
    layers, x = build(Failing, 2, device)
    expected, parameters = gradients(layers, x), list(layers.parameters())
    with stream_weights(layers, device):
        layers[1].error, layers[1].where = KeyboardInterrupt(), "after"
        with pytest.raises(KeyboardInterrupt):
            forward(layers, x)
        layers[1].where = ""
        assert_same(expected, gradients_of(parameters, lambda: backward(layers, x)))


def test_a_backward_whose_load_was_interrupted_and_that_runs_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot has a part of another layer's weights then."""
    layers, x = build("gpt", LAYERS, device)
    expected = gradients(layers, x)
    with stream_weights(layers, device):
        torch.manual_seed(1)  # of dropout, as ``gradients`` has it
        loss, backend = loss_of(forward(layers, x)), get_backend(device)
        copy, loads = backend.copy, list[int]()

        def interrupted(stream: Any, *what: Any) -> None:
            copy(stream, *what)
            if stream is backend.weight_stream:
                loads.append(1)
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(backend, "copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loss.backward(retain_graph=True)
        assert loads
        layers.zero_grad()
        loss.backward()
        assert_same(expected, [parameter.grad for parameter in layers.parameters()])


class TwoParts(nn.Module):
    """Backward fails between the two, if told so."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.fails:
            y.register_hook(self.fail)
        return self.second(y)

    def fail(self, _: torch.Tensor) -> None:
        raise ValueError("stop")


@pytest.mark.parametrize("steps", [False, True], ids=["", "without a step in backward"])
@pytest.mark.parametrize("earlier", [0, 1], ids=["", "after another microbatch"])
def test_a_failed_backward_leaves_the_gradients_that_are_complete(
    earlier: int, steps: bool, device: torch.device
) -> None:
    def run() -> list[torch.Tensor | None]:
        for _ in range(earlier):
            loss_of(forward(layers, x)).backward()
        layers[1].fails = True
        with pytest.raises(ValueError, match="stop"):
            loss_of(forward(layers, x)).backward()
        layers[1].fails = False
        return [None if p.grad is None else p.grad.cpu() for p in layers.parameters()]

    layers, x = build(TwoParts, LAYERS, device)
    expected, whole = run(), gradients(layers, x)
    layers.zero_grad()
    assert [gradient is None for gradient in expected] == [not earlier] * 6 + [False] * 10
    with stream_weights(layers, device) as handle, ExitStack() as stack:
        if steps:
            optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
            stack.enter_context(stack.enter_context(stream_optimizer(optimizer, in_backward=True)).no_step())
        assert_same(expected, run())
        assert_as_before(handle, layers, x, whole)


@pytest.mark.parametrize("in_thread", [False, True])
def test_failed_backward_that_autograd_still_holds(in_thread: bool, device: torch.device) -> None:
    """Also of a thread that has ended since: the program, which drops ``p.grad``, finds none there again."""
    layers, x = build(Failing, LAYERS, device)
    expected = gradients(layers, x)
    with stream_weights(layers, device) as handle:
        backward(layers, x)
        held = []

        def fail(_: torch.Tensor) -> None:
            # As a GPU's autograd thread does, for a moment.
            held.extend(each for each in gc.get_objects() if type(each).__name__ == "EndOfBackward")
            raise ValueError("stop")

        def failing() -> None:
            y = layers[1](layers[0](x))
            y.register_hook(fail)
            with pytest.raises(ValueError, match="stop"):
                loss_of(forward(layers[2:], y)).backward()

        in_threads(failing) if in_thread else failing()
        assert len(held) == 1
        assert all(p.grad is not None and p.device.type == "cpu" for p in layers.parameters())
        layers.zero_grad()
        forward(layers, x)
        assert all(p.grad is None for p in layers.parameters())
        assert_as_before(handle, layers, x, expected)
        held.clear()
        assert_as_before(handle, layers, x, expected)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("by", ["two threads", "what it frees"])
def test_a_failed_backward_is_dropped(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the program has its error, and when autograd lets it go: in its own thread on a GPU, or in the midst."""
    layers, x = build(Failing, LAYERS, torch.device("cpu"))
    expected = gradients(layers, x)
    dropped, held, both = list[object](), list[object](), threading.Barrier(2)
    finish = GradientWriter.finish

    def finish_and_free(writer: GradientWriter) -> None:
        dropped.append(writer)
        finish(writer)
        held.clear()

    def fail(_: torch.Tensor) -> None:
        held.extend(each for each in gc.get_objects() if type(each).__name__ == "EndOfBackward")
        if by == "two threads":
            other.start()
            sys.settrace(meet)
        raise ValueError("stop")

    def meet(frame: FrameType, *_: object) -> Any:
        if slow := slowly(WeightStream.drop_backward)(frame):
            both.wait(10)
        return slow

    def free() -> None:
        both.wait(10)
        sys.settrace(slowly(WeightStream.drop_backward))
        held.clear()

    other = threading.Thread(target=free, daemon=True)
    with stream_weights(layers, "cpu") as handle:
        y = layers[1](layers[0](x))
        y.register_hook(fail)
        monkeypatch.setattr(GradientWriter, "finish", finish_and_free)
        before = sys.gettrace()
        with pytest.raises(ValueError, match="stop"):
            loss_of(forward(layers[2:], y)).backward()
        sys.settrace(before)
        if by == "two threads":
            other.join(10)
        assert len(dropped) == 1 or by == "what it frees"
        monkeypatch.undo()
        assert_as_before(handle, layers, x, expected)


def test_one_changed_weight_is_noticed_however_often_others_have_changed(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    first, *_, last = layers[-1].parameters()
    with stream_weights(layers, device), torch.no_grad():
        for _ in range(3):
            first.mul_(0.5)
        with torch.enable_grad():
            loss = loss_of(forward(layers, x))
        last.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation: the weights of layer 3"):
            loss.backward()


def test_backward_of_a_step_that_was_overtaken(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    with stream_weights(layers, device):
        loss = loss_of(forward(layers, x))
        torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()  # changes no weight
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation: the weights of layer 3"):
            loss.backward()


def test_gradients_that_are_kept_are_not_overwritten(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    with stream_weights(layers, device) as handle:
        gradients(layers, x)
        kept = [parameter.grad for parameter in layers.parameters()]
        values = [gradient.clone() for gradient in kept]
        part = kept[1].view(-1)[:3]
        gradients(layers, x * 2)
        assert all(map(torch.equal, values, kept))
        assert all(parameter.grad is not old for parameter, old in zip(layers.parameters(), kept, strict=True))
        del kept
        before = handle.stats().gradient_host_bytes
        gradients(layers, x * 3)
        gradients(layers, x * 3)
        assert torch.equal(part, values[1].view(-1)[:3])
        assert handle.stats().gradient_host_bytes == before


def test_what_is_kept_of_gradients_is_counted(device: torch.device) -> None:
    """The program holds those of each last step, whose memory is not kept, therefore."""
    layers, x = build("gpt", LAYERS, device)
    found, held = list[int](), list[Any]()
    with stream_weights(layers, device) as handle:
        for _ in range(4):
            gradients(layers, x)
            held = [parameter.grad for parameter in layers.parameters()]
            found.append(handle.stats().gradient_host_bytes)
            for parameter in layers.parameters():
                parameter.grad = None
    assert sum(one.nbytes for one in held) <= found[0]
    assert found == found[:1] * 4


class Empty(nn.Module):
    """Only a parameter without elements has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.empty = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.empty.sum()


def test_gradients_without_elements(device: torch.device) -> None:
    layers, x = nn.ModuleList(Empty() for _ in range(LAYERS)).to(device), torch.ones(2, WIDTH, device=device)
    with stream_weights(layers, device):
        loss_of(forward(layers, x)).backward()
        assert all(layer.empty.grad is not None and not layer.empty.grad.numel() for layer in layers)


def test_stats(device: torch.device, lab: Lab) -> None:
    layers, x = build("gpt", LAYERS, device)
    weights = sum(parameter.nbytes for parameter in layers.parameters())
    copies = lab.record_streams()
    handle = stream_weights(layers, device)
    assert repr(handle).startswith("StreamedWeights(4 × GptBlock, ")
    assert repr(handle).endswith(" on the device)")
    gradients(layers, x)
    addresses = [parameter.grad.data_ptr() for parameter in layers.parameters()]
    stats = handle.stats()
    assert stats.loads == copies.count(lab.weight_stream) == 2 * LAYERS - 2  # a load is one copy
    assert stats.loaded_bytes == stats.weight_bytes * (2 * LAYERS - 2) // LAYERS
    assert stats.late_loads == 1
    assert stats.gradient_bytes == weights
    assert stats.added_bytes == stats.staging_bytes == 0
    assert weights <= stats.weight_bytes == stats.gradient_host_bytes <= 1.05 * weights
    assert stats.slot_bytes == stats.weight_bytes * 2 // LAYERS
    assert "late_loads           1" in str(stats)
    for _ in range(3):
        gradients(layers, x)
    assert addresses == [parameter.grad.data_ptr() for parameter in layers.parameters()]
    assert handle.stats().gradient_host_bytes == stats.gradient_host_bytes
    handle.remove()
    handle.remove()
    assert handle.stats().loads == 4 * stats.loads
    assert repr(handle).endswith(", removed)")


def test_timeline(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    with stream_weights(layers, device) as handle:
        timeline = record_timeline(lambda: gradients(layers, x), device)
        stats = handle.stats()
    for lane, nbytes in (("h2d", stats.loaded_bytes), ("d2h", stats.gradient_bytes)):
        assert timeline.copied_bytes(lane) == nbytes // 2  # the warm-up moved the other half
        assert {span.layer for span in timeline.lane(lane)} == set(range(LAYERS))
    kinds = {(span.kind, span.layer) for span in timeline.lane("compute")}
    assert {(kind, layer) for kind in ("forward", "backward") for layer in range(LAYERS)} <= kinds


def test_parameters_outlive_streaming(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    values = [parameter.detach().cpu().clone() for parameter in layers.parameters()]
    with stream_weights(layers, device):
        expected = gradients(layers, x)
        parameters = list(layers.parameters())
    grads = [parameter.grad for parameter in parameters]
    assert_same(expected, gradients(copy.deepcopy(layers).to(device), x))  # an ordinary model
    del layers
    gc.collect()
    assert all(map(torch.equal, values, parameters))
    assert all(map(torch.equal, expected, grads))


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_a_copy_of_a_streamed_model_is_an_ordinary_one(
    copied: Callable[[nn.Module], nn.ModuleList], device: torch.device
) -> None:
    layers, x = build("gpt", LAYERS, device)
    expected = gradients(layers, x)
    with stream_weights(layers, device) as handle:
        model = copied(copied(layers))
        model.load_state_dict(model.state_dict())
        assert_same(expected, gradients(model.to(device), x))
        with stream_weights(model, device) as other:
            assert_as_before(handle, layers, x, expected)
            assert_as_before(other, model, x, expected)
            with pytest.raises(RuntimeError, match="must remain as it is"):
                model.double()
        assert {parameter.dtype for parameter in model.double().parameters()} == {torch.float64}
        assert layers[0].norm1.weight.dtype is torch.float32


def test_prefetch_is_not_used_after_a_change(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    layers.eval()
    twin = copy.deepcopy(layers)
    with stream_weights(layers, device) as handle, torch.no_grad():
        y = layers[0](x)
        for model in (layers, twin):
            model[1].out.weight.mul_(2)  # loaded ahead by now
        y = layers[1](y)
        assert torch.equal(y, forward(twin[:2], x))
        for model in (layers, twin):
            model[2].out.weight.data.mul_(2)  # leaves no trace
        handle.synchronize()
        assert torch.equal(forward(layers[2:], y), forward(twin[2:], y))


def test_the_weights_of_one_layer_that_a_program_changes_between_forwards(device: torch.device) -> None:
    (layer, twin), x = build("gpt", 2, device)
    layer.eval()
    twin.eval().load_state_dict(layer.state_dict())
    with stream_weights([layer], device) as handle:
        for _ in range(2):  # no backward comes in between, which would let the program change weights
            assert torch.equal(layer(x), twin(x))
            for one in (layer, twin):
                one.out.weight.data.mul_(2)  # leaves no trace
        assert handle.stats().loads == 2


def shared() -> nn.Module:
    layer = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    layer["two"].weight = nn.Parameter(layer["one"].weight.data)
    return layer


def holding(weight: nn.Parameter) -> nn.Module:
    layer = nn.Module()
    layer.weight = weight
    return layer


class Special(nn.Parameter):
    pass


SPARSE = torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        (lambda: nn.Linear(3, 3), TypeError, "layers must be several modules, got one Linear"),
        (lambda: [nn.GELU()], ValueError, "layers must hold parameters, got 1 modules"),
        (lambda: [nn.Linear(3, 3, device="meta")], ValueError, "layer 0's weight must have values, got a lazy"),
        (lambda: [nn.LazyLinear(3)], ValueError, "layer 0's weight must have values, got a lazy"),
        (lambda: [shared()], ValueError, "layer 0's two.weight must have memory of its own"),
        (lambda: [holding(Special(torch.ones(3)))], TypeError, "must be a plain nn.Parameter, got a Special"),
        (lambda: [holding(nn.Parameter(SPARSE))], TypeError, "must be dense, got layout torch.sparse_coo"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_refused_layers(layers: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stream_weights(layers(), "cpu")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_slots": 1}, ValueError, "num_slots must be at least 2, got 1"),
        ({"num_slots": 2.0}, TypeError, "num_slots must be an int, got 2.0"),
    ],
)
def test_refused_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stream_weights([nn.Linear(3, 3)], "cpu", **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda layers: layers[0].norm1.double(),
        lambda layers: layers.load_state_dict(copy.deepcopy(layers.state_dict()), assign=True),
        lambda layers: prune.identity(layers[0].norm1, "weight"),
    ],
)
def test_parameters_that_were_replaced(change: Callable[[nn.ModuleList], object], device: torch.device) -> None:
    """Also between a forward and its backward, after which the layer would hold the earlier ones again."""
    layers, x = build("gpt", 2, device)
    with stream_weights(layers, device):
        y = forward(layers, x)
        change(layers)
        for use in (lambda: layers[0](x), lambda: y.sum().backward()):
            with pytest.raises(RuntimeError, match=r"layer \d's norm1.weight must keep .*, but it was replaced"):
                use()


def test_vmap(device: torch.device) -> None:
    layers, x = build(Linear, 2, device)
    mapped = torch.vmap(lambda x: forward(layers, x))
    with torch.no_grad():
        expected = mapped(x)
    with stream_weights(layers, device):
        with torch.no_grad():
            assert torch.equal(expected, mapped(x))
        with pytest.raises(RuntimeError, match=r"layer 0 .* must not run in torch\.vmap or torch\.func"):
            mapped(x)


class Returning(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.inner: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> Any:
        if self.what == "weight":
            return x, self.weight[:3]
        if self.what == "nothing":
            return {"x": None}
        if self.what == "changed":
            with torch.no_grad():
                self.weight.mul_(2)
        if self.what == "inner":
            return self.inner[0](x * self.weight)
        if self.what == "aside":
            self.aside = (x * self.weight).sum()
        return x * self.weight


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("weight", RuntimeError, "must not return a parameter or a view of one"),
        ("nothing", TypeError, "must return tensors, alone or in tuples, lists, mappings or dataclasses, got dict"),
        ("changed", RuntimeError, "layer 0's weight must not be changed in forward"),
    ],
)
def test_refused_forward(what: str, error: type[Exception], message: str, device: torch.device) -> None:
    layers = nn.ModuleList([Returning(what)])
    x = torch.ones(2, WIDTH, device=device, requires_grad=True)
    with stream_weights(layers, device):
        with pytest.raises(error, match=message):
            layers[0](x)
        with torch.no_grad(), pytest.raises(error, match=message) if what != "nothing" else nullcontext():
            layers[0](x)
        layers[0].what = ""
        layers[0](x).sum().backward()
        assert torch.equal(layers[0].weight.grad, torch.full((WIDTH,), 2.0))


def test_a_layer_inside_the_forward_of_another(device: torch.device) -> None:
    outer, inner = Returning("inner"), Returning("")
    outer.inner.append(inner)
    with stream_weights([outer, inner], device), pytest.raises(RuntimeError, match=r"layer 0 .* must run by itself"):
        outer(torch.ones(2, WIDTH, device=device))


def test_a_gradient_that_does_not_come_through_the_outputs(device: torch.device) -> None:
    layers = nn.ModuleList([Returning("aside"), Returning("")])
    x = torch.ones(2, WIDTH, device=device)
    with stream_weights(layers, device):
        forward(layers, x)
        with pytest.raises(RuntimeError, match="the gradient of layer 0's weight must be computed in its layer's"):
            layers[0].aside.backward()


def test_double_backward(device: torch.device) -> None:
    layers, x = build("gpt", 2, device)
    with stream_weights(layers, device):
        loss = loss_of(forward(layers, x))
        with pytest.raises(RuntimeError, match="create_graph=True must not be used with streamed weights"):
            torch.autograd.grad(loss, x, create_graph=True)


def test_sparse_gradients(device: torch.device) -> None:
    layers = nn.ModuleList([nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, 1)])
    with stream_weights(layers, device):
        loss = loss_of(forward(layers, torch.arange(9, device=device)))
        with pytest.raises(NotImplementedError, match="layer 0's weight must have a dense gradient"):
            loss.backward()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_sharded_layers() -> None:
    layers, _ = build("gpt", 2, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(layers[1], mesh=mesh)
    with pytest.raises(TypeError, match=r"layer 1's .* got a DTensor; .*offload_policy=CPUOffloadPolicy\(\); or"):
        stream_weights(layers, "cpu")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrapped_first", [False, True])
def test_layers_of_a_distributed_model(wrapped_first: bool) -> None:
    layers, x = build("gpt", 2, torch.device("cpu"))
    model = nn.Sequential(*layers)
    wrapped = nn.parallel.DistributedDataParallel(model) if wrapped_first else None
    with stream_weights(layers, "cpu"):
        wrapped = wrapped or nn.parallel.DistributedDataParallel(model)
        with pytest.raises(
            RuntimeError, match=r"layer 0 .* must be left alone by DistributedDataParallel.*prepare_ddp"
        ):
            wrapped(x)
        model(x).sum().backward()
    assert stream_weights(layers, "cpu").remove() is None


def test_too_little_host_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = build("gpt", LAYERS, torch.device("cpu"))
    expected = gradients(layers, x)
    addresses = [parameter.data_ptr() for parameter in layers.parameters()]
    one_layer = sum(aligned(parameter.nbytes) for parameter in layers[0].parameters())
    monkeypatch.setattr(pinned, "available_bytes", lambda: one_layer - 1)
    with pytest.raises(HostMemoryError, match=r"of host memory are missing, but the system has .* left"):
        stream_weights(layers, "cpu")
    assert addresses == [parameter.data_ptr() for parameter in layers.parameters()]
    # The parameters make room for themselves, as long as the first ones fit.
    monkeypatch.setattr(pinned, "available_bytes", lambda: one_layer)
    with stream_weights(layers, "cpu") as handle:
        monkeypatch.undo()
        assert_as_before(handle, layers, x, expected)


def test_host_memory_for_parameters_that_are_on_the_device(device: torch.device) -> None:
    layers, _ = build("gpt", LAYERS, device)
    one_layer = sum(aligned(parameter.nbytes) for parameter in layers[0].parameters())
    assert missing_bytes(list(layers)) == one_layer * (1 if device.type == "cpu" else 1 + LAYERS)
    layers[3].to("meta")
    assert missing_bytes(list(layers)) == one_layer * (2 if device.type == "cpu" else 1 + LAYERS)


def begin_and_wait(layers: nn.ModuleList, x: torch.Tensor, where: str) -> tuple[threading.Thread, threading.Event]:
    """A thread of its own that stops in the middle of forward or backward until the event is set."""
    there, go_on = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        there.set()
        go_on.wait()

    def run() -> None:
        layers.zero_grad()
        torch.manual_seed(1)
        if where == "forward":
            handle = layers[1].norm1.register_forward_pre_hook(stop)
            loss = loss_of(forward(layers, x))
            handle.remove()
        else:
            y = forward(layers[:2], x)
            y.register_hook(stop)
            loss = loss_of(forward(layers[2:], y))
        loss.backward()

    thread = threading.Thread(target=run, name="first", daemon=True)
    thread.start()
    there.wait()
    return thread, go_on


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_threads_at_the_same_time(where: str, device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    expected = gradients(layers, x)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.0)
    with stream_weights(layers, device) as handle:
        other = loss_of(forward(layers, x))
        thread, go_on = begin_and_wait(layers, x, where)
        refusals: list[Callable[[], object]] = [
            lambda: layers[1](x),
            lambda: layers[3](x),
            layers.state_dict,
            optimizer.step,
            handle.synchronize,
        ]
        if where == "forward" or device.type == "cpu":  # autograd has one thread for a GPU, which has stopped
            refusals.append(other.backward)
        for refused in refusals:
            with pytest.raises(RuntimeError, match=r"by one thread at a time, but MainThread begins .* first is"):
                refused()
        go_on.set()
        thread.join()
        assert_same(expected, [parameter.grad for parameter in layers.parameters()])
        assert_as_before(handle, layers, x, expected)


def test_threads_that_enter_in_the_same_moment() -> None:
    layers, x = build("gpt", LAYERS, torch.device("cpu"))
    layers[0].norm1.register_forward_pre_hook(lambda *_: time.sleep(0.3))
    both, found = threading.Barrier(2), list[object]()

    def run() -> None:
        sys.settrace(slowly(WeightStream.enter_thread))
        both.wait(10)
        try:
            found.append(layers[0](x))
        except RuntimeError as error:
            found.append(str(error))

    with stream_weights(layers, "cpu"):
        in_threads(run, run)
    refused, entered = sorted(found, key=lambda one: isinstance(one, torch.Tensor))
    assert isinstance(entered, torch.Tensor)
    assert "must be used by one thread at a time" in str(refused)


def test_threads_one_after_another(device: torch.device) -> None:
    layers, x = build("gpt", LAYERS, device)
    expected = gradients(layers, x)

    def forward_here_and_backward_there(layers: nn.ModuleList, x: torch.Tensor) -> None:
        in_threads(loss_of(forward(layers, x)).backward)

    with stream_weights(layers, device) as handle:
        in_threads(lambda: loss_of(forward(layers, x)))
        in_threads(lambda: backward(layers, x))
        assert_same(expected, gradients(layers, x, forward_here_and_backward_there))
        assert_as_before(handle, layers, x, expected)
