"""What a training holds beside activations, and what is left for these of a device's memory, or of a budget."""

from __future__ import annotations

import atexit
import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import nn

from offload.base.checks import describe, format_bytes, warn_caller
from offload.base.head import number_of_head
from offload.base.layer_events import compute_device
from offload.base.tensors import check_values
from offload.device.select import get_backend
from offload.host.pool import get_host_pool
from offload.observe.memory import memory_meter
from offload.optimizer.chunks import NUM_SLOTS
from offload.optimizer.early import is_consumed
from offload.optimizer.proof import LARGEST, prove, stand_in_for, unhooked_step, with_groups
from offload.optimizer.state import REMAINDER_BYTES, local
from offload.optimizer.stepped_gradients import FreedGradient
from offload.optimizer.stream import check_can_be_streamed
from offload.planning.profile import Link
from offload.planning.training_bytes import TrainingBytes

_logger = logging.getLogger(__name__)

AUTO_SHARE = 0.92  # of what the device has left: allocators need some room to cut blocks from

TOLERANCE = 0.02  # by what part of a budget a peak may be above it without a warning


@dataclass(eq=False)
class BrokenBudget:
    """By how much microbatches broke a budget, and what the program was told of that."""

    spare_bytes: int = 0  # of the budget, what no plan uses: a microbatch that had them has not broken it
    over_bytes: float = -math.inf  # over what plans use
    told_bytes: float = 0.0
    memory_budget: int = 0  # the one that was broken

    def note(self, over_bytes: int, memory_budget: int) -> None:
        """A microbatch has needed so much more than plans use."""
        if over_bytes > self.over_bytes:
            self.over_bytes, self.memory_budget = over_bytes, memory_budget
            _noted.add(self)

    def tell(self) -> None:
        """Say that the budget was broken, if it was, and by more than was told of."""
        budget, over_bytes = self.memory_budget, self.over_bytes - self.spare_bytes
        if over_bytes > self.told_bytes + TOLERANCE * budget:
            self.told_bytes = over_bytes
            given, needed = format_bytes(budget), format_bytes(budget + round(over_bytes))
            warn_caller(
                f"memory_budget = {given} was broken: a microbatch needed {needed}, as its layers were learned, which "
                "runs them twice, or its inputs were larger than all before, or its plan was too tight. Give more if "
                "such microbatches do not fit."
            )

    def expect(self, others: int, needed_bytes: int, memory_budget: int) -> None:
        """A microbatch that needs up to so much begins beside others, and nobody has counted what these hold."""
        over_bytes = needed_bytes - memory_budget
        if over_bytes > self.told_bytes + TOLERANCE * memory_budget:
            self.told_bytes = over_bytes
            warn_caller(
                f"memory_budget = {format_bytes(memory_budget)} may be broken: {others + 1} microbatches await their "
                f"backward at once, more than before, and need up to {format_bytes(needed_bytes)}. Peaks are measured "
                "from the next step on; give more if this one does not fit."
            )

    def warn(self, budget: str, why: str) -> None:
        """Say that the budget is broken for good: only once, as each longer input may do so."""
        line = f"memory_budget = {budget} {why} Give more, or use smaller microbatches."
        if self.told_bytes < math.inf:
            warn_caller(f"{line} Longer inputs may need more: that is logged.")
        else:
            _logger.info("%s", line)
        self.told_bytes = math.inf


_version = attrgetter("_version")
_noted = weakref.WeakSet[BrokenBudget]()


@atexit.register
def _say_at_exit() -> None:
    for one in _noted:
        one.tell()


class MemoryLeft(Protocol):
    """What is left for activations of the memory that a whole training may use."""

    broken: BrokenBudget

    def device_bytes(self) -> int:
        """Of the device's memory, for what a step adds to weights and optimizer state."""

    def host_bytes(self) -> int | None:
        """Of pinned memory; ``None`` is no limit."""

    def link(self, measured: Link) -> Link:
        """Of the link, for activations."""
        return measured

    def gradient_bytes(self) -> int:
        """Gradients on the device now, if they count to what a step adds, whichever step has added them."""
        return 0

    def found_left(self, nbytes: int) -> None:
        """A microbatch has left so many bytes more than there were before it, gradients included."""

    def end(self) -> None:
        """No microbatch follows by this plan."""

    def asked_bytes(self, nbytes: int) -> int:
        """The ``memory_budget`` with which a step may need so many bytes."""
        return nbytes

    def instead(self, nbytes: int) -> str:
        """What would fit in place of the ``memory_budget`` with which a step may need so many bytes."""
        return ""

    def more_after_step(self) -> bool:
        """Ask for more, as no plan fits: whether more may be left once the step has ended."""
        return False

    def say_too_little(self, needed_bytes: int, outside_bytes: int, given_bytes: int, host_bytes: int | None) -> None:
        """Say that no plan fits: a step needs more than is given, at its peak so many bytes outside of the layers."""
        budget, needed = (format_bytes(self.asked_bytes(nbytes)) for nbytes in (given_bytes, needed_bytes))
        within = "" if host_bytes is None else f" with {format_bytes(host_bytes)} of host memory"
        why = "cannot be met, so everything is recomputed and inputs are offloaded: a step needs"
        outside = f"of which {format_bytes(outside_bytes)} outside of the layers."
        self.broken.warn(budget, f"{why} {needed}{within}, {outside}{self.instead(needed_bytes)}")


class GivenMemory(MemoryLeft):
    """A budget in bytes, to which counts what earlier microbatches of the same step have left.

    That is gradients of the layers, and what a microbatch was found to leave beside these: gradients of an embedding or
    a head, or logits that the program holds.
    """

    def __init__(
        self, device_bytes: int, device: torch.device, layers: Iterable[nn.Module], max_host_bytes: int | None
    ) -> None:
        self.broken = BrokenBudget()
        self._device_bytes = device_bytes
        self._max_host_bytes = max_host_bytes
        self._device = device
        # Gradients of streamed weights are on the host, which is a device, too, on the CPU.
        here = (layer for layer in layers if compute_device([layer]) is None)
        self._parameters = [parameter for layer in here for parameter in layer.parameters()]
        self._counted = [one for one in self._parameters if not one.is_inference()]
        self._versions = -1  # the sum of the parameters' versions: an optimizer's step changes them
        self._before_bytes = 0  # the gradients that there were when the step began
        self._begin_bytes = 0  # those when the microbatch began
        self._others_bytes = 0  # the most that a microbatch has left beside gradients of the layers
        self._found = 0, -1  # the gradients before the last microbatch, and what that has left

    def gradient_bytes(self) -> int:
        now_bytes = self._begin_bytes = bytes_of_gradients(self._parameters, self._device)
        versions = sum(map(_version, self._counted))
        before_bytes = self._before_bytes if versions == self._versions else now_bytes
        self._versions, self._before_bytes = versions, min(before_bytes, now_bytes)
        return self._with_others(now_bytes - self._before_bytes)

    def found_left(self, nbytes: int) -> None:
        if (self._begin_bytes, nbytes) != self._found:  # else as before: to ask all parameters takes a while
            self._found = self._begin_bytes, nbytes
            new_bytes = bytes_of_gradients(self._parameters, self._device) - self._begin_bytes
            self._others_bytes = max(self._others_bytes, nbytes - new_bytes)

    def end(self) -> None:
        self.broken.tell()

    def _with_others(self, gradient_bytes: int) -> int:
        return gradient_bytes + self._others_bytes if gradient_bytes else 0

    def device_bytes(self) -> int:
        return self._device_bytes

    def host_bytes(self) -> int | None:
        return get_host_pool(get_backend(self._device)).room_bytes(self._max_host_bytes)


class DeviceLeft(GivenMemory):
    """What the device has left, for ``memory_budget="auto"``."""

    def __init__(self, device: torch.device, layers: Iterable[nn.Module], max_host_bytes: int | None) -> None:
        super().__init__(left_bytes(device), device, layers, max_host_bytes)

    def device_bytes(self) -> int:
        return int(AUTO_SHARE * (left_bytes(self._device) + self.gradient_bytes()))

    def gradient_bytes(self) -> int:
        self._begin_bytes = bytes_of_gradients(self._parameters, self._device)
        return self._with_others(self._begin_bytes)


def bytes_of_gradients(parameters: Iterable[torch.Tensor], device: torch.device) -> int:
    """The gradients that parameters have on a device; of sharded ones, this rank's part, and sparse ones as nothing."""
    found = 0
    for parameter in parameters:  # of all of them in each microbatch: a loop takes less time than generators
        gradient = parameter.grad if parameter.is_leaf else None
        if gradient is None or isinstance(gradient, FreedGradient) or gradient.device != device:
            continue
        if gradient.layout is torch.strided:  # a plain one is its own part: an alias would wait for its step
            found += (local(gradient) if hasattr(gradient, "to_local") else gradient).nbytes
    return found


def new_gradients(layer: nn.Module) -> int:
    """The bytes of the gradients that a backward allocates for a layer, and leaves on the device."""
    if compute_device([layer]) is not None:
        return 0  # those of streamed weights are on the host
    found = (one for one in layer.parameters() if one.is_leaf and one.requires_grad and one.grad is None)
    return sum(local(one).nbytes for one in found if not is_consumed(one))


def allocated_bytes(device: torch.device) -> int:
    """What is allocated on an accelerator; 0 on the CPU, where nobody knows."""
    return 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def left_bytes(device: torch.device) -> int:
    """What can still be allocated: what nobody has, and what PyTorch's allocator has cached; within its limit."""
    if device.type == "cpu":
        raise ValueError('memory_budget="auto" asks an accelerator what it has left; on the CPU, give bytes.')
    free, total = torch.accelerator.get_memory_info(device)
    reserved = torch.accelerator.memory_reserved(device)
    if device.type == "cuda":
        free = min(free, int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved)
    return max(0, free + reserved - torch.accelerator.memory_allocated(device))


def all_bytes(device: torch.device, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """What the device has left, and what the training has there already."""
    entries = [entry for optimizer in optimizers for entry in optimizer.state.values()]
    tensors = [one for entry in entries for one in entry.values() if isinstance(one, torch.Tensor)]
    tensors += [one for each in model.parameters() for one in (each, each.grad) if one is not None]
    here = {part.untyped_storage() for part in map(local, tensors) if part.device == device}
    return left_bytes(device) + sum(storage.nbytes() for storage in here)


def usable_bytes(memory_budget: int, device: torch.device) -> int:
    """What of a budget can be planned: an accelerator's allocator needs some room to cut blocks from."""
    return memory_budget if device.type == "cpu" else int(AUTO_SHARE * memory_budget)


def training_bytes(
    model: nn.Module,
    layers: list[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    chunk_bytes: int,
    device: torch.device,
    *,
    state_dtype: torch.dtype | None = None,
    master_weights: bool = False,
) -> TrainingBytes:
    """What a model's training holds beside activations; of sharded parameters, this rank's part counts."""
    for name, one in model.named_parameters():
        check_values(name, one)
    layouts: dict[Any, Any] = {}
    for optimizer in optimizers:
        layouts.update(_layouts_of(optimizer, model, state_dtype, layouts))
    parts: dict[Any, torch.Tensor] = {one: local(one).requires_grad_(one.requires_grad) for one in model.parameters()}
    for number, layer in enumerate(layers):
        if not parts.keys() >= {*layer.parameters()}:
            raise ValueError(
                f"layers must be parts of the model, but layer {number} ({type(layer).__name__}) has parameters that "
                f"are none of {type(model).__name__}'s; take the layers from this model."
            )
    state: dict[Any, int] = {}
    for parameter, layout in layouts.items():
        sizes = [dtype.itemsize for dtype in layout.values()]
        if sizes and master_weights and parameter.dtype is torch.bfloat16:
            sizes.append(REMAINDER_BYTES)
        part = parts[parameter]
        state[part] = parameter.requires_grad * part.numel() * sum(sizes)
    own = [[parts[one] for one in layer.parameters()] for layer in layers]
    slots = NUM_SLOTS * chunk_bytes * len(optimizers)
    made = TrainingBytes.of([*parts.values()], own, lambda one: state.get(one, 0), slots, [*state])
    if state_dtype is None:  # else all is stepped in chunks
        made = replace(made, step=max(bytes_of_step(optimizer, device) for optimizer in optimizers))
    # The gradient of a sharded parameter is never set aside.
    asides = {part: 0 if hasattr(one, "to_local") else part.nbytes for one, part in parts.items()}
    # A part of the state can be resident where one optimizer has all of it, and picks the parameters.
    if len(optimizers) == 1:
        return replace(made, parameter_gradient=tuple(asides[one] for one in state if state[one]))
    aside = 0
    for optimizer in optimizers:  # each has slots of its own
        trained = [parts[one] for _, one in with_groups(optimizer) if one.requires_grad]
        head = number_of_head([state.get(one, 0) for one in trained], NUM_SLOTS * chunk_bytes)
        aside += 0 if head is None else asides[trained[head]]
    return replace(made, parameter_state=(), parameter_layer=(), parameter_gradient=(), aside=aside)


def _layouts_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, state_dtype: torch.dtype | None, others: Collection[Any]
) -> dict[Any, Mapping[str, torch.dtype]]:
    """The state of each of an optimizer's parameters, which are the model's, and none of ``others``."""
    parameters, own = [one for _, one in with_groups(optimizer)], {*model.parameters()}
    strange = [one for one in parameters if one not in own]
    if strange:
        raise ValueError(
            f"optimizer must hold parameters of the model, got {len(strange)} others, the first {describe(strange[0])} "
            f"of shape {tuple(strange[0].shape)}; build it from model.parameters()."
        )
    if shared := [one for one in parameters if one in others]:
        raise ValueError(
            f"optimizers must hold different parameters, got {len(shared)} that two of them hold, the first of shape "
            f"{tuple(shared[0].shape)}; leave each to one optimizer."
        )
    check_can_be_streamed(optimizer)
    try:
        layouts = prove(optimizer, state_dtype).layouts
    except TypeError as error:
        instead = "call offload_layers(…, memory_budget=…), which plans activations alone"
        raise TypeError(f"{str(error).rstrip('.')}, and {instead}.") from error
    return {one: layouts.get(one, {}) for one in parameters}


def bytes_of_step(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """What ``optimizer.step()`` allocates at once beside state and gradients, by small steps of a few parameters.

    PyTorch's ``foreach`` optimizers, which are the default on a GPU, hold some numbers of all parameters at once.
    """
    sized = [(number, local(one)) for number, one in with_groups(optimizer) if one.requires_grad and one.ndim]
    number, largest = max(sized, key=lambda pair: pair[1].numel(), default=(0, torch.empty(0)))
    if not largest.numel():
        return 0
    small, needed = [min(size, LARGEST.get(largest.ndim, 8)) for size in largest.shape], list[float]()
    for count in (1, 2, 3):
        alike = [nn.Parameter(torch.zeros(small, dtype=largest.dtype, device=device)) for _ in range(count)]
        group = {**optimizer.param_groups[number], "params": alike}
        trial = stand_in_for(optimizer, [group], defaultdict(dict))
        for one in alike:
            one.grad = torch.zeros_like(one)
        for _ in range(2):  # the first one makes the state
            with torch.no_grad(), memory_meter(device) as meter:
                unhooked_step(optimizer)(trial)
        needed.append(meter.peak_bytes / alike[0].numel())
    each = max(0.0, needed[2] - needed[1])  # for each parameter; the rest is for one at a time
    alone = max(0.0, needed[0] - each)
    left = max(0.0, needed[2] - 3 * each - alone)  # of the parameter before
    sizes = [one.numel() for _, one in sized]
    at_a_time = [alone * size + left * before for before, size in pairwise([0, *sizes])]
    return round(each * sum(sizes) + max(at_a_time))
