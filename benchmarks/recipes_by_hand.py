"""Recipes put together by the calls for their parts: what ``offload.prepare`` could have chosen, and how long it takes.

    python -m benchmarks.recipe --by-hand --tokens 65536

One process has all recipes of all budgets in turn: the layers are profiled once, and host memory is pinned once.
PyTorch limits the process to the budget of each row.
"""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import offload
from benchmarks.instruments import Row, attempt, device_peak, give_memory_back, limit_memory, timed
from benchmarks.models import Training
from offload.device.select import get_backend
from offload.host.pool import get_host_pool
from offload.optimizer.chunks import NUM_SLOTS
from offload.optimizer.stream import CHUNK_BYTES
from offload.planning.plan import TooLittleMemoryError
from offload.planning.recipes import without_activations
from offload.planning.training_bytes import Recipe, TrainingBytes

PLANNED = 0.9  # of a budget; the rest is for the allocator
FIRST = 2  # steps before the one that is timed: the layers are learned in the first, and proven in the next


class ByHand:
    """A model, a profile of its layers, and the sizes of what its training has; AdamW's moments are float32."""

    def __init__(self, model: Training, device: torch.device, host: int, min_bytes: int) -> None:
        self.model, self.device, self.host, self.min_bytes = model, device, host, min_bytes
        own = [list(layer.parameters()) for layer in model.layers]
        parameters, slots = list(model.module.parameters()), NUM_SLOTS * CHUNK_BYTES
        self.training = TrainingBytes.of(parameters, own, lambda one: 8 * one.numel(), slots)
        self.link = offload.measure_link(device)
        measured = partial(offload.profile_layers, min_bytes=min_bytes, device=device, steps=1, regions=True)
        self.profile = measured(model.layers, lambda: model.loss().backward())

    def rows(self, budget: int) -> Iterator[Row]:
        """Each recipe that fits, but for the CPU's: it does not step in float32."""
        for one in without_activations(self.training, int(PLANNED * budget), self.host).recipes:
            if not one.reason and one.recipe.optimizer != "cpu" and (plan := self.plan(budget, one.recipe)):
                yield self.row(budget, one.recipe, plan)

    def plan(self, budget: int, recipe: Recipe) -> offload.Plan | None:
        """Activations have what is left, of the device and of the host; ``None`` where that is too little."""
        left = int(PLANNED * budget) - self.training.held_bytes(recipe) - self.training.gradient_bytes(recipe)
        host_left = self.host - self.training.host_bytes(recipe)
        try:
            return offload.plan(self.profile, left, self.link, max_host_bytes=host_left)
        except TooLittleMemoryError:
            return None

    def row(self, budget: int, recipe: Recipe, plan: offload.Plan) -> Row:
        """Steps in which the layers are learned and proven, and one that is timed."""
        row: Row = {"recipe": str(recipe), "budget_bytes": budget, "activations": repr(plan)}
        model, device = self.model, self.device
        model.optimizer.zero_grad()
        model.optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-5, fused=True)
        model.module.to(device)
        pooled = self.host - self.training.layer_host_bytes(recipe)  # weights are pinned outside of the pool
        give_memory_back(device, pinned=False)
        get_host_pool(get_backend(device)).trim(pooled)
        limit_memory(device, budget)
        with contextlib.ExitStack() as stack:
            attempt(row, lambda: self._put_together(stack, recipe, plan, pooled))
            attempt(row, lambda: row.update(first_s=[timed(self._step, device) for _ in range(FIRST)]))
            peak_bytes = device_peak(device)
            attempt(row, lambda: row.update(step_s=timed(self._step, device)))
            row["peak_bytes"] = peak_bytes()
        limit_memory(device, math.inf)
        return row

    def _put_together(self, stack: contextlib.ExitStack, recipe: Recipe, plan: offload.Plan, pooled: int) -> None:
        model, consumed = self.model, recipe.gradients == "consumed"
        if recipe.weights == "streamed":
            stack.enter_context(offload.stream_weights(model.layers, self.device))
        options: dict[str, Any] = {"in_backward": consumed, "consume_gradients": consumed}
        options |= {"resident_bytes": "1TiB" if recipe.optimizer == "resident" else 0, "state_dtype": torch.float32}
        state = offload.stream_optimizer(model.optimizer, max_host_bytes=pooled, **options)
        stack.callback(state.remove, on_device=False)
        layers = partial(offload.offload_layers, min_bytes=self.min_bytes, max_host_bytes=pooled)
        stack.enter_context(layers(model.layers, plan=plan))

    def _step(self) -> None:
        self.model.loss().backward()
        self.model.optimizer.step()
        self.model.optimizer.zero_grad()
