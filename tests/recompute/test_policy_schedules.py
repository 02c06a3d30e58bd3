"""Policies under schedules of all kinds, with several microbatches in flight in any order."""

import pytest
import torch
from lab import Lab
from models import assert_same, build, gradients, leaves_of, loss_of, step_gradients, through

import offload
from offload.activations.activation_set import ActivationSet
from offload.activations.context import OffloadContext
from offload.activations.module_hooks import HookedLayers
from offload.recompute.layer_policies import LayerPolicies
from offload.recompute.policies import Policy

LAYERS = 5
SCHEDULES = {
    "default": offload.Schedule.default(3, LAYERS),
    "released in forward, back in backward": offload.Schedule.from_synchronization_dict(
        {0: (True, 2, False, 2), 1: (True, 4, False, 3)}, LAYERS
    ),
    "released in backward": offload.Schedule.from_synchronization_dict(
        {1: (False, 4, False, 2), 2: (True, 4, False, 3)}, LAYERS
    ),
    "back before the last forward": offload.Schedule.from_synchronization_dict({1: (True, 3, True, 4)}, LAYERS),
}
POLICIES = {
    "products offloaded": {"*mm": "offload", "*": "recompute"},
    "products kept": {"*mm": "keep", "*": "recompute"},
    "some": {"*norm*": "recompute", "gelu": "recompute", "*softmax": "recompute", "*": "offload"},
}
ORDERS = ["F0 B0 F1 B1", "F0 F1 B0 F2 B1 B2", "F0 F1 F2 B1 B0 B2"]
PAIRS = [
    (schedule, list(POLICIES)[(i + j) % len(POLICIES)], order)
    for i, schedule in enumerate(SCHEDULES)
    for j, order in enumerate(ORDERS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "policies", "order"), PAIRS)
def test_gradients(schedule: str, policies: str, order: str, lab: Lab) -> None:
    layers, x = build("gpt", LAYERS, lab.device)
    actions = order.split()
    inputs = [x.detach().roll(i, 1).requires_grad_() for i in range(len(actions) // 2)]

    def step() -> None:
        losses: dict[str, torch.Tensor] = {}
        for phase, number in actions:
            if phase == "F":
                y = through(layers, inputs[int(number)])
                losses[number] = loss_of(y)
            else:
                losses.pop(number).backward()

    leaves = leaves_of(layers, *inputs)
    expected = gradients(leaves, step)
    lab.adverse()
    plan = {"schedule": SCHEDULES[schedule], "policies": POLICIES[policies]}
    with offload.offload_layers(layers, min_bytes=1, device=lab.device, **plan) as handle:
        for _ in range(3):
            assert_same(expected, gradients(leaves, step))
        assert handle.stats().reloaded_bytes > 0
        assert not handle.stats().late_reloads
        assert "recompute" in handle.regions(LAYERS - 1).values()


def test_layers_behind_the_last_one_with_policies_have_no_hooks(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the next one: what it saves of the last one's output must not be dropped."""
    layers, x = build("gpt", LAYERS, lab.device)
    policies = [LayerPolicies({"*mm": Policy.OFFLOAD, "*": Policy.RECOMPUTE}, layer) for layer in layers[:2]]
    schedule = offload.Schedule.default(1, LAYERS)
    context = OffloadContext(
        schedule, LAYERS, min_bytes=1, device=lab.device, policies=[*policies, *[None] * (LAYERS - 2)]
    )
    entered = []
    enter = ActivationSet.enter
    monkeypatch.setattr(ActivationSet, "enter", lambda one, inputs=None: (entered.append(one.layer), enter(one))[1])
    expected = step_gradients(layers, x)
    entered.clear()
    lab.adverse()
    with HookedLayers(list(layers), context):
        for _ in range(3):
            entered.clear()
            assert_same(expected, step_gradients(layers, x))
            assert entered == [0, 1, 2]
