"""The tutorial's scenario: one model, and eight microbatches of one pipeline rank as layers 0 to 7."""

import pytest
import torch
from lab import late_copies
from models import assert_same
from strategies import PIPELINE, PIPELINE_ORDER
from torch import nn

from offload import OffloadState, Schedule, get_cpu_offload_context
from offload.observe.memory import CpuAllocations

MICROBATCHES = 8
WIDTH = 64
MIN_BYTES = 1024
ON_DEVICE = {OffloadState.RESIDENT, OffloadState.OFFLOADING, OffloadState.RELOADING, OffloadState.RELOADED}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(
        *(layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)))
    )


@pytest.fixture
def microbatches():
    torch.manual_seed(1)
    return [torch.randn(256, WIDTH) for _ in range(MICROBATCHES)]


@pytest.fixture(autouse=True)
def _races_show():
    with late_copies(0.002):
        yield


def declarative(**options):
    options = {"synchronization_dict": PIPELINE, "model_layers": MICROBATCHES, "device": "cpu"} | options
    return get_cpu_offload_context(enabled=True, min_bytes=MIN_BYTES, **options)


def step(model, microbatches, context=None, sync=lambda x: x, check=lambda _: None):
    """One training step in the tutorial's order; ``check`` is called at the beginning of each point."""
    losses = {}
    for point in PIPELINE_ORDER:
        number = int(point[1:])
        if point[0] == "B":
            losses.pop(number).backward()
            continue
        if context is None:
            output = model(microbatches[number])
        else:
            with context:
                check(point)
                output = model(microbatches[number])
            output = sync(output)
            output.grad_fn.register_prehook(lambda _, point=f"B{number}": check(point))
        losses[number] = output.square().sum()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def test_gradients_are_those_without_offloading_and_states_those_of_the_grid(model, microbatches):
    expected = step(model, microbatches)
    schedule = Schedule.from_synchronization_dict(PIPELINE, MICROBATCHES, PIPELINE_ORDER)
    assert {move.layer: move.entry for move in schedule.moves} == PIPELINE
    grid = {repr(point): set(layers) for point, layers in schedule.resident()}
    seen = []

    def check(point):
        seen.append(point)
        # The grid ends with a layer's backward; its set is held for as long as the round is.
        done = {int(past[1:]) for past in seen[:-1] if past[0] == "B"}
        sets = {layer: context.sets_of(layer).get(0) for layer in range(MICROBATCHES) if layer not in done}
        on_device = {layer for layer, moving in sets.items() if moving is not None and moving.state in ON_DEVICE}
        assert on_device == grid[point], point

    context, sync = declarative(schedule=schedule, synchronization_dict=None)
    assert_same(expected, step(model, microbatches, context, sync, check))
    assert seen == PIPELINE_ORDER


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_dictionary_gives_the_same_gradients(device, model, microbatches):
    model, microbatches = model.to(device), [x.to(device) for x in microbatches]
    expected = step(model, microbatches)
    context, sync = declarative(device=device)
    for _ in range(3):
        assert_same(expected, step(model, microbatches, context, sync))
    assert context.stats().offloaded_bytes == context.stats().reloaded_bytes > 0
    assert context.stats().late_reloads == 0


def steady_peak_bytes(model, microbatches, context=None, sync=lambda x: x):
    """The most memory at once from the beginning of F4 to that of F7, the last forward, whose set stays."""
    live_bytes = 0
    peak_bytes = 0
    steady = False

    def count(nbytes):
        nonlocal live_bytes, peak_bytes
        live_bytes = nbytes
        if steady:
            peak_bytes = max(peak_bytes, nbytes)

    def check(point):
        nonlocal steady
        steady = PIPELINE_ORDER.index("F4") <= PIPELINE_ORDER.index(point) < PIPELINE_ORDER.index("F7")

    if context is None:
        context, sync = declarative(synchronization_dict={})
    with CpuAllocations(count):
        step(model, microbatches, context, sync, check)
    return peak_bytes


def test_memory_is_lower(model, microbatches):
    # The dictionary lets nothing go before B0, so the first four forwards need what they need without it.
    without = steady_peak_bytes(model, microbatches)
    offloaded = steady_peak_bytes(model, microbatches, *declarative())
    assert offloaded < 0.75 * without  # three sets of four, and what forward and backward need beside them
