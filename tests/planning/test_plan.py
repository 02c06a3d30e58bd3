"""The planner: the fewest layers that meet the budget, and an honest prediction."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import default, layer_profiles, links

import offload
from offload.planning.plan import free_plan, make_plan
from offload.planning.profile import LayerProfile, Link, Profile
from offload.planning.simulate import simulate
from offload.schedule.schedule import Schedule

GIB = 1 << 30
LINK = Link(60e9, 60e9, 110e9)
PROFILE = Profile((LayerProfile(0.01, 0.02, GIB),) * 20)


@given(st.lists(layer_profiles, min_size=1, max_size=6), links, st.integers(0, 10**10))
def test_meets_the_budget_with_no_layer_more_than_needed(layers, link, budget):
    profile = Profile(tuple(layers))
    peaks = [simulate(default(k, len(layers)), profile, link).peak_bytes for k in range(len(layers))]
    if min(peaks) > budget:
        with pytest.raises(ValueError, match=f"must be at least {min(peaks)} bytes"):
            make_plan(profile, budget, link)
        return
    chosen = make_plan(profile, budget, link)
    assert chosen.peak_bytes <= budget
    assert all(peak > budget for peak in peaks[: chosen.num_layers])


def test_prediction_is_the_simulation():
    chosen = make_plan(PROFILE, "8GiB", LINK)
    assert chosen.schedule == Schedule.default(12, 20)
    assert chosen.timeline == simulate(chosen.schedule, PROFILE, LINK)
    assert chosen.step_s == chosen.timeline.duration_s > chosen.without.duration_s
    assert chosen.without.peak_bytes == 20 * GIB
    assert chosen.host_bytes == 12 * GIB


def test_infeasible():
    with pytest.raises(ValueError) as caught:
        make_plan(PROFILE, "512MiB", LINK)
    assert str(caught.value) == (
        "memory_budget must be at least 1073741824 bytes (1.00 GiB), the least peak that offloading reaches, with "
        "19 of 20 layers, got 536870912 bytes (512.0 MiB); raise it, use smaller microbatches, or recompute in the "
        "layers (torch.utils.checkpoint)."
    )


def test_all_but_one_layer_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_plan(PROFILE, "1GiB", LINK).num_layers == 19


def test_refuses_no_layers():
    with pytest.raises(ValueError, match=r"^layers must hold at least one LayerProfile, got none; profile "):
        Profile(())


def test_measures_the_link_if_none_is_given(monkeypatch):
    monkeypatch.setattr("offload.measuring.measure_link.measure_link", lambda: LINK)
    assert offload.plan(PROFILE, "15GiB").link == LINK
    other = Link(1e9, 1e9, 2e9)
    assert offload.plan(PROFILE, "15GiB", other).link == other


def test_repr():
    profile = Profile((LayerProfile(0.01, 0.02, GIB),) * 5)
    assert repr(make_plan(profile, "3.5GiB", LINK)) == (
        "<Plan: offload 2 of 5 layers, step 150.0 ms, peak 3.00 GiB of 3.50 GiB>"
    )


class TestFree:
    LAYER = LayerProfile(0.01, 0.02, GIB)

    def test_one_more_layer_would_make_the_step_longer(self):
        profile = Profile((self.LAYER,) * 12)
        found = free_plan(profile, LINK)
        assert 0 < found.num_layers < 11
        assert found.step_s == pytest.approx(found.without.duration_s)
        more = simulate(Schedule.default(found.num_layers + 1, 12), profile, LINK)
        assert more.duration_s > 1.001 * found.step_s
        assert found.peak_bytes == found.memory_budget < found.without.peak_bytes

    def test_the_host_is_a_capacity(self):
        found = free_plan(Profile((self.LAYER,) * 12), LINK, max_host_bytes=GIB)
        assert (found.num_layers, found.host_bytes) == (1, GIB)

    def test_nothing_may_be_free(self):
        assert free_plan(Profile((LayerProfile(1e-6, 1e-6, GIB),) * 12), LINK).num_layers == 0
        assert free_plan(Profile((self.LAYER,)), LINK).num_layers == 0
