"""Small storages that move together come back as they were, and cost one copy."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lab import Lab
from models import NOTHING, Offloading, assert_same, build, loss_of, offloading, save, step_gradients
from test_saved import FLOAT8, GEOMETRIES, assert_identical, normal, nothing, run
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from offload import get_cpu_offload_context, packing, start_offload
from offload.backend import ALIGNMENT
from offload.host_pool import HostBuffer

pytestmark = pytest.mark.parametrize("packed", [True], indirect=True, ids=[""])

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.ones(1, device=device, requires_grad=True)


@pytest.fixture
def copied(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy to the host from now on."""
    found: list[int] = []
    to_host = lab.backend.to_host

    def noting(stream: object, host: HostBuffer, device: torch.Tensor) -> None:
        found.append(host.nbytes)
        to_host(stream, host, device)

    monkeypatch.setattr(lab.backend, "to_host", noting)
    return found


def of_all_kinds(device: torch.device) -> list[torch.Tensor]:
    """Tensors of all dtypes, layouts and odd sizes, each with a storage of its own."""
    values = normal(8, 12).to(device)
    views = [view(values.clone()) for view in GEOMETRIES.values()]
    dtypes = [torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.int16, torch.uint16, *FLOAT8]
    typed = [values.abs().to(dtype)[:3] for dtype in dtypes]
    lazy = [torch.complex(values, values.flip(0)).conj(), torch.complex(values, values).conj().imag]
    odd = [torch.arange(size, device=device).to(torch.uint8) for size in (1, 3, 511, 513)]
    images = normal(2, 3, 4, 5).to(device).contiguous(memory_format=torch.channels_last)
    return [*views, *typed, *lazy, *odd, images, values.clone().requires_grad_().exp().t()]


def test_all_kinds_come_back_out_of_one_copy(lab: Lab, x: torch.Tensor, copied: list[int]) -> None:
    lab.adverse()
    expected = of_all_kinds(lab.device)
    offloaded = offloading(1, 3, lab.device)
    found, _, _ = run(offloaded, x, [lambda: tuple(of_all_kinds(lab.device)), nothing, nothing])
    for before, after in zip(expected, found, strict=True):
        assert_identical(before, after)
    assert len(copied) == 1
    stats = offloaded.stats
    assert stats.offloaded_storages == len(expected)
    assert stats.offloaded_bytes == stats.reloaded_bytes == sum(t.untyped_storage().nbytes() for t in expected)


def test_each_comes_back_in_a_storage_of_its_own(lab: Lab, x: torch.Tensor) -> None:
    sizes = (1, 7, 512, 515, 3)

    def layer() -> Tensors:
        return tuple(torch.arange(2 * n, device=lab.device).to(torch.uint8)[n:] for n in sizes)

    (found, _, _) = run(offloading(1, 3, lab.device), x, [layer, nothing, nothing])
    for size, tensor in zip(sizes, found, strict=True):
        assert (tensor.untyped_storage().nbytes(), tensor.storage_offset()) == (2 * size, size)
        assert tensor.untyped_storage().data_ptr() % min(ALIGNMENT, 64) == 0
        assert torch.equal(torch.as_strided(tensor, (2 * size,), (1,), 0), torch.arange(2 * size).to(tensor))


def test_each_is_freed_by_itself_during_backward(lab: Lab, x: torch.Tensor) -> None:
    left: list[int] = []
    storages: list[StorageWeakRef] = []

    def look(saved: Tensors) -> None:
        storages.append(StorageWeakRef(saved[0].untyped_storage()))
        left.append(sum(not storage.expired() for storage in storages))

    def layer(y: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            y = save(y, look, normal(64).to(lab.device))
        return y

    offloading(1, 3, lab.device).forward([layer, torch.neg, torch.neg], x).sum().backward()
    assert left == [1, 1, 1, 1]


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16])
def test_under_autocast(autocast: torch.dtype, saved: torch.dtype, lab: Lab, x: torch.Tensor) -> None:
    expected = [normal(8).to(lab.device, saved), normal(9).to(lab.device, saved)]
    with torch.autocast(lab.device.type, autocast):
        (found, _, _) = run(
            offloading(1, 3, lab.device), x, [lambda: tuple(t.clone() for t in expected), nothing, nothing]
        )
    assert_same(expected, list(found))


def test_subclasses_that_compare_their_inner_tensors(lab: Lab, x: torch.Tensor) -> None:
    expected = TwoTensor(normal(8).to(lab.device), normal(8).to(lab.device))
    (found, _, _) = run(
        offloading(1, 3, lab.device),
        x,
        [lambda: (TwoTensor(expected.a.clone(), expected.b.clone()),), nothing, nothing],
    )
    assert torch.equal(found[0].a, expected.a)
    assert torch.equal(found[0].b, expected.b)


def test_recomputation_that_addresses_a_whole_storage(lab: Lab) -> None:
    """What a checkpointed layer got begins in the middle of a storage; it reads the storage from its begin."""
    lab.adverse()
    x = normal(4, 64).to(lab.device).requires_grad_()

    def inside(y: torch.Tensor) -> torch.Tensor:
        return (torch.as_strided(y, (64,), (1,), 0) * y).sin()

    def step(offloaded: Offloading) -> list[torch.Tensor]:
        x.grad = None

        def layer(y: torch.Tensor) -> torch.Tensor:
            return checkpoint(inside, (y * 2).view(-1)[64:128], use_reentrant=False) + checkpoint(
                inside, (y * 3).view(-1)[64:128], use_reentrant=False
            )

        offloaded.forward([layer, torch.neg, torch.neg], x).square().sum().backward()
        assert x.grad is not None
        return [x.grad]

    assert_same(step(NOTHING), step(offloading(1, 3, lab.device)))


@pytest.mark.parametrize("block", ["decoder", "gpt", "conv", "encoder"])
@pytest.mark.parametrize("pack_bytes", [1, 4096, packing.PACK_BYTES])
def test_gradients(block: str, pack_bytes: int, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """In packs of one storage, of a few, and of all that a layer saves."""
    monkeypatch.setattr(packing, "PACK_BYTES", pack_bytes)
    lab.adverse()
    layers, x = build(block, 5, lab.device)
    torch.manual_seed(1)
    expected = step_gradients(layers, x)
    for num_layers in (1, 3):
        offloaded = offloading(num_layers, 5, lab.device)
        for _ in range(2):
            torch.manual_seed(1)
            assert_same(expected, step_gradients(layers, x, offloaded))
        assert offloaded.stats.late_reloads == 0


def test_a_pack_is_full_at_its_size_and_large_storages_move_alone(
    lab: Lab, x: torch.Tensor, copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SMALL_BYTES", 2048)
    monkeypatch.setattr(packing, "PACK_BYTES", 3000)

    def layer() -> Tensors:
        return tuple(torch.ones(n, dtype=torch.uint8, device=lab.device) for n in (1024, 1024, 2048, 1024, 512))

    run(offloading(1, 3, lab.device), x, [layer, nothing, nothing])
    assert copied == [2048, 3072, 512]


def test_their_own_memory_is_free_before_the_copy_has_begun(lab: Lab, x: torch.Tensor) -> None:
    storages: list[StorageWeakRef] = []
    offloaded = offloading(1, 3, lab.device)
    open_gate = lab.hold(lab.d2h_stream)
    made = [normal(64).to(lab.device) for _ in range(4)]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in made]
    y = offloaded.layer(lambda y: save(y, lambda _: None, *made), x)
    assert not any(storage.expired() for storage in storages)
    made.clear()
    assert all(storage.expired() for storage in storages)
    open_gate()
    offloaded.forward([torch.neg, torch.neg], y).sum().backward()


def test_a_storage_is_packed_once_also_when_its_pack_has_left(
    lab: Lab, x: torch.Tensor, copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PACK_BYTES", 1024)
    twice = normal(128).to(lab.device)
    expected = twice.clone()

    def layer() -> Tensors:
        return twice[:64], normal(128).to(lab.device), twice[64:]

    offloaded = offloading(1, 3, lab.device)
    (found, _, _) = run(offloaded, x, [layer, nothing, nothing])
    assert_identical_values(expected[:64], found[0])
    assert_identical_values(expected[64:], found[2])
    assert found[0].untyped_storage().data_ptr() == found[2].untyped_storage().data_ptr()
    assert copied == [1024]
    assert (offloaded.stats.offloaded_storages, offloaded.stats.offloaded_tensors) == (2, 3)


def assert_identical_values(expected: torch.Tensor, found: torch.Tensor) -> None:
    assert torch.equal(expected, found)


@pytest.mark.parametrize("when", ["before its pack leaves", "after"])
def test_a_change_in_place_is_an_error(when: str, lab: Lab, x: torch.Tensor) -> None:
    changed, other = normal(8).to(lab.device), normal(8).to(lab.device)
    offloaded = offloading(1, 3, lab.device)

    def layer(y: torch.Tensor) -> torch.Tensor:
        y = save(y, lambda _: None, other, changed)
        if when == "before its pack leaves":
            changed.add_(1)
        return y

    y = offloaded.layer(layer, x)
    if when == "after":
        changed.add_(1)
    with pytest.raises(RuntimeError, match=r"saved in layer 0, is at version 1; expected version 0"):
        offloaded.forward([torch.neg, torch.neg], y).sum().backward()


def test_backward_inside_the_layer_reads_what_has_not_left(lab: Lab, x: torch.Tensor) -> None:
    received: list[Tensors] = []
    expected = [normal(8).to(lab.device), normal(9).to(lab.device)]
    offloaded = offloading(1, 3, lab.device)

    def layer(y: torch.Tensor) -> torch.Tensor:
        loss = save(y, received.append, *(tensor.clone() for tensor in expected)).sum()
        (gradient,) = torch.autograd.grad(loss, y)
        return y * gradient

    offloaded.forward([layer, torch.neg, torch.neg], x).sum().backward()
    assert_same(expected, list(received[0]))


def test_retained_graph(lab: Lab, x: torch.Tensor) -> None:
    lab.adverse()
    received: list[Tensors] = []
    expected = [normal(8).to(lab.device), normal(9).to(lab.device)]
    offloaded = offloading(1, 3, lab.device)
    y = offloaded.layer(lambda y: save(y, received.append, *(t.clone() for t in expected)), x)
    loss = offloaded.forward([torch.neg, torch.neg], y).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for found in received:
        assert_same(expected, list(found))


def test_a_failing_layer_copies_no_pack(lab: Lab, x: torch.Tensor, copied: list[int]) -> None:
    offloaded = offloading(1, 3, lab.device)
    made = [normal(8).to(lab.device) for _ in range(3)]

    def failing(y: torch.Tensor) -> torch.Tensor:
        save(y, lambda _: None, *made)
        raise KeyError("in forward")

    with pytest.raises(KeyError):
        offloaded.layer(failing, x)
    assert copied == []
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in made]
    made.clear()
    assert all(storage.expired() for storage in storages)
    assert lab.pool.used_bytes == 0


def test_without_host_memory_all_of_a_pack_stays(lab: Lab, x: torch.Tensor) -> None:
    layers, inputs = build("decoder", 3, lab.device)
    expected = step_gradients(layers, inputs)
    offloaded = offloading(1, 3, lab.device, max_host_bytes=0)
    with pytest.warns(UserWarning, match="stays on the device"):
        assert_same(expected, step_gradients(layers, inputs, offloaded))
    stats = offloaded.stats
    assert stats.offloaded_bytes == 0
    assert stats.skipped["no host memory"] > 3


def test_what_a_later_layer_keeps_is_wasted_but_no_surprise(lab: Lab, x: torch.Tensor) -> None:
    shared = normal(256).to(lab.device)
    offloaded = offloading(1, 4, lab.device)

    def layer() -> Tensors:
        return shared, normal(16).to(lab.device)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            run(offloaded, x, [layer, lambda: (shared,), nothing, nothing])
    assert offloaded.stats.wasted_bytes == 3 * 1024


@pytest.mark.filterwarnings("ignore:256 B of the 512 B that a round of layers copied")
def test_waste_is_named_by_storage(lab: Lab, x: torch.Tensor) -> None:
    kept: list[torch.Tensor] = []
    offloaded = offloading(1, 3, lab.device)

    def layer(y: torch.Tensor) -> torch.Tensor:
        wide = y.expand(64).exp()
        kept.append(wide)
        return save(y, lambda _: None, wide, wide.sin())

    for _ in range(2):
        offloaded.forward([layer, torch.neg, torch.neg], x).sum().backward()
    assert offloaded.stats.wasted == {"Exp": 2 * 256}


def test_an_explicit_start_of_a_packed_tensor_copies_its_pack(lab: Lab, x: torch.Tensor, copied: list[int]) -> None:
    tensor = normal(128).to(lab.device)
    seen: list[list[int]] = []

    def layer(y: torch.Tensor) -> torch.Tensor:
        y = save(y, lambda _: None, tensor)
        start_offload(tensor)
        seen.append(list(copied))
        return y

    offloading(1, 3, lab.device).forward([layer, torch.neg, torch.neg], x).sum().backward()
    assert seen == [[512]] == [copied]


def test_an_explicit_start_copies_at_once(lab: Lab, x: torch.Tensor, copied: list[int]) -> None:
    offloaded = offloading(1, 3, lab.device)
    seen: list[list[int]] = []

    def layer(y: torch.Tensor) -> torch.Tensor:
        early, late = normal(32).to(lab.device), normal(256).to(lab.device)
        start_offload(early)
        seen.append(list(copied))
        return save(y, lambda _: None, late, early)

    offloaded.forward([layer, torch.neg, torch.neg], x).sum().backward()
    assert seen == [[128]]
    assert copied == [128, 1024]


@pytest.mark.parametrize(("first", "second"), [(1536, 1024), (1024, 512), (1536, 512), (0, 0)])
def test_a_storage_that_is_resized_after_it_was_saved(first: int, second: int, lab: Lab) -> None:
    """PyTorch counts that as no change, and FSDP does it to memory that it fills again before backward."""

    def step(offloaded: Offloading) -> list[torch.Tensor]:
        x = torch.linspace(0, 1, 128, device=lab.device, requires_grad=True)
        saved: list[torch.Tensor] = []

        def layer(y: torch.Tensor) -> torch.Tensor:
            a, b, c = (torch.arange(256.0, device=lab.device) + n for n in range(3))
            y = y * c[:128] + y * a[:128] + y * b[:128]
            for tensor, nbytes in ((a, first), (b, second)):
                tensor.untyped_storage().resize_(nbytes)
                saved.append(tensor)
            return y

        loss = offloaded.forward([layer, torch.neg, torch.neg], x).sum()
        for number, tensor in enumerate(saved):
            if not tensor.untyped_storage().nbytes():
                tensor.untyped_storage().resize_(1024)
                with torch.autograd._unsafe_preserve_version_counter(tensor):
                    tensor.copy_(torch.arange(256.0) + number)
        return list(torch.autograd.grad(loss, x))

    assert_same(step(NOTHING), step(offloading(1, 3, lab.device)))


def test_a_pack_of_nothing_but_a_resized_storage(lab: Lab, x: torch.Tensor, copied: list[int]) -> None:
    received: list[Tensors] = []
    tensor = normal(8).to(lab.device)

    def layer(y: torch.Tensor) -> torch.Tensor:
        y = save(y, received.append, tensor)
        tensor.untyped_storage().resize_(0)
        return y

    offloaded = offloading(1, 3, lab.device)
    with pytest.warns(UserWarning, match="nothing was offloaded: .* for these reasons: 1 resized"):
        loss = offloaded.forward([layer, torch.neg, torch.neg], x).sum()
    assert copied == []
    assert offloaded.stats.skipped == {"resized": 1}
    tensor.untyped_storage().resize_(32)
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.fill_(3)
    loss.backward()
    assert received[0][0].tolist() == [3.0] * 8


def test_a_storage_without_bytes_stays(lab: Lab, x: torch.Tensor, copied: list[int]) -> None:
    received: list[Tensors] = []
    context, sync = get_cpu_offload_context(True, 1, 3, min_bytes=0, device=lab.device)
    with context:
        y = save(x, received.append, normal(0).to(lab.device), normal(8).to(lab.device))
    for _ in range(2):
        y = sync(y)
        with context:
            y = y * 1
    sync(y).sum().backward()
    assert copied == [512]
    assert context.stats().skipped == {"small": 1}
    assert [tensor.numel() for tensor in received[0]] == [0, 8]


def test_out_of_memory_when_a_pack_is_split_and_then_there_is_enough(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.adverse()
    x = torch.tensor(0.5, device=lab.device, requires_grad=True)

    def layer(y: torch.Tensor) -> torch.Tensor:
        return y.tanh() * y.sigmoid().exp()

    layers = [layer, torch.neg, torch.neg]
    expected = torch.autograd.grad(NOTHING.forward(layers, x), x)
    y = offloading(1, 3, lab.device).forward(layers, x)

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(torch, "_foreach_mul", fails)
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(y, x, retain_graph=True)
    assert_same(list(expected), list(torch.autograd.grad(y, x)))


def test_threads_whose_graphs_share_a_pack(lab: Lab) -> None:
    def layer(tensors: Tensors) -> Tensors:
        for _ in range(30):
            tensors = tuple(y.tanh() * y.sigmoid() * 1.5 for y in tensors)
        return tensors

    for _ in range(5):
        leaves = [torch.tensor(0.5, device=lab.device, requires_grad=True) for _ in range(3)]
        (expected,) = torch.autograd.grad(layer((leaves[0],))[0], leaves[0])
        context, sync = get_cpu_offload_context(True, 1, 3, min_bytes=0, device=lab.device)
        with context:
            outputs = layer(tuple(leaves))
        outputs = sync(outputs)
        for _ in range(2):
            with context:
                outputs = tuple(y * 1 for y in outputs)
            outputs = sync(outputs)
        barrier = threading.Barrier(3)

        def backward(y: torch.Tensor, leaf: torch.Tensor, barrier: threading.Barrier = barrier) -> torch.Tensor:
            barrier.wait()
            return torch.autograd.grad(y, leaf)[0]

        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(backward, outputs, leaves))
        assert_same([expected] * 3, found)


@pytest.mark.gpu
def test_what_another_stream_has_computed_moves_alone() -> None:
    """Nothing says that the layer's stream may read it yet."""
    device = torch.device("cuda")
    side = torch.cuda.Stream()
    context, sync = get_cpu_offload_context(True, 1, 3, min_bytes=0)
    offloaded = Offloading(context, sync)
    received: list[Tensors] = []
    x = torch.ones(1, device=device, requires_grad=True)
    main = torch.cuda.current_stream()

    def layer(y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            late = torch.zeros(1024, device=device)
            torch.cuda._sleep(100_000_000)
            late.fill_(3.0)
            return save(y, received.append, late, late + 1)

    y = offloaded.layer(layer, x)
    main.wait_stream(side)
    offloaded.forward([torch.neg, torch.neg], y).sum().backward()
    assert [tensor.unique().tolist() for tensor in received[0]] == [[3.0], [4.0]]


def test_many_small_tensors_are_few_copies_and_few_waits(lab: Lab, copied: list[int]) -> None:
    """What a tensor costs by itself is Python only."""
    x = torch.randn(64, device=lab.device, requires_grad=True)
    offloaded = offloading(1, 3, lab.device)
    waits = lab.count_waits()

    def many(y: torch.Tensor) -> torch.Tensor:
        for _ in range(200):
            y = y.sin()
        return y

    layers: list[Callable[[torch.Tensor], torch.Tensor]] = [many, torch.neg, torch.neg]
    loss_of(offloaded.forward(layers, x)).backward()
    assert offloaded.stats.offloaded_storages == 199  # the first is a leaf
    assert len(copied) == 1
    assert len(waits) <= 5
