"""What public functions say when they are given something else than they take: what was expected, and what to write."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload
import offload.pipelining
from offload import LayerProfile, Link, Profile, Schedule
from offload.base.checks import is_int, parse_bytes
from offload.callbacks.base import WhileTraining
from offload.device.select import resolve_device
from offload.pipelining.plan import PipelinePlan, StageProfile

LINK = Link(1e9, 1e9, 2e9)
PROFILE = Profile(tuple(LayerProfile(1e-3, 2e-3, 1 << 20) for _ in range(4)))
ORDER = ["0F0", "0F1", "0B0", "0B1"]
STAGES = {0: StageProfile(forward_s=0.1, backward_s=0.2, saved_bytes=1 << 30)}


def layers(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(count))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = layers()


def step() -> None:
    raise AssertionError("nothing may run before the arguments are checked")


def budget_of(value: Any) -> Any:
    return offload.offload_layers(layers(), memory_budget=value, device="cpu")


LAYERS_WANTED = r"layers must be a list of modules, such as model\.layers, got "
PROFILE_WANTED = r"profile must be a Profile, such as profile_layers\(layers, step\) gives, got "
LINK_WANTED = r"link must be a Link, such as measure_link\(\) gives or Link\(55e9, 55e9, 100e9\) says, got "
SCHEDULE_WANTED = (
    r"schedule must be a Schedule, such as Schedule\.default\(4, 32\), or Schedule\.from_synchronization_dict"
)
DEVICE_WANTED = r"device must be one of this machine's, such as 'cpu' or 'cuda:0', got 'gpu'; leave it out"

offloaded, pipelined = offload.offload_layers, offload.pipelining.plan_pipeline
LAZY_WANTED = r"layer 0 \(LazyLinear\) must know the shapes of its parameters, but it is lazy; run the model once"
WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: offload.offload_layers([nn.LazyLinear(2), nn.Linear(2, 2)], memory_budget="1MiB"),
        ValueError,
        LAZY_WANTED,
    ),
    (lambda: offload.plan(layers(), "1GiB", LINK), TypeError, PROFILE_WANTED + "a ModuleList"),
    (lambda: offload.plan(PROFILE, "2MiB", 55e9), TypeError, LINK_WANTED + r"55000000000\.0"),
    (lambda: offload.plan(PROFILE, None, LINK), TypeError, "memory_budget must be an int"),
    (lambda: offload.plan(PROFILE, -1, LINK), ValueError, "memory_budget must be at least 0 bytes, got -1"),
    (lambda: offload.plan(PROFILE, "2MiB", LINK, max_host_bytes=-1), ValueError, "max_host_bytes must be at least 0"),
    (lambda: offload.simulate(3, PROFILE, LINK), TypeError, r"schedule must be a Schedule, .* or a plan, got 3"),
    (lambda: offload.simulate(Schedule(4), layers(), LINK), TypeError, PROFILE_WANTED + "a ModuleList"),
    (lambda: offload.simulate(Schedule(4), PROFILE, 55e9), TypeError, LINK_WANTED),
    (lambda: offload.profile_layers(Model(), step), TypeError, r"got one Model; .* such as model\.blocks"),
    (lambda: offload.profile_layers(layers(), 3), TypeError, "step must be a function without arguments, got 3"),
    (lambda: offload.record_timeline(torch.ones(1), "cpu"), TypeError, "step must be .* got a Tensor"),
    (lambda: offload.record_timeline(step, "cpu", warmup=-1), ValueError, "warmup must be at least 0, got -1"),
    (lambda: offload.measure_link("gpu"), ValueError, DEVICE_WANTED),
    (lambda: offload.memory_meter("gpu").__enter__(), ValueError, DEVICE_WANTED),
    (lambda: offload.reserve_host_memory(None), TypeError, "nbytes must be an int"),
    (lambda: offload.reserve_host_memory(-1), ValueError, "nbytes must be at least 0 bytes"),
    (lambda: offloaded(3), TypeError, LAYERS_WANTED + "3"),
    (lambda: offloaded("model.layers"), TypeError, LAYERS_WANTED + "'model.layers'"),
    (lambda: offloaded({"a": nn.Tanh()}), TypeError, LAYERS_WANTED + "a dict"),
    (lambda: offloaded(Model()), TypeError, r"got one Model; pass its list of layers, such as model\.blocks"),
    (lambda: offloaded(layers(), layers()), TypeError, "num_layers must be an int, got a ModuleList$"),
    (lambda: offloaded(layers(), schedule={0: (True, 2, False, 1)}), TypeError, SCHEDULE_WANTED),
    (
        lambda: offloaded(layers(), schedule=offload.plan(PROFILE, "2MiB", LINK)),
        TypeError,
        "schedule must be a Schedule, got a Plan, which has one; pass it as plan=",
    ),
    (lambda: offloaded(layers(), plan=PROFILE), TypeError, "plan must be what offload.plan returns"),
    (lambda: offloaded(layers(), 1, device="gpu"), ValueError, DEVICE_WANTED),
    (lambda: offloaded(layers(), 1, max_host_bytes=-1), ValueError, "max_host_bytes must be at least 0"),
    (lambda: budget_of(-1), ValueError, "memory_budget must be at least 0 bytes, got -1"),
    (lambda: budget_of(1e9), TypeError, r"memory_budget must be an int \(bytes\) or a text"),
    (lambda: offloaded(layers(), policies={}), ValueError, "policies must hold a pattern"),
    (lambda: offloaded(layers(), "auto"), TypeError, "got 'auto'; for device memory, write memory_budget='auto'"),
    (lambda: WhileTraining(2, memory_budget="1GiB"), ValueError, "memory_budget excludes num_layers"),
    (lambda: WhileTraining(-3), ValueError, "num_layers must be at least 0, got -3"),
    (lambda: WhileTraining(memory_budget=0), ValueError, "memory_budget must be at least 1.00 KiB"),
    (lambda: WhileTraining(policies={"*": "drop"}), ValueError, "a policy must be one of 'keep'"),
    (lambda: offload.stream_weights(3), TypeError, LAYERS_WANTED + "3"),
    (lambda: offload.get_cpu_offload_context(True, 1, 4, schedule={}), TypeError, SCHEDULE_WANTED),
    (lambda: Schedule(4, ((0, 1),)), TypeError, "each of moves must be a Move"),
    (lambda: Link("55GB/s", 1, 2), TypeError, r"d2h_bytes_per_s must be a positive, .* got '55GB/s'"),
    (lambda: Profile(layers()), TypeError, "layers must hold a LayerProfile for each layer, got a Linear"),
    (lambda: Profile(3), TypeError, "layers must hold a LayerProfile for each layer, got 3"),
    (
        lambda: Profile(PROFILE.layers, calls=(0, 1)),
        ValueError,
        r"calls must name .* 0 to 3, got \(0, 1\); leave it out",
    ),
    (
        lambda: Profile(PROFILE.layers, calls=4),
        ValueError,
        r"calls must name each of the layers 0 to 3, got \(4,\); leave",
    ),
    (lambda: LayerProfile(1, None, 3), TypeError, "backward_s must be a finite number, at least 0, got None"),
    (lambda: LayerProfile(1, 2, 3, 3), TypeError, "tensors must hold the bytes of each tensor, .* got 3"),
    (lambda: StageProfile(forward_s="1"), TypeError, "forward_s must be a finite number, at least 0, got '1'"),
    (lambda: pipelined(3, STAGES, LINK), TypeError, "actions must be the actions of a rank in order"),
    (lambda: pipelined(ORDER, PROFILE, LINK), TypeError, "profile must be a dictionary of stages"),
    (lambda: pipelined(ORDER, {0: PROFILE}, LINK), TypeError, "each entry of profile must be a StageP"),
    (lambda: pipelined(ORDER, STAGES, 55e9), TypeError, LINK_WANTED),
]


@pytest.mark.parametrize(("call", "kind", "text"), WRONG)
def test_says_what_was_expected(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^{text}" if text[0] != "g" else text):
        call()


def planned(budget: str) -> PipelinePlan:
    return offload.pipelining.plan_pipeline(ORDER, STAGES, LINK, memory_budget=budget)


@pytest.mark.parametrize(
    "accepts",
    [
        lambda size: offload.plan(PROFILE, size, LINK, max_host_bytes=size),
        planned,
        lambda size: offload.reserve_host_memory("1MB", "cpu"),
        lambda size: offload.get_cpu_offload_context(True, 1, 4, min_bytes=size, max_host_bytes=size, device="cpu"),
        lambda size: offload.offload_layers(layers(), 2, min_bytes=size, max_host_bytes=size).remove(),
        lambda size: budget_of(size).remove(),
        lambda size: offload.offload_layers(layers(), policies={"*": "keep"}, num_layers=2, min_bytes=size).remove(),
    ],
)
def test_sizes_may_be_texts(accepts: Callable[[int | str], object]) -> None:
    accepts("24GB")


def test_weights_go_to_the_best_device() -> None:
    with offload.stream_weights(layers()) as streamed:
        assert streamed._stream is not None
        assert streamed._stream.device == resolve_device(None)


def test_no_advice_to_offload_nothing() -> None:
    with pytest.warns(UserWarning, match="it takes three layers or more for overlap") as told:
        offload.offload_layers(layers(2), 1).remove()
    assert "0 or less" not in str(told[0].message)


def test_profiles_take_keywords() -> None:
    assert LayerProfile(forward_s=1.0, backward_s=2.0, saved_bytes=3) == LayerProfile(1.0, 2.0, 3)
    assert StageProfile(forward_s=1.0, backward_s=2.0, weight_s=0.5, saved_bytes=3) == StageProfile(1.0, 2.0, 0.5, 3)


class TestBytes:
    @pytest.mark.parametrize(
        ("value", "nbytes"),
        [
            ("40GiB", 40 << 30),
            ("40gib", 40 << 30),
            ("40G", 40 << 30),
            ("40 GB", 40 * 10**9),
            ("512 MiB", 512 << 20),
            ("1.5GiB", 3 << 29),
            ("2KB", 2000),
            ("7B", 7),
            ("1TB", 10**12),
            (123, 123),
        ],
    )
    def test_parse(self, value, nbytes):
        assert parse_bytes(value) == nbytes

    @pytest.mark.parametrize("value", ["", "40", "40 gigs", "GiB", "-1GiB", "1,5GiB", "40GiB of memory"])
    def test_refuses_text(self, value):
        with pytest.raises(ValueError, match=r"^budget must be a number and a unit, such as '40GiB', got '"):
            parse_bytes(value, "budget")

    @pytest.mark.parametrize("value", [1.5, None, True, b"1GiB"])
    def test_refuses_type(self, value):
        with pytest.raises(TypeError, match=r"^budget must be an int \(bytes\) or a text such as '40GiB', got "):
            parse_bytes(value, "budget")

    def test_refuses_negative(self):
        with pytest.raises(ValueError, match=r"^budget must be at least 0 bytes, got -1$"):
            parse_bytes(-1, "budget")


@pytest.mark.parametrize(
    ("value", "fits"), [(0, False), (1, True), (3, True), (4, False), (True, False), (2.0, False), (None, False)]
)
def test_ints_within_bounds(value, fits):
    assert is_int(value, 1, 3) is fits


@pytest.mark.gpu
def test_a_device_that_the_machine_has_not() -> None:
    with pytest.raises(ValueError, match=r"whose last one is 'cuda:\d+', got 'cuda:99'"):
        resolve_device("cuda:99")
