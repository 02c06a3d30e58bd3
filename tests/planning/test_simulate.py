"""The simulator: offloaded bytes are reloaded, streams run one thing at a time, and the link decides."""

import ast
import math
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import default, layer_profiles, links, points, seconds, sizes, steps

import offload
from offload.observe.timeline import COPY_LANES, LANES, Timeline
from offload.planning.layer_costs import region_costs
from offload.planning.plan import Plan, make_plan
from offload.planning.profile import LayerProfile, Link, Profile
from offload.planning.simulate import simulate
from offload.schedule.schedule import Schedule

GIB = 1 << 30
PCIE = Link(55.4e9, 55.5e9, 101.6e9)


def uniform(model_layers: int, saved_bytes: int = GIB, **more: float) -> Profile:
    return Profile((LayerProfile(0.01, 0.02, saved_bytes),) * model_layers, **more)


def played(step) -> Timeline:
    schedule, profile, link, policies = step
    return simulate(schedule, profile, link, policies=policies)


def busy_spans(timeline: Timeline, kind: str, layer: int) -> list:
    return [span for span in timeline.spans if span.kind == kind and span.layer == layer]


class TestInvariants:
    @given(steps())
    def test_offloaded_bytes_are_reloaded_bytes(self, step):
        schedule, profile, _, policies = step
        timeline = played(step)
        for number, (layer, policy) in enumerate(zip(profile.layers, policies, strict=True)):
            sizes = [layer.regions[one].nbytes for one in policy.offloaded] if policy else [layer.saved_bytes]
            for kind in ("offload", "reload"):
                copied = sum(span.nbytes for span in busy_spans(timeline, kind, number))
                assert copied == (sum(sizes) if number in schedule.offloaded_layers else 0)

    @given(steps())
    def test_a_stream_does_one_thing_at_a_time_within_the_bandwidth(self, step):
        _, _, link, _ = step
        timeline = played(step)
        for lane in LANES:
            for earlier, later in pairwise(timeline.lane(lane)):
                assert later.start_s >= earlier.end_s
        for lane, alone in (("d2h", link.d2h_bytes_per_s), ("h2d", link.h2d_bytes_per_s)):
            assert timeline.copied_bytes(lane) <= alone * timeline.busy_s(lane) * (1 + 1e-6) + 1e-3

    @given(steps())
    def test_compute_is_busy_or_stalled_and_busy_with_recomputation_too(self, step):
        _, profile, _, policies = step
        layers = zip(profile.layers, policies, strict=True)
        again_s = sum(region_costs(layer.regions, policy.kept).recompute_s for layer, policy in layers if policy)
        timeline = played(step)
        recomputed = [span.duration_s for span in timeline.spans if span.kind == "recompute"]
        assert sum(recomputed) == pytest.approx(again_s)
        assert timeline.busy_s("compute") == pytest.approx(profile.compute_s + again_s)
        assert timeline.duration_s == pytest.approx(profile.compute_s + again_s + timeline.stall_s + timeline.late_s)

    @given(steps())
    def test_memory_ends_at_zero_and_is_never_negative_and_its_times_are_in_order(self, step):
        memory = played(step).memory
        assert memory[-1][1] == min(held for _, held in memory) == 0
        assert [time_s for time_s, _ in memory] == sorted(time_s for time_s, _ in memory)

    @given(steps())
    def test_a_layer_is_reloaded_after_it_was_offloaded_and_before_its_backward_ends(self, step):
        schedule = step[0]
        timeline = played(step)
        for layer in schedule.offloaded_layers:
            offloads, reloads = (busy_spans(timeline, kind, layer) for kind in ("offload", "reload"))
            if offloads:
                assert offloads[-1].end_s <= reloads[0].start_s
                # Of a layer with regions, compute may wait last for an input, which takes no seconds.
                ends = [span.end_s for kind in ("backward", "stall") for span in busy_spans(timeline, kind, layer)]
                assert reloads[-1].end_s <= max(ends)

    @given(sizes)
    def test_default_schedule_fills_n_minus_k_sets(self, size):
        num_layers, model_layers = size
        timeline = simulate(default(num_layers, model_layers), uniform(model_layers), PCIE)
        assert timeline.peak_bytes == (model_layers - num_layers) * GIB


class TestLink:
    @given(steps(), st.floats(1.0, 10.0))
    def test_a_faster_link_is_never_slower(self, step, factor):
        # Where directions do not disturb each other: else a copy that starts earlier can hold up another one.
        schedule, profile, link, policies = step
        d2h, h2d = link.d2h_bytes_per_s, link.h2d_bytes_per_s
        slow, fast = Link(d2h, h2d, d2h + h2d), Link(factor * d2h, factor * h2d, factor * (d2h + h2d))
        slow_s = played((schedule, profile, slow, policies)).duration_s
        assert played((schedule, profile, fast, policies)).duration_s <= slow_s * (1 + 1e-9)

    @given(sizes, seconds)
    def test_more_bytes_are_never_faster(self, size, more):
        schedule = default(*size)
        less = simulate(schedule, uniform(size[1], 10**8), PCIE).duration_s
        assert less <= simulate(schedule, uniform(size[1], round(1e8 * (1 + more))), PCIE).duration_s * (1 + 1e-9)

    @pytest.mark.parametrize(("back_bytes", "out_s"), [(100, 100 / 60), (50, 50 / 60 + 50 / 100)])
    def test_contention_is_exact(self, back_bytes, out_s):
        """One copy each way: alone 1 s each; together they start at once and run at 60%, until one of them is over."""
        schedule = Schedule.from_synchronization_dict({0: (True, 2, False, 1)}, 3, points("F0 F1 F2 B1 B0 B2"))
        layers = tuple(LayerProfile(1.0, 1.0, nbytes, tensors) for nbytes, tensors in [(100, (100,)), (0, ()), (0, ())])
        alone = simulate(schedule, Profile(layers), Link(100, 100, 120))
        assert [span.duration_s for lane in COPY_LANES for span in alone.lane(lane)] == pytest.approx([1.0, 1.0])

        schedule = Schedule.from_synchronization_dict(
            {0: (True, 2, True, 3), 2: (False, 0, False, 2)}, 4, points("F0 F1 F2 F3 B0 B1 B2 B3")
        )
        layers = tuple(
            LayerProfile(1.0, 1.0, nbytes, (nbytes,) if nbytes else ()) for nbytes in (back_bytes, 0, 100, 0)
        )
        shared = simulate(schedule, Profile(layers), Link(100, 100, 120))
        # Layer 2 starts out at t = 3, layer 0 starts back at t = 3: both at 60 bytes/s.
        (out,) = busy_spans(shared, "offload", 2)
        (back,) = busy_spans(shared, "reload", 0)
        assert (out.start_s, back.start_s) == pytest.approx((3.0, 3.0))
        assert (out.end_s, back.end_s) == pytest.approx((3 + out_s, 3 + back_bytes / 60))


def test_the_tensor_that_was_saved_last_is_reloaded_first():
    timeline = simulate(Schedule.default(1, 3), Profile((LayerProfile(1.0, 2.0, 7, (1, 2, 4)),) * 3), PCIE)
    assert [span.nbytes for span in timeline.lane("d2h")] == [1, 2, 4]
    assert [span.nbytes for span in timeline.lane("h2d")] == [4, 2, 1]


def test_loss_and_the_rest_of_the_step():
    profile = Profile((LayerProfile(1.0, 2.0, 100),) * 2, loss_s=0.5, other_s=0.25)
    spans = simulate(Schedule(2), profile, PCIE).lane("compute")
    assert [span.label for span in spans] == ["F0", "F1", "loss", "B1", "B0", "rest of the step"]
    assert [span.start_s for span in spans] == [0.0, 1.0, 2.0, 2.5, 4.5, 6.5]
    assert spans[-1].end_s == 6.75


def test_takes_a_plan():
    plan = Plan(Schedule.default(2, 5), uniform(5), PCIE, 10 * GIB)
    assert simulate(plan, uniform(5), PCIE) == simulate(plan.schedule, uniform(5), PCIE)


def test_profile_of_another_model():
    with pytest.raises(ValueError, match=r"^profile must have as many layers as the schedule, 5, got 4; profile the "):
        simulate(Schedule.default(2, 5), uniform(4), PCIE)


class TestProfile:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ((-1.0, 0.0, 0), r"forward_s must be a finite number, at least 0, got -1\.0"),
            ((0.0, math.nan, 0), "backward_s must be a finite number, at least 0, got nan"),
            ((0.0, 0.0, -5), "saved_bytes must be a finite number, at least 0, got -5"),
            ((0.0, 0.0, 1, (2, -1)), "each of tensors must be a finite number, at least 0, got -1"),
            ((0.0, 0.0, 5, (2, 2)), r"tensors must add up to saved_bytes = 5, got \(2, 2\) with sum 4; "),
        ],
    )
    def test_refuses(self, arguments, text):
        with pytest.raises(ValueError, match=f"^{text}"):
            LayerProfile(*arguments)

    @given(st.integers(0, 1000))
    def test_stand_ins_add_up(self, nbytes):
        pieces = [region.nbytes for region in LayerProfile(0.0, 0.0, nbytes).known_regions()]
        assert sum(pieces) == nbytes
        assert max(pieces, default=0) - min(pieces, default=0) <= 1

    def test_tensors_may_be_a_list(self):
        profile = Profile((LayerProfile(1.0, 2.0, 10, [4, 6]),) * 3)
        assert simulate(Schedule.default(1, 3), profile, PCIE).copied_bytes("d2h") == 10


def test_pure_parts_import_no_torch():
    """They and all they import: read, simulated and drawn where there is no torch."""
    folder = Path(offload.__file__).parent
    pending = ["planning.plan", "schedule.schedule"]
    pending += ["observe.timeline", "base.checks"]
    seen = set()
    while pending:
        module = pending.pop()
        seen.add(module)
        for node in ast.walk(ast.parse((folder / f"{module.replace('.', '/')}.py").read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                package, _, inside = name.partition(".")
                assert package != "torch", module
                if package == "offload" and inside not in seen:
                    pending.append(inside)


FAST_LINK = Link(60e9, 60e9, 110e9)
TWENTY = Profile((LayerProfile(0.01, 0.02, GIB),) * 20)


@given(st.lists(layer_profiles, min_size=1, max_size=6), links, st.integers(0, 10**10))
def test_meets_the_budget_by_the_shortest_step(layers, link, budget):
    profile = Profile(tuple(layers))
    steps = [simulate(default(k, len(layers)), profile, link) for k in range(len(layers))]
    least = min(one.peak_bytes for one in steps)
    if least > budget:
        with pytest.raises(ValueError, match=f"must be at least {least} bytes"):
            make_plan(profile, budget, link)
        return
    chosen = make_plan(profile, budget, link)
    assert chosen.peak_bytes <= budget
    shortest_s = min(one.duration_s for one in steps if one.peak_bytes <= budget)
    kept = steps[0].peak_bytes <= budget
    assert chosen.step_s == pytest.approx(steps[0].duration_s if kept else shortest_s)


def test_prediction_is_the_simulation():
    chosen = make_plan(TWENTY, "8GiB", FAST_LINK)
    assert chosen.schedule == Schedule.default(12, 20)
    assert chosen.timeline == simulate(chosen.schedule, TWENTY, FAST_LINK)
    assert chosen.step_s == chosen.timeline.duration_s > chosen.without.duration_s
    assert chosen.without.peak_bytes == 20 * GIB
    assert chosen.host_bytes == 12 * GIB


def test_infeasible():
    with pytest.raises(ValueError) as caught:
        make_plan(TWENTY, "512MiB", FAST_LINK)
    assert str(caught.value) == (
        "memory_budget must be at least 1073741824 bytes (1.00 GiB), the least peak that a plan reaches, with 19 of "
        "20 layers offloaded, got 536870912 bytes (512.0 MiB); raise it or use smaller microbatches."
    )


def test_all_but_one_layer_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_plan(TWENTY, "1GiB", FAST_LINK).num_layers == 19


def test_refuses_no_layers():
    with pytest.raises(ValueError, match=r"^layers must hold at least one LayerProfile, got none; profile "):
        Profile(())


def test_measures_the_link_if_none_is_given(monkeypatch):
    monkeypatch.setattr("offload.measuring.measure_link.measure_link", lambda: FAST_LINK)
    assert offload.plan(TWENTY, "15GiB").link == FAST_LINK
    other = Link(1e9, 1e9, 2e9)
    assert offload.plan(TWENTY, "15GiB", other).link == other


def test_repr():
    profile = Profile((LayerProfile(0.01, 0.02, GIB),) * 5)
    assert repr(make_plan(profile, "3.5GiB", FAST_LINK)) == (
        "<Plan: offload 2 of 5 layers, step 150.0 ms, peak 3.00 GiB of 3.50 GiB>"
    )
