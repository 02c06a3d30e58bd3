"""Regions as they are measured in a model, and plans by region as they are carried out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from lab import Lab
from models import assert_same, build, step_gradients

import offload
from offload.planning.measure_regions import measure_regions
from offload.recompute.costs import RegionProfile, Treated, ways
from offload.schedule.schedule import Schedule

LAYERS = 4


@dataclass
class Numbers:
    kept: frozenset[int]
    travelling: frozenset[int] = frozenset()


@dataclass
class Costs:
    regions: tuple[RegionProfile, ...]


@dataclass
class Profiled:
    layers: list[Costs]


@dataclass
class Planned:
    schedule: Schedule
    treatments: list[Numbers | None]
    profile: Profiled


@pytest.mark.parametrize("frugally", [False, True])
def test_regions_of_a_decoder(frugally: bool, lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    expected = step_gradients(layers, x)

    def step() -> None:
        assert_same(expected, step_gradients(layers, x))

    found = measure_regions(layers, step, min_bytes=0, device=lab.device, frugally=frugally)
    assert len(found) == LAYERS
    for regions in found[1:]:
        by_name = {region.name: region for region in regions}
        assert by_name["input"].saved
        assert not by_name["input"].recomputable
        assert by_name["qkv: mm"].saved
        assert by_name["qkv: mm"].nbytes == x.nbytes * 3
        assert by_name["qkv: mm"].seconds > 0
        assert not by_name["out: mm"].saved  # added to the residual, which is saved
        assert all(region.recomputable for region in regions if region.name != "input")
        assert all(read < number for number, region in enumerate(regions) for read in region.reads)
        ladder = ways(regions)
        assert [way.saved_bytes for way in ladder] == sorted(way.saved_bytes for way in ladder)
        assert ladder[0].recompute_s > ladder[-1].recompute_s == 0
        assert ladder[-1].saved_bytes <= sum(region.nbytes for region in regions if region.saved)


def planned(found: list[tuple[RegionProfile, ...]], rung: int, num_layers: int) -> Planned:
    """Each layer on one rung of its ladder, the first ones with all that is held on the host."""
    treatments: list[Numbers | None] = []
    for regions in found:
        ladder: list[Treated] = ways(regions)
        held = ladder[min(rung, len(ladder) - 1)].held
        treatments.append(Numbers(held, held))
    profile = Profiled([Costs(regions) for regions in found])
    return Planned(Schedule.default(num_layers, LAYERS), treatments, profile)


@pytest.mark.parametrize("num_layers", [0, 2])
@pytest.mark.parametrize("rung", [0, 2, 5, 99])
def test_each_rung_is_carried_out(rung: int, num_layers: int, lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    expected = step_gradients(layers, x)
    found = measure_regions(layers, lambda: step_gradients(layers, x), min_bytes=0, device=lab.device)
    plan = planned(found, rung, num_layers)
    lab.adverse()
    with offload.offload_layers(layers, plan=plan, min_bytes=0, device=lab.device) as handle:
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
        treatments = handle.regions(LAYERS - 1)
    regions = found[-1]
    kept = ways(regions)[min(rung, len(ways(regions)) - 1)]
    for number, region in enumerate(regions):
        if region.name in treatments and region.saved:
            assert (treatments[region.name] == "recompute") == (number in kept.recomputed)


def test_a_plan_for_other_layers_is_refused(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    found = measure_regions(layers, lambda: step_gradients(layers, x), min_bytes=0, device=lab.device)
    others, _ = build("gpt", LAYERS, lab.device)
    handle = offload.offload_layers(others, plan=planned(found, 0, 2), min_bytes=0, device=lab.device)
    with handle, pytest.raises(ValueError, match="the plan must be for these layers"):
        others[0](x)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
