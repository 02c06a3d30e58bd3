"""What a pipeline rank keeps, offloads and computes again within a budget."""

import pytest

from offload.pipelining.order import gpipe_order, one_f_one_b_order
from offload.pipelining.pipeline_regions import everything_again, plan_regions, treated
from offload.pipelining.stage_plan import plan_pipeline
from offload.pipelining.stage_profile import StageProfile
from offload.planning.link import Link
from offload.planning.profile import LayerProfile
from offload.recompute.costs import RegionProfile

KB = 1000
REGIONS = (
    RegionProfile("input", 100 * KB, 0.0, recomputable=False),
    RegionProfile("norm", 100 * KB, 0.001, (0,)),
    RegionProfile("up: mm", 400 * KB, 0.05, (1,)),
    RegionProfile("gelu", 400 * KB, 0.001, (2,)),
)
"""A block's MLP: half of its bytes take no time to compute again."""
LAYER = LayerProfile.from_regions(REGIONS, 0.1, 0.2)
STAGE = StageProfile.of_layers([LAYER] * 4)
SET = 4 * 1000 * KB
ORDER = one_f_one_b_order(0, 4, 8)
SLOW, FAST = Link(1e6, 1e6, 2e6), Link(1e9, 1e9, 2e9)


def planned(budget, link=SLOW, order=ORDER, stage=STAGE):
    return plan_regions(order, dict.fromkeys({action.stage for action in order}, stage), link, memory_budget=budget)


def kept_names(plan):
    return {REGIONS[number].name for policies in plan.policies.values() for one in policies for number in one.kept}


def test_a_stage_consists_of_its_layers():
    assert STAGE.saved_bytes == SET
    assert STAGE.tensors == (100 * KB, 100 * KB, 400 * KB, 400 * KB) * 4
    assert STAGE.forward_s == pytest.approx(0.4)
    assert STAGE.cut(4) == [(100 * KB, 100 * KB, 400 * KB, 400 * KB)] * 4


def test_what_is_treated_keeps_less_and_computes_more():
    least = treated(STAGE, everything_again(STAGE))
    assert least.saved_bytes == 4 * 100 * KB
    assert least.backward_s == pytest.approx(STAGE.backward_s + 4 * 0.052)
    assert least.forward_s == pytest.approx(STAGE.forward_s)
    assert least.again_bytes == pytest.approx(4 * 900 * KB, rel=0.5)


def test_with_room_for_all_nothing_is_done():
    plan = planned(4 * SET)
    assert kept_names(plan) == {"input", "norm", "up: mm", "gelu"}
    assert plan.offloaded_bytes == 0
    assert plan.step_s_without + plan.stall_s == pytest.approx(8 * (0.4 + 0.8))


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.35])
def test_a_budget_is_met_in_less_time_than_by_offloading_alone(share):
    budget = round(share * 4 * SET)
    plan = planned(budget)
    assert plan.peak_bytes <= budget
    whole = plan_pipeline(ORDER, {0: STAGE}, SLOW, parts=4, memory_budget=budget)
    assert plan.step_s_without + plan.stall_s <= whole.step_s_without + whole.stall_s + 1e-9
    if share <= 0.7:
        assert "gelu" not in kept_names(plan)
        assert plan.step_s_without + plan.stall_s < 0.9 * (whole.step_s_without + whole.stall_s)


def test_over_a_fast_link_nothing_is_computed_again():
    plan = planned(2 * SET, FAST)
    assert kept_names(plan) == {"input", "norm", "up: mm", "gelu"}
    assert plan.offloaded_bytes > 0
    assert plan.stall_s == 0


def test_a_budget_that_cannot_be_met_is_warned_of():
    with pytest.warns(UserWarning, match="memory_budget must be at least .* the plan breaks the budget"):
        plan = planned(1000)
    assert kept_names(plan) == {"input"} or plan.offloaded_bytes > 0
    least = planned(plan.peak_bytes)
    assert least.peak_bytes <= plan.peak_bytes


def test_what_a_split_backward_computes_again_is_held_for_its_second_half():
    split = StageProfile.of_layers([LAYER] * 4, weight_s=0.1)
    order = ["1F0", "1F1", "1I0", "1I1", "1W0", "1W1"]
    costs = treated(split, everything_again(split))
    walk = plan_pipeline(order, {1: costs}, SLOW, parts=4, fraction=0.0)
    assert walk.peak_bytes == 2 * (costs.saved_bytes + costs.again_bytes)
    whole = plan_pipeline(gpipe_order(1, 2), {1: costs}, SLOW, parts=4, fraction=0.0)
    assert whole.peak_bytes == 2 * costs.saved_bytes + costs.again_bytes / 4


@pytest.mark.parametrize("profile", [{}, {0: StageProfile(saved_bytes=10)}])
def test_layers_are_needed(profile):
    with pytest.raises(ValueError, match="profile must have the layers of each stage, got none for stage 0"):
        plan_regions(ORDER, profile, SLOW, memory_budget=1)


def test_a_plan_says_what_is_computed_again():
    assert str(planned(4 * SET)).splitlines()[-1] == "stage 0, layers 0 to 3 computed again: nothing"
    said = str(planned(2 * SET)).splitlines()
    assert said[0] == "chunk    size  offloaded"
    assert said[-1] == "stage 0, layers 0 to 3 computed again: norm, gelu"
