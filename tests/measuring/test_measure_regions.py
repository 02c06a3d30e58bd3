"""Regions as they are measured in a model, and plans by region as they are carried out."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from lab import Lab
from models import WIDTH, Composed, assert_same, build, gradients, leaves_of, loss_of, step_gradients, through

import offload
from benchmarks.workloads import DecoderBlock
from offload.base.layer_events import LayerListener, Turn, listeners_on
from offload.planning.layer_costs import ways_of
from offload.planning.plan import Plan
from offload.planning.profile import Link, Profile
from offload.recompute.costs import LayerPolicy
from offload.schedule.schedule import Schedule

LAYERS = 4
LINK = Link(55e9, 55e9, 101e9)


def test_regions_of_a_decoder(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    expected = step_gradients(layers, x)

    def step() -> None:
        assert_same(expected, step_gradients(layers, x))

    profile = offload.profile_layers(layers, step, regions=True, steps=1, min_bytes=0, device=lab.device)
    assert len(profile.layers) == LAYERS
    for layer in profile.layers[1:]:
        assert layer.forward_s > 0
        assert layer.backward_s > 0
        by_name = {region.name: region for region in layer.regions}
        assert by_name["input"].saved
        assert not by_name["input"].recomputable
        assert by_name["qkv: mm"].saved
        assert by_name["qkv: mm"].nbytes == x.nbytes * 3
        assert by_name["qkv: mm"].seconds > 0
        assert not by_name["out: mm"].saved  # added to the residual, which is saved
        assert all(region.recomputable for region in layer.regions if region.name != "input")
        assert all(read < number for number, region in enumerate(layer.regions) for read in region.reads)
        ways = ways_of(layer.regions)
        assert [way.kept_bytes for way in ways] == sorted(way.kept_bytes for way in ways)
        assert ways[0].recompute_s > ways[-1].recompute_s == 0


class Experts(torch.nn.Module):
    """Sends each token to one of some experts, as the largest number in it says."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4 * WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.qkv(x.flatten(0, -2)).tanh().sin()
        found = torch.zeros_like(x.flatten(0, -2))
        choice = x.flatten(0, -2).detach()[:, : len(self.experts)].argmax(-1)
        for number, expert in enumerate(self.experts):
            (rows,) = (choice == number).nonzero(as_tuple=True)
            found = found.index_add(0, rows, expert(tokens[rows]).exp().sin())
        return (found + tokens[:, :WIDTH]).view_as(x) + x


def test_experts_are_planned_as_one_region_with_their_seconds(lab: Lab) -> None:
    """What is saved behind the choice of experts is kept or recomputed as one; to recompute it is not free."""
    layers, x = build(Experts, LAYERS, lab.device)
    expected = step_gradients(layers, x)

    def step() -> None:
        assert_same(expected, step_gradients(layers, x))

    options: dict[str, Any] = {"min_bytes": 0, "device": lab.device}
    profile = offload.profile_layers(layers, step, regions=True, steps=1, **options)
    for layer in profile.layers:
        *before, rest = layer.regions
        assert rest.name == "data-dependent rest"
        assert rest.nbytes > 2 * x.nbytes
        assert rest.seconds > 0
        assert rest.recomputable
        assert not any(region.name.startswith("experts") for region in before)
    saved = [{number for number, one in enumerate(layer.regions[:-1]) if one.saved} for layer in profile.layers]
    policies = [LayerPolicy(frozenset(kept)) for kept in saved]
    plan = replace(offload.plan(profile, 1 << 40, LINK), policies=tuple(policies))
    with offload.offload_layers(layers, plan=plan, **options) as handle:
        for _ in range(3):
            step()
        found = handle.regions(1)
        assert {policy for name, policy in found.items() if name.startswith("experts")} == {"recompute"}
        assert found["tanh"] == "keep"


def profiled(layers: torch.nn.ModuleList, x: torch.Tensor, lab: Lab) -> Profile:
    options: dict[str, Any] = {"min_bytes": 0, "device": lab.device, "steps": 1, "regions": True}
    return offload.profile_layers(layers, lambda: step_gradients(layers, x), **options)


def planned(profile: Profile, way: int, num_layers: int) -> Plan:
    """Each layer on one of its ways, the first ones with all that is kept on the host."""
    ways = [ways_of(layer.regions) for layer in profile.layers]
    kept = [found[min(way, len(found) - 1)].kept for found in ways]
    policies = tuple(LayerPolicy(one, one) for one in kept)
    return Plan(Schedule.default(num_layers, LAYERS), profile, LINK, 0, policies)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "num_layers"), [(0, 2), (2, 0), (5, 2), (99, 2)])
def test_each_way_is_carried_out(way: int, num_layers: int, lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    expected = step_gradients(layers, x)
    plan = planned(profiled(layers, x, lab), way, num_layers)
    lab.adverse()
    with offload.offload_layers(layers, plan=plan, min_bytes=0, device=lab.device) as handle:
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
        policies = handle.regions(LAYERS - 1)
        assert (handle.stats().reloaded_bytes > 0) == (num_layers > 0)
    policy = plan.policies[-1]
    assert policy is not None
    named = [(number, one) for number, one in enumerate(plan.profile.layers[-1].regions) if one.saved]
    assert [policies[one.name] == "recompute" for number, one in named if one.name in policies] == [
        number not in policy.kept for number, one in named if one.name in policies
    ]


def test_a_plan_for_other_layers_is_refused(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    plan = planned(profiled(layers, x, lab), 0, 2)
    others, _ = build("gpt", LAYERS, lab.device)
    handle = offload.offload_layers(others, plan=plan, min_bytes=0, device=lab.device)
    with handle, pytest.raises(ValueError, match="the plan must be for these layers"):
        others[0](x)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def branching() -> torch.nn.Module:
    """Without ``scale``, other regions, as batches without a mask have them."""

    def forward(own: Any, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        y = own.up(x).sin()
        return x + own.down(y.exp().tanh() if scale is None else (y * scale).tanh())

    return Composed(forward, up=torch.nn.Linear(WIDTH, 64), down=torch.nn.Linear(64, WIDTH))


@pytest.mark.parametrize("first", [False, True])
def test_a_plan_is_followed_by_name_where_inputs_are_of_another_kind(first: bool, lab: Lab) -> None:
    layers, x = build(branching, LAYERS, lab.device)
    scale = torch.rand(64, device=lab.device)

    def step(scale: torch.Tensor | None) -> list[torch.Tensor]:
        def run() -> None:
            y = x
            for layer in layers:
                y = layer(y, scale)
            loss_of(y).backward()

        return gradients(leaves_of(layers, x), run)

    kinds = [None, scale] if first else [scale, None]
    expected = [step(kind) for kind in kinds]
    options: dict[str, Any] = {"min_bytes": 0, "device": lab.device, "steps": 1, "regions": True}
    profile = offload.profile_layers(layers, lambda: step(scale), **options)
    kept = [
        frozenset(n for n, one in enumerate(layer.regions) if one.saved and one.name in ("input", "up: addmm"))
        for layer in profile.layers
    ]
    plan = Plan(
        Schedule.default(0, LAYERS), profile, LINK, 1 << 30, tuple(LayerPolicy(one, frozenset()) for one in kept)
    )
    with offload.offload_layers(layers, plan=plan, min_bytes=0, device=lab.device) as handle:
        for _ in range(3):
            for kind, wanted in zip(kinds, expected, strict=True):
                assert_same(wanted, step(kind))
        found = handle.regions(1)
        assert found["up: addmm"] == "keep"
        assert found["tanh"] == "recompute"
        assert first or found["exp"] == "recompute"  # the plan does not name it


def is_offloaded(layer: torch.nn.Module) -> bool:
    return any(one.turn is Turn.ACTIVATIONS for one in listeners_on(layer, LayerListener))


def test_a_model_that_does_not_fit_is_measured_recomputed(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    options: dict[str, Any] = {"min_bytes": 0, "device": lab.device}
    offloaded = []

    def step() -> None:
        if not all(is_offloaded(layer) for layer in layers):
            layers[0](x)
            raise torch.OutOfMemoryError("as a device says it")
        offloaded.append(step_gradients(layers, x))

    with pytest.raises(torch.OutOfMemoryError):
        offload.profile_layers(layers, step, **options)
    assert offload.profile_layers(layers, step, regions=True, steps=2, **options).saved_bytes > 0
    assert len(offloaded) == 4
    assert not any(is_offloaded(layer) for layer in layers)


@pytest.mark.gpu
@pytest.mark.alone
def test_predicted_peaks_are_those_of_the_allocator() -> None:
    """With workspace, with what the loss needs, and with what recomputation has on the device for a moment."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(DecoderBlock(1024, 2816, 8) for _ in range(8)).to("cuda", torch.bfloat16)
    x = torch.randn(4, 2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        y = through(layers, x)
        y.float().square().mean().backward()

    measured = offload.profile_layers(layers, step, regions=True)
    assert measured.loss_bytes > x.nbytes
    with pytest.raises(ValueError, match=r"at least [0-9]+ bytes") as caught:
        offload.plan(measured, 0, LINK)
    least = int(re.findall("at least ([0-9]+) bytes", str(caught.value))[0])
    for budget in (least, 2 * least, measured.saved_bytes // 2, 2 * measured.saved_bytes):
        plan = offload.plan(measured, budget, LINK)
        with offload.offload_layers(layers, plan=plan):
            step()
            step()
            with offload.memory_meter("cuda") as meter:
                step()
        assert meter.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.02)
