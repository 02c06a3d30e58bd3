"""Where to hold weights, gradients and optimizer state, so that the step is the shortest within a memory budget.

A recipe says where weights, gradients and optimizer state are. What it needs beside the activations is arithmetic on
the sizes of the parameters. The activations have the rest of the budget, and a plan of their own; the copies of the
recipe and those of the plan share one simulated link.

Weights are loaded one layer ahead. In backward, the state of a layer is loaded from the layer's start on, and is copied
to the host after that; the optimizer's arithmetic takes compute's time. Compute waits for state two layers later, as
gradients are held until then, and for all of it at the end of backward, which has nothing to hide the last loads. The
copies of these to the host run beside the next forward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter

from offload.base.checks import format_bytes, format_s
from offload.planning.plan import Plan, TooLittleMemoryError
from offload.planning.profile import Link
from offload.planning.simulate import Interlude, run_steps
from offload.planning.training_bytes import RECIPES, Recipe, TrainingBytes
from offload.schedule.schedule import Point

LEAST_SHARE = 0.05  # of the link, for activations beside copies that need all of it: a plan needs some speed
SHARES = 8  # in so many parts a link is divided for that: recipes share plans
FINER = 2  # so many amounts of memory for activations are tried from each power of two to the next
MARGIN = 0.02  # of the budget, what state leaves free that is resident because the activations do not need the memory
WORTH = 0.01  # by what part two predicted steps may differ that are as good as each other: a change takes many steps


@dataclass(frozen=True)
class RecipePlan:
    """A recipe within a budget: its plan for the activations, or why it does not fit."""

    recipe: Recipe  #: Where weights, gradients and optimizer state are.
    plan: Plan | None  #: Of the activations; ``None`` if the recipe does not fit, or nothing was measured yet.
    step_s: float  #: Predicted seconds of a step.
    device_bytes: int  #: The predicted peak of device memory; what is needed at least, if the recipe does not fit.
    host_bytes: int  #: Pinned host memory.
    reason: str = ""  #: Why the recipe does not fit.
    state_bytes: tuple[int, int] = (0, 0)  #: Optimizer state on the device, and on the host.

    @property
    def resident_bytes(self) -> int:
        """Optimizer state that remains on the device."""
        return self.state_bytes[0]


@dataclass(frozen=True)
class TrainingPlan:
    """Every recipe within a budget, the chosen one among them. ``print`` shows a table."""

    recipes: tuple[RecipePlan, ...]  #: Those that the call allows, the one with the least traffic first.
    memory_budget: int
    max_host_bytes: int | None
    in_place: Recipe | None = None  # the recipe that was chosen before, and is followed
    in_pieces: tuple[str, ...] = ()  #: What is computed in pieces of tokens, because nothing fits otherwise.

    @property
    def fits(self) -> bool:
        """Whether any recipe fits."""
        return any(not one.reason for one in self.recipes)

    @property
    def chosen(self) -> RecipePlan:
        """The shortest step of those that fit; of equals the first, which copies the least. Raises if none fits."""
        fitting = [one for one in self.recipes if not one.reason]
        fitting = [one for one in fitting or self.recipes if one.recipe == self.in_place] or fitting
        if not fitting:
            raise ValueError(
                f"memory_budget must fit one recipe, got {format_bytes(self.memory_budget)}, which fits none; "
                "print the plan, which says what each recipe needs."
            )
        shortest = min(one.step_s for one in fitting)
        return next(one for one in fitting if one.step_s <= shortest * (1 + WORTH))

    @property
    def least(self) -> RecipePlan:
        """The one that needs the least device memory within the host's; of equals the first, which copies the least."""
        most = math.inf if self.max_host_bytes is None else self.max_host_bytes
        within = [one for one in self.recipes if one.host_bytes <= most] or self.recipes
        least = min(one.device_bytes for one in within)
        return next(one for one in within if one.device_bytes <= (1 + MARGIN) * least)

    def __repr__(self) -> str:
        fits = sum(not one.reason for one in self.recipes)
        return f"<TrainingPlan: {fits} of {len(self.recipes)} recipes fit into {format_bytes(self.memory_budget)}>"

    def __str__(self) -> str:
        head = f"{'weights':<10}{'gradients':<11}{'optimizer':<11}{'state on device':>16}{'on host':>12}"
        lines = [f"{head}{'step':>10}{'device':>12}{'host':>12}"]
        best = self.chosen if self.in_place or any(one.plan for one in self.recipes) else None  # else none is timed
        for one in self.recipes:
            step = format_s(one.step_s) if one.plan is not None else "-"
            here, there, device, host = map(format_bytes, (*one.state_bytes, one.device_bytes, one.host_bytes))
            note = ", but ".join(filter(None, ("chosen" if one is best else "", one.reason)))
            recipe = one.recipe
            cells = f"{recipe.weights:<10}{recipe.gradients:<11}{recipe.optimizer:<11}{here:>16}{there:>12}"
            lines.append(f"{cells}{step:>10}{device:>12}{host:>12}  {note}".rstrip())
        host = "no limit" if self.max_host_bytes is None else format_bytes(self.max_host_bytes)
        lines += self.in_pieces
        lines.append(f"budget {format_bytes(self.memory_budget)}, host memory {host}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Prediction:
    """Predicts steps of recipes from a profile that was measured under one of them."""

    training: TrainingBytes
    link: Link
    measured: Recipe  # that of the measured steps
    resident_bytes: int = 0  # state that was on the device in the measured steps, if the recipe streams it
    arithmetic_s: float = 0.0  # in which the device steps all parameters if nothing waits for copies
    overlap_forward: bool = False  # whether steps run beside the next forward, where that is possible

    def step_s(self, plan: Plan, recipe: Recipe, resident: int) -> float:
        """Seconds of a step of this recipe, with ``resident`` bytes of the state on the device."""
        # What the optimizer's arithmetic and copies have added to the measured steps does not count.
        profile = plan.profile
        before = self.training.seconds(self.measured, self.link, self.resident_bytes, self.arithmetic_s)
        less_s = before.beside / len(profile.order)
        layers = profile.layers
        if less_s:
            layers = tuple(replace(layer, backward_s=max(0.0, layer.backward_s - less_s)) for layer in layers)
        rest = Interlude("rest of the step", max(0.0, profile.other_s - before.step - before.tail))
        steps = [*self._steps(plan, recipe, resident), rest]
        return run_steps(plan.schedule, layers, self.link, steps, plan.policies).seconds

    def _steps(self, plan: Plan, recipe: Recipe, resident: int) -> Iterator[Point | Interlude]:
        """The points of the schedule, and before each what the recipe does there."""
        training, last = self.training, len(plan.profile.layers) - 1
        busy = training.seconds(recipe, self.link, resident, self.arithmetic_s)
        streams, nothing = recipe.weights == "streamed", (0,) * (last + 1)
        weights, sent = (training.layer_weights, training.layer_gradients) if streams else (nothing, nothing)
        calls = Counter(plan.profile.order)  # as if they came in a row
        copied = training.copied_state(resident)
        overlaps = self.overlap_forward and recipe.overlaps and training.state > 0
        front, states, of_head = copied if recipe.gradients == "consumed" else (0, [*nothing], 0)
        behind = training.state - training.front_state - sum(training.layer_state)
        share = busy.beside / max(1, training.state)  # of the arithmetic, for a byte of state
        aside = training.aside_bytes(recipe, resident)  # for whose copy to the host backward waits
        of_head, head_s = of_head + aside, share * behind + aside / self.link.d2h_bytes_per_s
        yield Interlude("state of the last step", 0.0, sent_bytes=front)
        yield Interlude("weights 0", 0.0, loaded_bytes=weights[0])
        forward_s = self.arithmetic_s / training.state if overlaps else 0.0  # as ``share``, beside the next forward
        if overlaps:  # each layer waits for its own
            for name, nbytes in [("front", copied[0]), *enumerate(copied[1]), ("behind", copied[2])]:
                yield Interlude(f"step {name}", 0.0, loaded_bytes=nbytes, sent_bytes=nbytes)
            yield Interlude("in front", forward_s * training.front_state, awaits="step front")
        for point in plan.schedule.order:
            layer = point.layer
            waits, step_s = f"weights {layer}", forward_s * training.layer_state[layer]
            if point.phase == "F":
                ahead = weights[layer + 1] if layer < last else 0
                waits = f"step {layer}" if overlaps else waits
                yield Interlude(f"weights {layer + 1}", step_s, loaded_bytes=ahead, awaits=waits)
            else:
                if layer == last:
                    loss_s = forward_s * behind + plan.profile.loss_s
                    yield Interlude("loss", loss_s, plan.profile.loss_bytes, awaits="step behind")
                    yield Interlude("state behind", head_s, loaded_bytes=of_head, sent_bytes=of_head)
                again = weights[layer - 1] if 0 < layer < last else 0  # the last two layers' are there since forward
                yield Interlude(f"weights {layer - 1}", 0.0, loaded_bytes=again, awaits=waits)
                arithmetic_s = share * training.layer_state[layer]
                state, held = states[layer], f"state {layer + 2}"  # so many gradients are held until they are stepped
                yield Interlude(f"state {layer}", arithmetic_s, 0, state, state + sent[layer], awaits=held)
            yield from [point] * calls[layer]
        yield Interlude("state in front", 0.0, loaded_bytes=front, awaits="state 0")
        yield Interlude("step", share * training.front_state + busy.step * (not overlaps), awaits="state in front")


def without_activations(
    training: TrainingBytes, memory_budget: int, max_host_bytes: int | None, recipes: Iterable[Recipe] = RECIPES
) -> TrainingPlan:
    """Which recipes fit as far as arithmetic tells: before any step, without a word on activations."""
    found = []
    for recipe in recipes:
        resident = training.least_resident(recipe, max_host_bytes)
        one = _beside_activations(training, recipe, resident)
        reason, device = "", f"needs {format_bytes(one.device_bytes)} of device memory"
        if one.device_bytes >= memory_budget:
            reason = f"{device} without activations"
        elif (stepping := _step_bytes(training, one)) > memory_budget:
            reason = f"optimizer.step() needs {format_bytes(stepping)} of device memory"
        elif max_host_bytes is not None and one.host_bytes > max_host_bytes:
            reason = f"needs {format_bytes(one.host_bytes)} of host memory without activations"
        if reason and resident:
            reason = f"{device}, or {format_bytes(training.host_bytes(recipe))} of host memory without activations"
        found.append(replace(one, reason=reason))
    return TrainingPlan(tuple(found), memory_budget, max_host_bytes)


def _step_bytes(training: TrainingBytes, one: RecipePlan) -> int:
    """The device memory in ``optimizer.step()``: streamed state is stepped in small chunks."""
    return one.device_bytes + (training.step if one.recipe.optimizer == "resident" else 0)


def _beside_activations(training: TrainingBytes, recipe: Recipe, resident: int) -> RecipePlan:
    device = training.held_bytes(recipe, resident) + training.gradient_bytes(recipe)
    host = training.host_bytes(recipe, resident)
    return RecipePlan(recipe, None, 0.0, device, host, state_bytes=training.state_bytes(recipe, resident))


def plan_recipes(
    prediction: Prediction,
    memory_budget: int,
    max_host_bytes: int | None,
    plan: Callable[[int, int | None, Link], Plan],
    missing_bytes: int,
    recipes: Iterable[Recipe] = RECIPES,
) -> TrainingPlan:
    """Every recipe with a plan for the activations in what it leaves of all device memory and all pinned host memory.

    ``plan`` plans activations within so many bytes of device and of host memory for a link; it raises a
    :class:`TooLittleMemoryError` if they do not fit. ``missing_bytes`` is what a measured step needs beside weights,
    optimizer state and the layers' activations: gradients, the loss, what libraries allocate.
    Resident state and activations share what a recipe leaves. All amounts that a smaller budget tries are tried, too.
    """
    training, link, measured = prediction.training, prediction.link, prediction.measured
    made = cache(plan)  # recipes ask for the same plans
    known_s: dict[tuple[object, ...], float] = {}  # of steps; plans for other amounts of memory are often the same

    def beside(recipe: Recipe) -> int:
        """What is needed beside layers and gradients; less where the layers were measured with these."""
        others = missing_bytes - training.gradient_bytes(measured)
        if measured.gradients in (recipe.gradients, "resident"):  # all of them are no fewer than any recipe's
            return min(max(0, others), missing_bytes - training.gradient_bytes(recipe))
        return max(0, others)

    def added(recipe: Recipe, nbytes: int) -> int:
        """What activations that need so much add to a recipe whose gradients are whole when backward ends."""
        return max(0, beside(recipe) + nbytes)

    def best(least: RecipePlan) -> RecipePlan:
        """The shortest step of a recipe that needs as much ``least``."""
        if max_host_bytes is not None and least.host_bytes > max_host_bytes:
            return least
        most, found = max(1, memory_budget - least.device_bytes - beside(least.recipe)), list[RecipePlan]()
        try:
            found += within(least, most)
            plans = (one.plan for one in found if one.plan)
            # Where everything is kept, it is in any amount that holds it.
            used = max(most if one.host_bytes or one.recompute_s else one.peak_bytes for one in plans)
            # The same amounts of memory below any budget, the largest first.
            powers = range(math.ceil(FINER * math.log2(max(1, used))) - 1, 0, -1)
            for power in powers if any(training.link_s(least.recipe, link)) else ():
                found += within(least, int(2 ** (power / FINER)))
        except TooLittleMemoryError as error:  # nor in less
            if not found:
                reason = f"activations need {format_bytes(error.least_bytes)}, {format_bytes(most)} are left"
                reason = least.reason or reason
                needed = least.device_bytes + added(least.recipe, error.least_bytes)
                return replace(least, step_s=math.inf, device_bytes=needed, reason=reason)
        shortest = min(found, key=attrgetter("step_s"))
        return replace(shortest, step_s=math.inf, reason=least.reason) if least.reason else shortest

    def within(least: RecipePlan, left: int) -> list[RecipePlan]:
        """With so much ``left`` for activations. The state has what they do not need."""
        recipe, resident = least.recipe, least.resident_bytes
        if recipe.optimizer == "streamed":
            resident += max(0, memory_budget - least.device_bytes - added(recipe, left))
            resident = training.most_resident(resident)
        one = _beside_activations(training, recipe, resident)
        gap_bytes = training.gap_bytes if one.state_bytes[1] else 0
        host_left = None if max_host_bytes is None else max(0, max_host_bytes - one.host_bytes - gap_bytes)
        plans = [made(left, host_left, link)]
        busy_s = training.link_s(recipe, link, resident)[1]
        plans += [made(left, host_left, other) for other in _beside_copies(link, busy_s, plans[0])]
        pairs = [(each, resident) for each in plans]
        if recipe.optimizer == "streamed":
            free = memory_budget * (1 - MARGIN) - one.device_bytes + resident
            more = ((each, training.most_resident(free - added(recipe, each.peak_bytes))) for each in plans)
            pairs += [(each, amount) for each, amount in more if amount > resident]
        return [planned(recipe, *pair) for pair in pairs]

    def planned(recipe: Recipe, each: Plan, resident: int) -> RecipePlan:
        same = recipe, resident, each.num_layers, each.policies
        if same not in known_s:
            known_s[same] = prediction.step_s(each, recipe, resident)
        one, step_s = _beside_activations(training, recipe, resident), known_s[same]
        device, host = one.device_bytes + added(recipe, each.peak_bytes), one.host_bytes + each.host_bytes
        device = max(device, _step_bytes(training, one))
        return replace(one, plan=each, step_s=step_s, device_bytes=device, host_bytes=host)

    every = without_activations(training, memory_budget, max_host_bytes, recipes).recipes
    return TrainingPlan(tuple(map(best, every)), memory_budget, max_host_bytes)


def _beside_copies(link: Link, busy_s: float, plan: Plan) -> list[Link]:
    """What is left to load activations in backward, of which a recipe's copies take ``busy_s``; and next to nothing."""
    if busy_s <= 0:
        return []
    profile = plan.profile
    forward_s = math.fsum(profile.layers[number].forward_s for number in profile.order)
    backward_s = plan.step_s - profile.other_s - forward_s  # with the loss
    share = round(SHARES * (1.0 - busy_s / backward_s)) / SHARES if backward_s > 0 else 0.0
    shares = {LEAST_SHARE, max(LEAST_SHARE, share)} - {1.0}
    return [replace(link, h2d_bytes_per_s=one * link.h2d_bytes_per_s) for one in sorted(shares)]
