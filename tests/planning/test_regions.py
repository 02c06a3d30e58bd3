"""Planning by region: what the simulator plays of it, and that the search finds what brute force finds."""

import pickle
import sys
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import default, links, region, region_layers, sizes, steps

from offload.planning.layer_costs import (
    Peaks,
    costs_of,
    peak_bytes,
    peaks_of,
    region_costs,
    saved_of,
    step_s,
    ways_of,
    with_workspace,
)
from offload.planning.plan import Plan, make_plan, relaxed
from offload.planning.profile import HostSeconds, LayerProfile, Link, Profile
from offload.planning.search import Among
from offload.planning.simulate import simulate
from offload.recompute.costs import LayerPolicy, RegionProfile
from offload.schedule.schedule import Schedule

MIB, GIB = 1 << 20, 1 << 30
PCIE = Link(55e9, 55e9, 101e9)


DECODER = LayerProfile.from_regions(
    [
        region("input", 64, 0, recomputable=False),
        region("norm1", 64, 0.1, 0),
        region("qkv", 192, 1.15, 1),
        region("attention", 64, 0.55, 2),
        region("o_proj", 64, 0.4, 3, saved=False),
        region("residual", 64, 0.1, 0, 4),
        region("norm2", 64, 0.1, 5),
        region("gate", 172, 1.05, 6),
        region("up", 172, 1.05, 6),
        region("silu", 172, 0.25, 7),
        region("product", 172, 0.3, 8, 9),
    ],
    0.0059,
    0.012,
    workspace_bytes=300 * MIB,
)
"""A decoder layer as measured on an H200."""
REFERENCE = Profile((DECODER,) * 20, other_s=0.026)
"""It takes 384 ms if all is kept."""


def numbers(*names: str) -> frozenset[int]:
    return frozenset(number for number, one in enumerate(DECODER.regions) if one.name in names)


def policy(layer: LayerProfile, kept: frozenset[int], *, offloads: bool = False) -> LayerPolicy:
    held = region_costs(layer.regions, kept).kept
    return LayerPolicy(held, held if offloads else frozenset())


def fits(found: Plan, budget: int, host: float = float("inf")) -> bool:
    return found.peak_bytes <= budget and found.host_bytes <= host


@st.composite
def profiles(draw) -> Profile:
    """One or two kinds of layers, in any order."""
    kinds = draw(st.lists(region_layers(), min_size=1, max_size=2))
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    return Profile(tuple(layers), draw(st.floats(0, 0.1)), draw(st.floats(0, 0.1)), draw(st.integers(0, 200)) * MIB)


class TestRegions:
    INPUT = region("input", 64, 0, recomputable=False)
    SEVERAL = (INPUT, region("attention", 64, 2.0, 0), replace(region("attention #2", 1, 0, 0), another_of=1))
    """An operation like attention makes its output and the sums that its backward needs at once."""

    def test_one_of_several_results_costs_the_whole_operation(self):
        for kept in (frozenset(), frozenset({1}), frozenset({2})):
            assert region_costs(self.SEVERAL, kept).recompute_s == 2e-3
        assert region_costs(self.SEVERAL, frozenset({1, 2})).recompute_s == 0

    def test_several_results_are_kept_together(self):
        assert [way.kept for way in ways_of(self.SEVERAL)] == [frozenset({0}), frozenset({0, 1, 2})]

    def test_the_first_of_several_results_is_before_the_others(self):
        with pytest.raises(ValueError, match="another_of = 1; list the regions in the order of forward"):
            LayerProfile.from_regions([self.INPUT, replace(self.SEVERAL[2], another_of=1)], 0.01, 0.02)

    def test_a_region_that_is_kept_only_with_another(self):
        """Without that, the products would be kept first: they save more seconds per byte."""
        products = region("products", 10, 3.0, 0)
        free = (self.INPUT, region("attention", 10, 1.0, 0), products)
        assert [way.kept for way in ways_of(free)] == [frozenset({0}), frozenset({0, 2}), frozenset({0, 1, 2})]
        bound = (*free[:2], replace(products, only_with=1))
        assert [way.kept for way in ways_of(bound)] == [frozenset({0}), frozenset({0, 1}), frozenset({0, 1, 2})]
        with pytest.raises(ValueError, match="only_with = 2; list the regions in the order of forward"):
            LayerProfile.from_regions((*free[:2], replace(products, only_with=2)), 1.0, 1.0)

    @pytest.mark.timeout(60)
    def test_a_layer_that_runs_a_loop_has_few_ways(self):
        """Hundreds of operations, tried one at a time in all orders, took minutes."""
        regions = (self.INPUT, *(region(f"step {n}", 8 + n % 3, 1.0 + n % 5, n) for n in range(400)))
        ways = ways_of(regions)
        assert 64 < len(ways) < 150
        assert (len(ways[0].dropped), len(ways[-1].dropped)) == (400, 0)
        assert all(one.recompute_s > other.recompute_s for one, other in pairwise(ways))

    def test_operations_that_no_dropped_region_depends_on_are_skipped(self):
        regions = (self.INPUT, *(region(f"r{n}", 1, 1.0, n) for n in range(4)))
        costs = region_costs(regions, frozenset({2}))
        assert (costs.dropped, costs.rerun) == ({1, 3, 4}, (1, 3, 4))
        assert region_costs(regions, frozenset({1, 2})).rerun == (3, 4)
        assert region_costs(regions, frozenset({3, 4})).recompute_s == 2e-3

    def test_an_input_is_kept_for_the_second_run_although_autograd_does_not_save_it(self):
        regions = (replace(self.INPUT, saved=False), region("mm", 10, 1.0, 0))
        assert region_costs(regions, frozenset()).kept == {0}
        assert region_costs(regions, frozenset({1})).kept == {1}

    def test_what_depends_on_an_unsaved_region_that_cannot_be_recomputed_is_kept(self):
        regions = (self.INPUT, region("odd", 10, 1.0, 0, saved=False, recomputable=False), region("mm", 10, 1.0, 1))
        assert region_costs(regions, frozenset()).kept == {0, 2}


class TestSimulation:
    @pytest.mark.parametrize("case", ["once", "the list again", "in any order"])
    @given(step=steps(sizes.map(lambda size: default(*size))), data=st.data())
    def test_closed_form_is_the_simulation(self, case, step, data):
        """The search ranks by the closed form, so whatever that leaves out would be planned wrong."""
        schedule, profile, link, policies = step
        num_layers, every = len(schedule.offloaded_layers), (*range(schedule.model_layers),)
        if case == "in any order":
            more = data.draw(st.lists(st.sampled_from(every), max_size=2 * len(every)))
            profile = replace(profile, calls=data.draw(st.permutations([*every, *more])))
        elif case == "the list again":
            profile = replace(profile, calls=every * data.draw(st.integers(2, 3)))
        costs = costs_of(profile, link, range(num_layers), policies)
        timeline = simulate(schedule, profile, link, policies=policies)
        assert peak_bytes(costs, num_layers, profile.loss_bytes, profile.calls) == timeline.peak_bytes
        predicted_s = step_s(costs, num_layers, profile.loss_s, profile.other_s, profile.calls)
        assert case == "in any order" or predicted_s == pytest.approx(timeline.duration_s, rel=1e-9)

    @pytest.mark.parametrize(("kept", "needed"), [({0}, 60), ({0, 1}, 85), ({0, 1, 2}, 110)])
    def test_backward_of_a_compiled_layer_needs_what_was_measured(self, kept, needed):
        """Not what regions add up to: the compiler fuses what is recomputed."""
        given = replace(region("input", 10, 0, recomputable=False), spared_bytes=40 * MIB)
        some = replace(region("attention", 30, 1.0, 0), spared_bytes=-25 * MIB)
        others = replace(region("other operations", 60, 1.0, 0), spared_bytes=-25 * MIB)
        layer = LayerProfile.from_regions([given, some, others], 0.01, 0.02, workspace_bytes=20 * MIB)
        profile, policies = Profile((replace(layer, forward_workspace_bytes=0),)), [LayerPolicy(frozenset(kept))]
        timeline = simulate(Schedule(1), profile, PCIE, policies=policies)
        assert timeline.peak_bytes == (needed + 20) * MIB
        assert timeline.memory[-1][1] == 0
        assert peak_bytes(costs_of(profile, PCIE, (), policies), 0, 0, ()) == timeline.peak_bytes

    def test_no_more_is_spared_than_is_dropped(self):
        given = replace(region("input", 10, 0, recomputable=False), spared_bytes=90 * MIB)
        unsaved, last = region("unsaved", 200, 1.0, 0, saved=False), region("mm", 60, 1.0, 1)
        profile = Profile((LayerProfile.from_regions([given, unsaved, last], 0.01, 0.02),))
        policies = [LayerPolicy(frozenset({0}))]
        timeline = simulate(Schedule(1), profile, PCIE, policies=policies)
        assert peak_bytes(costs_of(profile, PCIE, (), policies), 0, 0, ()) == timeline.peak_bytes == 210 * MIB

    @given(steps())
    def test_without_policies_everything_saved_is_offloaded(self, step):
        schedule, profile, link, _ = step
        kept = [saved_of(layer.regions) for layer in profile.layers]
        saved = [LayerPolicy(one, one) if one else None for one in kept]
        assert simulate(schedule, profile, link) == simulate(schedule, profile, link, policies=saved)

    def test_all_dropped_regions_are_there_at_once(self):
        """To the byte: what the second run of forward has on the device, in its worst moment and at its end."""
        regions = [
            RegionProfile("input", 1000, 0.0, recomputable=False, saved=False),
            RegionProfile("a", 1, 1.0, (0,)),
            RegionProfile("large and unsaved", 600, 1.0, (1,), saved=False),
            RegionProfile("b", 20, 1.0, (2,)),
            RegionProfile("c", 300, 1.0, (3,)),
            RegionProfile("d", 4000, 1.0, (4,)),
        ]
        layer = LayerProfile.from_regions(regions, 5.0, 5.0)
        policies = [LayerPolicy(frozenset({0, 5}))]
        timeline = simulate(Schedule(1), Profile((layer,)), PCIE, policies=policies)
        samples = dict(timeline.memory)
        # The input and d are kept. a and the large one, b beside them, then c.
        assert timeline.peak_bytes == 5000 + 1 + 600 + 20
        # After the second run the input is needed no more. Backward of d frees d, that of c frees c.
        assert samples[9.0] == 4000 + 1 + 20 + 300
        assert samples[10.0] == 1 + 20 + 300
        assert samples[11.0] == 1 + 20

    def test_memory_of_skipped_operations_counts(self):
        """A result that is neither kept nor needed is memory in the second run, until its reader is skipped."""
        regions = [
            RegionProfile("input", 1000, 0.0, recomputable=False),
            RegionProfile("skipped and unsaved", 600, 1.0, (0,), saved=False),
            RegionProfile("kept", 20, 1.0, (1,)),
            RegionProfile("dropped", 50, 1.0, (2,)),
        ]
        layer = LayerProfile.from_regions(regions, 3.0, 3.0)
        timeline = simulate(Schedule(1), Profile((layer,)), PCIE, policies=[LayerPolicy(frozenset({0, 2}))])
        assert timeline.peak_bytes == 1020 + 600
        assert [span.duration_s for span in timeline.spans if span.kind == "recompute"] == [1.0]

    def test_a_policy_costs_the_host_what_it_adds(self):
        """Both add to forward, recomputing adds to backward, and offloading to both; the device is soon done here."""
        regions = [region("input", 10, 0, recomputable=False), region("a", 10, 1, 0)]
        layer = LayerProfile.from_regions(regions, 1e-3, 1e-3, host=HostSeconds(1.0, 0.25, 0.5, 2.0))
        ways = {1.0: (0, None), 3.25: (1, None), 1.75: (0, LayerPolicy(frozenset({0})))}
        for host_s, (num_layers, kept) in ways.items():
            timeline = simulate(default(num_layers, 2), Profile((layer,) * 2), PCIE, policies=[kept, None])
            assert timeline.duration_s == pytest.approx(1.0 + host_s)

    def test_recomputing_waits_for_all_that_is_offloaded_before_the_last_dropped_region(self):
        regions = [
            RegionProfile("input", 10, 0.0, recomputable=False),
            RegionProfile("middle", 10, 1.0, (0,)),
            RegionProfile("output", 10, 1.0, (1,)),
        ]
        profile = Profile((LayerProfile.from_regions(regions, 2.0, 4.0),) * 3)
        for kept, offloaded, waits in (({0, 1}, {0, 1}, True), ({0}, {0}, True), ({0, 2}, {2}, False)):
            policies = [LayerPolicy(frozenset(kept), frozenset(offloaded))] * 3
            timeline = simulate(default(1, 3), profile, Link(100, 1, 101), policies=policies)
            (again,) = [span for span in timeline.spans if span.kind == "recompute" and span.layer == 0]
            assert (again.start_s == timeline.lane("h2d")[-1].end_s) == waits
            for num_layers, count in ((1, 3), (2, 4)):  # with two offloaded layers, one reload waits for the other
                several = Profile(profile.layers[:1] * count), Link(100, 1, 101)
                costs = costs_of(*several, range(num_layers), policies[:1] * count)
                timeline = simulate(default(num_layers, count), *several, policies=policies[:1] * count)
                assert step_s(costs, num_layers, 0.0, 0.0, (*range(count),)) == pytest.approx(timeline.duration_s)


def simple_ways(profile: Profile, link: Link) -> list[Plan]:
    """Nothing; whole layers; all recomputed, with inputs kept, and offloaded."""
    count = len(profile.layers)
    found = []
    for num_layers in range(count):
        schedule = default(num_layers, count)
        found.append(Plan(schedule, profile, link, 0))
        again = tuple(
            policy(layer, frozenset(), offloads=number < num_layers) for number, layer in enumerate(profile.layers)
        )
        found.append(Plan(schedule, profile, link, 0, again))
    return found


def least_budget(profile: Profile, link: Link) -> int:
    """The one that the error names, if there is an error."""
    try:
        make_plan(profile, 0, link)
    except ValueError as error:
        return int(str(error).split()[5])
    return 0


class TestPlan:
    @given(profiles(), links, st.floats(0, 1.2), st.none() | st.floats(0, 1))
    def test_within_the_budget_and_never_slower_than_the_simple_ways(self, profile, link, part, host_part):
        everything = simulate(Schedule(len(profile.layers)), profile, link).peak_bytes
        budget = round(part * everything)
        host = None if host_part is None else round(host_part * profile.saved_bytes)
        most = float("inf") if host is None else host
        fitting = [way for way in simple_ways(profile, link) if fits(way, budget, most)]
        try:
            found = make_plan(profile, budget, link, max_host_bytes=host)
        except ValueError:
            assert not fitting
            return
        assert fits(found, budget, most)
        assert all(found.step_s <= way.step_s * (1 + 1e-6) + 1e-9 for way in fitting)

    @given(profiles(), links, st.floats(0, 1), st.floats(0, 1))
    def test_a_larger_budget_is_not_slower(self, profile, link, part, more):
        """But for what a limited search misses."""
        least = least_budget(profile, link)
        more_bytes = simulate(Schedule(len(profile.layers)), profile, link).peak_bytes - least
        small = make_plan(profile, least + round(part * more_bytes), link)
        large = make_plan(profile, least + round((part + more * (1 - part)) * more_bytes), link)
        assert large.step_s <= small.step_s * 1.01

    @given(profiles(), links)
    def test_the_least_budget_that_the_error_names_can_be_met(self, profile, link):
        least = least_budget(profile, link)
        assert make_plan(profile, least, link).peak_bytes <= least
        if least:
            with pytest.raises(ValueError, match=f"^memory_budget must be at least {least} bytes"):
                make_plan(profile, least - 1, link)

    def test_everything_is_kept_where_it_fits(self):
        found = make_plan(REFERENCE, "24GiB", PCIE)
        assert (found.num_layers, found.recompute_s, found.step_s) == (0, 0.0, pytest.approx(0.384))
        assert found.policies == (None,) * 20  # so that nothing has to tell regions apart
        assert found.binds() == "compute"

    def test_few_layers_are_offloaded_and_nothing_is_recomputed_where_the_link_is_fast_enough(self):
        fast = Link(1e13, 1e13, 2e13)
        found = make_plan(REFERENCE, "5GiB", fast)
        assert found.step_s == pytest.approx(0.384, rel=1e-3)
        assert found.recompute_s == 0.0
        # So many that the others fit, and no more.
        kept = [
            num_layers for num_layers in range(20) if fits(Plan(default(num_layers, 20), REFERENCE, fast, 0), 5 * GIB)
        ]
        assert found.num_layers == kept[0]
        assert found.policies == (None,) * 20

    def test_of_equal_layers_that_is_recomputed_which_takes_the_least_time(self):
        def layer(seconds):
            made = RegionProfile("made", 4 << 20, seconds, (0,))
            return LayerProfile.from_regions([RegionProfile("input", 0, 0.0, recomputable=False), made], 0.01, 0.02)

        profile = Profile(tuple(map(layer, (0.005, 0.001, 0.005))))
        found = make_plan(profile, profile.saved_bytes - 1, PCIE, max_host_bytes=0)
        assert found.recompute_s == pytest.approx(0.001)

    def test_a_slow_link_carries_next_to_nothing(self):
        found = make_plan(REFERENCE, "5GiB", Link(1e8, 1e8, 2e8))
        assert found.host_bytes < 0.001 * REFERENCE.saved_bytes
        assert found.timeline.stall_s == 0
        assert found.binds() == "device"

    def test_the_link_binds_where_it_is_busy_and_device_memory_does_not_help(self):
        found = make_plan(REFERENCE, "2GiB", PCIE)
        assert found.binds() == "link"
        assert found.helps()["link"] < found.helps()["device"]

    def test_kernels_bind_where_the_host_queues_them_more_slowly_than_the_device_runs_them(self):
        """The host runs ahead, also into the next step, and what a policy costs it counts."""
        host = HostSeconds(0.0195, 0.002, 0.009)
        profile = replace(REFERENCE, layers=(replace(DECODER, host=host),) * 20)
        found = make_plan(profile, "24GiB", PCIE)
        assert found.step_s == pytest.approx(20 * 0.0195)
        assert found.timeline.late_s == pytest.approx(20 * 0.0195 - 0.384)
        assert found.binds() == "kernels"
        fewer, more = (make_plan(one, "6GiB", PCIE).policies.count(None) for one in (REFERENCE, profile))
        assert more > fewer
        assert "for the host" in str(found)

    def test_the_error_of_a_budget_that_is_too_small_comes_whole_from_another_process(self):
        with pytest.raises(ValueError, match="memory_budget must be at least") as refused:
            make_plan(REFERENCE, 1, PCIE)
        copied = pickle.loads(pickle.dumps(refused.value))
        assert (str(copied), vars(copied)) == (str(refused.value), vars(refused.value))

    def test_what_fits_is_kept_where_the_host_hides_that_it_is_recomputed(self):
        """The host may be faster than it was when it was measured."""
        plain = make_plan(REFERENCE, "12GiB", PCIE, among=Among.CHECKPOINTS)
        bound = replace(REFERENCE, layers=(replace(DECODER, host=HostSeconds(0.1, 0, 0)),) * 20)
        assert make_plan(bound, "12GiB", PCIE, among=Among.CHECKPOINTS).policies == plain.policies

    def test_a_layer_that_is_recomputed_as_a_whole_frees_sooner(self):
        """One that keeps anything does not."""
        layers = DECODER, replace(DECODER, freed_sooner_bytes=100 * MIB)
        for kept, less in ((numbers("input"), 100 * MIB), (numbers("input", "qkv"), 0)):
            plans = [Plan(default(0, 1), Profile((one,)), PCIE, 0, (LayerPolicy(kept),)) for one in layers]
            assert plans[0].peak_bytes - plans[1].peak_bytes == less

    def test_the_seconds_of_the_host_are_in_the_profiles_text(self):
        profile = replace(REFERENCE, layers=(replace(DECODER, host=HostSeconds(1.0, 2.0, 3.0, 4.0)),))
        assert Profile.from_json(profile.to_json()) == profile
        with pytest.raises(ValueError, match=r"host\.policy_s"):
            replace(DECODER, host=HostSeconds(1.0, -2.0))

    def test_a_host_with_less_memory_takes_longer(self):
        found = make_plan(REFERENCE, "4GiB", PCIE, max_host_bytes="1GiB")
        assert found.host_bytes <= GIB
        assert found.step_s > make_plan(REFERENCE, "4GiB", PCIE).step_s
        assert found.helps()["host"] < found.step_s
        assert "of 1.00 GiB" in str(found)

    def test_a_layer_whose_input_alone_is_offloaded(self):
        """Operations that take next to no time are recomputed rather than offloaded."""
        cheap = LayerProfile.from_regions(
            [region("input", 64, 0, recomputable=False), *(region(f"r{n}", 256, 0.001, n) for n in range(4))],
            0.01,
            0.02,
        )
        found = make_plan(Profile((cheap,) * 20), "1400MiB", PCIE)
        assert found.step_s < 20 * (0.03 + 4e-6) + 1e-9
        assert all(one.offloaded == {0} for one in found.policies[: found.num_layers])
        assert found.num_layers > 0

    def test_a_second_run_does_not_wait_for_an_input_that_all_layers_share(self):
        """It has no bytes to copy, so that what is recomputed from it alone is there before the reload."""
        shared = region("shared", 0, 0, recomputable=False)
        layer = LayerProfile.from_regions([shared, region("cheap", 100, 1, 0), region("dear", 50, 6, 1)], 0.005, 0.01)
        found = make_plan(Profile((layer,) * 2), "160MiB", Link(20e9, 20e9, 40e9))
        assert found.policies == (policy(layer, frozenset({2}), offloads=True), None)

    def test_layers_of_several_kinds(self):
        """An expert layer that is cheap to keep beside a large one: bytes go where they save the most time."""
        dear = LayerProfile.from_regions(
            [region("input", 64, 0, recomputable=False), region("scan", 64, 9, 0)], 0.01, 0.02
        )
        cheap = LayerProfile.from_regions(
            [region("input", 64, 0, recomputable=False), region("mlp", 512, 1, 0)], 0.01, 0.02
        )
        found = make_plan(Profile((dear, cheap) * 8), "2400MiB", Link(1e6, 1e6, 2e6))
        # All of a dear one is kept, and of a cheap one the input alone, but for the last.
        assert found.policies == (None, LayerPolicy(frozenset({0}))) * 7 + (None, None)

    def kept_or_recomputed(self, mib: int) -> LayerProfile:
        regions = [region("input", 30, 0, recomputable=False), region("mlp", mib, mib / 10, 0)]
        return LayerProfile.from_regions(regions, 0.02, 0.04, workspace_bytes=7 * MIB)

    def test_many_kinds_of_layers_take_few_times_the_work_of_one(self):
        """As layers whose experts have got other numbers of tokens; each kind has its own levels."""

        def calls(profile):
            count = 0

            def tally(_frame, event, _argument):
                nonlocal count
                count += event == "call"

            sys.setprofile(tally)
            try:
                make_plan(profile, round(0.3 * profile.saved_bytes), PCIE)
            finally:
                sys.setprofile(None)
            return count

        def kind(number):
            regions = [replace(one, nbytes=one.nbytes + number * 512) for one in DECODER.regions]
            return LayerProfile.from_regions(regions, 0.0059, 0.012, workspace_bytes=300 * MIB)

        one, many = (Profile(tuple(map(kind, numbers))) for numbers in ([0] * 32, range(32)))
        assert calls(many) < 20 * calls(one)

    @settings(max_examples=30)
    @given(st.lists(st.sampled_from([3, 40, 77, 150]), min_size=2, max_size=5), st.floats(0.0, 1.0))
    def test_no_other_layers_could_be_kept_for_a_shorter_step(self, kinds, part):
        """Nothing can be offloaded, and a layer is kept or recomputed: all such plans are simulated and compared."""
        profile, count = Profile(tuple(self.kept_or_recomputed(mib) for mib in kinds)), len(kinds)
        found = []
        for kept in product((False, True), repeat=count):
            policies = [None if keeps else LayerPolicy(frozenset({0})) for keeps in kept]
            timeline = simulate(Schedule(count), profile, PCIE, policies=policies)
            found.append((timeline.peak_bytes, timeline.duration_s))
        least, most = min(peak for peak, _ in found), max(peak for peak, _ in found)
        budget = round(least + part * (most - least))
        fastest_s = min(step_s for peak, step_s in found if peak <= budget)
        assert make_plan(profile, budget, PCIE, max_host_bytes=0).step_s == pytest.approx(fastest_s, rel=0.01)

    def test_as_many_layers_are_kept_as_fit(self, monkeypatch):
        """Of 20 layers that are alike the last ones, whose backward is over first, each budget to the byte.

        Bisection alone finds them; sweeps of single layers would hide that it stops early.
        """
        monkeypatch.setattr("offload.planning.search.SWEEPS", 0)
        count, layer = 20, self.kept_or_recomputed(100)
        profile, recomputed = Profile((layer,) * count), LayerPolicy(frozenset({0}))
        peaks = []
        for kept in range(1, count + 1):
            policies = [recomputed] * (count - kept) + [None] * kept
            peaks.append(simulate(Schedule(count), profile, PCIE, policies=policies).peak_bytes)
        for kept, peak in enumerate(peaks, start=1):
            found = make_plan(profile, peak, PCIE, max_host_bytes=0)
            assert found.policies.count(None) == max(number for number, one in enumerate(peaks, start=1) if one <= peak)
            assert found.peak_bytes <= peak
            if peak > peaks[0]:
                fewer = make_plan(profile, peak - 1, PCIE, max_host_bytes=0)
                assert fewer.policies.count(None) < kept

    @pytest.mark.parametrize("kinds", [(100, 100, 100, 100, 100, 100), (300, 300, 300, 3, 3, 3)])
    def test_as_few_layers_follow_the_plan_for_larger_inputs_as_are_enough(self, kinds):
        """The others keep everything, on the device."""
        profile, count = Profile(tuple(self.kept_or_recomputed(mib) for mib in kinds)), len(kinds)
        input_alone = frozenset({0})
        policies = (None, *[LayerPolicy(input_alone, input_alone)] * 3, *[LayerPolicy(input_alone)] * 2)
        plan = Plan(default(4, count), profile, PCIE, 0, policies)
        plans = [
            replace(plan, schedule=default(min(4, n), count), policies=policies[:n] + (None,) * (count - n))
            for n in range(count + 1)
        ]
        peaks = [one.peak_bytes for one in plans]
        assert len({*peaks}) > 4
        for most in peaks:
            found = relaxed(plan, profile, most)
            assert found == next(one for one, peak in zip(plans, peaks, strict=True) if peak <= most)

    @pytest.mark.parametrize("loss_mib", [0, 200])
    @pytest.mark.parametrize("mib", range(240, 480, 30))
    def test_bisection_finds_about_what_all_choices_have(self, mib, loss_mib, monkeypatch):
        """On a link that is as fast as compute, so that few of many choices are good."""
        regions = [
            region("input", 20, 0, recomputable=False),
            region("up", 100, 4, 0),
            region("act", 50, 2, 1),
        ]
        layer = LayerProfile.from_regions(regions, 0.006, 0.012, workspace_bytes=30 * MIB)
        profile, link = Profile((layer,) * 4, loss_bytes=loss_mib * MIB), Link(20e9, 20e9, 30e9)
        best = make_plan(profile, mib * MIB, link)
        monkeypatch.setattr("offload.planning.search.FEW", 0)
        assert make_plan(profile, mib * MIB, link).step_s == pytest.approx(best.step_s, rel=0.06)

    def test_regions_are_kept_where_recomputing_all_of_them_needs_more_memory(self, monkeypatch):
        """The second run has "wide" on the device unless "output" is kept: the least kept is not the least peak."""
        monkeypatch.setattr("offload.planning.search.SWEEPS", 0)  # bisection alone finds them
        layer = LayerProfile.from_regions(
            [
                region("input", 10, 0, recomputable=False),
                region("cheap", 10, 0.1, 0),
                region("wide", 500, 0.1, 1, saved=False),
                region("output", 10, 5, 2),
            ],
            0.01,
            0.02,
        )
        found = make_plan(Profile((layer,) * 12), "300MiB", PCIE, max_host_bytes=0)
        assert {one.kept for one in found.policies if one is not None} == {frozenset({0, 3})}
        assert 0 < found.recompute_s < 8 * 0.0001

    def test_infeasible(self):
        with pytest.raises(ValueError) as caught:
            make_plan(REFERENCE, "512MiB", PCIE, max_host_bytes=0)
        assert str(caught.value) == (
            "memory_budget must be at least 2847932416 bytes (2.65 GiB), the least peak that a plan "
            "reaches within max_host_bytes = 0 (0 B), with 0 of 20 layers offloaded, got 536870912 bytes "
            "(512.0 MiB); raise it or use smaller microbatches."
        )

    def test_whole_layers_within_the_host_memory(self):
        profile = Profile((LayerProfile(0.01, 0.02, GIB),) * 5)
        assert make_plan(profile, "3GiB", PCIE, max_host_bytes="2GiB").host_bytes == 2 * GIB
        with pytest.raises(
            ValueError, match=r"^memory_budget must be at least 4294967296 bytes .* within max_host_bytes"
        ):
            make_plan(profile, "3GiB", PCIE, max_host_bytes="1GiB")


def test_workspace_is_what_each_pass_needs():
    """What was measured beside what the layers keep, in backward or in forward, is there in the prediction."""
    profile = Profile(tuple(LayerProfile(0.1, 0.2, 100) for _ in range(3)))
    plain = peaks_of(costs_of(profile, PCIE, ()), 0, profile.calls)
    for more in ((5, 70), (70, 5)):
        forward = [one + more[0] for one in plain.forward]
        backward = [one + more[1] for one in plain.backward]
        measured = Peaks(forward, plain.between + 9, backward)
        found = with_workspace(profile, measured)
        assert {(layer.forward_workspace_bytes, layer.workspace_bytes) for layer in found.layers} == {more}
        assert found.loss_bytes == 9
        assert make_plan(found, "1GiB", PCIE).peak_bytes == 300 + 70


WIDE = LayerProfile.from_regions(
    [
        region("input", 64, 0, recomputable=False),
        region("wide", 2000, 0.1, 0, saved=False),
        region("narrow", 64, 0.1, 1),
    ],
    0.001,
    0.002,
)
"""Its second run needs more for a moment than the layer saves."""


@pytest.mark.parametrize("num_layers", [0, 18])
@pytest.mark.parametrize("layer", [DECODER, WIDE])
def test_workspace_of_layers_that_run_again_gives_the_peaks_that_were_measured(layer, num_layers):
    profile, policies = Profile((layer,) * 20), (LayerPolicy(frozenset({0}), frozenset({0})),) * 20
    plain = peaks_of(costs_of(profile, PCIE, range(num_layers), policies), num_layers, profile.calls)
    measured = Peaks([one + MIB for one in plain.forward], plain.between, [one + 400 * MIB for one in plain.backward])
    found = with_workspace(profile, measured, num_layers, policies)
    costs = costs_of(found, PCIE, range(num_layers), policies)
    assert peaks_of(costs, num_layers, found.calls).backward == measured.backward


class TestText:
    @given(profiles())
    def test_profile_comes_back(self, profile):
        assert Profile.from_json(profile.to_json()) == profile

    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ("", "got ''"),
            ("[]", r"got '\[\]'"),
            ('{"offload": "plan"}', "got '"),
            ('{"offload": "plan", "version": 1}', "a plan of version 1"),
            ('{"offload": "profile", "version": 9}', "a profile of version 9"),
            ('{"offload": "profile", "version": 1}', "'layers'"),
            (
                Profile((LayerProfile(0.01, 0.02, GIB),)).to_json().replace("other_s", "others"),
                "'others'",
            ),
        ],
    )
    def test_refuses(self, text, what):
        with pytest.raises(ValueError, match=f"^text must be a profile of version 1 .*{what}"):
            Profile.from_json(text)


class TestProfile:
    def test_refuses_regions_in_another_order(self):
        with pytest.raises(ValueError, match=r"^region 0, 'late', must read regions before it, got \(1,\); list "):
            LayerProfile.from_regions([region("late", 1, 1, 1), region("early", 1, 1)], 0.01, 0.02)

    def test_refuses_negative_seconds(self):
        with pytest.raises(ValueError, match=r"^seconds of a region must be a finite number, at least 0, got -1"):
            LayerProfile.from_regions([region("a", 1, -1000)], 0.01, 0.02)

    def test_refuses_another_sum(self):
        with pytest.raises(ValueError, match=r"^tensors must add up to saved_bytes = 5, got "):
            LayerProfile(0.01, 0.02, 5, regions=DECODER.regions)


class TestPolicies:
    def test_what_is_offloaded_is_kept(self):
        with pytest.raises(ValueError, match=r"^offloaded must be some of the kept regions, got \[2\] beside them; "):
            LayerPolicy(frozenset({0, 1}), frozenset({1, 2}))

    def test_one_for_each_layer(self):
        with pytest.raises(ValueError, match=r"^policies must be one for each of the 20 layers, got 1; "):
            simulate(Schedule(20), REFERENCE, PCIE, policies=[None])

    def test_of_regions_that_there_are(self):
        policies = [None] * 19 + [LayerPolicy(frozenset({99}))]
        with pytest.raises(ValueError, match=r"^the policy of layer 19 must keep some of the regions .*, got \[99\]; "):
            simulate(Schedule(20), REFERENCE, PCIE, policies=policies)
        policies[-1] = LayerPolicy(numbers("o_proj"))  # which autograd does not save, so that nobody can keep it
        with pytest.raises(ValueError, match=r"which are saved or inputs, got \[4\]; "):
            simulate(Schedule(20), REFERENCE, PCIE, policies=policies)

    def test_of_a_plan_count_for_another_link(self):
        found = make_plan(REFERENCE, "5GiB", PCIE)
        slower = simulate(found, REFERENCE, Link(20e9, 20e9, 40e9))
        assert slower.duration_s > found.step_s
        assert slower.peak_bytes == found.peak_bytes
