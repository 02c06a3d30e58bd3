"""What layers cost with inputs of any shape, and how many steps that takes to measure."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest
import torch

from offload.measuring.sizes import CostsBySize, Inputs, given_to, is_within
from offload.planning.profile import LayerProfile, Profile
from offload.recompute.costs import RegionProfile

WIDTH = 8
SHORTEST, LONGEST = 64, 4096


def inputs(length: int, batch: int = 2) -> Inputs:
    return given_to([torch.empty(batch, length, WIDTH, device="meta")])


def region(name: str, nbytes: int) -> RegionProfile:
    return RegionProfile(name, nbytes, 1e-3)


def regions(length: int, batch: int = 2, *, mask: bool = False) -> list[list[RegionProfile]]:
    """Of one layer: what grows with the elements, with a square, and not at all."""
    sizes = {"x": 4 * batch * length * WIDTH, "scores": 4 * batch * length**2, "table": 512}
    return [[region(name, nbytes) for name, nbytes in sizes.items()] + [region("mask", 4 * length**2)] * mask]


def profile(length: int, batch: int = 2, *, mask: bool = False) -> Profile:
    """Half of the scores is needed once more in backward, and there are gradients of 1000 bytes."""
    workspace = 1000 + 2 * batch * length**2
    return Profile((LayerProfile.from_regions(regions(length, batch, mask=mask)[0], 1, 2, workspace_bytes=workspace),))


def measured(order: Iterable[tuple[int, bool]]) -> int:
    """How many steps measure with these lengths, with a mask or without one, as :class:`FollowPlan` asks for them.

    Layers learn two lengths of each kind; nothing is learned in steps that keep everything.
    """
    costs, learned, count = CostsBySize(), defaultdict[bool, set[int]](set), 0
    for length, mask in order:
        if not costs.lack(inputs(length)):
            continue
        count += 1
        if len(learned[mask]) < 2 and length not in learned[mask]:
            learned[mask].add(length)
            costs.learn(inputs(length), regions(length, mask=mask))
        else:
            costs.add(inputs(length), profile(length, mask=mask), 0, [0])
    return count


def log_normal(seed: int) -> list[tuple[int, bool]]:
    """The longer of two lengths; a mask unless they are the same."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(300, 2).log_normal_(math.log(LONGEST / 16), 1.0, generator=generator)
    lengths = drawn.round().long().clamp(SHORTEST, LONGEST).tolist()
    return [(max(pair), pair[0] != pair[1]) for pair in lengths]


@pytest.mark.parametrize("order", ["as drawn", "ascending", "descending"])
def test_lengths_of_a_log_normal_distribution_take_at_most_five_steps(order: str) -> None:
    for seed in range(40):
        drawn = [(length, True) for length, _ in log_normal(seed)]
        drawn = drawn if order == "as drawn" else sorted(drawn, reverse=order == "descending")
        assert measured(drawn) <= 5


def test_the_most_steps_are_five_for_one_kind_of_inputs_and_two_more_for_another() -> None:
    lengths = (SHORTEST, 65, 97, 641, LONGEST)
    assert max(measured((one, True) for one in order) for order in product(lengths, repeat=5)) == 5
    rising = [(one, True) for one in (64, 64, 65, 97, 641, 4096)]
    assert measured(rising) == 5
    others = [(64, True), (64, False), (65, True), (65, False), (64, True), (97, True), (641, True)]
    assert measured(others) == 7


@pytest.mark.parametrize("second", [(30, 2), (16, 4), (160, 1)], ids=["length", "batch", "both"])
def test_regions_of_other_shapes_follow_from_two(second: tuple[int, int]) -> None:
    costs = CostsBySize()
    for shape in ((20, 2), second):
        costs.learn(inputs(*shape), regions(*shape))
    costs.learn(inputs(40, 3), regions(40, 3))
    for shape in ((20, 2), (400, 2)):
        costs.add(inputs(*shape), profile(*shape), 100, [0])
    for shape in ((100, 2), (1000, 2), (64, 8), (800, 1)):
        found, missing_bytes = costs.at(costs.size_of(inputs(*shape)))
        assert [one.nbytes for one in found.layers[0].regions][:2] == [one.nbytes for one in regions(*shape)[0]][:2]
        assert found.layers[0].workspace_bytes == pytest.approx(profile(*shape).layers[0].workspace_bytes, rel=0.15)
        assert missing_bytes == 100


def test_what_backward_needs_less_than_its_regions_grows_with_them() -> None:
    def spared(length: int) -> list[RegionProfile]:
        return [replace(one, spared_bytes=one.nbytes // 4) for one in regions(length)[0]]

    costs = CostsBySize()
    for length in (64, 128):
        costs.learn(inputs(length), [spared(length)])
    costs.add(inputs(128), Profile((LayerProfile.from_regions(spared(128), 1, 2),)), 0, [0])
    longer, _ = costs.at(costs.size_of(inputs(256)))
    assert [one.spared_bytes for one in longer.layers[0].regions] == [one.spared_bytes for one in spared(256)]


def test_a_plan_for_two_shapes_covers_no_shape_that_needs_more_of_something() -> None:
    costs = CostsBySize()
    for shape in ((16, 16), (256, 1)):
        costs.learn(inputs(*shape), regions(*shape))
        costs.add(inputs(*shape), profile(*shape), 0, [0])
    costs.cover(inputs(16, 64))
    covered = [(16, 64), (256, 1), (100, 4), (64, 16), (8, 100)]
    others = [(16, 65), (257, 1), (200, 2), (100, 10)]
    assert [is_within(costs.size_of(inputs(*one)), costs.largest) for one in covered + others] == [True] * 5 + [
        False
    ] * 4
    found, _ = costs.at(costs.largest)
    assert found.layers[0].regions[0].nbytes == regions(16, 64)[0][0].nbytes
    assert found.layers[0].regions[1].nbytes == regions(256, 1)[0][1].nbytes


def test_a_side_that_never_varied_and_is_longer_is_measured() -> None:
    costs = CostsBySize()
    costs.learn(inputs(20), regions(20))
    costs.add(inputs(20), profile(20), 0, [0])
    assert costs.lack(inputs(21))
    assert not costs.lack(inputs(19))
    costs.learn(inputs(21), regions(21))
    assert not costs.lack(inputs(29))
    assert costs.lack(inputs(31))
    assert costs.lack(inputs(20, 3))


def test_what_microbatches_needed_more_counts_until_the_next_timing() -> None:
    costs = CostsBySize()
    costs.learn(inputs(20), regions(20))
    costs.add(inputs(20), profile(20), 100, [0])
    costs.need_more(50)
    costs.need_more(30)
    assert [costs.at(costs.size_of(inputs(length)))[1] for length in (20, 10)] == [180, 90]
    costs.add(inputs(80), profile(80), 60, [0])  # less than with shorter inputs: no line falls from there on
    assert [costs.at(costs.size_of(inputs(length)))[1] for length in (80, 200)] == [60, 60]
