"""One simulated link for a whole training: the copies of a recipe between those of the activations.

Weights are loaded one layer ahead. In backward, the state of a layer is loaded from the layer's start on, and is copied
to the host after that; the optimizer's arithmetic takes compute's time. Compute waits for state two layers later, as
gradients are held until then, and for all of it at the end of backward, which has nothing to hide the last loads. The
copies of these to the host run beside the next forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offload.planning.plan import Plan
from offload.planning.profile import Link, Profile
from offload.planning.simulate import Interlude, simulate_steps
from offload.planning.training_bytes import Recipe, RecipeSeconds, TrainingBytes
from offload.schedule.points import Point


def simulated_s(
    plan: Plan, training: TrainingBytes, recipe: Recipe, resident: int, link: Link, busy: RecipeSeconds, rest_s: float
) -> float:
    """Seconds of a step of this recipe with this plan for the activations.

    Args:
        plan: Of the activations.
        training: Sizes.
        recipe: Where weights, gradients and optimizer state are.
        resident: Of the state, what is on the device.
        link: All of it.
        busy: What the recipe adds to a step.
        rest_s: What a step does beside layers, loss and optimizer.
    """
    steps = [*_steps(plan, training, recipe, resident, busy), Interlude("rest of the step", rest_s)]
    timeline = simulate_steps(plan.schedule, plan.profile.layers, link, steps, policies=plan.policies, title="")
    return max(span.end_s for span in timeline.spans if span.lane == "compute")


def _steps(
    plan: Plan, training: TrainingBytes, recipe: Recipe, resident: int, busy: RecipeSeconds
) -> Iterator[Point | Interlude]:
    """The points of the schedule, and before each what the recipe does there."""
    last = len(plan.profile.layers) - 1
    weights = training.layer_weights if recipe.weights == "streamed" else (0,) * (last + 1)
    sent = training.layer_gradients if recipe.weights == "streamed" else (0,) * (last + 1)
    consumed = recipe.gradients == "consumed"
    front, states, of_head = training.copied_state(resident) if consumed else (0, [0] * (last + 1), 0)
    behind = training.state - training.front_state - sum(training.layer_state)
    share = busy.beside / max(1, training.state)  # of the arithmetic, for a byte of state
    yield Interlude("state of the last step", 0.0, sent_bytes=front)
    yield Interlude("weights 0", 0.0, loaded_bytes=weights[0])
    for point in plan.schedule.order:
        layer = point.layer
        waits = f"weights {layer}"
        if point.phase == "F":
            yield Interlude(
                f"weights {layer + 1}", 0.0, loaded_bytes=weights[layer + 1] if layer < last else 0, awaits=waits
            )
        else:
            if layer == last:
                yield Interlude("loss", plan.profile.loss_s, plan.profile.loss_bytes)
                yield Interlude("state behind", share * behind, loaded_bytes=of_head, sent_bytes=of_head)
            again = weights[layer - 1] if 0 < layer < last else 0  # the last two layers' are there since forward
            yield Interlude(f"weights {layer - 1}", 0.0, loaded_bytes=again, awaits=waits)
            arithmetic_s = share * training.layer_state[layer]
            state, held = states[layer], f"state {layer + 2}"  # so many gradients are held until they are stepped with
            yield Interlude(f"state {layer}", arithmetic_s, 0, state, state + sent[layer], awaits=held)
        yield point
    yield Interlude("state in front", 0.0, loaded_bytes=front, awaits="state 0")
    yield Interlude("step", share * training.front_state + busy.step, awaits="state in front")


def without_optimizer(profile: Profile, measured: RecipeSeconds) -> Profile:
    """A profile without what the optimizer's arithmetic has added to the backward of its layers."""
    less_s = measured.beside / len(profile.layers)
    layers = (replace(layer, backward_s=max(0.0, layer.backward_s - less_s)) for layer in profile.layers)
    return replace(profile, layers=tuple(layers))
