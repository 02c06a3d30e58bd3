"""Where weights, gradients and optimizer state can be, and the sizes and seconds of that: all but the activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any, Literal, NamedTuple

from offload.base.evenly import evenly
from offload.base.head import number_of_head
from offload.planning.profile import Link

CPU_ELEMENTS_PER_S = 6e9
"""Parameters per second that ``torch.optim.AdamW(fused=True)`` steps on 16 cores, in bfloat16: measured beside an H200.
Only the order of recipes depends on it, and stepping on the CPU comes last anyway."""

LAYERS_IN_FLIGHT = 2  # layers whose weights, or whose gradients, are on the device at once where they are streamed
GAP_BYTES = 1 << 10  # between two tensors in flat host memory there is no more than this


class Recipe(NamedTuple):
    """Where weights, gradients and optimizer state are, and who steps."""

    weights: Literal["resident", "streamed"]  #: On the device; or on the host, and loaded to run each layer.
    gradients: Literal["resident", "consumed", "host"]
    """On the device until the step; consumed by the step of each parameter in backward; or copied to the host."""
    optimizer: Literal["resident", "streamed", "cpu"]
    """State on the device; on the host, or a part of it, and stepped on the device in chunks; or stepped on the CPU."""

    @property
    def overlaps(self) -> bool:
        """Whether the step of streamed state can run beside the next forward: gradients and weights are there."""
        return self.optimizer == "streamed" and self.weights == self.gradients == "resident"

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


class RecipeSeconds(NamedTuple):
    """What a recipe adds to a step beside the activations, and beside copies that forward and backward can hide."""

    tail: float  # backward ends so much later: nothing is left to hide the loads of what it comes to last
    step: float  # after backward
    beside: float  # of the optimizer's arithmetic, what runs in backward, in the device's time


@dataclass(frozen=True)
class TrainingBytes:
    """The sizes of what a model's training has beside activations."""

    weights: int  # of all parameters
    gradients: int  # of all parameters that are trained
    state: int  # of the optimizer
    layer_weights: tuple[int, ...]  # of the parameters of each layer
    layer_gradients: tuple[int, ...]  # of those that are trained
    layer_state: tuple[int, ...]  # of the optimizer, for each layer's parameters
    largest_gradient: int  # of one parameter
    slots: int  # device memory through which optimizer state is streamed
    trained_elements: int
    parameter_state: tuple[int, ...] = ()  # of each of the optimizer's parameters in order; some can be resident
    front_state: int = 0  # of the first parameters, those before the layers', which backward comes to last
    parameter_layer: tuple[int, ...] = ()  # the layer that has this parameter; -1 before the layers, -2 behind them
    step: int = 0  # device memory that ``optimizer.step()`` allocates if all state is on the device
    parameter_gradient: tuple[int, ...] = ()  # of each of these parameters, as far as it may be set aside on the host
    aside: int = 0  # of several optimizers: the gradients that backward may set aside on the host

    @classmethod
    def of(
        cls,
        parameters: Sequence[Any],
        layers: Iterable[Sequence[Any]],
        state_of: Callable[[Any], int],
        slots: int,
        stepped: Sequence[Any] | None = None,
    ) -> TrainingBytes:
        """Of a model's parameters, and of each layer's. The optimizer has them in the order ``stepped``, if given."""

        def bytes_of(some: Sequence[Any]) -> tuple[int, int, int]:
            trained = sum(one.nbytes for one in some if one.requires_grad)
            return sum(one.nbytes for one in some), trained, sum(map(state_of, some))

        layers = [*layers]
        numbers = {one: number for number, own in enumerate(layers) for one in own}
        sized = [one for one in (parameters if stepped is None else stepped) if state_of(one)]
        in_front = {*takewhile(lambda one: one not in numbers, sized)}
        places = tuple(numbers.get(one, -1 if one in in_front else -2) for one in sized)
        trained = [one for one in parameters if one.requires_grad]
        largest, elements = max((one.nbytes for one in trained), default=0), sum(one.numel() for one in trained)
        weights, gradients, states = zip(*map(bytes_of, layers), strict=True)
        own, front = tuple(map(state_of, sized)), sum(map(state_of, in_front))
        made = cls(*bytes_of(parameters), weights, gradients, states, largest, slots, elements, own, front, places)
        return replace(made, parameter_gradient=tuple(one.nbytes for one in sized))

    def held_bytes(self, recipe: Recipe, resident: int = 0) -> int:
        """Weights, state and slots on the device from step to step; ``resident`` bytes of streamed state are there."""
        streamed = self.weights - sum(self.layer_weights) + LAYERS_IN_FLIGHT * max(self.layer_weights)
        here, there = self.state_bytes(recipe, resident)
        slots = min(self.slots, there) if recipe.optimizer == "streamed" else 0
        return (self.weights if recipe.weights == "resident" else streamed) + here + slots

    def state_bytes(self, recipe: Recipe, resident: int = 0) -> tuple[int, int]:
        """Optimizer state on the device, and on the host."""
        outside = self.state - sum(self.layer_state)
        here = {"resident": self.state, "streamed": resident, "cpu": outside}[recipe.optimizer]
        return here, self.state - here

    def gradient_bytes(self, recipe: Recipe) -> int:
        """The most gradients on the device at once."""
        outside = self.gradients - sum(self.layer_gradients)
        flight = LAYERS_IN_FLIGHT * max(self.layer_gradients)
        most = {"resident": self.gradients, "host": outside + flight, "consumed": max(flight, self.largest_gradient)}
        return min(self.gradients, most[recipe.gradients])

    def host_bytes(self, recipe: Recipe, resident: int = 0) -> int:
        """Host memory beside activations, all of it pinned but the state that the CPU steps."""
        aside = self.aside_bytes(recipe, resident)
        return self.layer_host_bytes(recipe) + self.state_bytes(recipe, resident)[1] + aside

    def aside_bytes(self, recipe: Recipe, resident: int = 0) -> int:
        """The gradient of a head that is copied to the host, from where it is loaded with the state."""
        if recipe.gradients != "consumed":
            return 0
        # Layers whose weights are on the host give their gradients by themselves.
        numbers = range(len(self.parameter_gradient))
        own = [one for one in numbers if recipe.weights == "resident" or self.parameter_layer[one] < 0]
        head = number_of_head([self.parameter_state[one] for one in own], self.slots)
        if head is None or own[head] in self._resident(resident):
            return self.aside
        return self.parameter_gradient[own[head]]

    def layer_host_bytes(self, recipe: Recipe) -> int:
        """Pinned host memory of the layers' weights and gradients."""
        weights = sum(self.layer_weights) if recipe.weights == "streamed" else 0
        return weights + (sum(self.layer_gradients) if recipe.gradients == "host" else 0)

    def most_resident(self, nbytes: float) -> int:
        """The state of as many parameters, in the order in which they are resident, as have so many bytes together."""
        return max((one for one in self._sums() if one <= nbytes), default=0)

    def least_resident(self, recipe: Recipe, max_host_bytes: int | None) -> int:
        """The state that must be resident because the host cannot hold it; 0 where that would not be enough."""
        if recipe.optimizer != "streamed" or max_host_bytes is None:
            return 0
        over = self.host_bytes(recipe) + self.gap_bytes - max_host_bytes
        return 0 if over <= 0 else next((one for one in self._sums() if one >= over), 0)

    @property
    def gap_bytes(self) -> int:
        """The most host memory between state tensors."""
        return GAP_BYTES * len(self.parameter_state)

    def _sums(self) -> Iterable[int]:
        return accumulate((self.parameter_state[one] for one in evenly(len(self.parameter_state))), initial=0)

    def copied_state(self, resident: int) -> tuple[int, list[int], int]:
        """State that is copied: of the parameters before the layers, of each layer, and of those behind the layers."""
        behind = self.state - self.front_state - sum(self.layer_state)
        copied = [*self.layer_state, behind, self.front_state]  # -1 and -2 are the last two
        for number in self._resident(resident):
            copied[self.parameter_layer[number]] -= self.parameter_state[number]
        return copied[-1], copied[:-2], copied[-2]

    def _resident(self, resident: int) -> Iterator[int]:
        """The numbers of the parameters whose state these bytes are."""
        for number in evenly(len(self.parameter_state)):
            if resident <= 0:
                break
            yield number
            resident -= self.parameter_state[number]

    def link_s(self, recipe: Recipe, link: Link, resident: int = 0) -> tuple[float, float, float]:
        """Seconds of a recipe's copies on the link: in forward, in backward, and in the optimizer's step."""
        d2h, h2d = link.rates(d2h=True, h2d=True)  # both directions are busy at once, and the slower one counts
        state = self.state - resident if recipe.optimizer == "streamed" else 0
        trained = sum(self.layer_gradients)  # and the new weights, which are as large
        weights, sent = (sum(self.layer_weights), trained) if recipe.weights == "streamed" else (0, 0)
        beside, step = (state, 0) if recipe.gradients == "consumed" else (0, state)
        read = trained if recipe.gradients == "host" else 0  # the step reads them, and reads and writes the weights
        step_s = max((step + 2 * read) / h2d, (step + read) / d2h)
        if recipe.optimizer == "cpu":
            step_s = self.trained_elements / CPU_ELEMENTS_PER_S
        return weights / link.h2d_bytes_per_s, max((weights + beside) / h2d, (sent + beside) / d2h), step_s

    def seconds(self, recipe: Recipe, link: Link, resident: int = 0, arithmetic_s: float = 0.0) -> RecipeSeconds:
        """What a recipe adds to a step, where the device steps all parameters in ``arithmetic_s`` if nothing waits."""
        step_s = self.link_s(recipe, link, resident)[2]
        if recipe.gradients != "consumed":
            # Copies and arithmetic of different chunks run at the same time; and the CPU is no faster than the device.
            return RecipeSeconds(0.0, max(step_s, arithmetic_s), 0.0)
        _, h2d = link.rates(d2h=True, h2d=True)
        return RecipeSeconds(self.copied_state(resident)[0] / h2d, step_s, arithmetic_s)
