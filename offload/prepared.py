"""Fit a whole training into a memory budget: weights, gradients, optimizer state and activations.

Arithmetic says which recipes can fit. Training begins with one that certainly does, while the layers are measured; at
the end of the step after that, the recipe with the shortest predicted step is put in place, between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from offload.activations.stats import OffloadStats
from offload.base.checks import format_bytes
from offload.base.find_layers import watch_order
from offload.base.layer_events import Attachment, ForwardBegins, Handle, LayerCall, compute_device
from offload.base.tensors import tensors_in
from offload.device.select import get_backend
from offload.host.pool import get_host_pool
from offload.measuring.follow_compiled import follow_plan
from offload.measuring.follow_plan import FollowPlan
from offload.measuring.in_pieces import Pieces
from offload.measuring.memory_left import BrokenBudget, MemoryLeft, bytes_of_gradients, usable_bytes
from offload.optimizer.arithmetic import seconds_per_element
from offload.optimizer.proof import with_groups
from offload.optimizer.state import local, move_state
from offload.optimizer.stream import OptimizerStats, StreamedOptimizer, stream_optimizer
from offload.planning.plan import Plan, make_plan
from offload.planning.profile import Link, Profile
from offload.planning.recipes import Prediction, RecipePlan, TrainingPlan, plan_recipes, without_activations
from offload.planning.training_bytes import Recipe, TrainingBytes
from offload.weights.streamed import StreamedWeights, WeightStats, stream_weights

_logger = logging.getLogger(__name__)

FIRST_SHARE = 0.35
"""A first recipe leaves the rest of the budget to activations that nobody has measured yet. The tokens say less: of
nine models, one's first microbatch needed 0.24 times, and another's 7.7 times, what the inputs and outputs of a layer's
matrix products have, because some layers save attention's scores, and others use few weights at a time. Fake tensors
would tell, but run the program's own code and kernels once more before the first step.
"""
_ALL = 1 << 60


@dataclass(eq=False, repr=False)
class PreparedTraining(Handle, MemoryLeft):
    """A model and its optimizers within a memory budget, from :func:`prepare` to :meth:`remove`."""

    _model: nn.Module
    _layers: list[nn.Module]
    _lists: Mapping[str, nn.ModuleList]  # where the layers were found, if nobody has named them
    _optimizers: list[torch.optim.Optimizer]
    _training: TrainingBytes
    _plan: TrainingPlan
    _device: torch.device
    _in_float32: Mapping[str, Any]  # which numbers are held and stepped in float32: arguments of stream_optimizer
    _overlap_forward: bool
    _chunk_bytes: int
    _follow: Mapping[str, Any]  # how a plan of the activations is followed
    _pieces: Pieces
    recipe: Recipe = field(init=False)
    """Where weights, gradients and optimizer state are at present."""

    def __post_init__(self) -> None:
        self._usable_bytes = usable_bytes(self._plan.memory_budget, self._device)
        self._weights: StreamedWeights | None = None
        self._states: list[StreamedOptimizer] = []  # of the optimizers, where it is streamed
        self._stepped: set[torch.optim.Optimizer] = set()  # optimizers, since all of them had stepped
        self._activations: FollowPlan | None = None
        self._removed = False
        self._prediction: Prediction | None = None  # of steps, once there is a profile
        self._planned_for: Profile | None = None  # what layers cost by which the recipes were planned
        self._decides_again = self._deciding = False
        self._too_large: set[Recipe] = set()  # recipes that were in place when none fitted, since one did
        self._link_left: Link | None = None  # for activations, beside the copies of the chosen recipe
        self._tokens = 0  # of the largest microbatch so far
        self.broken = BrokenBudget(self._plan.memory_budget - self._usable_bytes)
        self._undo = ExitStack()
        self._undo.callback(self._pieces.remove)
        self._put_in_place(_first_of(self._plan))
        for optimizer in self._optimizers:
            self._undo.callback(optimizer.register_step_post_hook(self._after_step).remove)
        if len(self._lists) > 1:
            self._undo.callback(watch_order(self._lists).remove)
        if self._pieces.left:
            self._undo.enter_context(Attachment([self._model], [ForwardBegins(self._begin_forward)], self))

    @property
    def state(self) -> Literal["measuring", "following", "removed"]:
        """Whether the layers are still measured, the chosen recipe is followed, or the handle was removed."""
        if self._removed:
            return "removed"
        return "measuring" if self._prediction is None else "following"

    @property
    def plan(self) -> TrainingPlan:
        """Every recipe: predicted seconds and memory of a step by the plan that is followed, or why it does not fit."""
        followed = self._activations
        if self._prediction is None:
            return self._plan
        if followed is not None and followed.profile is not None and followed.profile != self._planned_for:
            self._plan_recipes(self._prediction, followed, followed.profile)  # for longer inputs, which have come since
        return replace(self._plan, recipes=tuple(map(self._followed, self._plan.recipes)), in_place=self.recipe)

    def _followed(self, one: RecipePlan) -> RecipePlan:
        """A recipe as it was planned, or, if it is in place, with what the activations' plan says."""
        followed, predicted = self._activations, self._prediction
        if one.recipe != self.recipe or followed is None or followed.largest_plan is None or predicted is None:
            return one
        made, training, resident = followed.largest_plan, self._training, self.resident_bytes
        # Gradients are whole when backward ends.
        peak_bytes = max(made.peak_bytes, training.gradient_bytes(one.recipe))
        device_bytes = training.held_bytes(one.recipe, resident) + peak_bytes
        if made.peak_bytes > made.memory_budget:
            return replace(one, device_bytes=device_bytes)  # it does not fit
        return replace(
            one,
            plan=made,
            step_s=predicted.step_s(made, one.recipe, resident),
            device_bytes=device_bytes,
            host_bytes=training.host_bytes(one.recipe, resident) + made.host_bytes,
            state_bytes=training.state_bytes(one.recipe, resident),
            reason="",
        )

    @property
    def activations(self) -> Plan | None:
        """The plan of the activations; ``None`` while the layers are measured."""
        return None if self._activations is None else self._activations.plan

    def stats(self) -> dict[str, OffloadStats | OptimizerStats | WeightStats]:
        """Counters of each part that is in use.

        Under ``"activations"`` an :class:`~offload.OffloadStats`, under ``"optimizer"`` an
        :class:`~offload.OptimizerStats`, under ``"weights"`` a :class:`~offload.WeightStats`.
        """
        found: dict[str, OffloadStats | OptimizerStats | WeightStats] = {}
        if self._activations is not None:
            found["activations"] = self._activations.context.stats()
        if self._states:
            found["optimizer"] = OptimizerStats(
                *map(sum, zip(*(astuple(one.stats()) for one in self._states), strict=True))
            )
        if self._weights is not None:
            found["weights"] = self._weights.stats()
        return found

    @contextmanager
    def no_step(self) -> Iterator[None]:
        """Inside the block, backward steps nothing: for all microbatches of a step but the last."""
        with ExitStack() as stack:
            for one in self._states:
                stack.enter_context(one.no_step())
            yield

    def synchronize(self) -> None:
        """Block until copies to the host are over, and with them every step, as the handles of the parts do."""
        for state in self._states:
            state.synchronize()
        if self._weights is not None:
            self._weights.synchronize()

    def remove(self) -> None:
        """Remove all hooks. A second call does nothing.

        Weights and optimizer state remain where they are, because those on the host need not fit on the device. State
        keeps its ``state_dtype``, for another :func:`prepare` or :func:`stream_optimizer`.
        """
        if self._removed:
            return
        with ExitStack() as others:  # in the opposite order: they go also where a warning is an error for the program
            others.callback(self.broken.tell)
            if self._weights is not None:
                others.callback(self._weights.remove)
            others.callback(self._remove_states)
            if self._activations is not None:
                others.callback(self._activations.remove)
            self._undo.close()
        self._removed = True

    # What is left for activations, as :class:`~offload.measuring.memory_left.MemoryLeft` has it.

    def device_bytes(self) -> int:
        return max(1, self._usable_bytes - self._training.held_bytes(self.recipe, self.resident_bytes))

    def asked_bytes(self, nbytes: int) -> int:
        whole, usable = self._plan.memory_budget, self._usable_bytes
        return round(whole * (nbytes + usable - self.device_bytes()) / usable)

    def host_bytes(self) -> int | None:
        most = self._plan.max_host_bytes
        return None if most is None else max(0, most - self._training.host_bytes(self.recipe, self.resident_bytes))

    def link(self, measured: Link) -> Link:
        return self._link_left or measured  # the recipe's copies have the rest

    def gradient_bytes(self) -> int:
        # Those of streamed weights are on the host, or stepped with already.
        layers = self._layers if self.recipe.weights == "streamed" else []
        elsewhere = {one for layer in layers for one in layer.parameters()}
        return bytes_of_gradients((one for one in self._model.parameters() if one not in elsewhere), self._device)

    def found_left(self, nbytes: int) -> None:
        """All gradients are known, and where they are."""

    def end(self) -> None:
        """No microbatch follows by a plan of the activations; another plan may."""

    def more_after_step(self) -> bool:
        """Ask for another recipe, unless this one is chosen for just these activations, or no other needs less."""
        self._decides_again = self._prediction is not None and not self._deciding
        if not self._decides_again or self._pieces.left:
            return not self._deciding
        plan = self.plan  # for these activations
        return plan.fits or plan.least.recipe != self.recipe

    def instead(self, nbytes: int) -> str:
        """What would fit in place of a budget with which a step may add so many bytes."""
        gradients, activations = self._training.gradient_bytes(self.recipe), self._activations
        share = max(0.0, (self.device_bytes() - gradients) / max(1, nbytes - gradients))
        host = None
        if self._plan.max_host_bytes is not None and self._prediction and activations and activations.profile:
            freely = self._recipes_within(None, self._prediction, activations, activations.profile)
            host = min((one.host_bytes for one in freely.recipes if not one.reason), default=None)
        more = "" if host is None else f", or with {format_bytes(host + self._training.gap_bytes)} of host memory"
        return f" No recipe needs less than {self.recipe}: {share:.0%} of the tokens in a microbatch would fit{more}."

    def __repr__(self) -> str:
        budget = format_bytes(self.plan.memory_budget)
        return f"PreparedTraining({type(self._model).__name__} in {budget}: {self.recipe}, {self.state})"

    def _begin_forward(self, call: LayerCall, inputs: Any) -> None:
        """A forward begins: compute in pieces what no recipe has the memory for in one piece."""
        if not (call.training and torch.is_grad_enabled()):
            return
        tokens = max((one.shape[:2].numel() for one in tensors_in(inputs) if one.ndim > 1), default=0)
        recipes, host, begins = [one.recipe for one in self._plan.recipes], self._plan.max_host_bytes, not self._tokens
        if tokens <= self._tokens and not self._pieces.due:
            return
        labelled = inputs[1].get("labels") is not None
        self._tokens = max(tokens, self._tokens)

        def beside(nbytes: int) -> TrainingPlan:
            return without_activations(self._training, self._usable_bytes - nbytes, host, recipes)

        nbytes = self._pieces.begin(self._tokens, lambda needed: beside(needed).fits, labelled=labelled)
        self._plan = replace(self._plan, in_pieces=tuple(self._pieces.said))
        plan = beside(nbytes)
        if begins and plan.fits and any(one.reason for one in plan.recipes if one.recipe == self.recipe):
            self._change_to(_first_of(plan))

    # Putting a recipe in place, and taking it away: between two steps.

    def _put_in_place(self, planned: RecipePlan) -> None:
        """Where that raises, as the host refuses memory, all is removed: half a recipe is none."""
        try:
            self._move(planned)
        except BaseException:
            self.remove()
            raise

    def _move(self, planned: RecipePlan) -> None:
        recipe = self.recipe = planned.recipe
        self.resident_bytes = planned.resident_bytes  # optimizer state that is on the device by the recipe
        if (most := self._most_pooled()) is not None:
            get_host_pool(get_backend(self._device)).trim(most)  # what held activations before makes room for weights
        if recipe.weights == "streamed" and compute_device(self._layers) is None:
            self._weights = stream_weights(self._layers, self._device)
        self._model.to(self._device)
        if self._overlap_forward and not recipe.overlaps:
            _logger.info("overlap_forward: no step is left to run beside the next forward with %s", recipe)
        if recipe.optimizer == "streamed" or (recipe.optimizer == "resident" and self._in_float32["state_dtype"]):
            options: dict[str, Any] = {
                "chunk_bytes": self._chunk_bytes,
                "max_host_bytes": most,
                "resident_bytes": _ALL if recipe.optimizer == "resident" else self.resident_bytes,
                "in_backward": recipe.gradients == "consumed",
                "consume_gradients": recipe.gradients == "consumed",
                "overlap_forward": self._overlap_forward and recipe.overlaps,
                **self._in_float32,
            }
            for optimizer in self._optimizers:  # each adopts the state from where it is
                self._states.append(stream_optimizer(optimizer, **options))
        else:
            for optimizer in self._optimizers:
                move_state(optimizer)
        if self._activations is None:
            self._activations = self._measured()
        self._activations.context.limit_host(most)

    def _measured(self) -> FollowPlan:
        most = self._most_pooled()
        made = follow_plan(self._layers, self, device=self._device, max_host_bytes=most, **self._follow)
        self._follow = {**self._follow, "link": made.link}  # measured once, in 128 MiB of the device
        return made

    def _remove_states(self) -> None:
        with ExitStack() as others:
            while self._states:  # in its own dtype, where it is: it need not fit on the device
                others.callback(self._states.pop().remove, on_device=False)

    def _end_activations(self) -> None:
        """The layers are to be measured again. Say so if the budget was broken since they were measured before."""
        if not self._too_large:  # else the recipes that follow may break it, too
            self.broken.tell()
        if self._activations is not None:
            self._activations.remove()
            self._activations = None

    def _change_to(self, planned: RecipePlan) -> None:
        self._remove_states()
        if planned.recipe.weights != self.recipe.weights:  # what the layers' forwards were learned with is no more
            self._end_activations()
            if self._weights is not None:
                self._weights.remove()
                self._weights = None
        self._put_in_place(planned)

    def _most_pooled(self) -> int | None:
        """Pinned memory that the pool may have: for activations, and for state that is streamed."""
        most = self._plan.max_host_bytes
        if most is None:
            return None
        pinned = self._training.layer_host_bytes(self.recipe)
        if self.recipe.optimizer == "cpu":
            pinned += self._training.state_bytes(self.recipe)[1]
        return max(0, most - pinned)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """A step has ended: decide once there is a profile, and again if that of longer inputs does not fit."""
        self._stepped.add(optimizer)
        if len(self._stepped) < len(self._optimizers):
            return  # the gradients of the others must remain where they are
        self._stepped.clear()
        activations = self._activations
        if self._overlap_forward and activations is not None and activations.measures:
            for one in self._states:
                one.synchronize()  # what is timed next has no waits for this step
        if activations is None or activations.profile is None or not (self._prediction is None or self._decides_again):
            return
        self._deciding = True
        try:
            self._decide(activations, activations.profile, again=self._decides_again)
        finally:
            self._deciding = self._decides_again = False

    def _plan_recipes(self, prediction: Prediction, activations: FollowPlan, profile: Profile) -> None:
        """Plan every recipe for layers that cost this."""
        made = self._recipes_within(self._plan.max_host_bytes, prediction, activations, profile)
        self._plan = replace(made, memory_budget=self._plan.memory_budget, in_pieces=self._plan.in_pieces)
        self._planned_for = profile

    def _recipes_within(
        self, max_host_bytes: int | None, prediction: Prediction, activations: FollowPlan, profile: Profile
    ) -> TrainingPlan:
        made = plan_recipes(
            prediction,
            self._usable_bytes,
            max_host_bytes,
            lambda device, host, left: make_plan(profile, device, left, max_host_bytes=host),
            activations.missing_bytes,
            [one.recipe for one in self._plan.recipes],
        )
        return replace(made, recipes=tuple(self._if_reached(one, made) for one in made.recipes))

    def _if_reached(self, one: RecipePlan, plan: TrainingPlan) -> RecipePlan:
        """A recipe; if a change to it, from the one in place, would need too much memory, with that as the reason."""
        if one.recipe.weights == self.recipe.weights:
            return one
        # Weights move first, and state last: meanwhile the device has the more of the state, or the host.
        state, most = sorted((one.resident_bytes, self.resident_bytes)), plan.max_host_bytes
        gradients = self._training.gradient_bytes(one.recipe)
        if self.recipe.gradients == "host" and one.recipe.weights == "resident":
            gradients = self._training.gradients  # those of the step that has ended: weights take them to the device
        device = self._training.held_bytes(one.recipe, state[1]) + gradients
        host = self._training.host_bytes(one.recipe, state[0])
        if device <= max(plan.memory_budget, one.device_bytes) and (most is None or host <= most):
            return one
        reason = one.reason or "a change to it, between two steps, needs more memory"
        device, host = max(device, one.device_bytes), max(host, one.host_bytes)
        return replace(one, device_bytes=device, host_bytes=host, reason=reason, step_s=float("inf"))

    def _decide(self, activations: FollowPlan, profile: Profile, *, again: bool) -> None:
        """Put the fastest recipe in place for layers that cost this."""
        link = activations.link
        options = {"device": self._device, "chunk_bytes": self._chunk_bytes, **self._in_float32}
        arithmetic_s = 0.0
        for optimizer in self._optimizers:
            trained = sum(local(one).numel() for _, one in with_groups(optimizer) if one.requires_grad)
            arithmetic_s += trained * seconds_per_element(optimizer, **options)
        measured = self.recipe, self.resident_bytes, arithmetic_s
        self._prediction = Prediction(self._training, link, *measured, overlap_forward=self._overlap_forward)
        self._plan_recipes(self._prediction, activations, profile)
        if self._plan.fits:
            chosen = self._plan.chosen
            self._too_large.clear()
        elif self._pieces.left and self._tokens:  # no forward of the model begins where its parts are called
            _logger.info("no recipe fits; the layers are measured again, with more in pieces\n%s", self._plan)
            self._pieces.due, self._prediction = True, None
            self._end_activations()
            self._activations = self._measured()
            return
        else:
            chosen = self._least(activations)
        self._link_left = None if chosen.plan is None else chosen.plan.link
        _logger.info("memory_budget = %s: %s\n%s", format_bytes(self._plan.memory_budget), chosen.recipe, self._plan)
        before = self.recipe
        if (chosen.recipe, chosen.resident_bytes) != (self.recipe, self.resident_bytes):
            self._change_to(chosen)
        elif self.link(link) == link and not again and self._plan.fits:
            return
        if chosen.recipe[:2] == before[:2]:
            activations.plan_again()
        else:  # the layers are measured again, as their gradients are elsewhere; or new ones, as weights have moved
            activations.time_again()
            self._prediction = replace(self._prediction, measured=chosen.recipe, resident_bytes=chosen.resident_bytes)

    def _least(self, activations: FollowPlan) -> RecipePlan:
        """As none fits, the recipe that needs the least: the one in place if that was measured to fit.

        It is no error, as steps have run already; with longer inputs, these may be many. The plan of the activations
        says what would fit.
        """
        self._too_large.add(self.recipe)
        least = self._plan.least
        if not activations.recomputed_fits and least.recipe not in self._too_large:  # else it was measured itself
            return least
        return next(one for one in self._plan.recipes if one.recipe == self.recipe)


def _first_of(plan: TrainingPlan) -> RecipePlan:
    """The one with the least traffic that leaves room for activations; else the one with the least device memory."""
    fitting = [one for one in plan.recipes if not one.reason]
    roomy = [one for one in fitting if one.device_bytes <= FIRST_SHARE * plan.memory_budget]
    return (roomy or sorted(fitting, key=lambda one: one.device_bytes))[0]
