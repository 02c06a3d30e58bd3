"""Tensor subclasses are reloaded as what they were, and their inner tensors are offloaded at their own size."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensor_parallel_worker
import torch
import torch.distributed as dist
from lab import Lab
from models import NOTHING, Composed, Offloading, Product, assert_same, gradients, loss_of, offloading, save, through
from ranks import ranks_of
from saving import CHANGES, WHERE, assert_identical, normal, nothing, round_trip, run
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

import offload
from offload import mark_not_offload, offload_layers
from offload.activations import what_moves as exclusions
from offload.activations.handles import SubclassHandle
from offload.activations.what_moves import Parts, Rules, decide
from offload.measuring.profile_layers import profile_layers

RULES = Rules(torch.device("cpu"), 0)

# Layers that keep what they save are the point of many tests here.
pytestmark = [pytest.mark.usefixtures("adverse"), pytest.mark.filterwarnings("ignore:a whole round of")]


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    """What the layers compute with; small, so that it is easy to tell from what they save."""
    return torch.ones(1, device=device, requires_grad=True)


@pytest.fixture(autouse=True)
def nothing_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusions, "_excluded", weakref.WeakKeyDictionary())


class Scaled(torch.Tensor):
    """Eight-bit values with a scale: a wrapper without memory of its own."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, note: str) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32, device=values.device)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, note: str) -> None:
        self.values_, self.scale, self.note = values, scale, note

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["values_", "scale"], self.note

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], note: str, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["values_"], inner["scale"], note)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].values_, args[0].scale, args[0].note)
        raise NotImplementedError(func)


class Boxed(torch.Tensor):
    """Computes as what it wraps does, which may be a box again."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Boxed:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Boxed:
        return Boxed(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unboxed, unboxed_kwargs = tree_map_only(Boxed, lambda box: box.inner, (args, kwargs or {}))
        result = tree_map_only(torch.Tensor, Boxed, func(*unboxed, **unboxed_kwargs))
        return return_and_correct_aliasing(func, args, kwargs or {}, result)


def scaled(device: torch.device) -> Scaled:
    return Scaled((normal(8, 12) * 8).to(torch.int8).to(device), normal(8, 1).to(device), "note")


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    return innermost(tensor.inner) if isinstance(tensor, Boxed) else tensor


def test_subclass_is_offloaded_by_its_inner_tensors(lab: Lab, x: torch.Tensor) -> None:
    found, offloaded = round_trip(lambda: scaled(lab.device), x)
    assert isinstance(found, Scaled)
    assert found.note == "note"
    assert_identical(scaled(lab.device).values_, found.values_)
    assert_identical(scaled(lab.device).scale, found.scale)
    assert offloaded.stats.offloaded_bytes == 8 * 12 + 8 * 4
    assert offloaded.stats.wasted_bytes == 0


def test_subclasses_and_inner_tensors_that_stay(lab: Lab, x: torch.Tensor) -> None:
    class Labelled(torch.Tensor):
        """Does not say what it is made of."""

    found, offloaded = round_trip(lambda: normal(8, 12).to(lab.device).as_subclass(Labelled), x, moves=False)
    assert torch.equal(found.as_subclass(torch.Tensor), normal(8, 12).to(lab.device))
    assert offloaded.stats.skipped == {"subclass": 1}

    class Quantized(Boxed):
        """As Transformer Engine's: taken apart by itself, and put together by what is in no context of autograd's."""

        def prepare_for_saving(self) -> None:
            raise AssertionError("nobody but its own functions may take it apart")

    found, offloaded = round_trip(lambda: Quantized(normal(8, 12).to(lab.device)), x, moves=False)
    assert_identical(normal(8, 12).to(lab.device), innermost(found))
    assert offloaded.stats.skipped == {"subclass": 1}
    marked = scaled(lab.device)
    offload.mark_not_offload(marked)
    found, offloaded = round_trip(lambda: marked, x, moves=False)
    assert_identical(marked.values_, found.values_)
    assert offloaded.stats.skipped == {"marked": 2}
    found, offloaded = round_trip(lambda: scaled(lab.device), x, min_bytes=64)
    assert_identical(scaled(lab.device).scale, found.scale)
    assert offloaded.stats.offloaded_bytes == 8 * 12
    assert offloaded.stats.skipped == {"small": 1}


def test_subclasses_and_views_in_a_subclass(lab: Lab, x: torch.Tensor) -> None:
    found, offloaded = round_trip(lambda: Boxed(normal(8, 12).to(lab.device)).t()[2:5], x)
    assert_identical(normal(8, 12).to(lab.device).t()[2:5], innermost(found))
    assert offloaded.stats.offloaded_bytes == 8 * 12 * 4
    found, offloaded = round_trip(lambda: Boxed(Boxed(scaled(lab.device))), x)
    assert isinstance(found, Boxed)
    assert isinstance(found.inner, Boxed)
    assert isinstance(innermost(found), Scaled)
    assert_identical(scaled(lab.device).values_, innermost(found).values_)
    assert offloaded.stats.offloaded_bytes == 8 * 12 + 8 * 4


@pytest.mark.parametrize("depth", [1, 2])
def test_gradients_of_subclasses(depth: int, lab: Lab) -> None:
    def box(tensor: torch.Tensor) -> torch.Tensor:
        for _ in range(depth):
            tensor = Boxed(tensor)
        return tensor

    def step(offloaded: Offloading) -> list[torch.Tensor]:
        x = box(normal(8, 12).to(lab.device)).requires_grad_()
        weights = [nn.Parameter(box(normal(12, 12).to(lab.device))) for _ in range(3)]
        layers = [lambda y, weight=weight: torch.tanh(nn.functional.linear(y, weight)).exp() for weight in weights]
        offloaded.forward(layers, x).square().mean().backward()
        return [innermost(leaf.grad) for leaf in (x, *weights)]

    offloaded = offloading(1, 3, lab.device)
    assert_same(step(NOTHING), step(offloaded))
    assert offloaded.stats.skipped == {"leaf": 1, "parameter": 1}  # the input, the weight
    assert offloaded.stats.offloaded_bytes == 2 * 8 * 12 * 4  # what tanh and exp return


def test_profile_counts_what_is_offloaded(lab: Lab) -> None:
    layers = nn.Sequential(*(Composed(lambda _, y: torch.tanh(y).exp()) for _ in range(3)))

    def step() -> None:
        layers(Boxed(Boxed(normal(8, 12).to(lab.device))).requires_grad_()).sum().backward()

    profile = profile_layers(layers, step, min_bytes=0)
    with offload.offload_layers(layers, num_layers=1, min_bytes=0) as handle:
        step()
    assert handle.stats().offloaded_bytes == profile.layers[0].saved_bytes == 2 * 8 * 12 * 4


def test_start_offload_takes_subclasses(lab: Lab, x: torch.Tensor) -> None:
    def make() -> tuple[torch.Tensor, ...]:
        early = Boxed(Boxed(normal(8, 12).to(lab.device))).mul_(2)
        offload.start_offload(early)
        seen.append(offloaded.stats.offloaded_bytes)
        return (early,)

    seen: list[int] = []
    offloaded = offloading(1, 3, lab.device)
    ((found,), *_) = run(offloaded, x, [make, nothing, nothing])
    assert_identical(normal(8, 12).to(lab.device) * 2, innermost(found))
    assert seen == [offloaded.stats.offloaded_bytes] == [8 * 12 * 4]


LOOKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda weight: weight,
    "view": lambda weight: weight.t()[1:],
    "cast": lambda weight: weight.to(torch.bfloat16),
}


@pytest.mark.parametrize("look", LOOKS)
def test_parameters_that_are_subclasses_stay(look: str) -> None:
    weight = nn.Parameter(Boxed(Boxed(torch.ones(4, 4))))
    seen = LOOKS[look](weight)
    assert decide(seen, RULES) == "parameter"
    assert decide(innermost(seen)[0], RULES) == "parameter"


def test_activations_that_are_subclasses_are_no_parameters() -> None:
    activation = Boxed(torch.ones(4, 4, requires_grad=False)).requires_grad_().exp()
    for seen in (activation, activation.t(), activation.to(torch.bfloat16)):
        assert isinstance(decide(seen, RULES), Parts)


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, lambda tensor: Boxed(Boxed(tensor))], ids=["plain", "boxed"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("change", CHANGES)
def test_change_in_place_after_saving_raises(change: str, where: str, wrap: Any, lab: Lab) -> None:
    """The same error as without offloading, for tensors that were offloaded and for those that were not."""
    offloaded = NOTHING if where == "nowhere" else offloading(1, 3, lab.device, min_bytes=1 << 20 * (where == "small"))
    y = wrap(normal(8, 12).to(lab.device)).requires_grad_()
    for layer in range(3):
        if layer == WHERE[where]:
            y = changed = offloaded.layer(torch.exp, y)
        else:
            y = offloaded.layer(lambda y: y + 1, y)
    with torch.no_grad():
        CHANGES[change](changed)
    assert (offloaded is not NOTHING and offloaded.stats.offloaded_bytes > 0) == (where == "offloaded")
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation") as raised:
        y.sum().backward()
    assert "is at version 1; expected version 0 instead" in str(raised.value)
    if where not in ("nowhere", "a later one"):  # there autograd itself looks
        assert f"[torch.float32 [8, 12]], saved in layer {WHERE[where]}" in str(raised.value)


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_change_in_place_of_an_inner_tensor_after_saving_raises(min_bytes: int, lab: Lab, x: torch.Tensor) -> None:
    """Autograd alone would compute with the changed values, but what is on the host has the old ones."""
    saved = scaled(lab.device)
    offloaded = offloading(1, 3, lab.device, min_bytes=min_bytes)
    y = offloaded.layer(lambda y: save(y, lambda _: None, saved), x)
    y = offloaded.forward([torch.neg, torch.neg], y)
    saved.scale.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.float32 \[8, 1\]\]"):
        y.sum().backward()


def test_what_is_saved_before_and_after_a_change_is_offloaded_twice(lab: Lab, x: torch.Tensor) -> None:
    """The first would raise in backward, so only the second is used; it must not get the first one's copy."""
    received: list[tuple[torch.Tensor, ...]] = []
    first: list[torch.Tensor] = []

    def layer(y: torch.Tensor) -> torch.Tensor:
        boxed = Boxed(Boxed(torch.ones(8, 12, device=lab.device)))
        first.append(save(y, received.append, boxed))
        lab.drain()
        boxed.mul_(2)
        return save(y, received.append, boxed, boxed)

    offloaded = offloading(1, 3, lab.device)
    offloaded.forward([layer, torch.neg, torch.neg], x).sum().backward()
    for found in received[0]:
        assert torch.equal(innermost(found), torch.full((8, 12), 2.0, device=lab.device))
    assert offloaded.stats.offloaded_bytes == 2 * 8 * 12 * 4


def test_torch_functions_of_a_subclass_do_not_matter(lab: Lab, x: torch.Tensor) -> None:
    class Refusing(Boxed):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch.Tensor.detach
            return super().__torch_function__(func, types, args, kwargs or {})

    found, _ = round_trip(lambda: Refusing(normal(8, 12).to(lab.device)), x)
    assert_identical(normal(8, 12).to(lab.device), innermost(found))


def jagged(values: torch.Tensor, *, holes: bool = False) -> torch.Tensor:
    offsets = torch.tensor([0, 3, 8], device=values.device)
    lengths = torch.tensor([2, 5], device=values.device) if holes else None
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths)


@pytest.mark.parametrize("holes", [False, True])
def test_jagged_tensor_keeps_its_ragged_size(holes: bool, lab: Lab, x: torch.Tensor) -> None:
    seen: list[Any] = []

    def make() -> torch.Tensor:
        made = jagged(normal(8, 12).to(lab.device), holes=holes).detach()
        seen.extend((made.shape, made.offsets()))
        return made

    found, offloaded = round_trip(make, x)
    assert found.shape == seen[0]
    assert found.offsets() is seen[1]
    assert_identical(normal(8, 12).to(lab.device), found.values())
    assert offloaded.stats.offloaded_bytes == 8 * 12 * 4


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One group for all tests: PyTorch caches what it worked out for a mesh, with the mesh."""
    on_cpu = request.param == "cpu"
    device = None if on_cpu else torch.device("cuda", 0)
    if device is not None:
        torch.cuda.set_device(device)  # else the mesh guesses, and warns, unless an earlier test has chosen one
    store = dist.HashStore()
    dist.init_process_group("gloo" if on_cpu else "nccl", store=store, rank=0, world_size=1, device_id=device)
    yield init_device_mesh(request.param, (1,))
    dist.destroy_process_group()


def distributed_layers(mesh: Any) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3)).to(mesh.device_type)
    for layer in layers:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [Shard(0)]))
    return layers


def test_gradients_of_dtensors(mesh: Any) -> None:
    layers = distributed_layers(mesh)
    blocks = nn.ModuleList(
        Composed(lambda own, y: torch.tanh(own.linear(y)).to_local().exp(), linear=linear) for linear in layers
    )
    x = normal(8, 12).to(mesh.device_type).requires_grad_()

    def step() -> None:
        y = x
        for block in blocks:
            y = block(distribute_tensor(y, mesh, [Replicate()]) if y is x else DTensor.from_local(y, mesh))
        loss_of(y).backward()

    expected = [tensor.clone() for tensor in local_gradients([x, *layers.parameters()], step)]
    gc.collect()  # what tests before this one have left in cycles
    with offload.offload_layers(blocks, num_layers=1, min_bytes=0, device=mesh.device_type) as handle:
        assert_same(expected, local_gradients([x, *layers.parameters()], step))
    assert handle.stats().skipped == {"leaf": 1, "parameter": 1}  # the input, the weight
    assert handle.stats().offloaded_bytes == 2 * 8 * 12 * 4  # what tanh and exp return
    assert not any(type(held) is SubclassHandle for held in gc.get_objects())


def local_gradients(leaves: list[torch.Tensor], step: Callable[[], None]) -> list[torch.Tensor]:
    return [found.to_local() if isinstance(found, DTensor) else found for found in gradients(leaves, step)]


LOCAL_LOOKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **LOOKS,
    "local": lambda weight: weight.to_local(),
    "view of the local": lambda weight: weight.to_local().t()[1:],
}


@pytest.mark.parametrize("look", LOCAL_LOOKS)
def test_parameters_that_are_dtensors_stay(look: str, mesh: Any) -> None:
    seen = LOCAL_LOOKS[look](distributed_layers(mesh)[0].weight)
    assert decide(seen, Rules(seen.device, 0)) == "parameter"


def test_leaves_that_are_dtensors_stay(mesh: Any) -> None:
    """Autograd holds them until it has added up their gradient."""
    leaf = distribute_tensor(normal(8, 12).to(mesh.device_type), mesh, [Replicate()]).requires_grad_()
    rules = Rules(leaf.to_local().device, 0)
    assert decide(leaf, rules) == decide(leaf.view(96), rules) == "leaf"
    assert isinstance(decide(leaf.detach(), rules), Parts)
    assert isinstance(decide(leaf.exp(), rules), Parts)


def test_local_tensors_of_activations_are_offloaded(mesh: Any) -> None:
    weight = distributed_layers(mesh)[0].weight
    activation = distribute_tensor(normal(8, 12).to(mesh.device_type), mesh, [Replicate()]).requires_grad_()
    for seen in (activation.to_local(), activation.exp().to_local().t(), weight.exp().to_local().t()):
        assert isinstance(decide(seen, Rules(seen.device, 0)), type)


ranks = ranks_of(tensor_parallel_worker)


@pytest.mark.slow
@pytest.mark.parametrize("name", tensor_parallel_worker.MODELS)
def test_tensor_parallel_layers(name: str, ranks: list[dict[Any, Any]]) -> None:
    for found in ranks:
        assert found[name]["equal"]
        assert found[name]["stats"].offloaded_bytes == found[name]["expected bytes"]
        assert found[name]["stats"].late_reloads == 0
        assert found[name]["handles left"] == 0


@pytest.mark.slow
def test_float8_is_offloaded_in_dtensors(ranks: list[dict[Any, Any]]) -> None:
    for found in ranks:
        assert found["float8"]["dtypes in DTensors"] == {torch.float8_e4m3fn, torch.float32}


@pytest.mark.slow
def test_result_of_a_collective_is_copied_once_it_is_there(ranks: list[dict[Any, Any]]) -> None:
    for found in ranks:
        assert found["late collective"]


CPU = torch.device("cpu")


def why(tensor: torch.Tensor, min_bytes: int = 0) -> str | Parts | None:
    """The reason to stay, or the parts; ``None`` for what is offloaded."""
    decision = decide(tensor, Rules(CPU, min_bytes))
    return None if isinstance(decision, type) else decision


def test_casts_of_activations_and_what_lies_in_a_marked_storage() -> None:
    for given in (torch.ones(4, requires_grad=True) * 2, torch.ones(4, requires_grad=True)):
        assert why(given.to(torch.bfloat16)) is None
    tensor = torch.ones(8)
    assert why(tensor) is None
    mark_not_offload(tensor[2:4], None)
    assert why(tensor.view(2, 4)[1]) == "marked"


def test_parameters_of_offloaded_layers_are_known_before_one_is_saved() -> None:
    layers = nn.ModuleList(Product(8) for _ in range(4))
    x = torch.randn(4, 8, requires_grad=True)
    with offload_layers(layers, 2, min_bytes=0, device="cpu") as handle:
        y = through(layers, x)
        y.sum().backward()
        stats = handle.stats()
    assert stats.skipped["parameter"] == 2
    assert stats.offloaded_bytes == 4 * 8 * 4, "the second layer's input; the first one's is a leaf"


def test_parameters_without_a_shape_yet_are_passed_over() -> None:
    layers = nn.ModuleList(nn.LazyLinear(8) for _ in range(3))
    with offload_layers(layers, 1, min_bytes=0, device="cpu"):
        nn.Sequential(*layers)(torch.randn(4, 8, requires_grad=True) * 2).sum().backward()


def test_marking_takes_tensors() -> None:
    with pytest.raises(TypeError, match="mark_not_offload takes tensors, got int"):
        mark_not_offload(torch.ones(1), 3)


def test_memory_that_is_reused_is_not_taken_for_the_old() -> None:
    """A new storage, perhaps at the address of one that was marked and has gone, is not marked."""
    for _ in range(100):
        assert why(torch.ones(8)) is None
        mark_not_offload(torch.ones(8))


def test_what_has_gone_is_forgotten() -> None:
    kept = torch.ones(8)
    mark_not_offload(kept)
    for _ in range(50):
        mark_not_offload(torch.ones(1))
    assert len(exclusions._excluded) == 1
    assert why(kept.view(2, 4)) == "marked"
