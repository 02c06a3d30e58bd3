"""Layers that are measured in their first rounds, and follow a plan from then on.

A round of a microbatch through the layers is what is counted. In the first everything is recomputed, inputs travel, and
each region is timed. The second, run in the same way, is timed as a whole. Then a plan is made; it is made anew where
the inputs' size changes much. What is planned, those say who derive from this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum, auto

import torch

from offload.activations.context import OffloadContext
from offload.activations.module_hooks import HookedLayers
from offload.base.layer_events import Attachment, LayerCall, LayerListener, Turn
from offload.base.tensors import is_plain
from offload.base.torch_private import address_of, before_backward, tensors_in, when_backward_ends
from offload.device.capture import CaptureError
from offload.host.limits import HostMemory
from offload.measuring.layer_times import LayerTimes
from offload.measuring.measure_regions import frugal_profile, frugal_schedule, learning
from offload.measuring.profile_layers import measure_link
from offload.planning.plan import Plan
from offload.planning.profile import Profile
from offload.recompute.policies import LayerPolicies
from offload.schedule.schedule import Schedule

MUCH = 1.25
"""From this factor on, inputs of another size are worth another plan."""


class _Stage(Enum):
    LEARNING = auto()
    TIMING = auto()
    FOLLOWING = auto()


class PlannedLayers(HookedLayers, ABC):
    """Layers that follow a plan as soon as there is one; undone by ``remove()``.

    Args:
        layers: The layers, in call order.
        min_bytes: Storages below this size are no regions of their own.
        device: Where the layers compute.
        host: How much host memory there is; a capacity of the plan.
    """

    def __init__(
        self,
        layers: list[torch.nn.Module],
        *,
        min_bytes: int | str,
        device: torch.device | str | int | None,
        host: HostMemory,
    ) -> None:
        context = OffloadContext(Schedule(len(layers)), len(layers), min_bytes=min_bytes, device=device, host=host)
        self._backend = context.backend
        self._has_peak = self._backend.device.type != "cpu"
        self._max_host_bytes = host.max_bytes
        super().__init__(layers, context)
        self._layers = layers
        self.plan: Plan | None = None
        """What is followed; ``None`` in the first rounds."""
        self._link = measure_link(self._backend.device)
        self._times = LayerTimes(layers, self._backend)
        self._peak_bytes = 0
        """The most device memory in the last round, above what there was when its step began."""
        ends = [_Rounds(self), _Backwards(self)]
        self._rounds = Attachment([layers[0], layers[-1]], ends)
        self._restart(0)

    @property
    def measures(self) -> bool:
        """Whether the layers are still measured, and follow no plan."""
        return self._stage is not _Stage.FOLLOWING

    @abstractmethod
    def _first_plan(self, profile: Profile) -> Plan | None:
        """The plan for layers that cost this; ``None`` goes on as in the first rounds."""

    def _next_plan(self, followed: Plan) -> Plan | None:
        """What to follow in place of a plan after a round; ``None`` goes on with it."""
        return None

    def remove(self) -> None:
        super().remove()
        self._rounds.remove()
        self._times.remove()

    def _restart(self, elements: int) -> None:
        """Be frugal, and learn what the regions cost with inputs of so many elements."""
        self._stage = _Stage.LEARNING
        self._elements = elements
        self._start_bytes = 0
        self._input_bytes = 0
        """Of what there was when the round began, what its step had allocated by then."""
        self._times.remove()
        # Attached now, since what is attached while a layer begins misses that.
        self._times = LayerTimes(self._layers, self._backend)
        self._policies = learning(self._layers)
        self._context.follow(frugal_schedule(len(self._layers)), self._policies)

    def begin_round(self, inputs: Sequence[torch.Tensor]) -> None:
        """A microbatch is about to enter the first layer, which is given these."""
        if self._backend.capturing:
            self._check_capture()
            return
        elements = sum(tensor.numel() for tensor in inputs)
        if self._elements and not self._elements / MUCH <= elements <= self._elements * MUCH:
            self._restart(elements)
        elif self._stage is _Stage.LEARNING:
            self._elements = elements
            if all(one.costs for one in self._policies):
                self._stage = _Stage.TIMING
                self._times.start(reads_memory=self._has_peak)
        elif self._stage is _Stage.TIMING and self._times.complete:
            self._times.remove()
            self._stage = _Stage.FOLLOWING
            self.plan = None
            self._follow(self._first_plan(frugal_profile(self._policies, self._times)))
        elif self._stage is _Stage.FOLLOWING and self.plan is not None:
            self._follow(self._next_plan(self.plan))
        self._input_bytes = _bytes_of(inputs, self._backend.device)
        if self._has_peak and self._stage is _Stage.FOLLOWING:
            torch.accelerator.reset_peak_memory_stats(self._backend.device)
            self._start_bytes = torch.accelerator.memory_allocated(self._backend.device)

    def _check_capture(self) -> None:
        """Nothing can be measured while a CUDA graph is captured, nor may it see two plans."""
        if self._stage is not _Stage.FOLLOWING:
            raise CaptureError(
                "a step that is still measured for a plan was to be captured; warm up with three steps before the "
                "capture, of which the third follows the plan."
            )

    def end_backward(self) -> None:
        """A round's backward has ended: what its peak was; later the program may have the peak forgotten."""
        if self._backend.capturing or not self._has_peak:
            return
        if self._stage is _Stage.TIMING:
            most_bytes = self._times.most_bytes()
        else:
            most_bytes = torch.accelerator.max_memory_allocated(self._backend.device) - self._start_bytes
        self._peak_bytes = most_bytes + self._input_bytes

    def _follow(self, plan: Plan | None) -> None:
        """Do as a plan says from here on, if there is one."""
        if plan is None:
            return
        self.plan = plan
        followed: list[LayerPolicies | None] = []
        for learned, numbered in zip(self._policies, plan.policies, strict=True):
            if numbered is not None:
                learned.follow(numbered)
            followed.append(None if numbered is None else learned)
        self._context.follow(plan.schedule, followed)


def _bytes_of(inputs: Iterable[torch.Tensor], device: torch.device) -> int:
    """What the step has allocated for the first layer's inputs, as an embedding's output: leaves outlive a step."""
    made = (tensor for tensor in inputs if tensor.device == device and not (tensor.is_leaf and tensor.requires_grad))
    storages = (tensor.untyped_storage() for tensor in made if is_plain(tensor))
    return sum({address_of(storage): storage.nbytes() for storage in storages}.values())


class _Rounds(LayerListener):
    """Tells when a microbatch enters the first layer, before anything else happens there."""

    turn = Turn.WEIGHTS

    def __init__(self, planned: PlannedLayers) -> None:
        self._planned = planned

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        if not self._planned._context.has_nothing_to_do():
            self._planned.begin_round(list(tensors_in(inputs)))


class _Backwards(LayerListener):
    """Tells when the backward that has come to the last layer is over."""

    turn = Turn.MEASURING

    def __init__(self, planned: PlannedLayers) -> None:
        self._planned = planned

    def forward_returned(self, call: LayerCall, output: object) -> None:
        if not call.recomputes and torch.is_grad_enabled():
            before_backward(output, call.first_node, self._begin)

    def _begin(self, _: object) -> None:
        when_backward_ends(self._planned.end_backward)
