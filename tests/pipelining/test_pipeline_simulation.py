"""All ranks of a pipeline in one simulation."""

import pytest

from offload.pipelining.order import gpipe_order, one_f_one_b_order
from offload.pipelining.pipeline_simulation import simulate_pipeline
from offload.pipelining.shared_link import SharedLink
from offload.pipelining.stage_plan import plan_pipeline
from offload.pipelining.stage_profile import StageProfile
from offload.planning.link import Link

LINK = Link(1.0, 1.0, 2.0)
COSTS = StageProfile(1.0, 2.0, saved_bytes=2)


def plans_of(*orders, link=LINK, costs=COSTS, **options):
    """A plan for each rank, each stage with the same costs."""
    found = []
    for order in orders:
        stages = {int(action[0]) if isinstance(action, str) else action.stage for action in order}
        found.append(plan_pipeline(order, dict.fromkeys(stages, costs), link, **options))
    return found


def computed(timeline):
    return [(span.label, span.start_s, span.end_s) for span in timeline.lane("compute")]


def test_what_a_stage_runs_waits_for_its_neighbours():
    step = simulate_pipeline(plans_of(["0F0", "0B0"], ["1F0", "1B0"], fraction=0.0))
    first, last = map(computed, step.timelines)
    assert first == [("F0", 0.0, 1.0), ("B0", 4.0, 6.0)]
    assert last == [("F0", 1.0, 2.0), ("B0", 2.0, 4.0)]
    assert step.step_s == step.step_s_without == 6.0
    assert step.slowdown == 0
    assert step.bubbles_s == (3.0, 3.0)
    assert "2 ranks" in repr(step)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (3, 3)])
def test_bubbles_are_those_that_are_known(stages, microbatches):
    for order in (lambda s: one_f_one_b_order(s, stages, microbatches), lambda s: gpipe_order(s, microbatches)):
        step = simulate_pipeline(plans_of(*map(order, range(stages)), fraction=0.0))
        assert step.step_s == pytest.approx(3.0 * (microbatches + stages - 1))
        assert step.bubbles_s == pytest.approx([3.0 * (stages - 1)] * stages)


def test_the_half_for_the_inputs_is_what_the_stage_before_waits_for():
    costs = StageProfile(1.0, 2.0, weight_s=5.0, saved_bytes=2)
    step = simulate_pipeline(plans_of(["0F0", "0B0"], ["1F0", "1I0", "1W0"], costs=costs, fraction=0.0))
    assert computed(step.timelines[0])[-1] == ("B0", 4.0, 6.0)
    assert computed(step.timelines[1])[-1] == ("1W0", 4.0, 9.0)


def test_stages_of_one_rank_wait_for_nothing_in_between():
    step = simulate_pipeline(plans_of(["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"], fraction=0.0))
    assert step.step_s == 12.0


def test_a_wait_that_fits_into_a_bubble_costs_nothing():
    order = [one_f_one_b_order(stage, 3, 6) for stage in range(3)]
    (first,) = plans_of(order[0], fraction=0.75, parts=4, link=Link(0.7, 0.7, 1.4))
    assert first.stall_s > 1.0
    step = simulate_pipeline([first, *plans_of(*order[1:], fraction=0.0)])
    assert step.slowdown == pytest.approx(0.0)
    assert step.timelines[0].stall_s > 0.1


def test_a_rank_that_waits_lets_the_others_wait():
    order = [one_f_one_b_order(stage, 2, 4) for stage in range(2)]
    (slow,) = plans_of(order[0], fraction=1.0, link=Link(0.2, 0.2, 0.4))
    step = simulate_pipeline([slow, *plans_of(order[1], fraction=0.0)])
    assert step.slowdown > 0.5
    assert step.bubbles_s[1] > 3.0 + 0.5 * step.step_s_without


def test_compute_is_stretched_to_the_measured_step():
    plans = plans_of(*(one_f_one_b_order(stage, 2, 4) for stage in range(2)))
    step = simulate_pipeline(plans, step_s_without=30.0)
    assert step.step_s_without == pytest.approx(30.0)
    assert step.timelines[0].lane("compute")[0].duration_s == pytest.approx(2.0)


def test_orders_that_wait_for_each_other_are_refused():
    crossed = plans_of(["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"], fraction=0.0)
    with pytest.raises(
        ValueError, match=r"must not wait for each other for ever, got no end of the wait for \['0F1', '1B0'\]"
    ):
        simulate_pipeline(crossed)
    with pytest.raises(ValueError, match="one link for each of the 2 ranks, got 1"):
        simulate_pipeline(crossed, SharedLink.private([LINK]))


# --- The link that devices share --------------------------------------------------------------------------------


SHARED = SharedLink((Link(50.0, 50.0, 90.0),) * 4, (Link(30.0, 40.0, 35.0),) * 4)


def test_who_copies_alone_has_the_link_alone():
    assert SHARED.rates(frozenset()) == {}
    assert SHARED.rates(frozenset({(2, "d2h")})) == pytest.approx({(2, "d2h"): 50.0})
    assert SHARED.rates(frozenset({(2, "d2h"), (2, "h2d")})) == pytest.approx({(2, "d2h"): 45.0, (2, "h2d"): 45.0})


def test_all_at_once_have_what_was_measured_all_at_once():
    everything = frozenset((rank, lane) for rank in range(4) for lane in ("d2h", "h2d"))
    assert SHARED.rates(everything) == pytest.approx(dict.fromkeys(everything, 17.5))
    down = frozenset((rank, "d2h") for rank in range(4))
    assert SHARED.rates(down) == pytest.approx(dict.fromkeys(down, 30.0))


def test_some_have_what_the_host_gives_and_no_more_than_alone():
    two = frozenset({(0, "d2h"), (1, "d2h")})
    assert SHARED.rates(two) == pytest.approx(dict.fromkeys(two, 50.0))
    three = frozenset((rank, "d2h") for rank in range(3))
    assert SHARED.rates(three) == pytest.approx(dict.fromkeys(three, 40.0))


def test_what_one_cannot_use_the_others_have():
    mixed = SharedLink(
        (Link(10.0, 10.0, 20.0), Link(60.0, 60.0, 90.0)), (Link(10.0, 10.0, 15.0), Link(40.0, 40.0, 45.0))
    )
    rates = mixed.rates(frozenset({(0, "d2h"), (1, "d2h")}))
    # 50 in all, in proportion to what each reaches alone.
    assert rates == pytest.approx({(0, "d2h"): 50 / 7, (1, "d2h"): 300 / 7})
    rates = mixed.rates(frozenset({(0, "d2h"), (0, "h2d"), (1, "d2h")}))
    assert rates == pytest.approx({(0, "d2h"): 50 / 7, (0, "h2d"): 10.0, (1, "d2h"): 300 / 7})


def test_a_link_is_needed_for_each_device():
    with pytest.raises(ValueError, match="must have a link for each device, got 2 and 1"):
        SharedLink((LINK, LINK), (LINK,))


# --- What stages cost -------------------------------------------------------------------------------------------


def test_parts_end_with_the_tensor_that_fills_them():
    costs = StageProfile(saved_bytes=100, tensors=(10, 50, 20, 20))
    assert costs.cut(4) == [(10, 50), (), (20,), (20,)]
    assert costs.cut(1) == [(10, 50, 20, 20)]
    assert StageProfile(saved_bytes=10).cut(4) == [(2,), (3,), (3,), (2,)]
    with pytest.raises(ValueError, match="tensors must add up to saved_bytes = 100, got 30"):
        StageProfile(saved_bytes=100, tensors=(10, 20))


def test_a_plan_knows_what_each_part_holds():
    costs = {0: StageProfile(1.0, 2.0, saved_bytes=100, tensors=(10, 50, 20, 20))}
    plan = plan_pipeline(["0F0", "0F1", "0B0", "0B1"], costs, Link(1e9, 1e9, 2e9), parts=4, fraction=0.0)
    assert [plan._walk.nbytes[layer] for layer in range(4)] == [60, 0, 20, 20]
    assert plan.peak_bytes == 200


def test_what_waits_for_the_weights_is_on_the_device():
    costs = {1: StageProfile(1.0, 1.0, 1.0, saved_bytes=100, weight_bytes=40)}
    order = ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]
    assert plan_pipeline(order, costs, LINK, fraction=0.0).peak_bytes == 280
    assert plan_pipeline(["1F0", "1B0"], costs, LINK, fraction=0.0).peak_bytes == 100


def test_what_backward_needs_beside_a_part_is_on_the_device_meanwhile():
    costs = StageProfile(1.0, 2.0, saved_bytes=100, tensors=(10, 50, 20, 20), workspace=(0, 5, 200, 7))
    assert costs.workspace_of(4) == [5, 0, 200, 7]
    assert costs.workspace_of(2) == [5, 200 - 20], "the last tensor is gone when the one before it is asked for"
    assert costs.workspace_of(1) == [200 - 20]
    assert StageProfile(saved_bytes=100, tensors=(60, 40), workspace=(0, 1)).workspace_of(1) == [1]
    assert StageProfile(saved_bytes=100, tensors=(60, 40), workspace=(5, 0)).workspace_of(1) == [0], (
        "less than was freed"
    )
    ends_early = StageProfile(saved_bytes=100, tensors=(10, 90), workspace=(1, 2))
    assert ends_early.cut(3) == [(10, 90), (), ()]
    assert ends_early.workspace_of(3) == [2, 2, 2], "backward begins in the last part, though nothing is in it"
    assert StageProfile(saved_bytes=100, tensors=(60, 40)).workspace_of(2) == [0, 0]
    assert StageProfile(saved_bytes=100).workspace_of(2) == [0, 0]
    plan = plan_pipeline(["0F0", "0B0"], {0: costs}, LINK, parts=4, fraction=0.0)
    assert plan.peak_bytes == 80 + 200
    split = plan_pipeline(["0F0", "0I0", "0W0"], {0: costs}, LINK, parts=4, fraction=0.0)
    assert split.peak_bytes == 100 + 200, "the set waits for the half for the weights"


def test_a_budget_is_met_with_the_workspace():
    costs = StageProfile(1.0, 2.0, saved_bytes=100, tensors=(25,) * 4, workspace=(10, 10, 10, 10))
    order = gpipe_order(0, 4)
    for each in (costs, StageProfile(1.0, 2.0, saved_bytes=100, tensors=(25,) * 4)):
        plan = plan_pipeline(order, {0: each}, Link(1e9, 1e9, 2e9), parts=4, memory_budget=150)
        assert plan.peak_bytes <= 150
    assert plan_pipeline(order, {0: costs}, Link(1e9, 1e9, 2e9), parts=4, fraction=0.0).peak_bytes == 410


def test_each_tensor_has_a_workspace_or_none_has():
    with pytest.raises(ValueError, match=r"workspace must have an entry for each of the 2 tensors, got \(1,\)"):
        StageProfile(saved_bytes=3, tensors=(1, 2), workspace=(1,))
    with pytest.raises(ValueError, match="workspace must be a finite number, at least 0, got -1"):
        StageProfile(saved_bytes=3, tensors=(1, 2), workspace=(1, -1))


def test_what_is_saved_again_belongs_to_the_later_part():
    costs = StageProfile(saved_bytes=100, tensors=(10, 50, 20, 20), last_saved=(2, 1, 4, 3), workspace=(0, 5, 9, 7))
    assert costs.cut(4) == [(50,), (), (10,), (20, 20)]
    assert costs.due_bytes() == [0, 50, 10, 20]
    assert costs.workspace_of(4) == [5, 0, 9, 0], "of the last part, one is never asked for first"
    late = StageProfile(saved_bytes=100, tensors=(10, 90), last_saved=(2, 1), workspace=(1, 12))
    assert late.cut(3) == [(90,), (), (10,)]
    assert late.workspace_of(3) == [12, 12, 2], "the last part is beside the others while backward begins"
    assert costs.cut(1) == [(10, 50, 20, 20)]


def test_a_tensor_is_saved_for_the_last_time_after_the_first():
    for last, message in (((0, 0), "from 1 to 2 for tensor 1, got 0"), ((3, 1), "from 0 to 2 for tensor 0, got 3")):
        with pytest.raises(ValueError, match=f"last_saved must be {message}"):
            StageProfile(saved_bytes=3, tensors=(1, 2), last_saved=last)
    with pytest.raises(ValueError, match="last_saved must have an entry for each of the 2 tensors"):
        StageProfile(saved_bytes=3, tensors=(1, 2), last_saved=(1,))
