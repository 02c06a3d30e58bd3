"""What a stage costs, and how its activation set is cut into parts."""

import pytest

from offload.pipelining.plan import plan_pipeline
from offload.pipelining.rank_step import StageProfile
from offload.planning.profile import Link

LINK = Link(1.0, 1.0, 2.0)


def test_parts_end_with_the_tensor_that_fills_them():
    costs = StageProfile(saved_bytes=100, tensors=(10, 50, 20, 20))
    assert [part.tensors for part in costs.cut(4)] == [(10, 50), (), (20,), (20,)]
    assert [part.tensors for part in costs.cut(1)] == [(10, 50, 20, 20)]
    assert [part.saved_bytes for part in StageProfile(saved_bytes=10).cut(4)] == [2, 3, 2, 3]
    with pytest.raises(ValueError, match="tensors must add up to saved_bytes = 100, got 30"):
        StageProfile(saved_bytes=100, tensors=(10, 20))


def test_a_plan_knows_what_each_part_holds():
    costs = {0: StageProfile(1.0, 2.0, saved_bytes=100, tensors=(10, 50, 20, 20))}
    plan = plan_pipeline(["0F0", "0F1", "0B0", "0B1"], costs, Link(1e9, 1e9, 2e9), parts=4, fraction=0.0)
    assert [plan._step.nbytes[layer] for layer in range(4)] == [60, 0, 20, 20]
    assert plan.peak_bytes == 200


def test_what_waits_for_the_weights_is_on_the_device():
    costs = {1: StageProfile(1.0, 1.0, 1.0, saved_bytes=100, weight_bytes=40)}
    order = ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]
    assert plan_pipeline(order, costs, LINK, fraction=0.0).peak_bytes == 280
    assert plan_pipeline(["1F0", "1B0"], costs, LINK, fraction=0.0).peak_bytes == 100
