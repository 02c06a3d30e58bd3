"""Who owns what for how long: the graph owns it all, and when the graph goes, everything goes."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lab import Lab
from models import Offloading, assert_same, build, loss_of, offloading, save, step_gradients
from torch.multiprocessing.reductions import StorageWeakRef

from offload import OffloadState, get_cpu_offload_context
from offload.activations.activation_set import ActivationSet
from offload.activations.round import Round
from offload.activations.saved_storage import SavedStorage
from offload.host.pool import HostBuffer, HostPool

LAYERS = 5
SET_BYTES = 4096
"""What each layer of :class:`Chain` saves."""


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Everything here is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Chain:
    """Layers that save one new tensor each, and weak references to their memory.

    Args:
        pieces: Number of tensors that a layer saves, which share ``SET_BYTES``.
    """

    def __init__(self, device: torch.device, pieces: int = 1) -> None:
        self.device = device
        self.pieces = pieces
        self.x = torch.ones(1, device=device, requires_grad=True)
        self.saved: list[list[StorageWeakRef]] = []
        self.received: list[tuple[float, StorageWeakRef]] = []
        self.on_receive: Callable[[], object] = lambda: None

    def layer(self, y: torch.Tensor) -> torch.Tensor:
        number = float(len(self.saved))
        self.saved.append([])
        for _ in range(self.pieces):
            tensor = torch.full((SET_BYTES // self.pieces // 4,), number, device=self.device)
            self.saved[-1].append(StorageWeakRef(tensor.untyped_storage()))
            y = save(y, self._receive, tensor)
        return y

    def _receive(self, saved: tuple[torch.Tensor, ...]) -> None:
        self.received.append((saved[0].unique().item(), StorageWeakRef(saved[0].untyped_storage())))
        self.on_receive()

    def alive(self) -> list[int]:
        """The layers whose first memory has not been freed."""
        return [number for number, references in enumerate(self.saved) if not all(map(expired, references))]


def expired(reference: StorageWeakRef) -> bool:
    return reference.expired()


def states(offloaded: Offloading) -> list[OffloadState]:
    return [moving.state for moving in offloaded.context._round.sets.values()]


def resident_bytes(offloaded: Offloading) -> int:
    return offloaded.context._transfers.resident_bytes


def assert_all_free(lab: Lab, offloaded: Offloading) -> None:
    """No device memory is counted, and every host buffer is back in the pool, which gives it all back."""
    lab.drain()
    assert resident_bytes(offloaded) == 0
    lab.pool.trim()
    assert lab.pool.used_bytes == 0
    assert lab.pool.pinned_bytes == 0


def release_points(k: int) -> list[int]:
    """Layer i of N is released before layer N-k+i begins forward."""
    return [LAYERS - k + i for i in range(k)]


@pytest.mark.parametrize("k", [1, 2, 3, LAYERS - 1])
def test_device_memory_is_freed_at_the_release_points(k: int, lab: Lab) -> None:
    chain = Chain(lab.device)
    offloaded = offloading(k, LAYERS, lab.device)
    y = chain.x
    for layer in range(LAYERS):
        alive_inside: list[int] = []

        def forward(y: torch.Tensor, alive_inside: list[int] = alive_inside) -> torch.Tensor:
            lab.drain()  # the CPU backend's worker lets go of what it copied only then
            alive_inside += chain.alive()
            return chain.layer(y)

        y = offloaded.layer(forward, y)
        released = sum(point <= layer for point in release_points(k))
        assert alive_inside == list(range(released, layer))
        # At most N-k sets are on the device.
        assert len(chain.alive()) <= LAYERS - k
    assert len(chain.alive()) == LAYERS - k
    y.sum().backward()
    assert [value for value, _ in chain.received] == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert chain.alive() == []
    assert_all_free(lab, offloaded)
    # The sets of offloaded layers never take more than N-k sets, nor more than there are.
    assert offloaded.stats.peak_resident_bytes == min(k, LAYERS - k) * SET_BYTES
    assert offloaded.stats.wasted_bytes == 0


def test_buffers_are_freed_one_by_one_during_backward(lab: Lab) -> None:
    pieces = 4
    chain = Chain(lab.device, pieces)
    offloaded = offloading(2, 4, lab.device)
    before_last: list[int] = []

    def look() -> None:
        *earlier, _ = chain.received
        assert all(reference.expired() for _, reference in earlier)
        before_last.append(resident_bytes(offloaded))

    chain.on_receive = look
    offloaded.forward([chain.layer] * 4, chain.x).sum().backward()
    piece = SET_BYTES // pieces
    assert before_last[-pieces:] == [4 * piece, 3 * piece, 2 * piece, piece]
    assert_all_free(lab, offloaded)


def test_host_memory_is_free_for_others_as_soon_as_its_reload_is_queued(lab: Lab) -> None:
    chain = Chain(lab.device)
    offloaded = offloading(1, 3, lab.device)
    y = offloaded.forward([chain.layer] * 3, chain.x)
    assert lab.pool.used_bytes == SET_BYTES
    y.sum().backward()
    offloaded.forward([chain.layer] * 3, chain.x).sum().backward()
    assert lab.pool.pinned_bytes == SET_BYTES


def forward_until(stage: OffloadState | str, offloaded: Offloading, chain: Chain) -> torch.Tensor:
    """A graph whose layer 0, the only one that is offloaded, has come to ``stage``, or was read by backward."""
    layers = 2 if stage is OffloadState.OFFLOADING else 3
    y = chain.x
    outputs = []
    for _ in range(layers):
        y = offloaded.layer(chain.layer, y)
        outputs.append(y)
    if stage in (OffloadState.RELOADING, READ):
        torch.autograd.grad(y.sum(), outputs[0], retain_graph=True)
    if stage == READ:
        torch.autograd.grad(y.sum(), chain.x, retain_graph=True)
    assert states(offloaded)[0] is (OffloadState.RELOADING if stage == READ else stage)
    return y


READ = "read"
ABANDONED = [OffloadState.OFFLOADING, OffloadState.OFFLOADED, OffloadState.RELOADING, READ]


@pytest.mark.parametrize("stage", ABANDONED)
@pytest.mark.parametrize("slow", [False, True])
def test_graph_abandoned_at_every_stage(stage: OffloadState | str, slow: bool, lab: Lab) -> None:
    lab.slow(d2h_s=0.01 * slow, h2d_s=0.01 * slow)
    lab.backend.poison = True
    chain = Chain(lab.device)
    offloaded = offloading(1, 3, lab.device)
    y = forward_until(stage, offloaded, chain)
    del y
    assert resident_bytes(offloaded) == 0
    lab.drain()
    assert chain.alive() == []
    assert_all_free(lab, offloaded)
    # The next step begins with layer 0 and is right.
    chain.received.clear()
    first = len(chain.saved)
    offloaded.forward([chain.layer] * 3, chain.x).sum().backward()
    assert [value for value, _ in chain.received] == [first + 2, first + 1, first]
    assert_all_free(lab, offloaded)


@pytest.mark.parametrize("stage", ABANDONED)
def test_graph_kept_at_every_stage_can_still_run_backward(stage: OffloadState | str, lab: Lab) -> None:
    """Other steps in between take nothing from it, even after the context itself has gone."""
    lab.adverse()
    chain = Chain(lab.device)
    offloaded = offloading(1, 3, lab.device)
    y = forward_until(stage, offloaded, chain)
    kept = len(chain.saved)
    offloaded.context.reset()
    for _ in range(3):
        offloaded.forward([chain.layer] * 3, chain.x).sum().backward()
    chain.received.clear()
    del offloaded
    y.sum().backward()
    assert [value for value, _ in chain.received] == list(range(kept))[::-1]


def test_exception_in_backward(lab: Lab) -> None:
    lab.adverse()
    layers, x = build("decoder", LAYERS, lab.device)
    offloaded = offloading(3, LAYERS, lab.device)

    def fail(_: torch.Tensor) -> None:
        raise KeyError("in backward")

    def failing() -> None:
        y = offloaded.forward(layers[:2], x)
        y.register_hook(fail)
        loss_of(offloaded.forward(layers[2:], y)).backward()

    with pytest.raises(KeyError):
        failing()
    assert_all_free(lab, offloaded)
    assert_same(step_gradients(layers, x), step_gradients(layers, x, offloaded))
    assert offloaded.stats.late_reloads == 0


def test_no_reference_cycles(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)

    def use() -> list[weakref.ref[Any]]:
        offloaded = offloading(3, LAYERS, lab.device)
        loss_of(offloaded.forward(layers, x)).backward()
        offloaded.forward(layers, x)
        with pytest.raises(ZeroDivisionError):
            offloaded.layer(lambda y: 1 / 0, x)
        y = offloaded.forward(layers, x)
        references: list[weakref.ref[Any]] = [
            weakref.ref(thing)
            for moving in offloaded.context._round.sets.values()
            for thing in (moving, moving.transfers, *moving._live())
        ]
        references += [weakref.ref(offloaded.context), weakref.ref(offloaded.context._round)]
        assert any(isinstance(reference(), SavedStorage) for reference in references)
        del y
        return references

    references = use()
    gc.collect()  # pytest.raises keeps a traceback in a cycle
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        loss_of(offloading(3, LAYERS, lab.device).forward(layers, x)).backward()
        offloading(3, LAYERS, lab.device).forward(layers, x)
        gc.collect()
        ours = [thing for thing in gc.garbage if type(thing).__module__.startswith("offload")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert ours == []
    assert [reference() for reference in references if reference() is not None] == []


@pytest.mark.filterwarnings("ignore:a whole round of")
@pytest.mark.parametrize("min_bytes", [0, 1 << 20], ids=["moved", "kept"])
@pytest.mark.parametrize("k", [0, 2])
def test_saved_outputs_do_not_own_themselves(k: int, min_bytes: int, lab: Lab) -> None:
    """An operation that saves its own result would keep itself alive through a handle that held that result."""
    x = torch.ones(1024, device=lab.device, requires_grad=True)
    offloaded = offloading(k, 3, lab.device, min_bytes=min_bytes)
    y = offloaded.forward([torch.exp, torch.tanh, torch.sigmoid], x)
    storage = StorageWeakRef(y.untyped_storage())
    del y
    lab.drain()
    assert storage.expired()


class TestHandOver:
    """What passes from one hand to another is lost at worst, when something comes in between."""

    def test_an_interrupt_after_a_buffer_was_given_back(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        layers, x = build("gpt", LAYERS, lab.device)
        expected, offloaded = step_gradients(layers, x), offloading(3, LAYERS, lab.device)
        give, given = HostPool.give, list[int]()

        def interrupted(pool: HostPool, buffer: HostBuffer, event: Any) -> None:
            give(pool, buffer, event)
            given.append(buffer.nbytes)
            if len(given) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(HostPool, "give", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step_gradients(layers, x, offloaded)
        for _ in range(5):
            assert_same(expected, step_gradients(layers, x, offloaded))

    @pytest.mark.parametrize("device", ["cpu"], indirect=True)
    def test_a_copy_that_cannot_be_queued(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is not on its way stays on the device, though the rest of its layer goes on."""
        chain = Chain(lab.device, pieces=2)
        chain.saved.append([])  # the first layer saves ones: new host memory is zeros
        options = {"manual_synchronization": True, "min_bytes": 0, "device": lab.device}
        context, sync, manual = get_cpu_offload_context(True, 1, 2, **options)
        y = Offloading(context, sync).forward([chain.layer] * 2, chain.x)
        copy, copies = lab.backend.copy, list[Any]()

        def refused(*copied: Any) -> None:
            copies.append(copied)
            if len(copies) == 2:
                raise OSError("refused")
            copy(*copied)

        monkeypatch.setattr(lab.backend, "copy", refused)
        with pytest.raises(OSError, match="refused"):
            manual.start_offload_layer(0)
        manual.release_activation_forward_gpu_memory(0)
        manual.start_reload_layer(0)
        y.sum().backward()
        assert [value for value, _ in chain.received] == [2.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("where", [(Round, "begin_forward"), (ActivationSet, "enter")], ids=["round", "set"])
def test_an_interrupt_while_a_layer_is_entered(
    where: tuple[type, str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next layer is the first one of a microbatch, and nobody is in a layer."""
    layers, x = build("decoder", 3, device)
    expected = step_gradients(layers, x)
    offloaded = offloading(1, 3, device)
    step_gradients(layers, x, offloaded)
    before = offloaded.copied_bytes
    run = getattr(*where)

    def interrupted(*args: Any, **options: Any) -> None:
        run(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            offloaded.forward(layers, x)
    assert_same(expected, step_gradients(layers, x, offloaded))
    assert offloaded.copied_bytes == (2 * before[0], 2 * before[1])
