"""What autograd saves is reloaded exactly as it was, and each storage is offloaded once or not at all."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lab import Lab
from models import (
    NOTHING,
    WIDTH,
    Offloading,
    assert_same,
    build,
    gradients,
    leaves_of,
    loss_of,
    offloading,
    save,
    through,
)
from ranks import true_in_a_child
from saving import FLOAT8, assert_identical, finish_copies, normal, nothing, round_trip, run
from torch import nn
from torch.autograd import forward_ad

import offload
from offload import Move, Schedule
from offload.schedule.schedule import backward, forward

# Layers that keep what they save are the point of many tests here.
pytestmark = [pytest.mark.usefixtures("adverse"), pytest.mark.filterwarnings("ignore:a whole round of")]


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    """What the layers compute with; small, so that it is easy to tell from what they save."""
    return torch.ones(1, device=device, requires_grad=True)


GEOMETRIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "slice": lambda t: t[2:5],
    "step": lambda t: t[1::2, ::3],
    "column": lambda t: t[:, 3],
    "element": lambda t: t[2, 3],
    "expanded": lambda t: t[:, :1].expand(8, 7),
    "broadcast scalar": lambda t: t[3, 4].expand(2, 3),
    "transposed": lambda t: t.t(),
    "fused qkv": lambda t: t.view(2, 4, 3, 2, 2).permute(2, 0, 3, 1, 4)[1],
    "overlapping": lambda t: t.as_strided((5, 4), (3, 1), 7),
    "diagonal": lambda t: t.diagonal(2),
    "nothing of it": lambda t: t[3:3],
    "reshaped": lambda t: t.view(4, 24).unsqueeze(1),
}


DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, *FLOAT8, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
]
LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conj": torch.conj,
    "neg": lambda t: t.conj().imag,
    "T": lambda t: t.conj().t()[1:],
    "re": torch.real,
}


def in_dtype(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    values = normal(6, 7) * 8
    if dtype.is_complex:
        values = torch.complex(values, values.flip(0))
    elif dtype in (torch.uint8, torch.uint16):
        values = values.abs()
    return values.to(dtype).to(device).t()[1:4]


def complex_numbers(device: torch.device) -> torch.Tensor:
    return torch.complex(normal(4, 5), normal(4, 5).flip(0)).to(device)


SAVED: dict[str, Callable[[torch.device], torch.Tensor]] = {
    **{name: lambda device, view=view: view(normal(8, 12).to(device)) for name, view in GEOMETRIES.items()},
    **{str(dtype): partial(in_dtype, dtype) for dtype in DTYPES},
    **{name: lambda device, view=view: view(complex_numbers(device)) for name, view in LAZY.items()},
    **{
        f"{nbytes} bytes": lambda device, nbytes=nbytes: (torch.arange(nbytes) % 251).to(torch.uint8).to(device)
        for nbytes in (1, 511, 513, 4097)
    },
}


@pytest.mark.parametrize("make", SAVED.values(), ids=list(SAVED))
def test_a_saved_tensor_is_reloaded_exactly(
    make: Callable[[torch.device], torch.Tensor], lab: Lab, x: torch.Tensor
) -> None:
    """Views, dtypes, conjugates and negatives that are marked so, and sizes that fit no page."""
    found, offloaded = round_trip(lambda: make(lab.device), x)
    assert_identical(make(lab.device), found)
    assert offloaded.stats.offloaded_storages == 1
    assert offloaded.stats.offloaded_bytes == make(lab.device).untyped_storage().nbytes()


def as_is(found: torch.Tensor) -> torch.Tensor:
    return found


def marked(device: torch.device) -> torch.Tensor:
    """A part of a buffer that the model keeps alive, so that to offload it saves no memory."""
    table = normal(8, 12).to(device)
    offload.mark_not_offload(table)
    return table[2:]


def quantized(device: torch.device) -> torch.Tensor:
    """Its scale is not in its bytes."""
    return torch.quantize_per_tensor(normal(8, 12).to(device), 0.1, 3, torch.quint8)


STAYS: dict[str, tuple[Callable[[torch.device], torch.Tensor], Callable[[torch.Tensor], torch.Tensor], str]] = {
    **{
        f"of size {size}": (lambda device, size=size: torch.empty(size, device=device), as_is, "small")
        for size in ((0,), (0, 3), (4, 0, 2))
    },
    "marked": (marked, as_is, "marked"),
    "sparse": (lambda device: normal(8, 12).relu().to(device).to_sparse(), torch.Tensor.to_dense, "layout"),
    "quantized": (quantized, torch.dequantize, "layout"),
}
"""What is saved, how it is looked into, and why it is not offloaded."""


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("make", "look", "reason"), STAYS.values(), ids=list(STAYS))
def test_what_stays(make: Callable[..., Any], look: Callable[..., Any], reason: str, lab: Lab, x: torch.Tensor) -> None:
    found, offloaded = round_trip(lambda: make(lab.device), x, moves=False)
    assert_identical(look(make(lab.device)), look(found))
    assert offloaded.stats.offloaded_storages == 0
    assert offloaded.stats.skipped == {reason: 1}


def test_host_buffer_in_several_pieces(lab: Lab, x: torch.Tensor) -> None:
    """Free host memory in small ranges holds one large storage: it is copied piece by piece."""
    taken = [lab.pool.take(4096) for _ in range(8)]
    for buffer in taken[::2]:
        lab.pool.give(buffer, lab.d2h_stream.record_event())
    pinned_bytes = lab.pool.pinned_bytes

    def make() -> torch.Tensor:
        return normal(4 * 1024 - 3).to(lab.device)

    found, offloaded = round_trip(make, x)
    assert_identical(make(), found)
    assert offloaded.stats.offloaded_storages == 1
    assert lab.pool.pinned_bytes == pinned_bytes
    assert taken


@pytest.mark.parametrize("changed", [False, True])
def test_views_of_one_storage_in_one_layer(changed: bool, lab: Lab, x: torch.Tensor) -> None:
    def make() -> tuple[torch.Tensor, ...]:
        base = normal(8, 12).to(lab.device)
        if changed:
            base.add_(1)
        return base[:4], base[4:], base.t(), base.view(-1)[5:6], base

    offloaded = offloading(1, 3, lab.device)
    (found, _, _) = run(offloaded, x, [make, nothing, nothing])
    for before, after in zip(make(), found, strict=True):
        assert_identical(before, after)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
    stats = offloaded.stats
    assert (stats.offloaded_storages, stats.offloaded_tensors) == (1, 5)
    assert stats.offloaded_bytes == stats.reloaded_bytes == 8 * 12 * 4


SHARED: dict[str, tuple[dict[int, tuple[bool, int, bool, int]], int, int, int]] = {
    "a later layer, which backward needs first": ({0: (True, 2, False, 1), 1: (True, 3, False, 2)}, 1, 1, 0),
    "a layer behind the release": ({0: (True, 2, False, 3), 2: (True, 4, False, 3)}, 2, 1, 0),
    "the first layer that stays": ({0: (True, 2, False, 2)}, 1, 0, 1),
    "a later one that stays": ({0: (True, 2, False, 2)}, 2, 1, 1),  # which does not look, as others cost nothing
    "an offloaded layer, behind one that stays": ({1: (True, 3, False, 2)}, 1, 1, 0),
}
"""Moves, the layer that saves the first one's storage as well, how often it is reloaded, and offloaded for nothing."""


@pytest.mark.parametrize(("moves", "second", "reloads", "wasted"), SHARED.values(), ids=list(SHARED))
def test_a_storage_that_two_layers_save_is_offloaded_once(
    moves: dict[int, tuple[bool, int, bool, int]], second: int, reloads: int, wasted: int, lab: Lab, x: torch.Tensor
) -> None:
    base = [normal(8, 12).to(lab.device)]
    expected = base[0].clone()
    offloaded = offloading(1, 5, lab.device, schedule=Schedule.from_synchronization_dict(moves, 5))
    saved: list[Callable[[], tuple[torch.Tensor, ...]]] = [lambda: (base[0][:4],), *[nothing] * 4]
    saved[second] = lambda: (base.pop()[4:],)
    found = run(offloaded, x, saved)
    assert_identical(expected[:4], found[0][0])
    assert_identical(expected[4:], found[second][0])
    stats = offloaded.stats
    assert (stats.offloaded_storages, stats.offloaded_bytes) == (1, expected.nbytes)
    assert (stats.reloaded_bytes, stats.wasted_bytes) == (reloads * expected.nbytes, wasted * expected.nbytes)
    lab.drain()
    lab.pool.trim()
    assert lab.pool.used_bytes == 0


def test_a_storage_whose_later_layer_has_no_backward(lab: Lab, x: torch.Tensor) -> None:
    """It was offloaded with that layer, and backward of the first one is all that asks for it."""

    def step(offloaded: Offloading) -> torch.Tensor:
        shared = [normal(8, 12).to(lab.device) * x]
        used = offloaded.layer(torch.sin, shared[0])
        y = offloaded.layer(lambda one: one.cos(), shared.pop())
        offloaded.forward([torch.exp, torch.exp], y)
        return torch.autograd.grad(used.sum(), x)[0]

    offloaded = offloading(2, 4, lab.device)
    assert_identical(step(NOTHING), step(offloaded))
    assert offloaded.stats.reloaded_bytes == 8 * 12 * 4


def test_a_storage_that_a_kept_layer_saves_after_its_release(lab: Lab, x: torch.Tensor) -> None:
    """The program has held it meanwhile, and lets it go before backward."""
    shared = [normal(8, 12).to(lab.device)]
    expected = shared[0].clone()
    received: list[tuple[torch.Tensor, ...]] = []
    offloaded = offloading(1, 3, lab.device, schedule=Schedule(3, [Move(0, forward(1), backward(1))]))
    y = x
    for _ in range(2):
        y = offloaded.layer(lambda y: save(y, received.append, shared[0]), y)
    shared.clear()
    offloaded.layer(torch.neg, y).sum().backward()
    for (saved,) in received:
        assert_identical(expected, saved)
    assert offloaded.stats.offloaded_bytes == expected.nbytes
    assert offloaded.stats.reloaded_bytes == 0


def test_same_storage_in_two_microbatches(lab: Lab, x: torch.Tensor) -> None:
    """Each microbatch has a copy of its own, so that one's backward takes nothing from the other."""
    shared = [normal(8, 12).to(lab.device)]
    expected = shared[0].clone()
    received: list[torch.Tensor] = []
    offloaded = offloading(1, 3, lab.device)
    outputs = []
    for _ in range(2):
        y = offloaded.layer(lambda y: save(y, lambda saved: received.append(saved[0]), shared[0]), x)
        y = offloaded.layer(torch.neg, y)
        outputs.append(offloaded.layer(torch.neg, y))
    shared.clear()
    for output in outputs:
        output.sum().backward()
        assert_identical(expected, received.pop())
    assert offloaded.stats.offloaded_storages == 2


@pytest.mark.parametrize(("frozen", "autocast"), [(False, False), (True, False), (False, True)])
def test_weights_and_their_casts_stay(frozen: bool, autocast: bool, lab: Lab) -> None:
    layers = [nn.Linear(WIDTH, WIDTH, device=lab.device) for _ in range(3)]
    layers[0].weight.requires_grad_(not frozen)
    x = normal(4, WIDTH).to(lab.device).requires_grad_()
    offloaded = offloading(1, 3, lab.device)
    with torch.autocast(lab.device.type, torch.bfloat16, enabled=autocast):
        # Autocast would keep a cast of the leaf itself, and doubling saves nothing.
        first = [lambda y: layers[0](2 * y if autocast else y.exp())]
        loss = loss_of(offloaded.forward([*first, *layers[1:]], x))
    loss.backward()
    stats = offloaded.stats
    assert stats.skipped == {"parameter": 1}
    # The input's cast, or exp's result, which is the linear's input too, if that is saved.
    assert stats.offloaded_bytes == 4 * WIDTH * (2 if autocast else 4)
    assert not autocast or stats.wasted_bytes == 0


def test_threshold_is_in_bytes_of_the_storage(lab: Lab, x: torch.Tensor) -> None:
    def make() -> tuple[torch.Tensor, ...]:
        return normal(256).to(lab.device)[:2], normal(255).to(lab.device), normal(512).half().to(lab.device)

    offloaded = offloading(1, 3, lab.device, min_bytes=1024)
    found = run(offloaded, x, [make, nothing, nothing])
    for before, after in zip(make(), found[0], strict=True):
        assert_identical(before, after)
    assert offloaded.stats.offloaded_bytes == 1024 + 1024
    assert offloaded.stats.skipped == {"small": 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_strided_nested_tensors_stay(lab: Lab) -> None:
    """They have no size of their own."""
    parts = [normal(3, 8).to(lab.device).requires_grad_(), normal(5, 8).to(lab.device).requires_grad_()]

    def step(offloaded: Offloading) -> None:
        y = offloaded.forward([nn.functional.gelu] * 3, torch.nested.as_nested_tensor(parts))
        torch.nested.to_padded_tensor(y, 0.0).sum().backward()

    offloaded = offloading(1, 3, lab.device)
    expected = gradients(parts, lambda: step(NOTHING))
    assert all(map(torch.equal, expected, gradients(parts, lambda: step(offloaded))))
    assert offloaded.stats.skipped == {"layout": 1}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which PyTorch itself uses for it
def test_forward_mode_over_offloaded_layers(lab: Lab) -> None:
    """A Hessian times a vector: autograd saves zero tensors, which have a size and no memory."""
    layers = [nn.LayerNorm(64, device=lab.device) for _ in range(3)]

    def product(offloaded: Offloading) -> torch.Tensor:
        x = normal(2, 64).to(lab.device).requires_grad_()
        with forward_ad.dual_level():
            y = offloaded.forward(layers, forward_ad.make_dual(x, torch.ones_like(x)) * 1.0)
            (gradient,) = torch.autograd.grad(y.pow(3).sum(), x)
            return forward_ad.unpack_dual(gradient).tangent

    offloaded = offloading(1, 3, lab.device)
    assert torch.equal(product(offloaded), product(NOTHING))
    assert offloaded.stats.skipped["layout"] > 0


@pytest.mark.gpu
def test_tensors_of_another_device_stay() -> None:
    x = torch.ones(1, device="cuda", requires_grad=True)
    found, offloaded = round_trip(lambda: normal(8, 12), x, moves=False)
    assert_identical(normal(8, 12), found)
    assert offloaded.stats.skipped == {"device": 1}


@pytest.mark.parametrize("base", [False, True])
def test_start_offload_begins_the_copy_before_the_save(base: bool, lab: Lab, x: torch.Tensor) -> None:
    started = []

    def make() -> tuple[torch.Tensor, ...]:
        early = normal(8, 12).to(lab.device)
        offload.start_offload(early[2:] if base else early, None, offload_base_tensor=base)
        started.append(offloaded.stats.offloaded_bytes)
        return early[:4], normal(5).to(lab.device)

    offloaded = offloading(1, 3, lab.device)
    found = run(offloaded, x, [make, nothing, nothing])
    assert started == [8 * 12 * 4]
    assert_identical(normal(8, 12).to(lab.device)[:4], found[0][0])
    assert offloaded.stats.offloaded_storages == 2


def test_start_offload_is_behind_what_was_computed(lab: Lab, x: torch.Tensor) -> None:
    """The copy waits for the tensor, not for what is computed after it."""
    lab.slow()

    def make() -> tuple[torch.Tensor, ...]:
        early = torch.zeros(8, 12, device=lab.device)
        lab.write_late(early, 3.0)
        offload.start_offload(early)
        return (early,)

    found, _ = round_trip(lambda: make()[0], x)
    assert torch.equal(found, torch.full((8, 12), 3.0, device=lab.device))


def test_start_offload_of_a_tensor_that_changes_before_the_save(lab: Lab, x: torch.Tensor) -> None:
    def make() -> torch.Tensor:
        early = normal(8, 12).to(lab.device)
        offload.start_offload(early)
        lab.drain()  # the old values are on the host
        return early.mul_(2)

    found, _ = round_trip(make, x)
    assert_identical(2 * normal(8, 12).to(lab.device), found)


def test_start_offload_of_a_tensor_that_nobody_saves(lab: Lab, x: torch.Tensor) -> None:
    def make() -> torch.Tensor:
        offload.start_offload(normal(8, 12).to(lab.device))
        return normal(3).to(lab.device)

    found, offloaded = round_trip(make, x)
    assert_identical(normal(3).to(lab.device), found)
    assert offloaded.stats.reloaded_bytes == 3 * 4  # the other was let go when the layer ended
    lab.pool.trim()
    assert lab.pool.used_bytes == 0


def test_start_offload_beside_another_model_in_another_thread(lab: Lab, x: torch.Tensor) -> None:
    """Whose layer has begun since, and still runs."""
    other, begun, over = offloading(1, 2, lab.device), threading.Event(), threading.Event()

    def wait() -> tuple[torch.Tensor, ...]:
        begun.set()
        assert over.wait(30)
        return (normal(5).to(lab.device),)

    thread = threading.Thread(target=run, args=(other, x.detach().clone().requires_grad_(), [wait, nothing]))

    def make() -> tuple[torch.Tensor, ...]:
        thread.start()
        assert begun.wait(30)
        early = normal(8, 12).to(lab.device)
        offload.start_offload(early)
        started.append((own.stats.offloaded_bytes, other.stats.offloaded_bytes))
        over.set()
        thread.join(30)
        return (early,)

    own, started = offloading(1, 2, lab.device), list[tuple[int, int]]()
    found = run(own, x, [make, nothing])
    assert started == [(8 * 12 * 4, 0)]
    assert_identical(normal(8, 12).to(lab.device), found[0][0])


def test_start_offload_elsewhere_does_nothing(lab: Lab, x: torch.Tensor) -> None:
    tensor = normal(8, 12).to(lab.device)
    offload.start_offload(tensor)
    with pytest.raises(TypeError, match="start_offload takes tensors, got str"):
        offload.start_offload("x")

    def make() -> tuple[torch.Tensor, ...]:
        offload.start_offload(tensor)
        return ()

    offloaded = offloading(1, 3, lab.device)
    run(offloaded, x, [nothing, make, make])
    assert offloaded.stats.offloaded_storages == 0


@pytest.mark.parametrize("second", [0, 1, 2])
def test_parts_of_a_storage_that_count_their_changes_for_themselves(
    second: int, lab: Lab, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one has been saved by layer 0 when the others change, in layer ``second``."""
    finish_copies(lab, monkeypatch)
    whole = [normal(3, 8).to(lab.device)]
    expected = whole[0] + 1
    parts = list(torch.unsafe_chunk(whole.pop(), 3))
    received: list[tuple[torch.Tensor, ...]] = []

    def layer(number: int, y: torch.Tensor) -> torch.Tensor:
        if number == 0:
            y = save(y, received.append, parts.pop(0).add_(1))
        if number == second:
            y = save(y, received.append, parts.pop(0).add_(1))
            y = save(y, received.append, parts.pop(0).add_(1))
        return y

    offloaded = offloading(3, 5, lab.device, schedule=Schedule.from_synchronization_dict({
        0: (True, 2, False, 3),
        1: (True, 4, False, 3),
        2: (True, 4, False, 3),
    }, 5))  # fmt: skip
    for number in range(5):
        x = offloaded.layer(partial(layer, number), x)
    x.sum().backward()
    for before, (after,) in zip(expected.flip(0), received, strict=True):
        assert torch.equal(before, after[0])


def test_backward_in_another_thread_while_versions_are_compared(
    lab: Lab, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer saves the tensor once more, and changes its version for a moment."""
    saved = normal(8, 12).to(lab.device).add_(1)
    offloaded = offloading(1, 3, lab.device)
    first = offloaded.layer(lambda y: save(y, lambda _: None, saved), x)
    errors: list[BaseException] = []
    increment_version, changed = torch.autograd.graph.increment_version, threading.Event()

    def backward() -> None:
        changed.wait(10)
        try:
            first.sum().backward()
        except RuntimeError as error:
            errors.append(error)

    def increment_and_wait(tensor: torch.Tensor) -> None:
        increment_version(tensor)
        changed.set()
        thread.join(0.1)

    monkeypatch.setattr(torch.autograd.graph, "increment_version", increment_and_wait)
    thread = threading.Thread(target=backward, daemon=True)
    thread.start()
    offloaded.layer(lambda y: save(y, lambda _: None, saved), first)
    assert changed.is_set()
    thread.join()
    assert not errors


def test_saved_tensors_of_other_hooks_are_left_alone(lab: Lab, x: torch.Tensor) -> None:
    """Only the innermost pair of hooks applies: a layer that brings its own is not offloaded, nor disturbed."""
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    def layer(y: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return y.exp()

    offloaded = offloading(1, 3, lab.device)
    offloaded.forward([layer, torch.neg, torch.neg], x).sum().backward()
    assert len(packed) == 1
    assert offloaded.stats.offloaded_storages == 0
    assert torch.equal(x.grad, torch.ones_like(x).exp())


class GradientAhead(torch.autograd.Function):
    """Computes a gradient in forward, as fused losses do, and saves a view of it as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ahead = x.sin() * torch.arange(64, device=x.device)
        ctx.save_for_backward(ahead[:4], ahead)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, ahead = ctx.saved_tensors
        return gradients[0], ahead


@pytest.mark.parametrize("offloaded_layers", [(0, 1), (1,), (0,), ()])
def test_a_saved_tensor_that_becomes_a_gradient_is_not_added_to(offloaded_layers: tuple[int, ...], lab: Lab) -> None:
    """Autograd takes over a gradient that nobody else holds, and adds the next one to it in place."""

    def step(offloaded: Offloading) -> list[torch.Tensor]:
        x = torch.ones(1, device=lab.device, requires_grad=True)
        weights = [nn.Parameter(torch.zeros(64, device=lab.device)) for _ in range(3)]
        layers = [lambda y, weight=weight: GradientAhead.apply(y, weight) for weight in weights]
        loss = offloaded.forward(layers, x.expand(64)).sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
        return [weight.grad for weight in weights if weight.grad is not None]

    expected = step(NOTHING)
    assert len(expected) == 3
    moves = tuple(Move(layer, forward(layer + 1), backward(layer + 1)) for layer in offloaded_layers)
    offloaded = offloading(2, 3, lab.device, schedule=Schedule(3, moves))
    for found, gradient in zip(step(offloaded), expected, strict=True):
        assert torch.equal(found, gradient)
    assert offloaded.stats.reloaded_bytes == 64 * 4 * len(moves)


class Ahead(torch.autograd.Function):
    """Returns a tensor that it was given as a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ahead)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], ctx.saved_tensors[0], None


class GivesGradients(nn.Module):
    """Two parameters get one tensor as their gradient, which the module may hold."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.zeros(64)) for _ in range(2))
        self.held = held
        self.register_buffer("buffer", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ahead = self.buffer if self.held else x.detach().sin()
        y: torch.Tensor = Ahead.apply(Ahead.apply(x, self.one, ahead), self.other, ahead)
        return y


@pytest.mark.filterwarnings("ignore:256 B of the 256 B that were copied")  # the module holds its buffer
@pytest.mark.parametrize("policies", [None, {"*": "keep"}, {"*": "recompute"}, {"*": "offload"}], ids=str)
@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
@pytest.mark.parametrize("held", [False, True])
def test_a_tensor_that_becomes_two_gradients_is_changed_by_neither(
    held: bool, min_bytes: int, policies: dict[str, str] | None, device: torch.device
) -> None:
    def steps(layers: nn.ModuleList) -> list[torch.Tensor]:
        x = torch.ones(64, device=device, requires_grad=True)
        for _ in range(3):
            through(layers, x).sum().backward()
            for layer in layers:
                layer.one.grad.mul_(2)
        return [*(parameter.grad for parameter in layers.parameters()), *layers.buffers()]

    plain, layers = (nn.ModuleList(GivesGradients(held) for _ in range(3)).to(device) for _ in range(2))
    with offload.offload_layers(layers, 1, min_bytes=min_bytes, policies=policies):
        assert_same(steps(plain), steps(layers))


ELEMENTS = 1 << 12
WHEN = ["at once", "while it is copied", "when the copy is queued", "when it is on the host"]


def step(offloaded: Offloading, when: str, nbytes: int, lab: Lab) -> list[torch.Tensor]:
    """The first layer's second tensor is resized and filled with other values, as PyTorch does not notice."""
    x = torch.linspace(0, 1, ELEMENTS, device=lab.device).requires_grad_()
    saved: list[torch.Tensor] = []

    def resize() -> None:
        saved[0].untyped_storage().resize_(nbytes)
        # Whoever reads or writes the memory that was freed shows.
        saved.append(torch.full((ELEMENTS,), 7.0, device=lab.device))

    def first(y: torch.Tensor) -> torch.Tensor:
        y = (y * 2).exp()
        saved.append(torch.linspace(1, 2, ELEMENTS, device=lab.device))
        y = y * saved[0] * saved[0][:]  # a view, which only autograd holds
        if when == "at once":
            resize()
        y = y.sin().cos()
        if when == "while it is copied":
            resize()
        return y

    y = offloaded.layer(first, x)
    if when == "when the copy is queued":
        resize()
    y = offloaded.forward([torch.neg, torch.neg], y)
    if when == "when it is on the host":
        resize()
    if saved[0].untyped_storage().nbytes() < 4 * ELEMENTS:
        saved[0].untyped_storage().resize_(4 * ELEMENTS)
        with torch.autograd._unsafe_preserve_version_counter(saved[0]):
            saved[0].copy_(torch.linspace(3, 4, ELEMENTS))
    gradients = list(torch.autograd.grad(y.sum(), x))
    assert saved[1].unique().tolist() == [7.0]
    return gradients


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("nbytes", [0, 1024, 8 * ELEMENTS], ids=["freed", "cut", "grown"])
@pytest.mark.parametrize("when", WHEN)
def test_backward_reads_what_the_program_put_there(when: str, nbytes: int, lab: Lab) -> None:
    """In a child on the CPU: a copy that still reads what was freed ends the process."""
    expected = step(NOTHING, when, nbytes, lab)

    def is_right() -> bool:
        offloaded = offloading(1, 3, lab.device)
        for _ in range(2):
            assert_same(expected, step(offloaded, when, nbytes, lab))
        assert offloaded.stats.skipped == {"resized": 4}
        assert offloaded.stats.reloaded_bytes > 0
        lab.drain()
        lab.pool.trim()
        return lab.pool.used_bytes == 0

    assert true_in_a_child(is_right) if lab.device.type == "cpu" else is_right()


def test_after_backward_has_begun_it_reads_its_own(lab: Lab) -> None:
    x = torch.linspace(0, 1, ELEMENTS, device=lab.device).requires_grad_()
    factor = torch.linspace(1, 2, ELEMENTS, device=lab.device)
    y = offloading(1, 3, lab.device).forward([lambda y: y * factor, torch.neg, torch.neg], x)
    (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    factor.untyped_storage().resize_(0)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_backward_in_inference_mode(device: torch.device) -> None:
    layers, x = build("gpt", 4, device)

    def step(offloaded: Offloading) -> None:
        loss = loss_of(offloaded.forward(layers, x))
        with torch.inference_mode():
            loss.backward()

    expected = gradients(leaves_of(layers, x), partial(step, NOTHING))
    offloaded = offloading(2, 4, device)
    assert_same(expected, gradients(leaves_of(layers, x), partial(step, offloaded)))
    assert offloaded.stats.reloaded_bytes > 0


def test_resizing_what_nobody_saved(lab: Lab) -> None:
    storage = torch.ones(8, device=lab.device).untyped_storage()
    storage.resize_(64)
    assert storage.nbytes() == 64
    storage.resize_(0)
    assert storage.nbytes() == 0
