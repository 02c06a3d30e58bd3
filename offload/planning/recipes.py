"""Where to hold weights, gradients and optimizer state, so that the step is the shortest within a memory budget.

A recipe says where weights, gradients and optimizer state are. What it needs beside the activations is arithmetic on
the sizes of the parameters. The activations have the rest of the budget, and a plan of their own; the copies of the
recipe and those of the plan share one link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from offload.base.checks import format_bytes, format_s
from offload.planning.plan import Plan
from offload.planning.profile import Link

CPU_ELEMENTS_PER_S = 6e9
"""Parameters per second that ``torch.optim.AdamW(fused=True)`` steps on 16 cores, in bfloat16: measured beside an H200.
Only the order of recipes depends on it, and stepping on the CPU comes last anyway."""

LEAST_SHARE = 0.05
"""Of the link, for activations beside copies that need all of it: a plan needs some speed."""

LAYERS_IN_FLIGHT = 2
"""Layers whose weights, or whose gradients, are on the device at once where they are streamed."""


class Recipe(NamedTuple):
    """Where weights, gradients and optimizer state are, and who steps."""

    weights: Literal["resident", "streamed"]
    gradients: Literal["resident", "consumed", "host"]
    """On the device until the step; consumed by the step of each parameter in backward; or copied to the host."""
    optimizer: Literal["resident", "streamed", "cpu"]
    """State on the device; on the host and stepped on the device in chunks; or on the host and stepped there."""

    def __str__(self) -> str:
        return f"weights {self.weights}, gradients {self.gradients}, optimizer {self.optimizer}"


RECIPES = (
    Recipe("resident", "resident", "resident"),
    Recipe("resident", "resident", "streamed"),
    Recipe("resident", "consumed", "streamed"),
    Recipe("streamed", "consumed", "streamed"),
    Recipe("streamed", "host", "streamed"),
    Recipe("streamed", "host", "cpu"),
)
"""The one with the least traffic first, and the CPU last."""


@dataclass(frozen=True)
class TrainingBytes:
    """The sizes of what a model's training has beside activations.

    Args:
        weights: Of all parameters.
        gradients: Of all parameters that are trained.
        state: Of the optimizer.
        layer_weights: Of the parameters of each layer.
        layer_gradients: Of those that are trained.
        layer_state: Of the optimizer, for each layer's parameters.
        largest_gradient: Of one parameter.
        slots: Device memory through which optimizer state is streamed.
        trained_elements: Elements of the parameters that are trained.
    """

    weights: int
    gradients: int
    state: int
    layer_weights: tuple[int, ...]
    layer_gradients: tuple[int, ...]
    layer_state: tuple[int, ...]
    largest_gradient: int
    slots: int
    trained_elements: int

    @classmethod
    def of(
        cls, parameters: Sequence[Any], layers: Iterable[Sequence[Any]], state_of: Callable[[Any], int], slots: int
    ) -> TrainingBytes:
        """The sizes of a model's parameters, and of those of each layer, with ``state_of`` bytes of optimizer state."""

        def gradient_of(parameter: Any) -> int:
            return int(parameter.nbytes) if parameter.requires_grad else 0

        def bytes_of(some: Sequence[Any]) -> tuple[int, int, int]:
            return sum(one.nbytes for one in some), sum(map(gradient_of, some)), sum(map(state_of, some))

        largest = max(map(gradient_of, parameters), default=0)
        elements = sum(one.numel() for one in parameters if one.requires_grad)
        by_layer: list[tuple[int, ...]] = [*zip(*map(bytes_of, layers), strict=True)]
        return cls(*bytes_of(parameters), by_layer[0], by_layer[1], by_layer[2], largest, slots, elements)

    def held_bytes(self, recipe: Recipe) -> int:
        """What is on the device from step to step: weights, optimizer state, and slots."""
        outside = self.weights - sum(self.layer_weights)
        slots = LAYERS_IN_FLIGHT * max(self.layer_weights)
        weights = self.weights if recipe.weights == "resident" else outside + slots
        outside_state = self.state - sum(self.layer_state)
        state = {"resident": self.state, "streamed": min(self.slots, self.state), "cpu": outside_state}
        return weights + state[recipe.optimizer]

    def gradient_bytes(self, recipe: Recipe) -> int:
        """The most gradients on the device at once."""
        outside = self.gradients - sum(self.layer_gradients)
        flight = LAYERS_IN_FLIGHT * max(self.layer_gradients)
        most = {"resident": self.gradients, "host": outside + flight, "consumed": max(flight, self.largest_gradient)}
        return min(self.gradients, most[recipe.gradients])

    def host_bytes(self, recipe: Recipe) -> int:
        """Host memory beside activations, all of it pinned but the state that the CPU steps."""
        state = {"resident": 0, "streamed": self.state, "cpu": sum(self.layer_state)}
        return self.layer_host_bytes(recipe) + state[recipe.optimizer]

    def layer_host_bytes(self, recipe: Recipe) -> int:
        """Pinned host memory of the layers' weights and gradients."""
        weights = sum(self.layer_weights) if recipe.weights == "streamed" else 0
        return weights + (sum(self.layer_gradients) if recipe.gradients == "host" else 0)

    def link_s(self, recipe: Recipe, link: Link) -> tuple[float, float, float]:
        """Seconds that the link is busy with a recipe's copies: in forward, in backward, and in the optimizer's step.

        Both directions are busy at once, and the slower one counts.
        """
        d2h, h2d = link.rates(d2h=True, h2d=True)
        loaded = sent = 0  # bytes in backward
        loaded_to_step = sent_to_step = 0
        if recipe.weights == "streamed":
            loaded += sum(self.layer_weights)
            sent += sum(self.layer_gradients)  # or the new weights, which are as large
        if recipe.optimizer == "streamed":
            if recipe.gradients == "consumed":
                loaded += self.state
                sent += self.state
            else:
                loaded_to_step = sent_to_step = self.state
            if recipe.gradients == "host":  # the step reads and writes the weights that are trained, too
                loaded_to_step += 2 * sum(self.layer_gradients)
                sent_to_step += sum(self.layer_gradients)
        forward_s = sum(self.layer_weights) / link.h2d_bytes_per_s if recipe.weights == "streamed" else 0.0
        step_s = max(loaded_to_step / h2d, sent_to_step / d2h)
        if recipe.optimizer == "cpu":
            step_s = self.trained_elements / CPU_ELEMENTS_PER_S
        return forward_s, max(loaded / h2d, sent / d2h), step_s


@dataclass(frozen=True)
class RecipePlan:
    """A recipe within a budget: its plan for the activations, or why it does not fit.

    Args:
        recipe: Where weights, gradients and optimizer state are.
        plan: Of the activations; ``None`` if the recipe does not fit, or nothing was measured yet.
        step_s: Predicted seconds of a step.
        device_bytes: The predicted peak of device memory, or what is needed beside activations if there is no plan.
        host_bytes: Pinned host memory.
        reason: Why the recipe does not fit.
    """

    recipe: Recipe
    plan: Plan | None
    step_s: float
    device_bytes: int
    host_bytes: int
    reason: str = ""


@dataclass(frozen=True)
class TrainingPlan:
    """Every recipe within a budget, the chosen one among them."""

    recipes: tuple[RecipePlan, ...]
    memory_budget: int
    max_host_bytes: int | None

    @property
    def chosen(self) -> RecipePlan:
        """The one with the shortest step of those that fit; of equals the first, which copies the least."""
        fitting = [one for one in self.recipes if not one.reason]
        return min(fitting, key=lambda one: one.step_s)

    def __str__(self) -> str:
        lines = [f"{'weights':<10}{'gradients':<11}{'optimizer':<11}{'step':>10}{'device':>12}{'host':>12}"]
        best = self.chosen if any(not one.reason for one in self.recipes) else None
        for one in self.recipes:
            step = format_s(one.step_s) if one.plan is not None else "-"
            sizes = f"{format_bytes(one.device_bytes):>12}{format_bytes(one.host_bytes):>12}"
            note = "chosen" if one is best else one.reason
            recipe = one.recipe
            cells = f"{recipe.weights:<10}{recipe.gradients:<11}{recipe.optimizer:<11}{step:>10}{sizes}"
            lines.append(f"{cells}  {note}".rstrip())
        host = "no limit" if self.max_host_bytes is None else format_bytes(self.max_host_bytes)
        lines.append(f"budget {format_bytes(self.memory_budget)}, host memory {host}")
        return "\n".join(lines)


def without_activations(
    training: TrainingBytes, memory_budget: int, max_host_bytes: int | None, recipes: Iterable[Recipe] = RECIPES
) -> TrainingPlan:
    """Which recipes fit as far as arithmetic tells: before any step, without a word on activations."""
    found = []
    for recipe in recipes:
        device, host = training.held_bytes(recipe) + training.gradient_bytes(recipe), training.host_bytes(recipe)
        found.append(RecipePlan(recipe, None, 0.0, device, host, _reason(device, host, memory_budget, max_host_bytes)))
    return TrainingPlan(tuple(found), memory_budget, max_host_bytes)


def plan_recipes(
    training: TrainingBytes,
    memory_budget: int,
    max_host_bytes: int | None,
    link: Link,
    plan: Callable[[int, int | None, Link], Plan],
    missing_bytes: int,
    measured: Recipe,
    recipes: Iterable[Recipe] = RECIPES,
) -> TrainingPlan:
    """Every recipe with a plan for the activations in what it leaves.

    Args:
        training: Sizes of weights, gradients and optimizer state.
        memory_budget: All device memory of the training, in bytes.
        max_host_bytes: All pinned host memory, in bytes.
        link: How fast copies are.
        plan: Plans the activations within so many bytes of device memory, and of host memory, for a link; a
            ``ValueError`` says that they do not fit.
        missing_bytes: What a step needs beside weights, optimizer state and the layers' activations, as it was measured
            under ``measured``: gradients, the loss, what libraries allocate.
        measured: The recipe of the measured steps.
        recipes: What to choose from.
    """
    beside = max(0, missing_bytes - training.gradient_bytes(measured))
    found = []
    for one in without_activations(training, memory_budget, max_host_bytes, recipes).recipes:
        recipe = one.recipe
        if one.reason:
            found.append(one)
            continue
        left = memory_budget - one.device_bytes - beside
        host_left = None if max_host_bytes is None else max_host_bytes - one.host_bytes
        busy, busy_when_measured = training.link_s(recipe, link), training.link_s(measured, link)
        try:
            plans = [plan(max(0, left), host_left, link)]
            rest = link_beside(link, busy[1], backward_s(plans[0]))
            plans += [plan(max(0, left), host_left, rest)] * (rest != link)
        except ValueError as error:
            found.append(RecipePlan(recipe, None, math.inf, one.device_bytes, one.host_bytes, _first_words(error)))
            continue
        step_s, made = min(
            ((_step_s(each, link, busy, busy_when_measured), each) for each in plans), key=lambda pair: pair[0]
        )
        device = one.device_bytes + beside + made.peak_bytes
        found.append(RecipePlan(recipe, made, step_s, device, one.host_bytes + made.host_bytes))
    return TrainingPlan(tuple(found), memory_budget, max_host_bytes)


def link_beside(link: Link, busy_s: float, seconds: float) -> Link:
    """What is left to load activations in so many seconds of backward, of which a recipe's copies take ``busy_s``."""
    share = 1.0 - busy_s / seconds if seconds > 0 else 0.0
    return link if busy_s <= 0 else replace(link, h2d_bytes_per_s=link.h2d_bytes_per_s * max(LEAST_SHARE, share))


def backward_s(plan: Plan) -> float:
    """Predicted seconds of a step's backward, with the loss."""
    return plan.step_s - plan.profile.other_s - _forward_s(plan)


def _forward_s(plan: Plan) -> float:
    return math.fsum(layer.forward_s for layer in plan.profile.layers)


def _step_s(plan: Plan, link: Link, recipe: tuple[float, float, float], measured: tuple[float, float, float]) -> float:
    """Forward and backward take as long as compute or the link; then comes the optimizer's step."""
    copied_s = plan.host_bytes / link.h2d_bytes_per_s
    sent_s = plan.host_bytes / link.d2h_bytes_per_s
    rest_s = max(0.0, plan.profile.other_s - measured[2])
    in_forward = max(_forward_s(plan), recipe[0] + (sent_s if recipe[0] else 0.0))
    return in_forward + max(backward_s(plan), recipe[1] + (copied_s if recipe[1] else 0.0)) + recipe[2] + rest_s


def _reason(device: int, host: int, memory_budget: int, max_host_bytes: int | None) -> str:
    if device >= memory_budget:
        return f"needs {format_bytes(device)} of device memory without activations"
    if max_host_bytes is not None and host > max_host_bytes:
        return f"needs {format_bytes(host)} of host memory without activations"
    return ""


def _first_words(error: ValueError) -> str:
    text = str(error).partition(", got")[0]
    return f"activations do not fit: {text}"
