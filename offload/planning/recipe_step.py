"""One simulated link for a whole training: the copies of a recipe between those of the activations.

Weights are loaded one layer ahead. In backward, the state of a layer is loaded from the layer's start on, and is copied
to the host after that; the optimizer's arithmetic takes compute's time. Compute waits for state two layers later, as
gradients are held until then, and for all of it at the end of backward, which has nothing to hide the last loads. The
copies of these to the host run beside the next forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from offload.planning.plan import Plan
from offload.planning.profile import Link
from offload.planning.simulate import Interlude, simulate_steps
from offload.planning.training_bytes import Recipe, RecipeSeconds, TrainingBytes
from offload.schedule.points import Point


class Prediction(NamedTuple):
    """Predicts steps of recipes from a profile that was measured under one of them."""

    training: TrainingBytes
    link: Link
    arithmetic_s: float
    measured: RecipeSeconds

    @classmethod
    def of(
        cls, training: TrainingBytes, link: Link, measured: Recipe, resident_bytes: int, arithmetic_s: float
    ) -> Prediction:
        """From steps under ``measured``, with so much of the state resident; see ``plan_recipes``."""
        return cls(training, link, arithmetic_s, training.seconds(measured, link, resident_bytes, arithmetic_s))

    def step_s(self, plan: Plan, recipe: Recipe, resident: int) -> float:
        """Seconds of a step of this recipe, with ``resident`` bytes of the state on the device.

        What the optimizer's arithmetic and copies have added to the measured steps does not count.
        """
        before, profile = self.measured, plan.profile
        less_s = before.beside / len(profile.layers)
        layers = [replace(layer, backward_s=max(0.0, layer.backward_s - less_s)) for layer in profile.layers]
        rest = Interlude("rest of the step", max(0.0, profile.other_s - before.step - before.tail))
        steps = [*self._steps(plan, recipe, resident), rest]
        timeline = simulate_steps(plan.schedule, layers, self.link, steps, policies=plan.policies, title="")
        return max(span.end_s for span in timeline.lane("compute"))

    def _steps(self, plan: Plan, recipe: Recipe, resident: int) -> Iterator[Point | Interlude]:
        """The points of the schedule, and before each what the recipe does there."""
        training, last = self.training, len(plan.profile.layers) - 1
        busy = training.seconds(recipe, self.link, resident, self.arithmetic_s)
        streams, nothing = recipe.weights == "streamed", (0,) * (last + 1)
        weights, sent = (training.layer_weights, training.layer_gradients) if streams else (nothing, nothing)
        consumed = recipe.gradients == "consumed"
        front, states, of_head = training.copied_state(resident) if consumed else (0, [*nothing], 0)
        behind = training.state - training.front_state - sum(training.layer_state)
        share = busy.beside / max(1, training.state)  # of the arithmetic, for a byte of state
        yield Interlude("state of the last step", 0.0, sent_bytes=front)
        yield Interlude("weights 0", 0.0, loaded_bytes=weights[0])
        for point in plan.schedule.order:
            layer = point.layer
            waits = f"weights {layer}"
            if point.phase == "F":
                ahead = weights[layer + 1] if layer < last else 0
                yield Interlude(f"weights {layer + 1}", 0.0, loaded_bytes=ahead, awaits=waits)
            else:
                if layer == last:
                    yield Interlude("loss", plan.profile.loss_s, plan.profile.loss_bytes)
                    yield Interlude("state behind", share * behind, loaded_bytes=of_head, sent_bytes=of_head)
                again = weights[layer - 1] if 0 < layer < last else 0  # the last two layers' are there since forward
                yield Interlude(f"weights {layer - 1}", 0.0, loaded_bytes=again, awaits=waits)
                arithmetic_s = share * training.layer_state[layer]
                state, held = states[layer], f"state {layer + 2}"  # so many gradients are held until they are stepped
                yield Interlude(f"state {layer}", arithmetic_s, 0, state, state + sent[layer], awaits=held)
            yield point
        yield Interlude("state in front", 0.0, loaded_bytes=front, awaits="state 0")
        yield Interlude("step", share * training.front_state + busy.step, awaits="state in front")
