"""Plans that choose among regions, whole layers or checkpoints, compared by what microbatches take."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.device.backend import Backend
from offload.measuring.compare_plans import ComparePlans
from offload.planning.plan import make_plan
from offload.planning.profile import HostSeconds, LayerProfile, Link, Profile
from offload.planning.search import Among
from offload.recompute.costs import RegionProfile

MIB = 1 << 20
LINK = Link(8e9, 8e9, 16e9)


class Device(Backend):
    """Marks that hold seconds, which a test lets pass."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now_s = 0.0

    def mark(self) -> Any:
        return self.now_s

    def seconds(self, marks: Iterable[tuple[Any, Any]]) -> list[float]:
        return [end - begin for begin, end in marks]


def plan(step_s: float, host_s: float = 9.0) -> Any:
    return SimpleNamespace(step_s=step_s + 1.0, profile=SimpleNamespace(other_s=1.0), host_s=host_s)


def run(compare: ComparePlans, device: Device, took_s: dict[Any, float], plan: Any, elements: int = 100) -> list[Any]:
    """The plans that a hundred microbatches follow."""
    followed = []
    for _ in range(100):
        plan = compare.begin_microbatch(elements, ready=True) or plan
        followed.append(plan)
        device.now_s += took_s[id(plan)] * elements / 100
        compare.end_backward(ran_all=True)
    return followed


@pytest.mark.parametrize("elements", [100, 75])
def test_a_plan_that_is_slower_than_predicted_gives_way_to_the_fastest(elements: int) -> None:
    regions, layers, checkpoints = plan(1.0), plan(1.1), plan(1.3)
    plans = {Among.REGIONS: regions, Among.LAYERS: layers, Among.CHECKPOINTS: checkpoints}
    device = Device()
    compare = ComparePlans(device)
    took_s = {id(regions): 1.6, id(layers): 1.7, id(checkpoints): 1.3}
    followed = run(compare, device, took_s, compare.best(plans, 100), elements)
    assert followed[0] is regions
    assert [one for one in (regions, layers, checkpoints) if one in followed] == [regions, layers, checkpoints]
    assert followed[-1] is checkpoints
    assert not compare.measures
    # Plans for another size begin with the one that was the fastest.
    assert compare.best({**plans, Among.CHECKPOINTS: (other := plan(1.2))}, 200) is other


def test_a_plan_stays_that_is_faster_than_the_others_can_be() -> None:
    plans = {Among.REGIONS: plan(1.0), Among.CHECKPOINTS: plan(1.5)}
    device = Device()
    compare = ComparePlans(device)
    first = compare.best(plans, 100)
    assert set(map(id, run(compare, device, {id(one): 1.02 for one in plans.values()}, first))) == {id(first)}


@pytest.mark.parametrize("host_s", [0.1, 0.4])
def test_what_only_the_device_has_to_do_is_no_hope_for_a_plan(host_s: float) -> None:
    """A plan is tried that the host may have less to do for than was predicted, if that can make it the fastest."""
    plans = {Among.REGIONS: plan(1.0, host_s), Among.CHECKPOINTS: plan(1.2, host_s)}
    device = Device()
    compare = ComparePlans(device)
    first = compare.best(plans, 100)
    followed = run(compare, device, {id(one): 1.0 for one in plans.values()}, first)
    assert (plans[Among.CHECKPOINTS] in followed) is (host_s > 0.3)
    assert not compare.measures


def test_where_all_predictions_are_too_long_the_others_are_measured_too() -> None:
    """As on a host that is slow while layers are measured: the first plan takes less than any other is predicted to."""
    plans = {Among.REGIONS: plan(1.4), Among.LAYERS: plan(1.6), Among.CHECKPOINTS: plan(1.5)}
    device = Device()
    compare = ComparePlans(device)
    took_s = {id(plans[Among.REGIONS]): 1.0, id(plans[Among.LAYERS]): 1.1, id(plans[Among.CHECKPOINTS]): 0.9}
    assert run(compare, device, took_s, compare.best(plans, 100))[-1] is plans[Among.CHECKPOINTS]
    assert not compare.measures


@pytest.mark.parametrize("busy_s", [1.35, 1.5])
def test_a_host_that_is_busy_for_a_moment_does_not_decide(busy_s: float) -> None:
    """The fastest plan takes longer while it is measured for the first time, and is measured again."""
    now, other = plan(1.0), plan(1.2)
    regions, device = now, Device()
    compare = ComparePlans(device)
    assert compare.best({Among.REGIONS: regions, Among.CHECKPOINTS: other}, 100) is regions
    for number in range(100):
        now = compare.begin_microbatch(100, ready=True) or now
        device.now_s += 1.25 if now is other else busy_s if number < 7 else 1.0
        compare.end_backward(ran_all=True)
    assert now is regions
    assert not compare.measures


def followed_on_a_busy_host(*steps_s: float) -> list[Among]:
    """Among what the plan is that is followed in the end, on fifty hosts, of plans that take these seconds.

    Such a host is slower by 15% or faster for about fifteen microbatches, and each takes up to 8% more or less beside.
    """
    found = []
    for seed in range(50):
        draw, pace, device = random.Random(seed), 0.0, Device()
        compare = ComparePlans(device)
        plans = {kind: plan(1.0) for kind in Among}
        took_s = {id(one): step_s for one, step_s in zip(plans.values(), steps_s, strict=True)}
        now = compare.best(plans, 100)
        for _ in range(120):
            now = compare.begin_microbatch(100, ready=True) or now
            pace = 0.935 * pace + draw.gauss(0.0, 0.15 * math.sqrt(1 - 0.935**2))
            device.now_s += took_s[id(now)] * math.exp(pace + draw.gauss(0.0, 0.08))
            compare.end_backward(ran_all=True)
        assert not compare.measures
        found += [kind for kind, one in plans.items() if one is now]
    return found


def test_a_host_whose_speed_wanders_does_not_decide() -> None:
    found = followed_on_a_busy_host(1.08, 1.08, 1.0)
    assert found.count(Among.CHECKPOINTS) >= 49


def test_of_plans_that_a_busy_host_cannot_tell_apart_checkpoints_are_followed() -> None:
    """They can be no slower than PyTorch's, as far as anybody can measure."""
    found = followed_on_a_busy_host(1.0, 1.0, 1.0)
    assert found.count(Among.CHECKPOINTS) > 25
    assert found.count(Among.LAYERS) > found.count(Among.REGIONS)
    found = followed_on_a_busy_host(0.88, 1.0, 1.0)
    assert found.count(Among.REGIONS) >= 49


def test_a_few_slow_microbatches_say_nothing_of_a_plan() -> None:
    """Of those that are measured at first, the shortest counts."""
    now, other = plan(1.0), plan(1.2)
    device, followed = Device(), []
    compare = ComparePlans(device)
    assert compare.best({Among.REGIONS: now, Among.CHECKPOINTS: other}, 100) is now
    for _ in range(100):
        now = compare.begin_microbatch(100, ready=True) or now
        followed.append(now)
        device.now_s += 1.5 if now is not other else 2.0 if followed.count(other) < 6 else 1.2
        compare.end_backward(ran_all=True)
    assert now is other


def test_a_plan_that_is_fast_now_and_then_is_not_the_fastest() -> None:
    """As ConvNeXt-L, whose plan that copies took 122 ms at best and 151 most of the time, and checkpoints 127."""
    now, checkpoints = plan(1.0), plan(1.3)
    device = Device()
    compare = ComparePlans(device)
    assert compare.best({Among.REGIONS: now, Among.CHECKPOINTS: checkpoints}, 100) is now
    for number in range(100):
        now = compare.begin_microbatch(100, ready=True) or now
        device.now_s += 1.3 if now is checkpoints else 1.25 if number % 4 == 0 else 1.5
        compare.end_backward(ran_all=True)
    assert now is checkpoints
    assert not compare.measures


def test_small_microbatches_are_not_measured() -> None:
    plans = {Among.REGIONS: plan(1.0), Among.CHECKPOINTS: plan(1.3)}
    device = Device()
    compare = ComparePlans(device)
    first = compare.best(plans, 100)
    run(compare, device, {id(first): 9.0}, first, elements=50)
    assert compare.measures


def test_a_microbatch_that_skips_layers_is_not_measured() -> None:
    """Under the slower plan, every second microbatch skips most of its layers."""
    regions, checkpoints = plan(1.0), plan(1.3)
    now, device, followed = regions, Device(), []
    compare = ComparePlans(device)
    assert compare.best({Among.REGIONS: regions, Among.CHECKPOINTS: checkpoints}, 100) is regions
    for number in range(100):
        now = compare.begin_microbatch(100, ready=True) or now
        ran_all = now is regions or number % 2 == 1
        device.now_s += (1.0 if now is regions else 1.3) * (1.0 if ran_all else 0.3)
        compare.end_backward(ran_all=ran_all)
        followed.append(now)
    assert checkpoints in followed
    assert now is regions
    assert not compare.measures


def test_plans_among_fewer_policies() -> None:
    regions = (
        RegionProfile("input", 8 * MIB, 0.0, recomputable=False),
        RegionProfile("mm", 32 * MIB, 2e-3, (0,)),
        RegionProfile("gelu", 64 * MIB, 1e-4, (1,)),
    )
    profile = Profile((LayerProfile.from_regions(regions, 2e-3, 4e-3),) * 20)
    found = {among: make_plan(profile, 900 * MIB, LINK, among=among) for among in Among}
    assert found[Among.REGIONS].step_s < found[Among.LAYERS].step_s <= found[Among.CHECKPOINTS].step_s
    assert all(one.peak_bytes <= 900 * MIB for one in found.values())
    checkpoints = found[Among.CHECKPOINTS]
    assert checkpoints.num_layers == checkpoints.host_bytes == 0
    kept = [policy and policy.kept for policy in checkpoints.policies]
    assert kept == [frozenset({0})] * kept.count(frozenset({0})) + [None] * kept.count(None)
    assert 0 < kept.count(None) < 20
    assert found[Among.LAYERS].num_layers > 0
    assert {policy and policy.kept for policy in found[Among.LAYERS].policies} <= {None, frozenset({0})}


def test_checkpoints_of_compiled_layers_are_at_any_level() -> None:
    """Copies cost the host time, and what the compiler recomputes does not: without copies, some of it is enough."""
    levels = (
        RegionProfile("input", 8 * MIB, 0.0, recomputable=False),
        RegionProfile("products", 32 * MIB, 2e-3, (0,)),
        RegionProfile("other operations", 64 * MIB, 1e-4, (0,), only_with=1),
    )
    layer = LayerProfile.from_regions(levels, 2e-3, 4e-3)
    for host in (HostSeconds(), HostSeconds(1e-2)):  # the device is the limit, and the host
        profile = Profile((replace(layer, host=host),) * 20)
        found = {among: make_plan(profile, 900 * MIB, LINK, among=among) for among in Among}
        checkpoints = found[Among.CHECKPOINTS]
        assert checkpoints.host_bytes == 0
        assert checkpoints.peak_bytes <= 900 * MIB
        assert {policy and policy.kept for policy in checkpoints.policies} == {None, frozenset({0, 1})}
        assert {policy and policy.kept for policy in found[Among.LAYERS].policies} <= {None, frozenset({0})}


@pytest.mark.parametrize("link", [LINK, Link(6e7, 6e7, 6e7)], ids=["compute", "copies"])
def test_the_seconds_of_a_plan_are_corrected_by_what_microbatches_took(link: Link) -> None:
    """By the median of them, whatever the step waits for."""
    regions = tuple(RegionProfile(name, MIB, 0.01, (), recomputable=name != "input") for name in ("input", "mm"))
    layers = (LayerProfile.from_regions(regions, 0.01, 0.02),) * 4
    made = make_plan(Profile(layers, loss_s=0.01, other_s=0.05), 5 * MIB, link, among=Among.LAYERS)
    assert (made.timeline.stall_s > 0) is (link is not LINK)
    layers_s = made.step_s - 0.05
    device = Device()
    compare = ComparePlans(device)
    first = compare.best({Among.LAYERS: made}, 100)
    assert compare.as_measured(first) is first is made
    for number in range(100):
        assert compare.begin_microbatch(100, ready=True) is None
        device.now_s += layers_s * (1.2, 1.7, 1.4, 1.6)[number % 4]
        compare.end_backward(ran_all=True)
    corrected = compare.as_measured(first)
    assert corrected.step_s == pytest.approx(1.5 * layers_s + 0.05)
    assert (corrected.policies, corrected.peak_bytes) == (made.policies, made.peak_bytes)
    assert compare.as_measured(first) is corrected
