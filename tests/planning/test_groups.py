"""Plans in which groups of layers hold one input: where device and host are full, or where the room is worth more."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from lab import Lab
from models import NOTHING, WIDTH, assert_same, build, loss_of, step_gradients
from torch import nn

import offload
from offload.planning.choices import Choices, groups_of
from offload.planning.link import Link
from offload.planning.plan import Plan, _default, plan
from offload.planning.profile import LayerProfile, Profile
from offload.planning.search import Search
from offload.recompute.costs import RegionProfile

MIB = 1 << 20
LINK = Link(50e9, 50e9, 90e9)
LAYERS = 16
ROUNDING = 1e-9


def long_layer(*, from_before: bool = True, attention_s: float = 0.4) -> LayerProfile:
    """A layer of a long sequence: its attention takes most of the time, and its output has the size of the input."""
    regions = [
        RegionProfile("input", 64 * MIB, 0.0, recomputable=False, from_before=from_before),
        RegionProfile("norm", 64 * MIB, 0.001, (0,)),
        RegionProfile("qkv", 96 * MIB, 0.01, (1,)),
        RegionProfile("attention", 64 * MIB, attention_s, (2,)),
        RegionProfile("sum", 64 * MIB, 0.01, (0, 3)),
        RegionProfile("up", 224 * MIB, 0.02, (4,)),
    ]
    return LayerProfile.from_regions(regions, sum(one.seconds for one in regions) + 0.02, 1.0)


def long_profile(count: int = LAYERS, attention_s: float = 0.4) -> Profile:
    layers = (long_layer(from_before=number > 0, attention_s=attention_s) for number in range(count))
    return Profile(tuple(layers))


def without(profile: Profile) -> Profile:
    """The same, where no layer can compute the next one's input again."""
    layers = (
        replace(layer, regions=tuple(replace(region, from_before=False) for region in layer.regions))
        for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))


def least(profile: Profile, host_bytes: int) -> int:
    with pytest.raises(ValueError, match="memory_budget must be at least") as raised:
        plan(profile, 0, LINK, max_host_bytes=host_bytes)
    return int(str(raised.value).removeprefix("memory_budget must be at least ").split()[0])


def sizes(planned: Plan) -> set[int]:
    return {one.group[1] if one else 1 for one in planned.treatments}


def test_the_least_budget_falls_where_the_host_is_full() -> None:
    for host_bytes in (0, 2 * 64 * MIB):
        alone, grouped = least(without(long_profile()), host_bytes), least(long_profile(), host_bytes)
        assert grouped < alone - 6 * 64 * MIB
        planned = plan(long_profile(), grouped, LINK, max_host_bytes=host_bytes)
        assert max(sizes(planned)) > 1
        assert planned.peak_bytes <= grouped
        assert planned.host_bytes <= host_bytes
        with pytest.raises(ValueError, match="memory_budget must be at least"):
            plan(without(long_profile()), grouped, LINK, max_host_bytes=host_bytes)


def test_the_room_of_inputs_is_worth_more_to_attention() -> None:
    """Half of the inputs make room for as many outputs of attention, which take most of the time."""
    budget = least(without(long_profile()), 0) + 8 * 64 * MIB
    grouped = plan(long_profile(), budget, LINK, max_host_bytes=0)
    alone = plan(without(long_profile()), budget, LINK, max_host_bytes=0)
    assert max(sizes(grouped)) > 1
    assert grouped.peak_bytes <= budget
    assert grouped.step_s < 0.92 * alone.step_s


def test_groups_are_not_for_those_who_have_room() -> None:
    for budget, host_bytes in ((1 << 40, 0), (6 << 30, 64 << 30)):
        planned = plan(long_profile(attention_s=0.01), budget, LINK, max_host_bytes=host_bytes)
        assert sizes(planned) == {1}
        assert planned.step_s == plan(without(planned.profile), budget, LINK, max_host_bytes=host_bytes).step_s


def test_what_is_planned_is_what_is_simulated() -> None:
    profile = replace(long_profile(10), loss_s=0.1, loss_bytes=MIB)
    for size, share in product((1, 2, 3, 4), (0.0, 0.3, 0.7, 1.0)):
        choices = Choices(profile, LINK, size)
        position = round(share * choices.highest)
        for num_layers in {0, choices.most // 2, choices.most}:
            choice = choices.of(num_layers, position, position)
            planned = Plan(_default(num_layers, 10), profile, LINK, 1 << 50, choices.treatments(choice))
            assert planned.peak_bytes == choices.peak_bytes(choice)
            assert planned.step_s == pytest.approx(choices.step_s(choice), rel=ROUNDING)
            assert planned.host_bytes == choices.host_bytes(choice)


def test_what_a_group_costs() -> None:
    """All but the last of each group run forward once more; what was kept there does not."""
    profile = long_profile(8)
    alone, pairs, fours = (Choices(profile, LINK, size) for size in (1, 2, 4))
    again_s = profile.layers[0].forward_s
    base_s = alone.step_s(alone.of(0, 0, 0))
    last_s = base_s - alone.step_s(replace(alone.of(0, 0, 0), rungs=(0,) * 8))  # the last layer keeps what it can
    for choices, many in ((pairs, 4), (fours, 6)):
        everything = replace(choices.of(0, 0, 0), rungs=(0,) * 8)
        assert choices.step_s(everything) == pytest.approx(base_s - last_s + many * again_s, rel=ROUNDING)
    held = fours.passes(replace(fours.of(0, 0, 0), rungs=(0,) * 8))
    assert [layer.held_bytes // (64 * MIB) for layer in held] == [1, 0, 0, 0, 1, 0, 0, 0]


def test_groups_end_where_a_layer_cannot_be_asked() -> None:
    layers = [long_layer(from_before=number not in (0, 3)) for number in range(8)]
    assert groups_of(Profile(tuple(layers)), 2) == [(0, 2), (1, 2), (0, 1), (0, 2), (1, 2), (0, 2), (1, 2), (0, 1)]
    assert groups_of(Profile(tuple(layers)), 4)[:4] == [(0, 3), (1, 3), (2, 3), (0, 4)]
    assert groups_of(Profile(tuple(layers)), 1) == [(0, 1)] * 8


def test_plans_within_budgets_and_never_slower() -> None:
    draw = random.Random(0)
    for _ in range(12):
        profile = long_profile(draw.randint(2, 9), draw.choice([0.001, 0.05, 0.5]))
        host_bytes = draw.choice([0, 64, 256, 4096]) * MIB
        budget = least(profile, host_bytes) + draw.choice([0, 64, 300, 1000]) * MIB
        planned = plan(profile, budget, LINK, max_host_bytes=host_bytes)
        assert planned.peak_bytes <= budget
        assert planned.host_bytes <= host_bytes
        try:
            alone = plan(without(profile), budget, LINK, max_host_bytes=host_bytes)
        except ValueError:
            continue
        assert planned.step_s <= alone.step_s * (1 + ROUNDING)


def test_a_plan_says_so_and_is_stored() -> None:
    planned = plan(long_profile(), least(long_profile(), 0), LINK, max_host_bytes=0)
    size = max(sizes(planned))
    assert f"{size} layers in a row hold one input, and the others are computed again from it" in str(planned)
    row = next(line for line in str(planned).splitlines() if line.startswith("input"))
    assert "recompute" in row
    assert "keep" in row
    again = Plan.from_json(planned.to_json())
    assert again == planned
    assert again.peak_bytes == planned.peak_bytes


def test_the_search_is_not_much_longer() -> None:
    """A count, as seconds are the machine's: of the passes that are made for 100 layers."""
    made = 0
    for size in (1, 2, 4, 8):
        choices = Choices(long_profile(100), LINK, size)
        Search(choices, 40 << 30, 0).best()
        made += len(choices._passes)
    assert made < 1000


class _Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def measured(lab: Lab, layers: nn.ModuleList, x: torch.Tensor, between: nn.Module | None = None) -> Profile:
    def step() -> None:
        y = x
        for number, layer in enumerate(layers):
            y = layer(between(y) if between is not None and number == 2 else y)
        loss_of(y).backward()

    return offload.profile_layers(layers, step, min_bytes=1 << 14, regions=True, device=lab.device)


@pytest.mark.slow
def test_a_profile_knows_which_inputs_can_be_computed_again(lab: Lab) -> None:
    layers, _ = build("decoder", 4, lab.device)
    x = torch.randn(1, 512, WIDTH, device=lab.device, requires_grad=True)
    for between, expected in ((None, [0, 1, 1, 1]), (_Scaled(), [0, 1, 0, 1])):
        profile = measured(lab, layers, x, between)
        found = [[region.name for region in layer.regions if region.from_before] for layer in profile.layers]
        assert found == [["input"] * many for many in expected]


@pytest.mark.slow
@pytest.mark.parametrize("host_inputs", [0, 1, 3])
def test_a_plan_of_groups_is_carried_out(host_inputs: int, lab: Lab) -> None:
    """With the same bits, on the host no more than is asked, and less on the device than without, as was predicted."""
    count = 12
    layers, _ = build("decoder", count, lab.device)
    # On a GPU, kernels need workspace of some 100 KiB, which differs from way to way, whatever the number of tokens.
    tokens = 512 if lab.device.type == "cpu" else 1 << 14
    x = torch.randn(1, tokens, WIDTH, device=lab.device, requires_grad=True)
    profile = measured(lab, layers, x)
    host_bytes = host_inputs * x.numel() * 4
    budgets = least(without(profile), host_bytes), least(profile, host_bytes)
    plans = [
        plan(one, budget, LINK, max_host_bytes=host_bytes)
        for one, budget in zip((without(profile), profile), budgets, strict=True)
    ]
    assert max(sizes(plans[1])) > 1
    expected = step_gradients(layers, x)
    peaks = []
    for planned in plans:
        offload.empty_host_cache(lab.device)
        with offload.offload_layers(
            layers, plan=planned, min_bytes=1 << 14, device=lab.device, max_host_bytes=host_bytes
        ) as handle:
            for _ in range(3):
                assert_same(expected, step_gradients(layers, x))
            with offload.memory_meter(lab.device) as meter:
                NOTHING.forward(layers, x).float().square().mean().backward()
            assert handle.stats().pinned_bytes <= host_bytes
        peaks.append(meter.peak_bytes)
    assert plans[0].peak_bytes - plans[1].peak_bytes <= (peaks[0] - peaks[1]) * 1.25
    assert peaks[1] < peaks[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a whole round of", "ignore:.*of pinned host memory are missing")
def test_a_memory_budget_that_only_groups_meet(lab: Lab) -> None:
    layers, _ = build("decoder", 12, lab.device)
    x = torch.randn(1, 1024, WIDTH, device=lab.device, requires_grad=True)
    profile, host_bytes = measured(lab, layers, x), 2 * x.numel() * 4
    budget = (least(without(profile), host_bytes) + least(profile, host_bytes)) // 2
    expected = step_gradients(layers, x)
    with offload.offload_layers(
        layers, memory_budget=budget + MIB, min_bytes=1 << 14, device=lab.device, max_host_bytes=host_bytes
    ) as handle:
        for _ in range(5):
            assert_same(expected, step_gradients(layers, x))
        if lab.device.type == "cpu":  # a device's peak has more in it than its layers
            assert handle.plan is not None
        assert handle.stats().pinned_bytes <= host_bytes
