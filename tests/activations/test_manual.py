"""Layers whose offload, release and reload the program starts itself, as in Transformer Engine's interface."""

import re
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from faults import in_threads
from lab import late_copies
from models import assert_same, build

from offload import OffloadStateError, get_cpu_offload_context
from offload.activations.activation_set import ActivationSet
from offload.device.select import get_backend

LAYERS = 4
MIN_BYTES = 1024
CPU = torch.device("cpu")


@pytest.fixture
def layers():
    return build("decoder", LAYERS, CPU)[0]


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    return [torch.randn(2, 64, 32) for _ in range(3)]


@pytest.fixture(autouse=True)
def _races_show():
    with late_copies(0.002):
        yield


def slow_reloads(monkeypatch):
    """From now on, memory for a reload takes long; what is returned is set when it is asked for."""
    backend, begins = get_backend("cpu"), threading.Event()
    empty = backend.empty

    def slow_empty(nbytes):
        begins.set()
        time.sleep(0.1)
        return empty(nbytes)

    monkeypatch.setattr(backend, "empty", slow_empty)
    return begins


def gradients(layers):
    found = [parameter.grad for parameter in layers.parameters()]
    layers.zero_grad()
    return found


def expected_gradients(layers, inputs):
    for x in inputs:
        run(layers, x).backward()
    return gradients(layers)


def run(layers, x, after=lambda _: None, context=None, sync=lambda x: x):
    for number, layer in enumerate(layers):
        if context is None:
            x = layer(x)
        else:
            with context:
                x = layer(x)
        x = sync(x)
        after(number)
    return x.square().sum()


def manual(device=CPU, **options):
    return get_cpu_offload_context(
        True, model_layers=LAYERS, manual_synchronization=True, min_bytes=MIN_BYTES, device=device, **options
    )


def on_the_host(function):
    """What a layer returns whose saved tensors have been released; its context and its controller."""
    context, sync, controller = manual()
    with context:
        output = function()
    output = sync(output)
    controller.start_offload_layer(0)
    controller.release_activation_forward_gpu_memory(0)
    return output, context, controller


def release_all(controller):
    for layer in range(LAYERS):
        controller.release_activation_forward_gpu_memory(layer)


def reload_all(controller):
    for layer in reversed(range(LAYERS)):
        controller.start_reload_layer(layer)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_transformer_engines_example(device, layers, inputs):
    layers, x = layers.to(device), inputs[0].to(device)
    expected = expected_gradients(layers, [x])
    offload_stream = torch.cuda.Stream() if device == "cuda" else get_backend("cpu").new_stream("user")
    if device == "cpu":
        offload_stream.delay_s = 0.002
    context, sync, controller = manual(device, offload_stream=offload_stream)
    loss = run(layers, x, controller.start_offload_layer, context, sync)
    offload_stream.synchronize()
    release_all(controller)
    reload_all(controller)
    loss.backward()
    assert_same(expected, gradients(layers))
    stats = context.stats()
    assert stats.offloaded_bytes == stats.reloaded_bytes > 0
    assert stats.late_reloads == 0


def test_offload_inside_the_forward(layers, inputs):
    expected = expected_gradients(layers, inputs[:1])
    context, sync, controller = manual()
    x = inputs[0]
    for number, layer in enumerate(layers):
        with context:
            controller.start_offload_layer(number)
            x = layer(x)
        x = sync(x)
    release_all(controller)
    x.square().sum().backward()
    assert_same(expected, gradients(layers))
    assert context.stats().late_reloads == LAYERS


def test_a_release_inside_the_forward():
    """What the layer saves from then on is released as soon as it is copied, one copy after the other."""
    x = torch.linspace(0, 1, 4096).requires_grad_()
    context, sync, manual = get_cpu_offload_context(
        True, model_layers=1, manual_synchronization=True, device="cpu", min_bytes=0
    )

    def layer(x, begin=lambda: None):
        y = x.exp()
        begin()
        for _ in range(4):
            y = y.sin().exp()
        return y

    def begin():
        manual.start_offload_layer(0)
        manual.release_activation_forward_gpu_memory(0)

    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    with context:
        y = layer(x, begin)
    (found,) = torch.autograd.grad(sync(y).sum(), x)
    assert torch.equal(expected, found)
    assert context.stats().reloaded_bytes > 4 * x.nbytes


def test_a_layer_whose_graph_has_gone_does_not_end_the_microbatch():
    context, sync, controller = get_cpu_offload_context(
        True, model_layers=4, manual_synchronization=True, device="cpu", min_bytes=0
    )

    def forgets(x):
        x.exp()  # which saves its result, for nobody
        return x + 1

    x = torch.ones(8, requires_grad=True)
    for layer in (torch.sin, forgets, torch.exp, torch.exp):
        with context:
            x = layer(x)
        x = sync(x)
    assert controller.microbatch == 0


def test_threads_that_need_a_layer_at_once_reload_it_once(monkeypatch):
    """Both graphs keep tensors in one activation set, and the second thread comes while the first one reloads."""
    leaves = [torch.linspace(0, 1, MIN_BYTES, requires_grad=True) for _ in range(2)]
    expected = [torch.autograd.grad(leaf.sin().exp().sum(), leaf)[0] for leaf in leaves]
    sums, context, _ = on_the_host(lambda: tuple(leaf.sin().exp().sum() for leaf in leaves))
    reloads = []
    reload, both = ActivationSet._reload, threading.Barrier(2)

    def slow_reload(activations):
        reloads.append(activations.layer)
        time.sleep(0.05)
        reload(activations)

    def backward(loss, leaf):
        both.wait()
        return torch.autograd.grad(loss, leaf)[0]

    monkeypatch.setattr(ActivationSet, "_reload", slow_reload)
    found = in_threads(*(partial(backward, *one) for one in zip(sums, leaves, strict=True)))
    assert reloads == [0]
    assert context.stats().late_reloads == 1
    assert_same(expected, found)


def test_a_thread_that_needs_a_layer_while_its_reload_begins_starts_no_other(monkeypatch):
    leaf = torch.linspace(0, 1, MIN_BYTES, requires_grad=True)
    expected = torch.autograd.grad(leaf.sin().exp().sum(), leaf)
    loss, context, controller = on_the_host(lambda: leaf.sin().exp().sum())
    begun = slow_reloads(monkeypatch)

    def backward():
        begun.wait(10)
        return torch.autograd.grad(loss, leaf)

    found, _ = in_threads(backward, partial(controller.start_reload_layer, 0))
    assert_same(expected, found)
    stats = context.stats()
    assert stats.reloaded_bytes == stats.offloaded_bytes > 0
    assert stats.late_reloads == 0


def test_a_tensor_that_is_resized_while_its_reload_begins(monkeypatch):
    """The program lets the memory go in one thread, when backward in another one has its own already."""
    leaf, factor = (torch.linspace(1, 2, MIN_BYTES, requires_grad=needs) for needs in (True, False))
    expected = [factor.clone()]
    loss, _, _ = on_the_host(lambda: torch.sum(leaf * factor))
    begun = slow_reloads(monkeypatch)

    def resize():
        begun.wait(10)
        factor.untyped_storage().resize_(0)

    found, _ = in_threads(partial(torch.autograd.grad, loss, leaf), resize)
    assert_same(expected, found)


def test_named_microbatches_in_any_order(layers, inputs):
    expected = expected_gradients(layers, inputs[::-1])
    context, sync, controller = manual()
    losses, numbers = [], []
    for x in inputs:
        losses.append(run(layers, x, context=context, sync=sync))
        numbers.append(controller.microbatch)
    for microbatch in reversed(numbers):
        for layer in range(LAYERS):
            controller.start_offload_layer(layer, microbatch=microbatch)
            controller.release_activation_forward_gpu_memory(layer, microbatch=microbatch)
    for microbatch in reversed(numbers):
        for layer in reversed(range(LAYERS)):
            controller.start_reload_layer(layer, microbatch=microbatch)
        losses[microbatch].backward()
    assert_same(expected, gradients(layers))
    assert context.stats().late_reloads == 0


def test_what_a_layer_that_nobody_moves_has_saved_as_well_is_kept(inputs):
    """The first layer's output is in the second one's activation set, of which the program releases nothing."""
    factors = [x.clone().requires_grad_() for x in inputs[:2]]
    functions = [lambda x: (x * factors[0]).exp(), lambda x: (x * factors[1]).sin(), torch.neg, torch.neg]
    expected = torch.autograd.grad(run(functions, inputs[2]), factors)
    context, sync, controller = manual()

    def start(layer):
        if layer == 0:
            controller.start_offload_layer(0)

    loss = run(functions, inputs[2], start, context, sync)
    controller.release_activation_forward_gpu_memory(0)
    controller.start_reload_layer(0)
    assert_same(expected, torch.autograd.grad(loss, factors))
    assert context.stats().offloaded_bytes == 2 * inputs[0].nbytes
    assert context.stats().reloaded_bytes == inputs[0].nbytes


def test_calls_after_a_forward_without_gradients_mean_it(layers, inputs):
    expected = expected_gradients(layers, inputs[:1])
    context, sync, controller = manual()
    loss = run(layers, inputs[0], context=context, sync=sync)
    with torch.no_grad():
        run(layers, inputs[1], context=context, sync=sync)
    for named in ({}, {"microbatch": controller.microbatch}):
        controller.start_offload_layer(0, **named)
    loss.backward()
    assert_same(expected, gradients(layers))
    assert context.stats().offloaded_bytes == 0


def test_calls_without_a_microbatch_mean_the_oldest_that_they_can_move(layers, inputs):
    expected = expected_gradients(layers, inputs[:2])
    context, sync, controller = manual()
    losses = [run(layers, x, controller.start_offload_layer, context, sync) for x in inputs[:2]]
    for _ in losses:
        release_all(controller)
    for loss in losses:
        reload_all(controller)
        loss.backward()
    assert_same(expected, gradients(layers))
    assert context.stats().late_reloads == 0


def test_a_microbatch_whose_backward_is_over_is_not_released(layers, inputs):
    """Its sets live on with the loss, where they were when backward came, and the calls mean the next microbatch."""
    expected = expected_gradients(layers, inputs[1:2])
    context, sync, controller = manual()
    kept = run(layers, inputs[0], controller.start_offload_layer, context, sync)
    kept.backward()
    gradients(layers)
    loss = run(layers, inputs[1], controller.start_offload_layer, context, sync)
    controller.release_activation_forward_gpu_memory(0)
    loss.backward()
    assert context.stats().late_reloads > 0, "nothing of this microbatch was released"
    assert_same(expected, gradients(layers))


def test_a_layer_that_saved_nothing(inputs):
    x, context, controller = on_the_host(lambda: inputs[0].clone().requires_grad_() + 1)
    controller.start_reload_layer(0)
    x.sum().backward()
    assert context.stats().offloaded_bytes == 0


@contextmanager
def refused(text, error=OffloadStateError):
    with pytest.raises(error, match=re.escape(text)):
        yield


def test_calls_in_a_wrong_order(layers, inputs):
    assert issubclass(OffloadStateError, RuntimeError)
    context, sync, controller = manual()
    assert repr(controller) == "ManualOffloadSynchronizer(4 layers, microbatch=-1)"
    with refused("start_offload_layer(0): layer 0 must have run forward, but it has not run in microbatch -1"):
        controller.start_offload_layer(0)
    loss = run(layers, inputs[0], context=context, sync=sync)
    with refused(
        "release_activation_forward_gpu_memory(1): layer 1 must be OFFLOADING, but it is RESIDENT; "
        "call start_offload_layer first."
    ):
        controller.release_activation_forward_gpu_memory(1)
    with refused("start_reload_layer(1): layer 1 must be OFFLOADED, but it is RESIDENT"):
        controller.start_reload_layer(1)
    controller.start_offload_layer(1)
    with refused("layer 1 must be OFFLOADED, but it is OFFLOADING; call release_activation_forward_gpu_memory next"):
        controller.start_reload_layer(1)
    with refused("start_offload_layer(1): layer 1 must be RESIDENT, but it is OFFLOADING"):
        controller.start_offload_layer(1)
    controller.release_activation_forward_gpu_memory(1)
    with refused("layer 1 must be OFFLOADING, but it is OFFLOADED; call start_reload_layer next"):
        controller.release_activation_forward_gpu_memory(1)
    controller.start_reload_layer(1)
    with refused("start_reload_layer(1): layer 1 must be OFFLOADED, but it is RELOADING"):
        controller.start_reload_layer(1)
    loss.backward()
    with refused("layer 1 must be OFFLOADED, but it is RELOADING; nothing is left to call"):
        controller.start_reload_layer(1)
    with refused("start_offload_layer(0): layer 0 must be RESIDENT, but its backward is over"):
        controller.start_offload_layer(0)


def test_a_layer_that_has_not_run_in_this_round(layers, inputs):
    context, sync, controller = manual()
    run(layers, inputs[0], context=context, sync=sync)
    with context:
        x = layers[0](inputs[1])
    sync(x)
    with refused("start_offload_layer(2): layer 2 must have run forward, but it has not run in microbatch 1"):
        controller.start_offload_layer(2)
    with refused("layer 2 must have run forward, but it has not run in microbatch 1"):
        controller.start_offload_layer(2, microbatch=1)


@pytest.mark.parametrize("layer", [-1, LAYERS, "1", True])
def test_unknown_layers(layer):
    _, _, controller = manual()
    with refused(f"layer_id must be an int from 0 to model_layers - 1 = 3, got {layer!r}", ValueError):
        controller.start_offload_layer(layer)


def test_unknown_microbatch(layers, inputs):
    context, sync, controller = manual()
    run(layers, inputs[0], context=context, sync=sync)
    with refused("microbatch must be from 0 to 0, that of the last forward, got 1", ValueError):
        controller.start_reload_layer(0, microbatch=1)
