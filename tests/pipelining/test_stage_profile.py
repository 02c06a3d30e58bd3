"""What a stage costs, and how its activation set is cut into parts."""

import pytest

from offload.pipelining.order import gpipe_order
from offload.pipelining.stage_plan import plan_pipeline
from offload.pipelining.stage_profile import StageProfile
from offload.planning.link import Link

LINK = Link(1.0, 1.0, 2.0)


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
